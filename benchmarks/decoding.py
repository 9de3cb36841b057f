"""The decode functions, which every loader calls on a sample's bytes.

streamload itself calls the same one for images; arrays and labels it decodes by columns, which is what is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from streamload.decode.decoders import decode_npy
from streamload.images import RandomResizedCrop

CROP = 224


def decode_array(data: bytes | memoryview) -> np.ndarray:
    """The array in an .npy file."""
    return decode_npy(memoryview(data))


class DecodeAndCrop:
    """RandomResizedCrop from a JPEG's bytes, the function that streamload's workers call as well."""

    def __init__(self) -> None:
        self._crop = RandomResizedCrop(CROP)
        self._rng = np.random.default_rng()

    def __call__(self, data: bytes | memoryview) -> np.ndarray:
        return self._crop.from_encoded(memoryview(data), self._rng)


def decoders(fields: Sequence[str]) -> list[Callable[[Any], Any]]:
    """A function for each of the fields."""
    by_field: dict[str, Callable[[Any], Any]] = {"npy": decode_array, "jpg": DecodeAndCrop(), "cls": int}
    return [by_field[field] for field in fields]
