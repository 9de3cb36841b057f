"""The process's global random generators, reseeded for each sample that user code sees."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

__all__ = ["GlobalSeeds", "RowRandomness"]


class RowRandomness(Protocol):
    """The source of a sample's random numbers."""

    def generator(self, shard: int, sample: int, repeat: int = 0, /) -> np.random.Generator:
        """The generator for a function that takes an `rng`; valid until the next call."""

    def seeds(self, shard: int, sample: int, repeat: int = 0, /) -> tuple[int, int, int]:
        """The seeds for `random`, NumPy's legacy functions and torch."""


class GlobalSeeds:
    """Seeds Python's, NumPy's and (if loaded) torch's generator, so that augmentation depends on the sample alone.

    Args:
        needed: some code that runs may draw from them; without it nothing is ever touched.
        restore: leave the generators as they were found, because the process belongs to the user.

    Attributes:
        missed_torch: torch was first imported within the last task, so its generator was not seeded for all samples.
    """

    def __init__(self, *, needed: bool, restore: bool) -> None:
        self._needed = needed
        self._restore = restore
        self.missed_torch = False

    @contextmanager
    def whole_task(self) -> Iterator[None]:
        """Surround all user code of a task."""
        if not self._needed:
            yield
            return
        had_torch = _torch_generator() is not None
        saved = _states() if self._restore else None
        try:
            yield
        finally:
            self.missed_torch = not had_torch and _torch_generator() is not None
            if saved is not None:
                _set_states(saved)

    def seed(self, randomness: RowRandomness, shard: int, sample: int, repeat: int = 0) -> None:
        """Seed for one sample; torch only if it is loaded."""
        if not self._needed:
            return
        for_python, for_numpy, for_torch = randomness.seeds(shard, sample, repeat)
        random.seed(for_python)
        np.random.seed(for_numpy)  # the legacy generator is what most augmentation libraries draw from
        if (generator := _torch_generator()) is not None:
            generator.manual_seed(for_torch)


def _torch_generator() -> Any:
    """Torch's default generator; None as long as torch is not loaded, or a thread is still importing it."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _states() -> tuple[Any, Any, Any]:
    generator = _torch_generator()
    return random.getstate(), np.random.get_state(), None if generator is None else generator.get_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    for_python, for_numpy, for_torch = states
    random.setstate(for_python)
    np.random.set_state(for_numpy)
    if for_torch is not None:
        _torch_generator().set_state(for_torch)
