"""A picture that compresses and resizes as a photograph does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def photo(height: int, width: int) -> NDArray[np.uint8]:
    """Smooth shapes, edges and some grain, as a photograph has."""
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    shades = [np.sin(7 * x + 3 * y), np.cos(11 * y - 4 * x * y), ((x - 0.5) ** 2 + (y - 0.3) ** 2 < 0.05) * 1.0]
    grain = np.random.default_rng(1).normal(0, 0.02, (height, width, 3))
    return (np.clip(np.stack(shades, axis=2) / 2.5 + 0.5 + grain, 0, 1) * 255).astype(np.uint8)
