"""The operations that resample an image, a random part of it or the whole, decoded or still encoded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamload.arguments import as_python
from streamload.images.files import decode_image, readable_jpeg_header
from streamload.images.geometry import (
    Box,
    Image,
    Interpolation,
    Window,
    check_image,
    check_interpolation,
    check_range,
    check_size,
    cut,
    decode_resampled,
    draw_crop,
    resized_size,
)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """Cuts out a random part of the image and resizes it.

    Args:
        size: height and width of the result, or one integer for both.
        scale: least and greatest share of the image's area.
        ratio: least and greatest width / height of the part.
        interpolation: "bilinear", "bicubic", "lanczos", "box" or "nearest"; all but the last are antialiased.

    Raises:
        ValueError: an argument is out of range.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_size("RandomResizedCrop", self.size)
        check_range("RandomResizedCrop", "scale", self.scale, 1.0)
        check_range("RandomResizedCrop", "ratio", self.ratio, math.inf)
        check_interpolation("RandomResizedCrop", self.interpolation)

    def __call__(self, image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
        """The resized part, of the image's dtype: (*size, channels), or `size` for an image (height, width)."""
        check_image("RandomResizedCrop", image)
        return cut(image, self.window(image.shape[0], image.shape[1], rng), self.interpolation, out)

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """A random part; see `Geometric`."""
        box = draw_crop(height, width, self.scale, self.ratio, rng)
        return Window(box, check_size("RandomResizedCrop", self.size))

    def from_encoded(self, data: memoryview, rng: np.random.Generator, out: Image | None = None) -> Image:
        """Decodes and crops; draws the same part as calling it on the decoded image.

        A JPEG is decoded only down to the end of the part, so damage below it may go unnoticed.

        Raises:
            ValueError: `data` is not a whole image of a known format.
        """
        header = readable_jpeg_header(data)
        if header is None:
            return self(decode_image(data), rng, out)
        box, size, _ = self.window(header.height, header.width, rng)
        return decode_resampled(data, header, box, size, self.interpolation, out=out)


@dataclass(frozen=True, slots=True)
class Resize:
    """Resizes the whole image, antialiased.

    Args:
        size: an integer, to which the shorter side is brought while the ratio is kept; or exactly (height, width).
        max_size: for an integer `size` only: the longer side does not become longer than this.
        interpolation: as for RandomResizedCrop.

    Raises:
        ValueError: an argument is out of range, or `max_size` is given where it has no meaning.
    """

    size: int | tuple[int, int]
    max_size: int | None = None
    interpolation: Interpolation = "bilinear"
    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False

    def __post_init__(self) -> None:
        size, max_size = check_size("Resize", self.size), as_python(self.max_size)
        object.__setattr__(self, "size", size if isinstance(self.size, tuple | list) else size[0])
        object.__setattr__(self, "max_size", max_size)
        check_interpolation("Resize", self.interpolation)
        if self.max_size is not None and not (
            isinstance(self.size, int) and type(max_size) is int and max_size > self.size
        ):
            raise ValueError(
                "Resize: max_size must be an integer above an integer size, "
                f"not {self.max_size!r} with size {self.size!r}"
            )

    def __call__(self, image: Image, out: Image | None = None) -> Image:
        """The resized image, of the same dtype and number of channels."""
        check_image("Resize", image)
        return cut(image, self.window(image.shape[0], image.shape[1]), self.interpolation, out)

    def window(self, height: int, width: int, rng: np.random.Generator | None = None) -> Window:
        """The whole; `rng` is not used; see `Geometric`."""
        del rng
        return Window(Box(0, 0, height, width), resized_size(height, width, self.size, self.max_size))

    def from_encoded(self, data: memoryview, rng: np.random.Generator | None = None, out: Image | None = None) -> Image:
        """Decodes and resizes; `rng` is not used.

        Raises:
            ValueError: `data` is not a whole image of a known format.
        """
        del rng
        header = readable_jpeg_header(data)
        if header is None:
            return self(decode_image(data), out)
        box, size, _ = self.window(header.height, header.width)
        return decode_resampled(data, header, box, size, self.interpolation, out=out)
