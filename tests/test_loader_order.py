"""Exactly once, in one order: whatever the world size, the batch size, the window.

Whatever the workers, the storage, the compression and the index: `tests/remote/test_remote_same.py`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_shards import write_numbers
from transforms import is_bad

from streamload import Mixture, StreamLoader

COUNTS = [30, 1, 50, 0, 20, 39]
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("few") / "shards", [20, 7, 0, 34])


def numbers(source: str, **options: Any) -> list[list[int]]:
    """The samples of one pass, batch by batch."""
    defaults: dict[str, Any] = {"fields": ("cls",), "shuffle": 25, "batch_size": 7}
    with StreamLoader(source, **{**defaults, **options}) as loader:
        return [batch[0].tolist() for batch in loader]


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("indexed") / "shards", COUNTS)


@pytest.fixture(scope="module")
def unindexed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("unindexed") / "shards", COUNTS, index=False)


def test_seed_names_the_order(indexed: str) -> None:
    assert numbers(indexed, seed=1, num_workers=0) != numbers(indexed, seed=2, num_workers=0)


OPTIONS = st.fixed_dictionaries(
    {
        "world_size": st.integers(1, 9),
        "batch_size": st.integers(1, 40),
        "shuffle": st.integers(0, 300),
        "lanes": st.integers(1, 5),
        "drop_last": st.booleans(),
        "pad": st.booleans(),
    }
)


@pytest.mark.filterwarnings("ignore:drop_last=True drops the whole epoch")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=OPTIONS)
def test_ranks_share_out_the_epoch(indexed: str, options: dict[str, Any]) -> None:
    options["shuffle"] = options["shuffle"] or False
    world_size, global_batch = options["world_size"], options["world_size"] * options["batch_size"]
    ranks = [numbers(indexed, num_workers=0, rank=rank, **options) for rank in range(world_size)]
    delivered = sorted(number for rank in ranks for batch in rank for number in batch)
    if options["drop_last"]:
        assert len(delivered) == len(set(delivered)) == TOTAL // global_batch * global_batch
    elif options["pad"]:
        assert set(delivered) == set(range(TOTAL))
        assert len(delivered) == -(-TOTAL // world_size) * world_size
    else:
        assert delivered == list(range(TOTAL))
    if options["drop_last"] or options["pad"]:
        assert len({tuple(map(len, rank)) for rank in ranks}) == 1, "ranks must stay in step"


def test_len_is_what_comes(indexed: str, unindexed: str) -> None:
    for source in (indexed, unindexed):
        for options in ({}, {"drop_last": True}, {"world_size": 3, "rank": 1}, {"batch_size": 200}):
            with StreamLoader(source, **{"batch_size": 7, "fields": ("cls",), "num_workers": 0, **options}) as loader:
                assert len(loader) == sum(1 for _ in loader)


def test_len_works_in_the_middle_of_an_epoch(unindexed: str) -> None:
    with StreamLoader(unindexed, 7, fields=("cls",), num_workers=1) as loader:
        assert [(len(loader), len(batch[0])) for batch in loader] == [(20, 7)] * 20


def augmented(source: str, transform: Any, batch_size: int = 7, **options: Any) -> list[list[float]]:
    """The rows of two passes through a transform that draws random numbers."""
    with StreamLoader(source, batch_size, True, fields=("cls",), transform=transform, **options) as loader:
        return [row for _ in range(2) for batch in loader for row in torch.stack(tuple(batch)).T.tolist()]


@pytest.mark.parametrize(
    "transform",
    [
        lambda sample: [sample[0], random.random(), float(np.random.rand())],
        {"cls": lambda value, rng: value + rng.random()},
    ],
)
def test_augmentation_depends_on_sample_epoch_and_seed_alone(indexed: str, transform: Any) -> None:
    expected = augmented(indexed, transform, num_workers=0)
    again = augmented(indexed, transform, num_workers=0, seed=5)
    assert len({row[-1] for row in expected + again}) == 4 * TOTAL
    assert augmented(indexed, transform, 13, num_workers=2) == expected, "neither workers nor the batch size matter"


def test_no_workers_leave_the_callers_generators_alone(indexed: str) -> None:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    numbers(indexed, num_workers=0, fields=None, transform=lambda sample: (random.random() + np.random.rand(),))
    with pytest.raises(SystemExit):
        numbers(indexed, num_workers=0, transform=sys.exit)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


# -- ranks take equally many steps whatever fails ------------------------------------------------------------------

FAILING: dict[str, Any] = {"fields": ("cls",), "on_error": "skip", "num_workers": 0, "shuffle": True}
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


def check(source: Any, batch_size: int, **options: Any) -> None:
    """A loader that meets failures against one that meets none; the first batch fails for no seed that is used here."""
    options = {**FAILING, "seed": 1, **options}
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
def test_the_batch_before_comes_again_for_one_whose_samples_all_failed(few: str, options: dict[str, Any]) -> None:
    check(few, 1, **options)


def test_in_a_mixture_with_a_collate_fn(few: str, tmp_path: Path) -> None:
    def collate(rows: list[Any]) -> Any:
        return [np.array([value for (value,) in rows])]

    other = write_numbers(tmp_path / "other", [30])
    check(Mixture({"a": (few, 1), "b": (other, 2)}), 1, epoch_size=50, collate_fn=collate)


def test_with_replace(few: str) -> None:
    common: dict[str, Any] = {**FAILING, "shuffle": False, "on_error": "replace"}
    with StreamLoader(few, 2, transform={"cls": fails(lambda value: value in (1, 4, 5))}, **common) as loader:
        assert values(loader)[:4] == [[0, 0], [2, 3], [2, 3], [6, 7]]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_without_pad_no_sample_comes_twice(few: str, on_error: str) -> None:
    common: dict[str, Any] = {**FAILING, "shuffle": False, "pad": False, "transform": {"cls": fails(lambda v: v < 4)}}
    with StreamLoader(few, 2, **{**common, "on_error": on_error}) as loader:
        assert sum(values(loader), []) == list(range(4, 61))
        assert len(loader.skipped) == 4


def test_at_the_start_of_a_pass_the_next_batch_comes(few: str) -> None:
    common: dict[str, Any] = {**FAILING, "shuffle": False, "transform": {"cls": fails(lambda value: value < 6)}}
    with StreamLoader(few, 2, **common) as loader:
        assert values(loader)[:5] == [[6, 7]] * 4 + [[8, 9]]
    with StreamLoader(few, 2, **common) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 2})
        assert values(loader)[:4] == [[6, 7]] * 3 + [[8, 9]]
