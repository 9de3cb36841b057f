"""Finds transforms of torchvision that would do nothing with NumPy arrays, without importing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

__all__ = ["TorchvisionStart", "torchvision_start"]

_TAKE_ARRAYS = {"ToImage", "ToPILImage", "ToTensor", "Lambda", "Identity"}
_CHAINS = {"Compose", "Sequential", "RandomApply"}
_CHOICES = {"RandomChoice", "RandomOrder"}


class TorchvisionStart:
    """The transform of torchvision that gets a field or sample first, and does nothing useful with NumPy arrays.

    Those of `v2` pass over all that is neither a tensor nor an image of PIL, without a word, so that a model would be
    trained without them.
    """

    def __init__(self, transform: object) -> None:
        kind = type(transform)
        self._is_v2 = ".v2" in kind.__module__
        self._name = kind.__name__

    def check(self, value: Any) -> None:
        """Raises TypeError if a decoded field, or a whole sample, holds arrays and nothing that it would work on."""
        parts = _parts_of(value)
        if any(isinstance(part, np.ndarray) for part in parts) and not any(map(_is_image, parts)):
            raise TypeError(self._advice())

    def _advice(self) -> str:
        if self._is_v2:
            return (
                f"torchvision's v2.{self._name} passes over NumPy arrays, which images are decoded to, and would do "
                "nothing; begin with v2.ToImage(), as in v2.Compose([v2.ToImage(), ...])"
            )
        return (
            f"torchvision's {self._name} does not take NumPy arrays, which images are decoded to; begin with "
            "ToPILImage(), as in Compose([ToPILImage(), ...])"
        )


def torchvision_start(function: object) -> TorchvisionStart | None:
    """What would get arrays first, if it is of torchvision and takes none; None for all other functions."""
    module, name = type(function).__module__, type(function).__name__
    if module.startswith("streamload.images."):  # ours give arrays for arrays
        rest = [
            step for step in getattr(function, "operations", ()) if not type(step).__module__.startswith("streamload.")
        ]
        return torchvision_start(rest[0]) if rest else None
    if not module.startswith(("torchvision.transforms.", "torch.nn.modules.container")):
        return None
    if name in _CHAINS | _CHOICES:
        steps = list(_steps_of(function))
        found = map(torchvision_start, steps if name in _CHOICES else steps[:1])
        return next((each for each in found if each is not None), None)
    if name in _TAKE_ARRAYS or not module.startswith("torchvision."):
        return None
    return TorchvisionStart(function)


def _steps_of(chain: Any) -> Iterable[object]:
    steps = getattr(chain, "transforms", chain)
    return steps if isinstance(steps, Iterable) else (steps,)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else [value]


def _is_image(part: object) -> bool:
    """Whether it is a tensor or an image of PIL, whose packages need not be imported to know it."""
    return type(part).__module__.partition(".")[0] in ("torch", "torchvision", "PIL")
