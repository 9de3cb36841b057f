"""Fast antialiased bilinear resizing: a small filter on the source, then OpenCV's linear sampling.

Pillow and torchvision resize by a triangle filter as wide as the scale. Linear sampling of a filtered image has, at
phase p between two pixels, the weights `(1 - p) * g[k] + p * g[k - 1]` for a filter g, so the best g for a scale is a
linear least-squares fit of these weights to the triangle's over all phases. Both steps are vectorised in OpenCV;
together they take a third of the time of Pillow's resize. Enlarging needs no filter, and agrees with Pillow's within 1.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_SCALE", "resize_bilinear"]

LARGEST_SCALE = 4.0
"""Beyond it the filter would cost more than is gained."""

_SCALE_STEPS = 64
_PHASES = 32
_WEIGHT_OF_SUM = 1000.0

Image = NDArray[np.uint8]


def resize_bilinear(image: Image, size: tuple[int, int]) -> Image:
    """Resize a whole image.

    Args:
        image: uint8 (height, width, channels), contiguous or a part of a larger image; at most `LARGEST_SCALE` times as
            large as the result in either direction.
        size: height and width of the result.

    Returns:
        uint8 (*size, channels). Against Pillow's `resize(size, BILINEAR)` the mean absolute difference on photographs
        is below 1 of 255.
    """
    cv2 = _opencv()
    rows, columns = image.shape[0] / size[0], image.shape[1] / size[1]
    if rows > 1 or columns > 1:
        image = cv2.sepFilter2D(image, -1, _filter_of(columns), _filter_of(rows), borderType=cv2.BORDER_REPLICATE)
    resized: Image = cv2.resize(image, (size[1], size[0]), interpolation=cv2.INTER_LINEAR)
    return resized.reshape(*size, -1)


def _filter_of(scale: float) -> NDArray[np.float32]:
    return _fitted_filter(max(_SCALE_STEPS, round(scale * _SCALE_STEPS)))


@cache
def _fitted_filter(steps: int) -> NDArray[np.float32]:
    """The symmetric filter for a scale of `steps / _SCALE_STEPS`; its taps add up to 1."""
    scale = steps / _SCALE_STEPS
    if scale <= 1:
        return np.ones(1, np.float32)
    reach = math.ceil(scale)
    taps = np.arange(-reach - 1, reach + 3)
    equations, wanted = [np.array([1.0, *[2.0] * reach]) * _WEIGHT_OF_SUM], [_WEIGHT_OF_SUM]
    for phase in (np.arange(_PHASES) + 0.5) / _PHASES:
        triangle = np.maximum(0.0, 1.0 - np.abs(taps - phase) / scale)
        for tap, weight in zip(taps.tolist(), (triangle / triangle.sum()).tolist(), strict=True):
            equation = np.zeros(reach + 1)
            if abs(tap) <= reach:
                equation[abs(tap)] += 1 - phase
            if abs(tap - 1) <= reach:
                equation[abs(tap - 1)] += phase
            equations.append(equation)
            wanted.append(weight)
    half = np.linalg.lstsq(np.array(equations), np.array(wanted), rcond=None)[0]
    return np.concatenate([half[:0:-1], half]).astype(np.float32)


@lru_cache(maxsize=1)
def _opencv() -> Any:
    import cv2

    cv2.setNumThreads(0)  # the processors are shared out among workers already
    return cv2
