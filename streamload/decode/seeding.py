"""Reseed the process's global random generators for each sample that user code sees."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpy import random as numpy_random  # otherwise each worker would load it at its first use

from streamload.order.randomness import SampleRandomness

# The global generators, as names for `pkgutil.resolve_name`.
_GENERATORS = (
    "random:_inst",
    "numpy.random.mtrand:_rand",
    "numpy.random.mtrand:_rand._bit_generator",
    "torch:default_generator",
)


class UnseededError(Exception):
    """Raised if user code may have drawn from torch's generator before it was seeded; the task must be repeated."""


class GlobalSeeds:
    """Seed Python's, NumPy's and (if loaded) torch's generator, so that augmentation depends on the sample alone.

    Args:
        needed: some function may draw from them; otherwise they are never touched.
        restore: restore the generators after a task, because the process belongs to the user.
    """

    def __init__(self, *, needed: bool, restore: bool) -> None:
        self._needed = needed
        self._restore = restore

    @contextmanager
    def whole_task(self) -> Iterator[None]:
        """Wrap all user code of a task.

        Raises:
            UnseededError: the code imported torch for the first time in this process.
        """
        if not self._needed:
            yield
            return
        torch_generator = _torch_generator()
        had_torch = torch_generator is not None
        if self._restore:
            for_python, for_numpy = random.getstate(), numpy_random.get_state()
            for_torch = torch_generator.get_state() if had_torch else None
        try:
            yield
        finally:
            if self._restore:
                random.setstate(for_python)
                numpy_random.set_state(for_numpy)
                if had_torch:
                    torch_generator.set_state(for_torch)
        if not had_torch and _torch_generator() is not None:
            raise UnseededError

    def seed(self, randomness: SampleRandomness, shard: int, sample: int, repeat: int = 0) -> None:
        """Seed the generators for one sample; torch only if it is loaded."""
        if not self._needed:
            return
        for_python, for_numpy, for_torch = randomness.seeds(shard, sample, repeat)
        random.seed(for_python)
        numpy_random.seed(for_numpy)  # the legacy generator is what most augmentation libraries draw from
        if (generator := _torch_generator()) is not None:
            generator.manual_seed(for_torch)


def names_of_generators() -> dict[int, str]:
    """Return names for `pkgutil.resolve_name` of the global generators, by their `id` in this process.

    Functions such as `random.random` and `numpy.random.rand` are bound to one.
    """
    names = {}
    for name in _GENERATORS:
        module, _, path = name.partition(":")
        generator: Any = sys.modules.get(module)
        for attribute in path.split("."):
            generator = getattr(generator, attribute, None)
        if generator is not None:
            names[id(generator)] = name
    return names


def _torch_generator() -> Any:
    """Return torch's default generator; None if torch is not loaded, or still being imported by a thread."""
    return getattr(sys.modules.get("torch"), "default_generator", None)
