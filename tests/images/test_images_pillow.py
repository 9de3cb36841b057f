"""Bilinear resizing beside Pillow's, pixel by pixel: the tolerances that the docstrings state."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from streamload.images import RandomResizedCrop, Resize
from streamload.images.operations import Box, Window, cut

HEIGHT, WIDTH = 375, 500
ROWS, COLUMNS = np.mgrid[0:HEIGHT, 0:WIDTH]
RATIOS = [1.02, 1.1, 1.2, 1.34, 1.5, 1.67, 1.9, 2.0, 2.3, 2.7, 3.0, 3.5, 4.0, 5.0, 8.0]


class Tolerance(NamedTuple):
    """The most that the mean difference, 999 of 1000 values and all values may be off, in levels of 255."""

    mean: float
    almost_all: float
    all: float


PHOTOGRAPH, NOISE, EDGES = Tolerance(1.4, 12, 30), Tolerance(6.5, 30, 50), Tolerance(0.2, 25, 35)


def _photograph() -> NDArray[np.uint8]:
    """Smooth shapes, edges and grain of 8 levels, as the camera's and a JPEG's together."""
    y, x = ROWS / WIDTH, COLUMNS / WIDTH
    shades = [np.sin(7 * x + 3 * y), np.cos(11 * y - 4 * x * y), ((x - 0.5) ** 2 + (y - 0.3) ** 2 < 0.05) * 1.0]
    grain = np.random.default_rng(1).uniform(-8, 8, (HEIGHT, WIDTH, 3))
    return (np.stack(shades, axis=2) * 100 + 128 + grain).clip(0, 255).astype(np.uint8)


def _noise() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def _edges() -> NDArray[np.uint8]:
    """Black and white, with edges upright, level, slanted and round."""
    planes = [(COLUMNS > 250) ^ (ROWS > 180), COLUMNS * 3 + ROWS > 900, (COLUMNS - 250) ** 2 + (ROWS - 180) ** 2 < 9000]
    return np.stack(planes, axis=2).astype(np.uint8) * np.uint8(255)


KINDS = {
    "photograph": (_photograph(), PHOTOGRAPH),
    "noise": (_noise(), NOISE),
    "edges": (_edges(), EDGES),
    "grey": (np.full((HEIGHT, WIDTH, 3), 200, np.uint8), Tolerance(0, 0, 0)),
}


def difference(got: NDArray[np.uint8], expected: NDArray[np.uint8]) -> NDArray[np.int64]:
    assert got.shape == expected.shape
    return np.abs(got.astype(np.int64) - expected)


def assert_within(off: NDArray[np.int64], tolerance: Tolerance) -> None:
    assert off.mean() <= tolerance.mean
    assert np.quantile(off, 0.999) <= tolerance.almost_all
    assert off.max() <= tolerance.all


def by_pillow(pixels: NDArray[np.uint8], size: tuple[int, int], box: Box | None = None) -> NDArray[np.uint8]:
    edges = None if box is None else (box.left, box.top, box.left + box.width, box.top + box.height)
    image = Image.fromarray(pixels)
    return np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR, box=edges, reducing_gap=None))


def size_at(ratio: float) -> tuple[int, int]:
    return round(HEIGHT / ratio), round(WIDTH / ratio)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_shrinking_is_pillows_within_the_stated_tolerance(kind: str, ratio: float) -> None:
    pixels, tolerance = KINDS[kind]
    off = difference(Resize(size_at(ratio))(pixels), by_pillow(pixels, size_at(ratio)))
    assert_within(off, tolerance)
    if ratio > 4:
        assert not off.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(375, 500), (376, 501), (500, 500), (600, 1100)])
def test_enlarging_is_pillows_within_one(kind: str, size: tuple[int, int]) -> None:
    pixels, _ = KINDS[kind]
    assert difference(Resize(size)(pixels), by_pillow(pixels, size)).max() <= 1


def inner(off: NDArray[np.int64], box: Box, size: tuple[int, int]) -> NDArray[np.int64]:
    """Without the outermost pixels: there Pillow's `resize(box=)` looks beyond the box, but a crop does not."""
    rows, columns = (math.ceil(max(1.0, pixels / side)) for pixels, side in zip(size, box[2:], strict=True))
    return off[rows:-rows, columns:-columns]


@pytest.mark.parametrize("kind", KINDS)
def test_a_crop_is_pillows_resize_of_the_box(kind: str) -> None:
    pixels, tolerance = KINDS[kind]
    with_edges, without = [], []
    for seed in range(20):
        got = RandomResizedCrop(224)(pixels, rng=np.random.default_rng(seed))
        box = RandomResizedCrop(1).window(HEIGHT, WIDTH, np.random.default_rng(seed)).box
        off = difference(got, by_pillow(pixels, (224, 224), box))
        with_edges.append(off)
        without.append(inner(off, box, (224, 224)).ravel())
    assert_within(np.concatenate(without), tolerance)
    if kind == "photograph":
        assert_within(np.stack(with_edges), tolerance)


@pytest.mark.parametrize("box", [Box(10.25, 20.5, 220.75, 300.125), Box(0.0, 0.375, 99.5, 99.5), Box(3, 4, 60.5, 71)])
def test_boxes_of_broken_pixels_are_pillows_own(box: Box) -> None:
    """They come from decoding at a smaller scale."""
    for pixels, _ in KINDS.values():
        off = difference(cut(pixels, Window(box, (64, 48)), "bilinear"), by_pillow(pixels, (64, 48), box))
        assert not inner(off, box, (64, 48)).any()
