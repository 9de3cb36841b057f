"""A StreamLoader within torch's DataLoader, and in several threads: each sample once, or it says why not."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_shards import write_numbers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from streamload import StreamLoader


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("within") / "shards", [30, 20])


class Wrapped(IterableDataset[Any]):
    """Batches of a loader, as people wrap what they iterate over."""

    def __init__(self, source: str, *, divides: bool) -> None:
        self.source = source
        self.divides = divides

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        share = {"rank": info.id, "world_size": info.num_workers} if info is not None and self.divides else {}
        with StreamLoader(self.source, 5, fields=("cls",), num_workers=0, pad=False, **share) as loader:
            for (labels,) in loader:
                yield labels


def labels_of(wrapped: Wrapped, workers: int) -> list[int]:
    batches = DataLoader(
        wrapped, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
    )
    return sorted(torch.cat(list(batches)).tolist())


@pytest.mark.parametrize(("divides", "workers"), [(False, 0), (False, 1), (True, 2)])
def test_each_sample_comes_once(source: str, divides: bool, workers: int) -> None:
    assert labels_of(Wrapped(source, divides=divides), workers) == list(range(50))


def test_workers_that_would_each_read_everything_are_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2))
    with StreamLoader(source, 5, fields=("cls",), num_workers=0) as loader:
        with pytest.raises(RuntimeError, match="worker 1 of 2 of a torch DataLoader, and each of them would read all"):
            iter(loader)
