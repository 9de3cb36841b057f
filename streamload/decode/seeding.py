"""The process's global random generators, reseeded for each sample that user code sees."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, Protocol

from numpy import random as numpy_random  # otherwise NumPy loads it at its first use, and each worker for itself

# Where the global generators are: the module, and the attribute in it.
_GENERATORS = (
    "random:_inst",
    "numpy.random.mtrand:_rand",
    "numpy.random.mtrand:_rand._bit_generator",
    "torch:default_generator",
)


class RowRandomness(Protocol):
    """The source of a sample's random numbers."""

    def generator(self, shard: int, sample: int, repeat: int = 0, /) -> numpy_random.Generator:
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
        numpy_random.seed(for_numpy)  # the legacy generator is what most augmentation libraries draw from
        if (generator := _torch_generator()) is not None:
            generator.manual_seed(for_torch)


def names_of_generators() -> dict[int, str]:
    """The names by which `pkgutil.resolve_name` finds the global generators in any process, by the generators' `id`.

    Functions such as `random.random` and `numpy.random.rand` are bound to one. Those of modules that are not loaded are
    left out.
    """
    return {id(found): name for name in _GENERATORS if (found := _loaded(name)) is not None}


def _loaded(name: str) -> Any:
    """What has this name in the modules that are loaded, or None."""
    module, _, path = name.partition(":")
    return reduce(lambda holder, attribute: getattr(holder, attribute, None), path.split("."), sys.modules.get(module))


def _torch_generator() -> Any:
    """Torch's default generator; None as long as torch is not loaded, or a thread is still importing it."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _states() -> tuple[Any, Any, Any]:
    generator = _torch_generator()
    return random.getstate(), numpy_random.get_state(), None if generator is None else generator.get_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    for_python, for_numpy, for_torch = states
    random.setstate(for_python)
    numpy_random.set_state(for_numpy)
    if for_torch is not None:
        _torch_generator().set_state(for_torch)
