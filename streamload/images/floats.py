"""The operations that turn bytes into float32 planes.

Their results are transposed views (channels, height, width) of arrays that are contiguous as (height, width, channels),
so no time goes into moving pixels, and a batch of such images is a tensor in torch's `channels_last` memory format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamload.images.geometry import Image, check_image
from streamload.images.opencv import opencv
from streamload.images.placing import placed, writable_in_order

__all__ = ["Normalize", "ToFloat"]

Planes: TypeAlias = NDArray[np.float32]
"""float32 array (channels, height, width)."""


@dataclass(frozen=True, slots=True)
class ToFloat:
    """Bytes (height, width, channels) to float32 (channels, height, width) in [0, 1]."""

    writes_into_out: ClassVar[bool] = True

    def __call__(self, image: Image, out: Planes | None = None) -> Planes:
        """`image / 255`, float32 (channels, height, width), a transposed view."""
        check_image("ToFloat", image)
        return _computed(
            lambda target: np.divide(image, np.float32(255), out=target, dtype=np.float32), image.shape, out
        )


@dataclass(frozen=True, slots=True)
class Normalize:
    """Subtracts a mean from each channel and divides by a standard deviation.

    Args:
        mean: one number for each channel, for values in [0, 1].
        std: one number for each channel, above 0.

    Raises:
        TypeError: `mean` or `std` is no sequence of numbers.
        ValueError: the lengths differ, or a number is not finite, or a standard deviation is not above 0.
    """

    mean: Sequence[float]
    std: Sequence[float]
    writes_into_out: ClassVar[bool] = True

    def __post_init__(self) -> None:
        try:
            mean, std = tuple(map(float, self.mean)), tuple(map(float, self.std))
        except TypeError:
            raise TypeError(
                "Normalize: mean and std must be sequences of numbers, one for each channel, "
                f"not mean={self.mean!r}, std={self.std!r}"
            ) from None
        if len(mean) != len(std) or not mean or not np.isfinite([*mean, *std]).all() or min(std) <= 0:
            raise ValueError(
                "Normalize: mean and std must be finite numbers, one for each channel, and std above 0, "
                f"not mean={self.mean!r}, std={self.std!r}"
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)

    def __call__(self, image: Image | Planes, out: Planes | None = None) -> Planes:
        """Normalises what `ToFloat` gives, or a uint8 image as if `ToFloat` had been applied first, bit for bit.

        Returns:
            float32 (channels, height, width), a transposed view as `ToFloat` gives it.

        Raises:
            TypeError: neither a uint8 nor a float32 array.
            ValueError: not of three dimensions, or of another number of channels than `mean` has.
        """
        values: Any = image
        if not isinstance(values, np.ndarray) or values.dtype not in (np.float32, np.uint8):
            got = getattr(values, "dtype", type(values).__name__)
            raise TypeError(f"Normalize takes float32 (channels, height, width) or uint8 images, got {got}")
        is_bytes = values.dtype == np.uint8
        if is_bytes:
            check_image("ToFloat", values)
            values = values.transpose(2, 0, 1)
        if values.ndim != 3 or values.shape[0] != len(self.mean):
            raise ValueError(
                f"Normalize has {len(self.mean)} channels and takes (channels, height, width), got {values.shape}"
            )
        pixels = values.transpose(1, 2, 0)
        compute = self._normalize_bytes if is_bytes else self._normalize_floats
        return _computed(lambda target: compute(pixels, target), pixels.shape, out)

    def _normalize_bytes(self, pixels: Image, target: Planes) -> None:
        opencv().LUT(pixels, _normalized_bytes(tuple(self.mean), tuple(self.std)), dst=target)

    def _normalize_floats(self, pixels: Planes, target: Planes) -> None:
        height, width, channels = pixels.shape
        # Rows of whole pixels against a row of repeated constants: NumPy is slow at inner loops of three elements.
        rows = target.reshape(height, width * channels)
        np.subtract(pixels.reshape(rows.shape), np.tile(np.asarray(self.mean, np.float32), width), out=rows)
        np.divide(rows, np.tile(np.asarray(self.std, np.float32), width), out=rows)


@lru_cache(maxsize=16)
def _normalized_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> Planes:
    """What each byte becomes in each channel, (1, 256, channels), in the steps and roundings that floats go through."""
    table = np.empty((1, 256, len(mean)), np.float32)
    table[:] = (np.arange(256, dtype=np.float32) / np.float32(255))[:, None]
    table -= np.asarray(mean, np.float32)
    table /= np.asarray(std, np.float32)
    return table


def _computed(compute: Callable[[Planes], Any], shape: tuple[int, ...], out: Planes | None) -> Planes:
    """What `compute` writes into an array (height, width, channels), as planes; in `out` where that can be."""
    pixels = out.transpose(1, 2, 0) if isinstance(out, np.ndarray) and out.ndim == 3 else None
    target = writable_in_order(pixels, shape, np.float32)
    if out is not None and target is not None:
        compute(target)
        return out
    target = np.empty(shape, np.float32)
    compute(target)
    return placed(target.transpose(2, 0, 1), out)
