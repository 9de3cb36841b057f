"""The process's global random generators, reseeded for each sample that user code sees."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

__all__ = ["GlobalSeeds", "RowRandomness", "UnseededError", "global_generator", "name_of_generator"]

_BOUND: dict[str, Any] = {"random": random.random, "numpy.random": np.random.rand}
"""A function of each global generator."""


class RowRandomness(Protocol):
    """The source of a sample's random numbers."""

    def generator(self, shard: int, sample: int, repeat: int = 0, /) -> np.random.Generator:
        """The generator for a function that takes an `rng`; valid until the next call."""

    def seeds(self, shard: int, sample: int, repeat: int = 0, /) -> tuple[int, int, int]:
        """The seeds for `random`, NumPy's legacy functions and torch."""


class UnseededError(Exception):
    """User code may have drawn from torch's generator before that was seeded. Done again, the task is right."""


class GlobalSeeds:
    """Seeds Python's, NumPy's and (if loaded) torch's generator, so that augmentation depends on the sample alone.

    Args:
        needed: some code that runs may draw from them; without it nothing is ever touched.
        restore: leave the generators as they were found, because the process belongs to the user.
    """

    def __init__(self, *, needed: bool, restore: bool) -> None:
        self._needed = needed
        self._restore = restore

    @contextmanager
    def whole_task(self) -> Iterator[None]:
        """Surround all user code of a task.

        Raises:
            UnseededError: the code has imported torch, for the first time in this process.
        """
        if not self._needed:
            yield
            return
        had_torch = _torch_generator() is not None
        saved = _states() if self._restore else None
        try:
            yield
        finally:
            if saved is not None:
                _set_states(saved)
        if not had_torch and _torch_generator() is not None:
            raise UnseededError

    def seed(self, randomness: RowRandomness, shard: int, sample: int, repeat: int = 0) -> None:
        """Seed for one sample; torch only if it is loaded."""
        if not self._needed:
            return
        for_python, for_numpy, for_torch = randomness.seeds(shard, sample, repeat)
        random.seed(for_python)
        np.random.seed(for_numpy)  # the legacy generator is what most augmentation libraries draw from
        if (generator := _torch_generator()) is not None:
            generator.manual_seed(for_torch)


def name_of_generator(value: object) -> str | None:
    """The name by which `global_generator` finds Python's or NumPy's global generator; None for anything else.

    They are what functions such as `random.random` and `numpy.random.rand` are bound to.
    """
    return next((name for name, function in _BOUND.items() if value is function.__self__), None)


def global_generator(name: str) -> Any:
    """The global generator of that name in this process."""
    return _BOUND[name].__self__


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
