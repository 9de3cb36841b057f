"""Fast antialiased bilinear resizing: a small filter on the source, then OpenCV's linear sampling.

Pillow and torchvision resize by a triangle filter as wide as the scale. Linear sampling of a filtered image has, at
phase p between two pixels, the weights `(1 - p) * g[k] + p * g[k - 1]` for a filter g, so the best g for a scale is a
least-squares fit of these weights to the triangle's over all phases, with errors weighted as for pixels that resemble
their neighbours. g is only so wide that both reach equally far: 3 taps up to a scale of 2. Both steps are vectorised in
OpenCV. Enlarging needs no filter.

On its own because it is an algorithm that knows nothing of crops and operations.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from streamload.images.opencv import opencv
from streamload.images.placing import placed, writable_in_order

LARGEST_SCALE = 4.0
"""Beyond it the filter would cost more than is gained."""

_SCALE_STEPS = 64
_PHASES = 8
_WEIGHT_OF_SUM = 1000.0
_CORRELATION = 0.9  # of neighbouring pixels, as in photographs
_FINEST_TAP = 256  # OpenCV filters bytes by taps of 8 bits; rounded by itself they might not add up to 1

Image = NDArray[np.uint8]


def resize_bilinear(image: Image, shape: tuple[int, ...], out: Image | None = None) -> Image:
    """Resize a whole image.

    Args:
        image: uint8 (height, width, channels), contiguous or a part of a larger image; at most `LARGEST_SCALE` times as
            large as the result in either direction.
        shape: of the result: height, width, and its channels, which may be left out where it is one.
        out: where to write the result, by the rules of `placing`.

    Returns:
        uint8 of that shape. Against Pillow's `resize(size, BILINEAR)`, in levels of 255: enlarged within 1. Shrunk,
        on photographs within 1 in the mean (1.4 with strong grain), 12 for 999 of 1000 values and 30 for all; on pure
        noise 6.5, 30 and 50; on edges between black and white 0.2, 25 and 35. Of the contrast in noise, which is what
        antialiasing takes away, there is 95.5 to 101 % of what Pillow leaves, and without it there would be 110 % at a
        scale of 1.1, 178 % at 2 and 347 % at 4.
    """
    cv2 = opencv()
    rows, columns = image.shape[0] / shape[0], image.shape[1] / shape[1]
    if rows > 1 or columns > 1:
        image = cv2.sepFilter2D(image, -1, _filter_of(columns), _filter_of(rows), borderType=cv2.BORDER_REFLECT)
    target = writable_in_order(out, shape, np.uint8)
    resized: Image = cv2.resize(image, (shape[1], shape[0]), dst=target, interpolation=cv2.INTER_LINEAR)
    return target if target is not None else placed(resized.reshape(shape), out)


def _filter_of(scale: float) -> NDArray[np.float32]:
    return _fitted_filter(max(_SCALE_STEPS, round(scale * _SCALE_STEPS)))


@cache
def _fitted_filter(steps: int) -> NDArray[np.float32]:
    """The symmetric filter for a scale of `steps / _SCALE_STEPS`; its taps are at least 0 and add up to exactly 1."""
    scale = steps / _SCALE_STEPS
    if scale <= 1:
        return np.array([0, 1, 0], np.float32)  # for a single tap OpenCV has no fast way
    reach = max(1, math.ceil(scale) - 1)
    taps, distances = np.arange(-reach - 2, reach + 4), np.arange(reach + 1)
    phases = ((np.arange(_PHASES) + 0.5) / _PHASES)[:, None, None]
    at_pixel, at_next = np.abs(taps)[:, None] == distances, np.abs(taps - 1)[:, None] == distances
    triangle = np.maximum(0.0, 1.0 - np.abs(taps[:, None] - phases) / scale)
    similarity = np.linalg.cholesky(_CORRELATION ** np.abs(taps[:, None] - taps)).T
    equations = similarity @ (at_pixel * (1 - phases) + at_next * phases)
    wanted = similarity @ (triangle / triangle.sum(axis=1, keepdims=True))
    sum_of_taps = np.array([[1.0, *[2.0] * reach]])
    half = np.linalg.lstsq(
        np.concatenate([equations.reshape(-1, reach + 1), sum_of_taps * _WEIGHT_OF_SUM]),
        np.concatenate([wanted.ravel(), [_WEIGHT_OF_SUM]]),
        rcond=None,
    )[0]
    outer = np.maximum(0, np.round(half[1:] * _FINEST_TAP)) / _FINEST_TAP
    return np.concatenate([outer[::-1], [1 - 2 * outer.sum()], outer]).astype(np.float32)
