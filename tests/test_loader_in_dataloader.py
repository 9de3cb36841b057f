"""A StreamLoader within torch's DataLoader, and in several threads: each sample once, or it says why not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from make_shards import write_numbers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from streamload import StreamLoader
from streamload.errors import LoaderClosedError


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


@pytest.mark.parametrize("workers", [0, 1])
def test_threads_that_share_a_pass_get_each_batch_once_and_all_of_them_end(source: str, workers: int) -> None:
    seen: list[int] = []
    for _ in range(3):
        with StreamLoader(source, 1, fields=("cls",), shuffle=True, num_workers=workers) as loader:
            batches = iter(loader)
            threads = [
                threading.Thread(target=lambda: seen.extend(int(labels) for (labels,) in batches), daemon=True)
                for _ in range(3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert not any(thread.is_alive() for thread in threads)
    assert sorted(seen) == sorted(3 * list(range(50)))


def test_a_loader_that_is_closed_while_another_thread_waits_for_a_batch_says_so(source: str) -> None:
    errors: list[BaseException] = []

    def take_all(batches: Iterator[Any]) -> None:
        try:
            list(batches)
        except LoaderClosedError as error:
            errors.append(error)

    def slow(value: int) -> int:
        time.sleep(0.3)
        return value

    loader = StreamLoader(source, 1, fields=("cls",), transform={"cls": slow}, num_workers=1)
    batches = iter(loader)
    next(batches)
    thread = threading.Thread(target=take_all, args=(batches,), daemon=True)
    thread.start()
    time.sleep(0.2)
    loader.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) == 1
