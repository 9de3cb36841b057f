"""What frameworks do with a loader: they try `iter`, count steps instead of asking for the end, and look for names."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from make_shards import write_numbers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from streamload import StreamLoader
from streamload.errors import LoaderClosedError

_TOTAL = 50
_BATCH = 8


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("frameworks") / "shards", [20, 30])


def loader_of(source: str, **options: Any) -> StreamLoader:
    return StreamLoader(source, _BATCH, **{"fields": ("cls",), "shuffle": True, "num_workers": 0, **options})


def whole_epochs(source: str, **options: Any) -> list[list[list[int]]]:
    """The batches of three epochs of a plain loop."""
    with loader_of(source, **options) as loader:
        return [[labels.tolist() for (labels,) in loader] for _ in range(3)]


def counted(loader: StreamLoader) -> list[list[int]]:
    """An epoch of a loop that takes as many batches as there are, and never asks whether there is one more."""
    return [labels.tolist() for (labels,) in islice(iter(loader), len(loader))]


def processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("options", "position", "batches"),
    [
        ({"sampler": list(range(20)), "shuffle": False}, 0, 3),
        ({"drop_last": True}, 5, 5),  # of the 45 samples that are left 5 are dropped
        ({"pad": False, "rank": 1, "world_size": 2}, 1, 3),  # of the 49 that are left the last one is the other rank's
    ],
    ids=["sampler", "resumed", "a batch fewer"],
)
def test_the_last_batch_is_known_whatever_is_left_of_the_epoch(
    source: str, options: dict[str, Any], position: int, batches: int
) -> None:
    before = processes()
    with loader_of(source, num_workers=1, **options) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": position})
        rest = iter(loader)
        next(rest)
        started = processes() - before
        assert len(list(islice(rest, batches - 1))) == batches - 1
        del rest
        assert processes() - before == started
        assert loader.state_dict()["epoch"] == 1


def test_a_pass_that_has_given_no_batch_does_not_count(source: str) -> None:
    first, second, third = whole_epochs(source)
    with loader_of(source) as loader:
        tried = iter(loader)
        assert counted(loader) == first
        with pytest.raises(LoaderClosedError):
            next(tried)
        loader.set_epoch(2)
        iter(loader)
        assert counted(loader) == third
        loader.set_epoch(1)
        state = {**loader.state_dict(), "position": 2 * _BATCH}
        loader.load_state_dict(state)
        iter(loader)
        assert loader.state_dict() == state
        assert [labels.tolist() for (labels,) in loader] == second[2:]


def test_a_pass_that_was_finished_has_no_more_batches(source: str) -> None:
    with loader_of(source) as loader:
        running = iter(loader)
        list(islice(running, len(loader)))
        iter(loader)
        with pytest.raises(StopIteration):
            next(running)


def test_frameworks_find_what_they_look_for(source: str) -> None:
    with loader_of(source, drop_last=True, num_workers=3) as loader:
        assert (loader.batch_size, loader.drop_last, loader.num_workers) == (_BATCH, True, 3)
        assert len(loader.dataset) == _TOTAL
        assert len(loader) == _TOTAL // _BATCH
        assert not hasattr(loader, "sampler")  # Lightning would take the loader for one that is to be shuffled
    with loader_of(source, num_workers="auto") as loader:
        assert loader.num_workers >= 1


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_loader_in_a_dataloader_says_what_to_do_instead(source: str, batch_size: int | None) -> None:
    with loader_of(source) as loader:
        with pytest.raises(TypeError, match=r"iterate over it .*TarDataset"):
            next(iter(DataLoader(loader, batch_size=batch_size)))
        assert len(list(loader)) == len(loader)


def test_a_closed_loader_starts_nothing(tmp_path: Path) -> None:
    loader = StreamLoader(write_numbers(tmp_path / "s", [5], index=False), 2)
    loader.close()
    for use in (len, iter):
        with pytest.raises(LoaderClosedError):
            use(loader)


def test_loaders_cannot_be_copied(source: str) -> None:
    with StreamLoader(source, 10, num_workers=0) as loader, pytest.raises(TypeError, match="cannot be copied"):
        copy.copy(loader)


# -- within a DataLoader ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("divides", "workers"), [(False, 0), (False, 1), (True, 2)])
def test_each_sample_comes_once(source: str, divides: bool, workers: int) -> None:
    context = "fork" if workers else None
    wrapped = Wrapped(source, divides=divides)
    batches = DataLoader(wrapped, batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(50))


def test_workers_that_would_each_read_everything_are_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2))
    with StreamLoader(source, 5, fields=("cls",), num_workers=0) as loader:
        with pytest.raises(RuntimeError, match="each of the 2 workers of a torch DataLoader would read all"):
            iter(loader)
