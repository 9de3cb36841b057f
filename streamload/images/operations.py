"""Image operations on arrays (height, width, channels) or (height, width), applied in the worker.

Each agrees with torchvision's operation of the same name on PIL images: exactly if it moves or resamples pixels, except
for "bilinear", the default, which is three times as fast and on photographs within 1 of 255 in the mean over an image
and within 12 for 999 of 1000 values (`resize_bilinear` says more); `ToFloat` and `Normalize` within 1e-6. A crop is cut
out before it is resized, so pixels around it have no part in it. Operations never change their argument.

A random operation has a parameter `rng`, a `numpy.random.Generator`, which the worker passes. The same state of it
gives the same bytes.

An operation with a method `from_encoded(data, rng)` may get the encoded file instead, in memory that is reused
afterwards. A JPEG is then decoded no further down than the crop, and, if it shrinks to a fifth or less, at a smaller
scale. Then the result differs from that of the two steps: on photographs and text by 1 of 255 in the mean over an image
(1.03 in the worst of 1,652 cases) and by 15 for 999 of 1000 values; noise and drawings in black and white by up to 4 in
the mean, stripes of two pixels by 5, and a board of squares of 8 pixels, which are the JPEG's own blocks, by 9.

Every operation takes an array `out=` to write its result into; `placing` states the rules.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import as_python
from streamload.images.files import decode_image, readable_jpeg_header
from streamload.images.floats import Normalize, ToFloat, ToTensor, as_tensor
from streamload.images.geometry import (
    Box,
    Geometric,
    Image,
    Interpolation,
    Window,
    check_interpolation,
    check_range,
    check_size,
    decode_resampled,
    draw_crop,
    resized_size,
)
from streamload.images.placing import takes_out, takes_rng


@dataclass(frozen=True, slots=True)
class Compose:
    """Apply operations, or any other callables, one after the other.

    Those with a parameter `rng` get the same generator.

    Args:
        operations: what to apply, first to last; those of a Compose among them become this one's own.

    Raises:
        TypeError: `operations` is not a sequence of callables.
    """

    operations: Sequence[Callable[..., Any]]
    _random: tuple[bool, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.operations, Sequence) or not all(map(callable, self.operations)):
            raise TypeError(f"Compose: operations must be a list of callables, not {self.operations!r}")
        operations = tuple(chain.from_iterable(map(steps_of, self.operations)))
        object.__setattr__(self, "operations", operations)
        object.__setattr__(self, "_random", tuple(map(takes_rng, operations)))

    def __call__(self, image: Any, rng: np.random.Generator | None = None, out: NDArray[Any] | None = None) -> Any:
        """Return the result of the last operation, which gets `out` if it takes it."""
        value, makes_tensor = image, False
        following = (*self.operations[1:], None)
        for operation, after, random in zip(self.operations, following, self._random, strict=True):
            is_bytes = isinstance(value, np.ndarray) and value.dtype == np.uint8
            if type(operation) in (ToFloat, ToTensor) and type(after) is Normalize and is_bytes:
                makes_tensor = type(operation) is ToTensor
                continue  # Normalize does both in one pass
            options: dict[str, Any] = {"rng": rng} if random else {}
            if after is None and out is not None and takes_out(operation):
                options["out"] = out
            value = operation(value, **options)
            if makes_tensor:
                value, makes_tensor = as_tensor(value, out), False
        return value

    @property
    def writes_into_out(self) -> bool:
        """True if the last operation takes `out`."""
        return bool(self.operations) and takes_out(self.operations[-1])

    @property
    def uses_global_generators(self) -> bool:
        """True if an operation may draw from `random`, `numpy.random` or torch: one not of ours and without `rng`."""
        return any(
            getattr(operation, "uses_global_generators", not random and not is_ours(operation))
            for operation, random in zip(self.operations, self._random, strict=True)
        )


def steps_of(operation: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    """Return the operations of a Compose, or else the operation itself."""
    return operation.operations if type(operation) is Compose else (operation,)


def is_ours(operation: object) -> bool:
    """Return True for the operations of this library."""
    return type(operation).__module__.startswith("streamload.images.")


@dataclass(frozen=True, slots=True)
class CenterCrop(Geometric):
    """Cut out the middle; an image that is too small is first surrounded with zeros.

    Args:
        size: height and width of the result, or one integer for both.

    Raises:
        ValueError: `size` is not positive.
    """

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        check_size("CenterCrop", self.size)

    def __call__(self, image: Image, out: Image | None = None) -> Image:
        """Return the middle, of the image's dtype and number of channels."""
        return self.apply(image, None, out)

    def window(self, height: int, width: int, _: Any, /) -> Window:
        """Return the middle."""
        rows, columns = check_size("CenterCrop", self.size)
        return Window(Box(_middle(height, rows), _middle(width, columns), rows, columns), (rows, columns))


