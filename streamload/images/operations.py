"""Image operations on arrays (height, width, channels) or (height, width), applied in the worker.

Each agrees with torchvision's operation of the same name: those that move pixels exactly; those that resample exactly
with torchvision on PIL images, but for "bilinear", the default, which is three times as fast and on photographs within
1 of 255 in the mean over an image and within 12 for 999 of 1000 values (within 1 for all of them when enlarging;
`resize_bilinear` says more); a crop is cut out before it is resized, so no pixel around it has a part in it, as some
have at the border in Pillow's `resize(box=)`; `ToFloat` and `Normalize` within 1e-6. Operations never change their
argument.

A random operation has a parameter `rng`, a `numpy.random.Generator`; the worker passes one to every transform that
has a parameter of this name. The same state of it gives the same bytes.

An operation with a method `from_encoded(data, rng)` may be given the encoded file instead of the array, in memory that
is used for another one afterwards. A JPEG is then decoded no further down than the crop. If it shrinks to a fifth or
less it is decoded at a smaller scale too; the result differs from that of the two steps. Measured on 17 photographs and
textures and 2 pages of text, that is 1 of 255 in the mean over an image at most (1.03 in the worst of 1,652 cases) and
15 for 999 of 1000 values. Noise and drawings in black and white differ by up to 4 in the mean, coloured stripes of two
pixels by 5, and a board of squares of 8 pixels, which are the JPEG's own blocks, by 9. In all other cases it is the
same.

Every operation takes an array `out=` to write its result into; `placing` states the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import as_python
from streamload.images.files import decode_image, readable_jpeg_header
from streamload.images.floats import Normalize, ToFloat, ToTensor, as_tensor
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
from streamload.images.placing import placed, takes_out, takes_rng


@dataclass(frozen=True, slots=True)
class Compose:
    """Applies operations, or any other callables, one after the other.

    Those with a parameter `rng` are given the generator, all the same one.

    Args:
        operations: what to apply, first to last.

    Raises:
        TypeError: `operations` is not a sequence of callables.
    """

    operations: Sequence[Callable[..., Any]]
    _random: tuple[bool, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.operations, Sequence) or not all(map(callable, self.operations)):
            raise TypeError(f"Compose: operations must be a list of callables, not {self.operations!r}")
        object.__setattr__(self, "operations", tuple(self.operations))
        object.__setattr__(self, "_random", tuple(takes_rng(each) for each in self.operations))

    def __call__(self, image: Any, rng: np.random.Generator | None = None, out: NDArray[Any] | None = None) -> Any:
        """The result of the last operation; `out` is handed to that one, if it takes it."""
        return self._apply(0, image, rng, out)

    @property
    def writes_into_out(self) -> bool:
        """Whether `out` has a meaning: the last operation is one that takes it."""
        return bool(self.operations) and takes_out(self.operations[-1])

    @property
    def uses_global_generators(self) -> bool:
        """Whether an operation may draw from `random`, `numpy.random` or torch: one not of ours and without `rng`."""
        return may_use_global_generators(self.operations, self._random)

    @property
    def after_first(self) -> Compose:
        """All operations but the first."""
        return Compose(self.operations[1:])

    @property
    def from_encoded(self) -> Callable[..., Any]:
        """As calling it on the decoded image, where the first operation can begin with the encoded one.

        It takes `(data, rng, out)`, the latter two None if left out.

        Raises:
            AttributeError: the first operation cannot.
        """
        if not self.operations or not hasattr(self.operations[0], "from_encoded"):
            raise AttributeError("the first operation of this Compose takes no encoded image")
        return self._from_encoded

    def _from_encoded(
        self, data: memoryview, rng: np.random.Generator | None = None, out: NDArray[Any] | None = None
    ) -> Any:
        first: Any = self.operations[0]
        if len(self.operations) > 1:
            return self._apply(1, first.from_encoded(data, rng), rng, out)
        return first.from_encoded(data, rng, out) if takes_out(first) else first.from_encoded(data, rng)

    def _apply(self, start: int, value: Any, rng: np.random.Generator | None, out: NDArray[Any] | None) -> Any:
        last = len(self.operations) - 1
        makes_tensor = False
        for number in range(start, last + 1):
            operation = self.operations[number]
            options: dict[str, Any] = {"rng": rng} if self._random[number] else {}
            if number == last and out is not None and takes_out(operation):
                options["out"] = out
            following = self.operations[number + 1] if number < last else None
            if type(operation) in _TO_FLOATS and type(following) is Normalize and _is_bytes(value):
                makes_tensor = type(operation) is ToTensor
                continue  # Normalize does both in one pass
            value = operation(value, **options)
            if makes_tensor:
                value, makes_tensor = as_tensor(value, out), False
        return value


def may_use_global_generators(operations: Sequence[Callable[..., Any]], take_rng: Sequence[bool]) -> bool:
    """Whether one of some operations may draw from `random`, `numpy.random` or torch.

    Args:
        operations: to ask; where one does not say, it may if it is not ours and takes no `rng`.
        take_rng: for each whether it takes `rng`.
    """
    return any(
        bool(getattr(each, "uses_global_generators", not random and not _is_ours(each)))
        for each, random in zip(operations, take_rng, strict=True)
    )


_TO_FLOATS = (ToFloat, ToTensor)


def _is_bytes(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8


def _is_ours(operation: Callable[..., Any]) -> bool:
    return type(operation).__module__.startswith(__name__.rpartition(".")[0] + ".")


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """Cuts out the middle; an image that is too small is first surrounded with zeros.

    Args:
        size: height and width of the result, or one integer for both.

    Raises:
        ValueError: `size` is not positive.
    """

    size: int | tuple[int, int]
    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False
    interpolation: ClassVar[Interpolation] = "nearest"

    def __post_init__(self) -> None:
        check_size("CenterCrop", self.size)

    def __call__(self, image: Image, out: Image | None = None) -> Image:
        """The middle, of the image's dtype: (*size, channels), or `size` for an image (height, width)."""
        check_image("CenterCrop", image)
        return cut(image, self.window(image.shape[0], image.shape[1]), self.interpolation, out)

    def window(self, height: int, width: int, rng: np.random.Generator | None = None) -> Window:
        """The middle; `rng` is not used; see `Geometric`."""
        del rng
        rows, columns = check_size("CenterCrop", self.size)
        return Window(Box(_middle(height, rows), _middle(width, columns), rows, columns), (rows, columns))


