"""The global generators: the same seeds for a sample in any process, and no touch where nobody draws from them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from launched import run_python
from preloaded import Preloaded

from streamload.decode.seeding import GlobalSeeds
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
