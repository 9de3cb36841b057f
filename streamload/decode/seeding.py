"""The process's global random generators, as user code finds them: seeded for the sample that it sees."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

__all__ = ["GlobalSeeds", "RowRandomness", "UnseededError"]

_WATCHED_ROWS = 64
"""To seed for a row takes longer than most functions that do not draw. So many rows show those that do."""

_COMPARED_BYTES = 16


class RowRandomness(Protocol):
    """The source of a sample's random numbers."""

    def generator(self, shard: int, sample: int, repeat: int = 0, /) -> np.random.Generator:
        """The generator for a function that takes an `rng`; valid until the next call."""

    def seeds(self, shard: int, sample: int, repeat: int = 0, /) -> tuple[int, int, int]:
        """The seeds for `random`, NumPy's legacy functions and torch."""


class UnseededError(Exception):
    """User code may have drawn from a generator that was not seeded for its row. Done again, the task is right."""


class GlobalSeeds:
    """Seeds Python's, NumPy's and (if loaded) torch's generator, so that augmentation depends on the sample alone.

    Where the first rows have drawn neither from Python's nor from NumPy's, these are seeded once for a task, which has
    to be done again if some row has drawn after all; from then on they are seeded for every row.

    Args:
        needed: some code that runs may draw from them; without it nothing is ever touched.
        restore: leave the generators as they were found, because the process belongs to the user.
    """

    def __init__(self, *, needed: bool, restore: bool) -> None:
        self._needed = needed
        self._restore = restore
        self._generators = _WatchedGenerators()
        self._rows_to_watch = _WATCHED_ROWS
        self._is_drawn_from = False
        self._seeded_rows = self._unseeded_rows = 0

    @contextmanager
    def whole_task(self) -> Iterator[None]:
        """Surround all user code of a task.

        Raises:
            UnseededError: the task has to be done again: some row drew and was not seeded for, or user code has
                imported torch, from whose generator it may have drawn before that was seeded. At most once for either.
        """
        if not self._needed:
            yield
            return
        had_torch = _torch_generator() is not None
        saved = _states() if self._restore else None
        self._seeded_rows = self._unseeded_rows = 0
        try:
            yield
            self._note_draws()
        finally:
            if saved is not None:
                _set_states(saved)
        if (self._unseeded_rows and self._is_drawn_from) or (not had_torch and _torch_generator() is not None):
            raise UnseededError

    def seed(self, randomness: RowRandomness, shard: int, sample: int, repeat: int = 0) -> None:
        """Seed for one sample; torch only if it is loaded, and then always, since its seed can be read."""
        if not self._needed:
            return
        torch_generator = _torch_generator()
        is_trusted = self._seeded_rows and not self._rows_to_watch and not self._is_drawn_from
        self._unseeded_rows += bool(is_trusted)
        if is_trusted and torch_generator is None:
            return
        for_python, for_numpy, for_torch = randomness.seeds(shard, sample, repeat)
        if torch_generator is not None:
            torch_generator.manual_seed(for_torch)
        if not is_trusted:
            self._note_draws()
            self._generators.seed(for_python, for_numpy)
            self._seeded_rows += 1
            self._rows_to_watch = max(0, self._rows_to_watch - 1)

    def _note_draws(self) -> None:
        """Learn whether anything was drawn since the last seeding of this task, as far as it is not known yet."""
        if self._seeded_rows and not self._is_drawn_from:
            self._is_drawn_from = self._generators.were_drawn_from()


class _WatchedGenerators:
    """Python's and NumPy's global generators, which show whether anybody has drawn from them since they were seeded."""

    def __init__(self) -> None:
        self._python = random.Random()
        self._numpy = np.random.RandomState()
        self._seeds = 0, 0

    def seed(self, for_python: int, for_numpy: int) -> None:
        """Seed both."""
        self._seeds = for_python, for_numpy
        random.seed(for_python)
        np.random.seed(for_numpy)  # the legacy generator is what most augmentation libraries draw from

    def were_drawn_from(self) -> bool:
        """Whether their next numbers are not the first ones after `seed`. It draws these."""
        for_python, for_numpy = self._seeds
        self._python.seed(for_python)
        self._numpy.seed(for_numpy)
        first = self._python.randbytes(_COMPARED_BYTES), self._numpy.bytes(_COMPARED_BYTES)
        return (random.randbytes(_COMPARED_BYTES), np.random.bytes(_COMPARED_BYTES)) != first


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
