"""Ranks take equally many steps whatever fails: another batch comes for one of which every sample has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_numbers
from transforms import is_bad

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


def repeated(whole: Batches, bad: Callable[[int], bool] = is_bad) -> Batches:
    """What the rule says, slowly: an empty batch is the one before it, given all of the epoch's without a failure."""
    batches: Batches = []
    for batch in whole:
        left = [value for value in batch if not bad(value)]
        batches.append(left or batches[-1])
    return batches


def values(batches: Iterable[Any]) -> Batches:
    return [batch[0].tolist() for batch in batches]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("filling") / "shards", _COUNTS)


def check(source: Any, batch_size: int, **options: Any) -> None:
    """A loader that meets failures against one that meets none; the first batch fails for no seed that is used here."""
    options = {**_OPTIONS, "seed": 1, **options}
    with StreamLoader(source, batch_size, **{**options, "num_workers": 0}) as loader:
        whole = [values(loader) for _ in range(2)]
    bad = {value for epoch in whole for value in epoch[0]}

    def fails_later(value: int) -> bool:
        return is_bad(value) and value not in bad

    with StreamLoader(source, batch_size, transform={"cls": fails(fails_later)}, **options) as loader:
        found = [values(loader) for _ in range(2)]
        assert [len(epoch) for epoch in found] == [len(loader)] * 2
        failed = sum(len([value for value in batch if fails_later(value)]) for epoch in whole for batch in epoch)
        assert loader.statistics().skipped_samples == len(loader.skipped) == failed, "each of them is counted once"
    assert found == [repeated(epoch, fails_later) for epoch in whole] != whole


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2, "world_size": 3, "lanes": 3, "shuffle": 5, "drop_last": True},
        {"sampler": [*range(60, -1, -1), 3, 3], "shuffle": False},
        {"weights": np.arange(61.0), "epoch_size": 50},
        {"num_workers": 1},
    ],
    ids=[*range(4)],
)
def test_the_batch_before_comes_again_for_one_whose_samples_all_failed(shards: str, options: dict[str, Any]) -> None:
    check(shards, 1, **options)


def test_in_a_mixture_with_a_collate_fn(shards: str, tmp_path: Path) -> None:
    def collate(rows: list[Any]) -> Any:
        return [np.array([value for (value,) in rows])]

    other = write_numbers(tmp_path / "other", [30])
    check(Mixture({"a": (shards, 1), "b": (other, 2)}), 1, epoch_size=50, collate_fn=collate)


def test_with_replace(shards: str) -> None:
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "on_error": "replace"}
    with StreamLoader(shards, 2, transform={"cls": fails(lambda value: value in (1, 4, 5))}, **common) as loader:
        assert values(loader)[:4] == [[0, 0], [2, 3], [2, 3], [6, 7]]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_without_pad_no_sample_comes_twice(shards: str, on_error: str) -> None:
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "pad": False, "transform": {"cls": fails(lambda v: v < 4)}}
    with StreamLoader(shards, 2, **{**common, "on_error": on_error}) as loader:
        assert sum(values(loader), []) == list(range(4, 61))
        assert len(loader.skipped) == 4


def test_at_the_start_of_a_pass_the_next_batch_comes(shards: str) -> None:
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "transform": {"cls": fails(lambda value: value < 6)}}
    with StreamLoader(shards, 2, **common) as loader:
        assert values(loader)[:5] == [[6, 7]] * 4 + [[8, 9]]
    with StreamLoader(shards, 2, **common) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 2})
        assert values(loader)[:4] == [[6, 7]] * 3 + [[8, 9]]


def test_where_everything_fails_it_is_said(shards: str) -> None:
    common: dict[str, Any] = {**_OPTIONS, "shuffle": False, "transform": {"cls": fails(lambda value: value >= 40)}}
    with StreamLoader(shards, 2, **common) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 40})
        with pytest.raises(SampleError, match=r"every one of 21 samples has failed; the first: .*000040"):
            list(loader)