def _middle(length: int, wanted: int) -> int:
    """Where the middle begins; below 0 where it is longer than the image."""
    return -((wanted - length) // 2) if wanted > length else round((length - wanted) / 2)


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """Cuts out a part of a fixed size at a random place.

    Args:
        size: height and width of the part, or one integer for both.
        padding: rows and columns of zeros that are put around the image before.

    Raises:
        ValueError: `size` is not positive or `padding` is negative.
    """

    size: int | tuple[int, int]
    padding: int = 0
    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False
    interpolation: ClassVar[Interpolation] = "nearest"

    def __post_init__(self) -> None:
        check_size("RandomCrop", self.size)
        object.__setattr__(self, "padding", as_python(self.padding))
        if type(self.padding) is not int or self.padding < 0:
            raise ValueError(f"RandomCrop: padding must be an integer of at least 0, not {self.padding!r}")

    def __call__(self, image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
        """The part, of the image's dtype: (*size, channels), or `size` for an image (height, width).

        Raises:
            ValueError: the image with its padding is smaller than the part.
        """
        check_image("RandomCrop", image)
        return cut(image, self.window(image.shape[0], image.shape[1], rng), self.interpolation, out)

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window:
        """A random part; see `Geometric`.

        Raises:
            ValueError: the image with its padding is smaller than the part.
        """
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
class RandomHorizontalFlip:
    """Swaps left and right with probability `p`, and else returns the image itself (or a copy, in a fitting `out`).

    Args:
        p: the probability.

    Raises:
        ValueError: `p` is not within 0 and 1.
    """

    p: float = 0.5
    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False
    interpolation: ClassVar[Interpolation] = "nearest"

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", as_python(self.p))
        if not isinstance(self.p, float | int) or not 0 <= self.p <= 1:
            raise ValueError(f"RandomHorizontalFlip: p must be a probability from 0 to 1, not {self.p!r}")

    def __call__(self, image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
        """The image or its mirror image, of the same dtype and shape."""
        check_image("RandomHorizontalFlip", image)
        window = self.window(image.shape[0], image.shape[1], rng)
        return placed(image, out) if window is None else cut(image, window, self.interpolation, out)

    def window(self, height: int, width: int, rng: np.random.Generator) -> Window | None:
        """The mirror image, or None; see `Geometric`."""
        mirrored = rng.random() < self.p
        return Window(Box(0, 0, height, width), (height, width), mirrored=True) if mirrored else None


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