def _middle(length: int, wanted: int) -> int:
    """Return where the middle begins; below 0 if it is longer than the image."""
    return -((wanted - length) // 2) if wanted > length else round((length - wanted) / 2)


@dataclass(frozen=True, slots=True)
class RandomCrop(Geometric):
    """Cut out a part of a fixed size at a random place.

    Args:
        size: height and width of the part, or one integer for both.
        padding: rows and columns of zeros that are put around the image before.

    Raises:
        ValueError: `size` is not positive or `padding` is negative.
    """

    size: int | tuple[int, int]
    padding: int = 0

    def __post_init__(self) -> None:
        check_size("RandomCrop", self.size)
        object.__setattr__(self, "padding", as_python(self.padding))
        if type(self.padding) is not int or self.padding < 0:
            raise ValueError(f"RandomCrop: padding must be an integer of at least 0, not {self.padding!r}")

    def __call__(self, image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
        """Return the part, of the image's dtype; a ValueError if the image with its padding is smaller."""
        return self.apply(image, rng, out)

    def window(self, height: int, width: int, rng: np.random.Generator, /) -> Window:
        """Draw a part; a ValueError if the image with its padding is smaller."""
        rows, columns = check_size("RandomCrop", self.size)
        spare_rows, spare_columns = height + 2 * self.padding - rows, width + 2 * self.padding - columns
        if spare_rows < 0 or spare_columns < 0:
            raise ValueError(
                f"RandomCrop: an image of {height} x {width} with padding {self.padding} is smaller than the crop of "
                f"{rows} x {columns}; resize before or give a larger padding"
            )
        top, left = (int((spare + 1) * rng.random()) - self.padding for spare in (spare_rows, spare_columns))
        return Window(Box(top, left, rows, columns), (rows, columns))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(Geometric):
    """Swap left and right with probability `p`; else return the image itself (or a copy, in a fitting `out`).

    Args:
        p: the probability.

    Raises:
        ValueError: `p` is not within 0 and 1.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", as_python(self.p))
        if not isinstance(self.p, float | int) or not 0 <= self.p <= 1:
            raise ValueError(f"RandomHorizontalFlip: p must be a probability from 0 to 1, not {self.p!r}")

    def __call__(self, image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
        """Return the image or its mirror image, of the same dtype and shape."""
        return self.apply(image, rng, out)

    def window(self, height: int, width: int, rng: np.random.Generator, /) -> Window | None:
        """Draw the mirror image, or None."""
        mirrored = rng.random() < self.p
        return Window(Box(0, 0, height, width), (height, width), mirrored=True) if mirrored else None


class _Resizing(Geometric):
    """An operation that may begin with the encoded image."""

    __slots__ = ()

    @abstractmethod
    def window(self, height: int, width: int, rng: Any, /) -> Window:
        """Return the part to be resized."""

    def from_encoded(self, data: memoryview, rng: np.random.Generator | None = None, out: Image | None = None) -> Image:
        """Decode and resize the same part as on a call with the decoded image.

        A JPEG is decoded only down to the end of the part, so damage below it may go unnoticed.

        Raises:
            ValueError: `data` is not a whole image of a known format.
        """
        header = readable_jpeg_header(data)
        if header is None:
            return self.apply(decode_image(data), rng, out)
        box, size, _ = self.window(header.height, header.width, rng)
        return decode_resampled(data, header, box, size, self.interpolation, out=out)


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(_Resizing):
    """Cut out a random part of the image and resize it.

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

    def __post_init__(self) -> None:
        check_size("RandomResizedCrop", self.size)
        check_range("RandomResizedCrop", "scale", self.scale, 1.0)
        check_range("RandomResizedCrop", "ratio", self.ratio, math.inf)
        check_interpolation("RandomResizedCrop", self.interpolation)

    def __call__(self, image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
        """Return the resized part, of the image's dtype and number of channels."""
        return self.apply(image, rng, out)

    def window(self, height: int, width: int, rng: np.random.Generator, /) -> Window:
        """Draw a part."""
        box = draw_crop(height, width, self.scale, self.ratio, rng)
        return Window(box, check_size("RandomResizedCrop", self.size))


@dataclass(frozen=True, slots=True)
class Resize(_Resizing):
    """Resize the whole image, antialiased.

    Args:
        size: an integer, the length of the shorter side, which keeps the ratio; or exactly (height, width).
        max_size: for an integer `size` only: the longer side does not become longer than this.
        interpolation: as for RandomResizedCrop.

    Raises:
        ValueError: an argument is out of range, or `max_size` is given without an integer `size`.
    """

    size: int | tuple[int, int]
    max_size: int | None = None
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        size, max_size = check_size("Resize", self.size), as_python(self.max_size)
        object.__setattr__(self, "size", size if isinstance(self.size, tuple | list) else size[0])
        object.__setattr__(self, "max_size", max_size)
        check_interpolation("Resize", self.interpolation)
        has_integers = isinstance(self.size, int) and type(max_size) is int
        if max_size is not None and not (has_integers and max_size > self.size):
            raise ValueError(
                f"Resize: max_size must be an integer above an integer size, not {max_size!r} with size {self.size!r}"
            )

    def __call__(self, image: Image, out: Image | None = None) -> Image:
        """Return the resized image, of the same dtype and number of channels."""
        return self.apply(image, None, out)

    def window(self, height: int, width: int, _: Any, /) -> Window:
        """Return the whole."""
        return Window(Box(0, 0, height, width), resized_size(height, width, self.size, self.max_size))
