"""The process's global random generators, set anew for each sample that user code sees."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np

from streamload.order.randomness import SampleRandomness

__all__ = ["GlobalSeeds"]

ResultT = TypeVar("ResultT")


class GlobalSeeds:
    """Seeds Python's, NumPy's and (if loaded) torch's generator, so that augmentation depends on the sample alone.

    Args:
        needed: whether any code that runs may draw from them; without it nothing is ever touched.
        restore: leave the generators as they were found, because the process belongs to the user.
        guard: held for a whole task where `needed`, because threads share the generators.
    """

    def __init__(self, *, needed: bool, restore: bool, guard: AbstractContextManager[Any]) -> None:
        self._needed = needed
        self._restore = restore
        self._guard = guard

    @contextmanager
    def whole_task(self) -> Iterator[None]:
        """Surrounds everything that a task does."""
        if not self._needed:
            yield
            return
        with self._guard:
            saved = _states() if self._restore else None
            try:
                yield
            finally:
                if saved is not None:
                    _set_states(saved)

    def run_seeded(
        self, randomness: SampleRandomness, shard: int, sample: int, action: Callable[[], ResultT]
    ) -> ResultT:
        """The result of code that runs with the generators seeded for one sample.

        Code that was the first to import torch drew from a generator that nobody had seeded, so it is run again.
        """
        if not self._needed:
            return action()
        without_torch = "torch" not in sys.modules
        self._seed(randomness, shard, sample)
        result = action()
        if without_torch and "torch" in sys.modules:
            self._seed(randomness, shard, sample)
            result = action()
        return result

    def _seed(self, randomness: SampleRandomness, shard: int, sample: int) -> None:
        for_python, for_numpy, for_torch = randomness.seeds(shard, sample)
        random.seed(for_python)
        np.random.seed(for_numpy)  # the legacy generator is what most augmentation libraries draw from
        if (torch := sys.modules.get("torch")) is not None:
            torch.default_generator.manual_seed(for_torch)


def _states() -> tuple[Any, Any, Any]:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.default_generator.get_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    for_python, for_numpy, for_torch = states
    random.setstate(for_python)
    np.random.set_state(for_numpy)
    if for_torch is not None:
        sys.modules["torch"].default_generator.set_state(for_torch)
