"""The global generators: the same seeds for a sample in any process, and no touch where nobody draws from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from launched import run_python
from preloaded import Preloaded

from streamload.decode.seeding import GlobalSeeds, UnseededError
from streamload.order.randomness import SampleRandomness

DRAW = """
import random, sys
import numpy as np
from streamload.decode.seeding import GlobalSeeds
from streamload.order.randomness import SampleRandomness

if sys.argv[1]:
    import torch

GlobalSeeds(needed=True, restore=False).seed(SampleRandomness(5, 2), 3, 4)
print(random.random(), np.random.rand(), *([torch.rand(()).item()] if sys.argv[1] else []))
"""


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seeds(**options: Any) -> GlobalSeeds:
    return GlobalSeeds(**{"needed": True, "restore": False, **options})


@pytest.fixture(autouse=True)
def own_generators() -> Any:
    """These tests draw from the generators of the whole test run."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.mark.parametrize("with_torch", ["torch", ""])
def test_another_process_draws_the_same(preloaded: Preloaded, with_torch: str) -> None:
    ended = preloaded.run(DRAW, with_torch) if with_torch else run_python("-c", DRAW, with_torch)
    seeds().seed(SampleRandomness(5, 2), 3, 4)
    expected = drawn()
    assert [float(word) for word in ended.output.split()] == list(expected if with_torch else expected[:2])


def test_samples_epochs_and_seeds_draw_differently() -> None:
    seen = set()
    for seed, epoch, shard, sample in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]:
        seeds().seed(SampleRandomness(seed, epoch), shard, sample)
        seen.update(drawn())
    assert len(seen) == 15


def test_nothing_is_touched_where_nobody_needs_it() -> None:
    idle = seeds(needed=False, restore=True)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with idle.whole_task():
        idle.seed(SampleRandomness(0, 0), 0, 0)
    assert drawn() == expected


def test_the_users_own_generators_go_on_where_they_were() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    restoring = seeds(restore=True)
    with pytest.raises(ValueError, match="in the middle"), restoring.whole_task():
        restoring.seed(SampleRandomness(0, 0), 0, 0)
        drawn()
        raise ValueError("in the middle")
    assert drawn() == expected


MANY = 200
"""More rows than are watched for draws."""


def task_of(function: Callable[[int], Any], made: GlobalSeeds, samples: Iterable[int] = range(MANY)) -> list[Any]:
    """What the function returns for each sample, in one task."""
    with made.whole_task():
        returned = []
        for sample in samples:
            made.seed(SampleRandomness(0, 0), 0, sample)
            returned.append(function(sample))
        return returned


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: random.gauss(0, 1), np.random.standard_normal])
def test_a_task_in_which_one_late_row_has_drawn_is_to_be_done_again(draw: Callable[[], float]) -> None:
    made = seeds()

    def draws_once(sample: int) -> float:
        return draw() if sample == MANY - 1 else 0.0

    with pytest.raises(UnseededError):
        task_of(draws_once, made)
    again = task_of(draws_once, made)
    assert again[-1] == task_of(draws_once, seeds(), [MANY - 1])[0]


def test_functions_that_draw_now_and_then_are_called_once_for_a_row() -> None:
    called = []

    def draws_for_half(sample: int) -> float:
        called.append(sample)
        return random.random() if sample % 2 else 0.0

    drawn_now = task_of(draws_for_half, seeds())
    assert called == list(range(MANY))
    assert len(set(drawn_now)) == MANY // 2 + 1


def test_functions_that_never_draw_are_not_seeded_for_once_that_shows() -> None:
    states = task_of(lambda _: random.getstate(), seeds())
    assert len(set(states)) < MANY / 2, "to seed takes longer than most functions"


def test_a_seed_that_is_only_read_is_the_samples_own() -> None:
    made = seeds()
    first = task_of(lambda _: torch.initial_seed(), made)
    assert len(set(first)) == MANY
    assert task_of(lambda _: torch.initial_seed(), made, [7, 150]) == [first[7], first[150]]


def test_one_row_is_never_done_again() -> None:
    made = seeds()
    task_of(lambda _: None, made)
    assert task_of(lambda _: random.random(), made, [3]) == task_of(lambda _: random.random(), seeds(), [3])
