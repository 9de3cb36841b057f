"""Ranks take equally many steps whatever fails: another batch comes for one of which every sample has failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_numbers
from servers.faults import FaultServer
from transforms import is_bad, raise_on_bad

from streamload import Mixture, StreamLoader
from streamload.errors import SampleError

_COUNTS = [20, 7, 0, 34]
_OPTIONS: dict[str, Any] = {"fields": ("cls",), "on_error": "skip", "num_workers": 0, "shuffle": True}

Batches = list[list[int]]


def fails(bad: Callable[[int], bool]) -> Callable[[int], int]:
    def transform(value: int) -> int:
        if bad(value):
            raise ValueError(value)
        return value

    return transform


def filled(whole: Batches, start: int = 0, bad: Callable[[int], bool] = is_bad) -> Batches:
    """What the rule says, slowly: batches from one on, given all of the epoch's without a failure."""
    left = [[value for value in batch if not bad(value)] for batch in whole]
    return [next(batch for batch in (*left[number:], *left) if batch) for number in range(start, len(left))]


def values(batches: Iterable[Any]) -> Batches:
    return [batch[0].tolist() for batch in batches]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("filling") / "shards", _COUNTS)


def check(source: Any, batch_size: int, epochs: int = 2, **options: Any) -> None:
    """A loader that meets failures against one that meets none."""
    options = {**_OPTIONS, **options}
    with StreamLoader(source, batch_size, **{**options, "num_workers": 0}) as loader:
        whole = [values(loader) for _ in range(epochs)]
    with StreamLoader(source, batch_size, transform={"cls": raise_on_bad}, **options) as loader:
        found = [values(loader) for _ in range(epochs)]
        assert [len(epoch) for epoch in found] == [len(loader)] * epochs
        failed = sum(len([value for value in batch if is_bad(value)]) for epoch in whole for batch in epoch)
        assert loader.statistics().skipped_samples == len(loader.skipped) == failed, "each of them is counted once"
    assert found == [filled(epoch) for epoch in whole] != whole


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank": 2, "world_size": 3, "lanes": 3, "shuffle": 5},
        {"drop_last": True},
        {"sampler": [*range(60, -1, -1), 3, 3], "shuffle": False},
        {"weights": np.arange(61.0), "epoch_size": 50},
        {"num_workers": 1},
    ],
    ids=[*range(6)],
)
def test_the_next_batch_of_which_something_is_left_comes_for_one_of_which_nothing_is(
    shards: str, options: dict[str, Any]
) -> None:
    check(shards, 1, **options)
    if options.get("num_workers", 0) == 0:
        check(shards, 2, epochs=1, **options)


def test_in_a_mixture(shards: str, tmp_path: Path) -> None:
    other = write_numbers(tmp_path / "other", [30])
    check(Mixture({"a": (shards, 1), "b": (other, 2)}), 1, epoch_size=50)


@pytest.mark.parametrize(
    "where", ["local, a worker", "local, no index", pytest.param("remote", marks=pytest.mark.exhaustive)]
)
def test_behind_the_last_batch_the_first_one_comes(tmp_path: Path, where: str) -> None:
    """It is made again for that: from the start of the order, batch by batch, up to one of which something is left."""

    def bad(value: int) -> bool:
        return value < 10 or value > 40

    source: Any = write_numbers(tmp_path / "shards", [20, 7, 34], index="no index" not in where)
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "transform": {"cls": fails(bad)}}
    common["num_workers"] = int("worker" in where)
    with ExitStack() as stack:
        if "remote" in where:
            server = stack.enter_context(FaultServer(tmp_path))
            source = [f"{server.url}/shards/part{shard:03d}-000000.tar" for shard in range(3)]
            common["memory_budget"] = "128MiB"
        loader = stack.enter_context(StreamLoader(source, 5, **common))
        whole = [list(range(first, min(first + 5, 61))) for first in range(0, 61, 5)]
        for _ in range(2):
            assert values(loader) == filled(whole, bad=bad)
            assert loader.statistics().skipped_samples == len(loader.skipped)
        assert [int(error.key or "") for error in loader.skipped[30:]] == [*range(10), *range(41, 61)]


def test_what_comes_for_others_is_memory_of_its_own(shards: str) -> None:
    def bad(value: int) -> bool:
        return value < 4

    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "transform": {"cls": fails(bad)}}
    with StreamLoader(shards, 2, **common) as loader:
        batches = []
        for (labels,) in loader:
            batches.append(labels.tolist())
            labels.zero_()
        assert batches[:4] == [[4, 5], [4, 5], [4, 5], [6, 7]]


def test_it_goes_on_in_the_middle(shards: str) -> None:
    common: dict[str, Any] = {**_OPTIONS, "rank": 1, "world_size": 2, "lanes": 2}
    with StreamLoader(shards, 2, **common) as loader:
        whole = values(loader)
    transform = {"cls": fails(lambda value: is_bad(value) or value in whole[-1])}

    def bad(value: int) -> bool:
        return is_bad(value) or value in whole[-1]

    for step in range(1, len(whole)):
        with StreamLoader(shards, 2, transform=transform, **common) as loader:
            batches = iter(loader)
            for _ in range(step):
                next(batches)
            state = json.loads(json.dumps(loader.state_dict()))
        with StreamLoader(shards, 2, transform=transform, **common) as loader:
            loader.load_state_dict(state)
            assert values(loader) == filled(whole, step, bad)


def test_a_loop_that_counts_steps_finishes_the_epoch(shards: str) -> None:
    def bad(value: int) -> bool:
        return value >= 40

    with StreamLoader(shards, 4, transform={"cls": fails(bad)}, **{**_OPTIONS, "shuffle": False}) as loader:
        batches = iter(loader)
        assert [next(batches)[0][0].item() for _ in range(len(loader))] == [*range(0, 40, 4), *[0] * 6]
        del batches
        assert loader.state_dict()["epoch"] == 1


def test_with_replace_and_a_collate_fn(shards: str) -> None:
    def collate(rows: list[Any]) -> Any:
        return [np.array([value for (value,) in rows])]

    check(shards, 2, collate_fn=collate)
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "on_error": "replace"}
    with StreamLoader(shards, 2, transform={"cls": fails(lambda value: value in (1, 4, 5))}, **common) as loader:
        assert values(loader)[:4] == [[0, 0], [2, 3], [6, 7], [6, 7]]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_without_pad_no_sample_comes_twice(shards: str, on_error: str) -> None:
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "pad": False, "transform": {"cls": fails(lambda v: v < 4)}}
    with StreamLoader(shards, 2, **{**common, "on_error": on_error}) as loader:
        assert sum(values(loader), []) == list(range(4, 61))
        assert len(loader.skipped) == 4


def test_where_everything_fails_it_is_said_and_nothing_is_tried_for_ever(shards: str) -> None:
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False}
    with StreamLoader(shards, 2, transform={"cls": fails(lambda _: True)}, **common) as loader:
        with pytest.raises(SampleError, match=r"every one of 61 samples has failed; the first: .*000000"):
            list(loader)
    with StreamLoader(shards, 2, **common) as loader:
        batches = iter(loader)
        for _ in range(20):
            next(batches)
        state = loader.state_dict()
    with StreamLoader(shards, 2, transform={"cls": fails(lambda _: True)}, **common) as loader:
        loader.load_state_dict(state)
        with pytest.raises(SampleError, match=r"every one of 21 samples has failed; the first: .*000040"):
            list(loader)
