"""The process's global random generators, set anew for each sample that user code sees."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Protocol

import numpy as np

__all__ = ["GlobalSeeds", "RowRandomness"]


class RowRandomness(Protocol):
    """Where a sample's random numbers come from."""

    def generator(self, shard: int, sample: int, copy: int = 0, /) -> np.random.Generator:
        """For a function that takes an `rng`; good until the next call."""

    def seeds(self, shard: int, sample: int, copy: int = 0, /) -> tuple[int, int, int]:
        """For `random`, NumPy's legacy functions and torch."""


class GlobalSeeds:
    """Seeds Python's, NumPy's and (if loaded) torch's generator, so that augmentation depends on the sample alone.

    Args:
        needed: whether any code that runs may draw from them; without it nothing is ever touched.
        restore: leave the generators as they were found, because the process belongs to the user.
    """

    def __init__(self, *, needed: bool, restore: bool) -> None:
        self._needed = needed
        self._restore = restore

    @contextmanager
    def whole_task(self) -> Iterator[None]:
        """Surrounds everything that a task does."""
        if not self._needed:
            yield
            return
        saved = _states() if self._restore else None
        try:
            yield
        finally:
            if saved is not None:
                _set_states(saved)

    def seed(self, randomness: RowRandomness, shard: int, sample: int, copy: int = 0) -> None:
        """Seed for one sample. If the code that follows is the first to import torch, that is seeded as it arrives."""
        if not self._needed:
            return
        for_python, for_numpy, for_torch = randomness.seeds(shard, sample, copy)
        random.seed(for_python)
        np.random.seed(for_numpy)  # the legacy generator is what most augmentation libraries draw from
        torch = sys.modules.get("torch")
        if torch is None:
            _ARRIVAL.expect(for_torch)
        elif (generator := getattr(torch, "default_generator", None)) is not None:
            generator.manual_seed(for_torch)


class _TorchArrival(MetaPathFinder):
    """Stands in the way of `import torch` to seed its generator at once."""

    def __init__(self) -> None:
        self._seed = 0

    def expect(self, seed: int) -> None:
        self._seed = seed
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_seed(module: ModuleType) -> None:
                run(module)
                module.default_generator.manual_seed(self._seed)

            vars(spec.loader)["exec_module"] = run_and_seed
        return spec


_ARRIVAL = _TorchArrival()


def _states() -> tuple[Any, Any, Any]:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.default_generator.get_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    for_python, for_numpy, for_torch = states
    random.setstate(for_python)
    np.random.set_state(for_numpy)
    if for_torch is not None:
        sys.modules["torch"].default_generator.set_state(for_torch)
