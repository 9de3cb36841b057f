"""Image operations on arrays (height, width, channels) or (height, width), applied in the worker.

An operation that torchvision has agrees with it on PIL images. Operations that move or resample pixels agree
exactly, except for "bilinear", the default: it is three times as fast, and on photographs differs by about 1 of 255 on
average and at most 12 in 99.9 % of values (see `resize_bilinear`). `ToTensor` and `Normalize` agree within 1e-6.
A crop is cut out before it is resized, so pixels around it have no effect. Operations never change their argument.

A random operation has a parameter `rng`, a `numpy.random.Generator`, which the worker passes. Equal generator
states give equal bytes.

An operation with a method `from_encoded(data, rng)` may get the encoded file instead of pixels, in memory that is
reused. A JPEG is then decoded only down to the end of the crop, and at a smaller scale if the crop shrinks to a fifth
or less. The smaller scale changes photographs and text by up to 1 of 255 on average and 15 in 99.9 % of values,
black-and-white noise and drawings by up to 4 on average, two-pixel stripes by 5, and a checkerboard of the JPEG's own
8-pixel blocks by 9.

All but `Joint` take an array `out=` to write into; see `placing`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import alternatives, as_python
from streamload.errors import ShardNotFoundError, without_secrets
from streamload.images.files import PIXEL_LIMIT, decode_image, readable_jpeg_header
from streamload.images.jpeg import JpegHeader, decode_jpeg, smallest_scale
from streamload.images.placing import MODES, Image, check_image, copied, fits, opencv, placed, takes, writable_in_order

Planes: TypeAlias = NDArray[np.float32]
"""float32 array (channels, height, width)."""

Interpolation: TypeAlias = Literal["nearest", "box", "bilinear", "bicubic", "lanczos"]

Kind: TypeAlias = Literal["image", "mask", "boxes", "points"]

Item: TypeAlias = tuple[Any, Kind]
"""A value's number or key in its sample, and its kind."""

STATISTICS_NAME = "statistics.json"
_STATISTICS_BYTES = 1 << 20  # at most

_LARGEST_SCALE = 4.0  # source / result; at larger scales the filter takes more time than it saves
_SCALE_STEPS = 64  # scales are rounded to multiples of 1/64, so that few filters are fitted
_PHASES = 8  # positions of a result's pixel between two source pixels, for which the filter is fitted
_WEIGHT_OF_SUM = 1000.0  # of the equation that makes the taps add up to 1
_CORRELATION = 0.9  # of neighbouring pixels, as in photographs
_TAP_STEPS = 256  # OpenCV rounds taps to multiples of 1/256; they must still add up to 1

# Besides uint8, filters other than "nearest" take only these dtypes. Pillow resamples them as float32, which holds each
# of their values exactly.
_RESAMPLED_DTYPES = (np.uint16, np.float32)
# The JPEG's inverse transform can shrink a box, but ignores the requested filter. So it leaves the box's sides at least
# this many times the result's, for the filter to resample. With 2.5, photographs and textures differ by up to 1.03 of
# 255 on average; with 2, by up to 1.8; with 1, by up to 6.
_LEAST_SHRINKING = 2.5

_TRIES = 10  # of RandomResizedCrop, as in torchvision

_KINDS = ("image", "mask", "boxes", "points")
_COORDINATES = {"boxes": 4, "points": 2}


class Box(NamedTuple):
    """A rectangle of an image, in pixels: first row, first column, rows, columns."""

    top: float
    left: float
    height: float
    width: float


class Window(NamedTuple):
    """The source of a result's pixels.

    Attributes:
        box: the part of the image; pixels beyond the image are filled.
        size: height and width of the result. A box of another size is resampled, and must lie within the image.
        mirrored: swap left and right; `box` is then the whole image, and `size` its size.
    """

    box: Box
    size: tuple[int, int]
    mirrored: bool = False


class _Operation:
    __slots__ = ()
    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False


class Geometric(_Operation, ABC):
    """An operation that moves pixels, in the same way for all fields of a sample.

    Attributes:
        interpolation: the filter for resampling images.
    """

    __slots__ = ()
    interpolation: Interpolation = "nearest"

    @abstractmethod
    def window(self, height: int, width: int, rng: Any, /) -> Window | None:
        """Return the source of the pixels; None to leave the image unchanged. Only this method draws from `rng`."""

    def apply(self, image: Image, rng: Any, out: Image | None) -> Image:
        """Check an image, and return the pixels of its window."""
        check_image(type(self).__name__, image)
        window = self.window(image.shape[0], image.shape[1], rng)
        return placed(image, out) if window is None else cut(image, window, self.interpolation, out)


class _Fixed(Geometric):
    __slots__ = ()

    def __call__(self, image: Image, out: Image | None = None) -> Image:
        """Return the result in the image's dtype and channels. Raises TypeError or ValueError for unsuitable images."""
        return self.apply(image, None, out)


class _Random(Geometric):
    __slots__ = ()

    def __call__(self, image: Image, rng: np.random.Generator, out: Image | None = None) -> Image:
        """Return the result in the image's dtype and channels. Raises TypeError or ValueError for unsuitable images."""
        return self.apply(image, rng, out)


class _Resizing(Geometric):
    """An operation that can start from the encoded image."""

    __slots__ = ()

    def from_encoded(self, data: memoryview, rng: np.random.Generator | None = None, out: Image | None = None) -> Image:
        """Decode and resize the part that a call with the decoded image would use.

        A JPEG is decoded only down to the end of the part, so damage below it may go unnoticed.

        Raises:
            ValueError: the format is unknown, or the image is too large, truncated, or damaged above the part's end.
        """
        header = readable_jpeg_header(data)
        if header is None:
            return self.apply(decode_image(data), rng, out)
        window = self.window(header.height, header.width, rng)
        assert window is not None
        return decode_resampled(data, header, window.box, window.size, self.interpolation, out=out)


@dataclass(frozen=True, slots=True)
class CenterCrop(_Fixed):
    """Crop the centre; an image that is too small is first padded with zeros.

    Args:
        size: height and width of the result, or one integer for both.

    Raises:
        ValueError: `size` is not positive.
    """

    size: int | tuple[int, int]

    def __post_init__(self) -> None:
        check_size("CenterCrop", self.size)

    def window(self, height: int, width: int, _: Any, /) -> Window:
        """Return the centre."""
        size = check_size("CenterCrop", self.size)
        spare = [length - wanted for length, wanted in zip((height, width), size, strict=True)]
        top, left = (round(each / 2) if each >= 0 else -(-each // 2) for each in spare)
        return Window(Box(top, left, *size), size)


@dataclass(frozen=True, slots=True)
class RandomCrop(_Random):
    """Crop a part of fixed size at a random place.

    Args:
        size: height and width of the part, or one integer for both.
        padding: rows and columns of zeros to add on each side before the crop.

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

    def window(self, height: int, width: int, rng: np.random.Generator, /) -> Window:
        """Draw a part. Raises ValueError if the padded image is smaller than the part."""
        rows, columns = check_size("RandomCrop", self.size)
        spare_rows, spare_columns = height + 2 * self.padding - rows, width + 2 * self.padding - columns
        if spare_rows < 0 or spare_columns < 0:
            raise ValueError(
                f"RandomCrop: an image of {height} x {width} with padding {self.padding} is smaller than the crop of "
                f"{rows} x {columns}; resize it first, or give a larger padding"
            )
        top, left = (int((spare + 1) * rng.random()) - self.padding for spare in (spare_rows, spare_columns))
        return Window(Box(top, left, rows, columns), (rows, columns))


@dataclass(frozen=True, slots=True)
class RandomHorizontalFlip(_Random):
    """Swap left and right with probability `p`; else return the image itself, or a copy in a fitting `out`.

    Args:
        p: the probability.

    Raises:
        ValueError: `p` is not between 0 and 1.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", as_python(self.p))
        if not isinstance(self.p, float | int) or not 0 <= self.p <= 1:
            raise ValueError(f"RandomHorizontalFlip: p must be a probability from 0 to 1, not {self.p!r}")

    def window(self, height: int, width: int, rng: np.random.Generator, /) -> Window | None:
        """Return the mirrored image with probability `p`, else None."""
        mirrored = rng.random() < self.p
        return Window(Box(0, 0, height, width), (height, width), mirrored=True) if mirrored else None


@dataclass(frozen=True, slots=True)
class RandomResizedCrop(_Resizing, _Random):
    """Crop a random part of the image and resize it.

    Args:
        size: height and width of the result, or one integer for both.
        scale: minimum and maximum share of the image's area.
        ratio: minimum and maximum width / height of the part.
        interpolation: "bilinear", "bicubic", "lanczos", "box" or "nearest"; all but the last are antialiased.

    Raises:
        ValueError: an argument is out of range.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        check_size("RandomResizedCrop", self.size, self.interpolation)
        check_range("RandomResizedCrop", "scale", self.scale, 1.0)
        check_range("RandomResizedCrop", "ratio", self.ratio, math.inf)

    def window(self, height: int, width: int, rng: np.random.Generator, /) -> Window:
        """Draw a part as torchvision does: area uniformly and ratio log-uniformly, in up to ten tries.

        If no try fits, return the largest central part of an allowed ratio.
        """
        size = check_size("RandomResizedCrop", self.size)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_TRIES):
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * rng.random())
            aspect = math.exp(low + (high - low) * rng.random())
            rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
            if 0 < rows <= height and 0 < columns <= width:
                top = int((height - rows + 1) * rng.random())
                left = int((width - columns + 1) * rng.random())
                return Window(Box(top, left, rows, columns), size)
        rows, columns = height, width
        if width < height * self.ratio[0]:
            rows = max(1, round(width / self.ratio[0]))
        elif width > height * self.ratio[1]:
            columns = max(1, round(height * self.ratio[1]))
        return Window(Box((height - rows) // 2, (width - columns) // 2, rows, columns), size)


@dataclass(frozen=True, slots=True)
class Resize(_Resizing, _Fixed):
    """Resize the whole image.

    Args:
        size: the length of the shorter side (the ratio is kept), or (height, width).
        max_size: for an integer `size` only: maximum length of the longer side.
        interpolation: as for RandomResizedCrop.

    Raises:
        ValueError: an argument is out of range, or `max_size` is given without an integer `size`.
    """

    size: int | tuple[int, int]
    max_size: int | None = None
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        size = check_size("Resize", self.size, self.interpolation)
        max_size = as_python(self.max_size)
        object.__setattr__(self, "size", size if isinstance(self.size, tuple | list) else size[0])
        object.__setattr__(self, "max_size", max_size)
        has_integers = isinstance(self.size, int) and type(max_size) is int
        if max_size is not None and not (has_integers and max_size > self.size):
            raise ValueError(
                f"Resize: max_size and size must be integers, and max_size larger, not {max_size!r} and {self.size!r}"
            )

    def window(self, height: int, width: int, _: Any, /) -> Window:
        """Return the whole image."""
        whole = Box(0, 0, height, width)
        if not isinstance(self.size, int):
            return Window(whole, self.size)
        new_shorter, new_longer = self.size, int(self.size * max(height, width) / min(height, width))
        if self.max_size is not None and new_longer > self.max_size:
            new_shorter, new_longer = max(1, int(self.max_size * new_shorter / new_longer)), self.max_size
        return Window(whole, (new_shorter, new_longer) if height <= width else (new_longer, new_shorter))


# Results of `ToFloat`, and of `Normalize` after it, are transposed views (channels, height, width) of arrays contiguous
# as (height, width, channels): no pixels are moved, and a batch is a tensor in torch's `channels_last` memory format.
# Results of `ToTensor` are contiguous tensors, as in torchvision.
@dataclass(frozen=True, slots=True)
class ToFloat(_Operation):
    """Convert uint8 (height, width, channels), or (height, width), to float32 (channels, height, width) in [0, 1]."""

    def __call__(self, image: Image, out: Planes | None = None) -> Planes:
        """Return `image / 255`, a transposed view.

        Raises:
            TypeError: the image is not uint8; the range of other numbers is unknown.
            ValueError: the image has another shape.
        """
        pixels = _pixels("ToFloat", image)
        target = _target(pixels.shape, out)
        np.divide(pixels, np.float32(255), out=target, dtype=np.float32)
        return _planes(target, out)


@dataclass(frozen=True, slots=True)
class ToTensor(_Operation):
    """Convert as `ToFloat` does, but to a contiguous tensor, like torchvision's `ToTensor`.

    Use it before a `collate_fn` or another function that needs tensors. Otherwise `ToFloat` is faster: its results are
    written directly to the batch's memory, and torch is not imported.
    """

    def __call__(self, image: Image, out: Planes | None = None) -> Any:
        """Return `image / 255`, a float32 tensor (channels, height, width) that owns its memory; or a fitting `out`.

        Raises:
            TypeError, ValueError: as `ToFloat`.
        """
        return _as_tensor(ToFloat()(_pixels("ToTensor", image), out), out)


@dataclass(frozen=True, slots=True)
class Normalize(_Operation):
    """Subtract a mean from each channel and divide by a standard deviation.

    Args:
        mean: one number for each channel, for values in [0, 1].
        std: one number for each channel, above 0.

    Raises:
        TypeError: `mean` or `std` is not a sequence of numbers.
        ValueError: the lengths differ, a number is not finite, or a standard deviation is not above 0.
    """

    mean: Sequence[float]
    std: Sequence[float]

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

    @classmethod
    def of(cls, folder: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> Self:
        """Normalize by a dataset's own mean and standard deviation, saved by `streamload stats --pixels`.

        Args:
            folder: the folder of the shards, local or a url; or the JSON file.
            storage_options: as for `StreamLoader`.

        Raises:
            StorageError: the file does not exist or cannot be read.
            ValueError: the file is not from `streamload stats --pixels`.
        """
        from streamload.storage.storages import Storages  # imported here: it takes as long as all other imports

        place = os.fspath(folder)
        url = place if place.endswith(".json") else f"{place.rstrip('/')}/{STATISTICS_NAME}"
        try:
            saved = json.loads(Storages(storage_options).for_url(url).read_bytes(url, most_bytes=_STATISTICS_BYTES))
            mean, std = saved["mean"], saved["std"]
        except ShardNotFoundError:
            raise ShardNotFoundError(
                f"no such file; `streamload stats SHARDS --pixels --output {without_secrets(url)}` makes it", url=url
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{without_secrets(url)!r} was not written by `streamload stats --pixels`; run that again"
            ) from None
        return cls(mean, std)

    def __call__(self, image: Any, out: Planes | None = None) -> Any:
        """Normalize a result of `ToFloat` or `ToTensor`, or a uint8 image exactly as if `ToFloat` came first.

        Returns:
            float32 (channels, height, width): a transposed view as from `ToFloat`, or a tensor for a tensor.

        Raises:
            TypeError: `image` is neither an array nor a tensor, or neither uint8 nor float32.
            ValueError: `image` has the wrong number of dimensions, or its channels do not match `mean`.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(image, torch.Tensor):
            return _as_tensor(self(image.numpy(), out), out)
        if not isinstance(image, np.ndarray) or image.dtype not in (np.float32, np.uint8):
            got = getattr(image, "dtype", type(image).__name__)
            raise TypeError(f"Normalize takes float32 (channels, height, width) or uint8 images, got {got}")
        is_bytes = image.dtype == np.uint8
        if is_bytes:
            image = _pixels("ToFloat", image).transpose(2, 0, 1)
        if image.ndim != 3 or image.shape[0] != len(self.mean):
            raise ValueError(
                f"Normalize has {len(self.mean)} channels and takes (channels, height, width), got {image.shape}"
            )
        pixels = image.transpose(1, 2, 0)
        target = _target(pixels.shape, out)
        if is_bytes:
            opencv().LUT(pixels, _normalized_bytes(tuple(self.mean), tuple(self.std)), dst=target)
            return _planes(target, out)
        height, width, channels = pixels.shape
        # Compute whole rows, with repeated constants: NumPy is slow at inner loops over three elements.
        rows = target.reshape(height, width * channels)
        np.subtract(pixels.reshape(rows.shape), np.tile(np.asarray(self.mean, np.float32), width), out=rows)
        np.divide(rows, np.tile(np.asarray(self.std, np.float32), width), out=rows)
        return _planes(target, out)


@dataclass(frozen=True, slots=True)
class Compose:
    """Apply operations, or other callables, in order. Those with a parameter `rng` share a generator.

    Args:
        operations: the operations, first to last; a nested Compose is flattened.

    Attributes:
        writes_into_out: the last operation takes `out`.
        uses_global_generators: an operation of the user's that takes no `rng` may draw from `random`, `numpy.random` or
            torch.

    Raises:
        TypeError: `operations` is not a sequence of callables.
    """

    operations: Sequence[Callable[..., Any]]
    _random: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    writes_into_out: bool = field(init=False, repr=False, compare=False)
    uses_global_generators: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.operations, Sequence) or not all(map(callable, self.operations)):
            raise TypeError(f"Compose: operations must be a list of callables, not {self.operations!r}")
        operations = tuple(chain.from_iterable(map(steps_of, self.operations)))
        object.__setattr__(self, "operations", operations)
        random = tuple(takes(each, "rng") for each in operations)
        object.__setattr__(self, "_random", random)
        object.__setattr__(self, "writes_into_out", bool(operations) and takes(operations[-1], "out"))
        may_draw = (
            getattr(each, "uses_global_generators", not is_random and not is_ours(each))
            for each, is_random in zip(operations, random, strict=True)
        )
        object.__setattr__(self, "uses_global_generators", any(may_draw))

    def __call__(self, image: Any, rng: np.random.Generator | None = None, out: NDArray[Any] | None = None) -> Any:
        """Return the result of the last operation, which gets `out` if it has that parameter."""
        value, makes_tensor = image, False
        following = (*self.operations[1:], None)
        for operation, after, random in zip(self.operations, following, self._random, strict=True):
            is_bytes = isinstance(value, np.ndarray) and value.dtype == np.uint8
            if type(operation) in (ToFloat, ToTensor) and type(after) is Normalize and is_bytes:
                makes_tensor = type(operation) is ToTensor
                continue  # Normalize does both in one pass
            options: dict[str, Any] = {"rng": rng} if random else {}
            if after is None and out is not None and takes(operation, "out"):
                options["out"] = out
            value = operation(value, **options)
            if makes_tensor:
                value, makes_tensor = _as_tensor(value, out), False
        return value


def steps_of(operation: Callable[..., Any]) -> Sequence[Callable[..., Any]]:
    """Return the operations of a Compose, or the operation itself."""
    return operation.operations if type(operation) is Compose else (operation,)


def is_ours(operation: object) -> bool:
    """Return True for this library's operations."""
    return type(operation).__module__.startswith("streamload.images.")


@dataclass(frozen=True, slots=True)
class Joint:
    """Crop, flip and resize several fields of a sample alike. A transform of whole samples can be or call a Joint.

    Kinds of fields:

    * "image": an array (height, width, channels) or (height, width), resampled by each operation's filter;
    * "mask": ids of classes or objects, or depths, (height, width) or (height, width, 1); resized by "nearest";
    * "boxes": (boxes, 4 or more): left, top, right, bottom in pixels (right and bottom exclusive), and further numbers
      such as a class. Moved with the image and clipped to it; empty boxes are removed. The result is float32 with the
      same columns;
    * "points": (..., points, 2 or more): x and y as in boxes (the centre of the first pixel is (0.5, 0.5)), and
      further numbers such as visibility. Moved with the image; points outside it are kept. The result is float32.

    Operations other than crops, flips and resizes (`ToFloat`, `ToTensor`, `Normalize`, changes of colour) apply to
    images only, to each separately.

    Args:
        operations: the operations, first to last; crops and flips draw from `rng` once per sample.
        fields: for tuples, the kind of each item, None for items to leave alone; for dicts, the kinds by name
            (`{"jpg;png": "image", "mask.png": "mask"}`). Values that are None stay None.
        mask_fill: the value of a mask beyond its edges, for `RandomCrop` and `CenterCrop`; images are filled with 0.

    Raises:
        TypeError, ValueError: an argument is invalid, or there is neither an image nor a mask.
    """

    operations: Sequence[Callable[..., Any]]
    fields: Sequence[Kind | None] | Mapping[str, Kind]
    mask_fill: int = 0
    _random: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    uses_global_generators: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        composed = Compose(self.operations)
        object.__setattr__(self, "operations", composed.operations)
        object.__setattr__(self, "_random", tuple(takes(each, "rng") for each in composed.operations))
        object.__setattr__(self, "uses_global_generators", composed.uses_global_generators)
        if isinstance(self.fields, str) or not isinstance(self.fields, Mapping | Sequence):
            raise TypeError(
                'Joint: fields must have a kind for each item of a sample, as ("image", "mask") or '
                f'{{"jpg": "image", "mask.png": "mask"}}, not {self.fields!r}'
            )
        is_mapping = isinstance(self.fields, Mapping)
        kinds = list(self.fields.values() if isinstance(self.fields, Mapping) else self.fields)
        wrong = [kind for kind in kinds if kind not in _KINDS and (is_mapping or kind is not None)]
        if wrong:
            raise ValueError(f"Joint: fields must be of {_KINDS}{'' if is_mapping else ' or None'}, not {wrong[0]!r}")
        if not {"image", "mask"}.intersection(kinds):
            raise ValueError(f"Joint: one of the fields must be an image or a mask, not only {self.fields!r}")
        object.__setattr__(self, "mask_fill", as_python(self.mask_fill))
        if type(self.mask_fill) is not int:
            raise TypeError(f"Joint: mask_fill must be an integer, such as 255, not {self.mask_fill!r}")

    def __call__(self, sample: Any, rng: np.random.Generator) -> Any:
        """Transform the fields of a tuple, list or dict; return a new one.

        Raises:
            TypeError: the sample does not match `fields`, or a value is not of its kind.
            ValueError: images and masks differ in size, or a box ends before it begins.
        """
        values: Any = (
            dict(sample) if isinstance(sample, Mapping) else list(sample) if type(sample) in (tuple, list) else sample
        )
        items = [(key, kind) for key, kind in self._items(values) if values[key] is not None]
        size = _prepared(values, items)
        operation: Any
        for operation, random in zip(self.operations, self._random, strict=True):
            if hasattr(operation, "window"):  # also for users' operations
                window = operation.window(*size, rng)
                if window is None:
                    continue
                for key, kind in items:
                    if kind in _COORDINATES:
                        values[key] = _clipped(_moved(values[key], kind, window), kind, window.size)
                        continue
                    check_image(type(operation).__name__, values[key])
                    if kind == "mask":
                        values[key] = cut(values[key], window, "nearest", fill=self.mask_fill)
                    else:
                        values[key] = cut(values[key], window, operation.interpolation)
                size = window.size
                continue
            for key in (key for key, kind in items if kind == "image"):
                values[key] = operation(values[key], **({"rng": rng} if random else {}))
        for key, kind in items:
            if kind in _COORDINATES:
                values[key] = _clipped(values[key], kind, size).astype(np.float32)
        return tuple(values) if isinstance(sample, tuple) else values

    def _items(self, values: Any) -> list[Item]:
        if isinstance(values, dict) and isinstance(self.fields, Mapping):
            items = []
            for names, kind in self.fields.items():
                name = next((name for name in alternatives(names) if name in values), None)
                if name is None:
                    has = ", ".join(map(repr, values))
                    raise TypeError(f"Joint: the sample has no field {names!r}; it has {has}")
                items.append((name, kind))
            return items
        if isinstance(values, list) and not isinstance(self.fields, Mapping):
            if len(values) == len(self.fields):
                return [(number, kind) for number, kind in enumerate(self.fields) if kind is not None]
            raise TypeError(f"Joint: fields has kinds for {len(self.fields)} items, but the sample has {len(values)}")
        raise TypeError(
            "Joint: fields must be a mapping for samples that are dicts, and a sequence for tuples; it is "
            f"{self.fields!r}, but the sample is of type {type(values).__name__}"
        )


def _prepared(values: Any, items: Sequence[Item]) -> tuple[int, int]:
    """Check the values, convert boxes and points in place, and return the images' size."""
    sizes: dict[str, tuple[int, int]] = {}
    for key, kind in items:
        if kind in _COORDINATES:
            values[key] = _coordinates(values[key], kind)
            continue
        check_image(f"Joint ({kind} {key!r})", values[key])
        if kind == "mask" and values[key].shape[2:] not in ((), (1,)):
            raise TypeError(
                f"Joint: the mask {key!r} has {values[key].shape[2]} numbers for each pixel, like a decoded "
                "image; decode masks by images.palette or images.unchanged, as in decode={'mask.png': images.palette}"
            )
        sizes[f"the {kind} {key!r}"] = values[key].shape[:2]
    if len(set(sizes.values())) != 1:
        differ = ", ".join(f"{name} {height} x {width}" for name, (height, width) in sizes.items())
        raise ValueError(f"Joint: images and masks must have the same height and width; found {differ or 'none'}")
    return next(iter(sizes.values()))


def _coordinates(numbers: Any, kind: Kind) -> NDArray[np.float64]:
    least = _COORDINATES[kind]
    expected = f"Joint: {kind} must be numbers of shape ({kind}, {least} or more)"
    try:
        array = np.array(numbers, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"{expected}, not {type(numbers).__name__}; convert them in a decoder, as in decode={{'json': function}}"
        ) from None
    if array.size == 0:
        return array.reshape(0, array.shape[1] if array.ndim == 2 and array.shape[1] >= least else least)
    if array.ndim < 2 or (array.ndim > 2 and kind == "boxes") or array.shape[-1] < least:
        raise TypeError(f"{expected}, not of shape {array.shape}")
    if kind == "boxes":
        valid = np.isfinite(array[:, :4]).all(axis=1) & (array[:, :2] <= array[:, 2:4]).all(axis=1)
        if not valid.all():
            wrong = array[np.argmin(valid), :4].tolist()
            raise ValueError(
                f"Joint: a box is (left, top, right, bottom) with left <= right, top <= bottom, not {wrong}"
            )
    return array


def _moved(numbers: NDArray[np.float64], kind: Kind, window: Window) -> NDArray[np.float64]:
    (top, left, rows, columns), (height, width) = window.box, window.size
    moved, end = numbers.copy(), _COORDINATES[kind]
    moved[..., 0:end:2] = (numbers[..., 0:end:2] - left) * (width / columns)
    moved[..., 1:end:2] = (numbers[..., 1:end:2] - top) * (height / rows)
    if window.mirrored:  # a box's left edge becomes its right one
        moved[..., 0:end:2] = width - moved[..., end - 2 :: -2]
    return moved


def _clipped(numbers: NDArray[np.float64], kind: Kind, size: tuple[int, int]) -> NDArray[np.float64]:
    if kind == "points":
        return numbers
    height, width = size
    numbers[:, 0:4:2] = numbers[:, 0:4:2].clip(0, width)
    numbers[:, 1:4:2] = numbers[:, 1:4:2].clip(0, height)
    return numbers[(numbers[:, 0] < numbers[:, 2]) & (numbers[:, 1] < numbers[:, 3])]


def check_size(operation: str, size: object, interpolation: str = "nearest") -> tuple[int, int]:
    """Return (height, width) from one positive integer or a pair.

    Raises:
        ValueError: `size` is something else, or the filter is unknown.
    """
    if interpolation not in get_args(Interpolation):
        raise ValueError(f"{operation}: interpolation must be one of {get_args(Interpolation)}, not {interpolation!r}")
    both: Sequence[object] = size if isinstance(size, tuple | list) else (size, size)
    if len(both) == 2:
        height, width = map(as_python, both)
        if type(height) is int and type(width) is int and height > 0 and width > 0:
            return height, width
    raise ValueError(f"{operation}: size must be a positive integer or a pair (height, width), not {size!r}")


def check_range(operation: str, name: str, value: tuple[float, float], limit: float) -> None:
    """Raise ValueError unless `value` is (low, high), both finite, with 0 < low <= high <= limit."""
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    if not is_pair or not 0 < value[0] <= value[1] <= limit or math.isinf(value[1]):
        most = "" if math.isinf(limit) else f" <= {limit:g}"
        raise ValueError(f"{operation}: {name} must be (low, high) with 0 < low <= high{most}, not {value!r}")


def cut(
    image: Image, window: Window, interpolation: Interpolation, out: Image | None = None, *, fill: float = 0
) -> Image:
    """Return the pixels of a window, in new memory or in `out`, by the rules of `placing`.

    Args:
        image: the source.
        window: the source of the result's pixels.
        interpolation: used if the box and the result differ in size.
        out: where to write.
        fill: the value beyond the image's edges.

    Raises:
        TypeError: a filter other than "nearest" would resample a dtype other than uint8, uint16 or float32.
        ValueError: the result, or the box at the result's width, has too many pixels.
    """
    if window.mirrored:
        if image.dtype != np.uint8:
            return copied(image[:, ::-1], out)
        target = writable_in_order(out, image.shape, np.uint8)
        flipped: Image = opencv().flip(image, 1, dst=target)
        return placed(flipped.reshape(image.shape), out) if target is None else target
    if (window.box.height, window.box.width) != window.size:
        return _resample(image, window.box, window.size, interpolation, out)
    top, left = int(window.box.top), int(window.box.left)
    bottom, right = top + window.size[0], left + window.size[1]
    inside = image[max(0, top) : max(0, bottom), max(0, left) : max(0, right)]
    if inside.shape[:2] == window.size:
        return copied(inside, out)
    shape = (*window.size, *image.shape[2:])
    target = out if fits(out, shape, image.dtype) else np.empty(shape, image.dtype)
    target[...] = fill
    top, left = max(0, -top), max(0, -left)
    target[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return target


def decode_resampled(
    data: memoryview,
    header: JpegHeader,
    box: Box,
    size: tuple[int, int],
    interpolation: Interpolation,
    *,
    out: Image | None = None,
) -> Image:
    """Decode a JPEG at the smallest sufficient scale, only down to the end of the box, and resample the box.

    The JPEG's inverse transform shrinks the picture, by the largest of the factors 8/4, 8/3 and 8/2 that leaves the box
    at least `_LEAST_SHRINKING` times as high and wide as the result.

    Raises:
        ValueError: the file is truncated, or its decoded part damaged.
    """
    min_height = math.ceil(_LEAST_SHRINKING * header.height * size[0] / box.height)
    min_width = math.ceil(_LEAST_SHRINKING * header.width * size[1] / box.width)
    eighths = smallest_scale(header, min_height, min_width)
    image = decode_jpeg(data, header, eighths=eighths, rows=math.ceil(box.top + box.height))
    if image is None:
        image, eighths = decode_image(data), 8
    # Sides are rounded up to whole pixels, but the contents are scaled exactly.
    scaled = box if eighths == 8 else Box(*(edge * eighths / 8 for edge in box))
    return _resample(image, scaled, size, interpolation, out)


def _resample(
    image: Image, box: Box, size: tuple[int, int], interpolation: Interpolation, out: Image | None = None
) -> Image:
    """Resize the pixels within `box` to `size`, antialiased when shrinking (except by "nearest").

    Pixels beyond the (rounded) edge of the box have no effect.
    """
    if max(size[0], box.height) * size[1] > PIXEL_LIMIT:  # Pillow resizes the width first
        raise ValueError(
            f"resizing {box.height:.0f} x {box.width:.0f} pixels to {size[0]} x {size[1]} needs over {PIXEL_LIMIT} "
            "pixels; give Resize a max_size, or both height and width, or leave out such images"
        )
    top, left = math.floor(box.top), math.floor(box.left)
    bottom, right = math.ceil(box.top + box.height), math.ceil(box.left + box.width)
    part = image[top:bottom, left:right]
    if part.shape[:2] == size and (box.height, box.width) == size:
        return copied(part, out)
    if image.dtype != np.uint8:
        return placed(_resampled_numbers(part, size, interpolation), out)
    shape = (*size, *image.shape[2:])
    part = part.reshape(*part.shape[:2], -1)
    is_within = part.shape[0] <= _LARGEST_SCALE * size[0] and part.shape[1] <= _LARGEST_SCALE * size[1]
    if interpolation == "bilinear" and part.shape[:2] == (box.height, box.width) and is_within:
        return resize_bilinear(part, shape, out)

    from PIL import Image as PillowImage

    mode = MODES[part.shape[2]]
    rows, columns = part.shape[:2]
    source = PillowImage.frombuffer(mode, (columns, rows), np.ascontiguousarray(part), "raw", mode, 0, 1)
    method = PillowImage.Resampling[interpolation.upper()]
    x, y = box.left - left, box.top - top
    region = (x, y, min(x + box.width, columns), min(y + box.height, rows))
    resized = np.array(source.resize((size[1], size[0]), method, region))
    return placed(resized.reshape(shape), out)


def resize_bilinear(image: Image, shape: tuple[int, ...], out: Image | None = None) -> Image:
    """Resize a whole uint8 image (height, width, channels).

    Args:
        image: at most `_LARGEST_SCALE` times as large as the result in either direction.
        shape: the result's height, width, and channels; a single channel may be omitted.
        out: where to write the result, by the rules of `placing`.

    Returns:
        uint8 of that shape. It differs from Pillow's `resize(size, BILINEAR)`, in levels of 255: if enlarged, by at
        most 1; if shrunk (mean, 99.9th percentile, maximum), on photographs by 1 (1.4 with strong grain), 12 and 30;
        on pure noise by 6.5, 30 and 50; on black-and-white edges by 0.2, 25 and 35. Noise keeps 95.5 to 101 % of
        Pillow's contrast.
    """
    cv2 = opencv()
    rows, columns = image.shape[0] / shape[0], image.shape[1] / shape[1]
    if rows > 1 or columns > 1:
        steps = (max(_SCALE_STEPS, round(scale * _SCALE_STEPS)) for scale in (columns, rows))
        image = cv2.sepFilter2D(image, -1, *map(_fitted_filter, steps), borderType=cv2.BORDER_REFLECT)
    target = writable_in_order(out, shape, np.uint8)
    resized: Image = cv2.resize(image, (shape[1], shape[0]), dst=target, interpolation=cv2.INTER_LINEAR)
    return target if target is not None else placed(resized.reshape(shape), out)


@cache
def _fitted_filter(steps: int) -> NDArray[np.float32]:
    """Return the symmetric filter for a scale of `steps / _SCALE_STEPS`; its taps are >= 0 and sum to exactly 1."""
    # Linear interpolation follows the filter. The fit makes both steps together approximate Pillow's triangle filter.
    scale = steps / _SCALE_STEPS
    if scale <= 1:
        return np.array([0, 1, 0], np.float32)  # OpenCV has no fast path for a single tap
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
    outer = np.maximum(0, np.round(half[1:] * _TAP_STEPS)) / _TAP_STEPS
    return np.concatenate([outer[::-1], [1 - 2 * outer.sum()], outer]).astype(np.float32)


def _resampled_numbers(part: Image, size: tuple[int, int], interpolation: Interpolation) -> Image:
    if interpolation == "nearest":
        for axis, (length, wanted) in enumerate(zip(part.shape, size, strict=False)):
            positions = np.full(wanted, length / wanted)
            positions[0] /= 2
            # Positions are summed step by step, to round as Pillow does.
            part = part.take(np.cumsum(positions).astype(np.int64).clip(max=length - 1), axis)
        return part
    if part.dtype not in _RESAMPLED_DTYPES:
        raise TypeError(
            f"{interpolation!r} averages pixels, but pixels of {part.dtype} are usually ids of classes or "
            'objects; give interpolation="nearest", or convert them to float32'
        )

    from PIL import Image as PillowImage

    planes = part.reshape(*part.shape[:2], -1).astype(np.float32)
    resized: Image = np.empty((*size, planes.shape[2]), np.float32)
    method = PillowImage.Resampling[interpolation.upper()]
    for channel in range(planes.shape[2]):
        source = PillowImage.fromarray(np.ascontiguousarray(planes[:, :, channel]))
        resized[:, :, channel] = np.asarray(source.resize((size[1], size[0]), method))
    if part.dtype != np.float32:
        resized = np.rint(resized).clip(0, np.iinfo(part.dtype).max)  # bicubic and lanczos overshoot
    return resized.astype(part.dtype, copy=False).reshape(*size, *part.shape[2:])


def _pixels(operation: str, image: Any) -> Image:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        got = f"an array of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise TypeError(f"{operation} takes a uint8 array (height, width, channels) or (height, width), got {got}")
    check_image(operation, image)
    return image if image.ndim == 3 else image[:, :, None]


def _target(shape: tuple[int, ...], out: Planes | None) -> Planes:
    """Return an array (height, width, channels) to compute planes in, with the memory of `out` if that fits."""
    pixels = out.transpose(1, 2, 0) if isinstance(out, np.ndarray) and out.ndim == 3 else None
    target = writable_in_order(pixels, shape, np.float32)
    return np.empty(shape, np.float32) if target is None else target


def _planes(target: Planes, out: Planes | None) -> Planes:
    if out is not None and np.may_share_memory(target, out):
        return out
    return placed(target.transpose(2, 0, 1), out)


@lru_cache(maxsize=16)
def _normalized_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> Planes:
    """Return the normalized value of each byte in each channel, (1, 256, channels), computed in float32."""
    table = np.empty((1, 256, len(mean)), np.float32)
    table[:] = (np.arange(256, dtype=np.float32) / np.float32(255))[:, None]
    table -= np.asarray(mean, np.float32)
    table /= np.asarray(std, np.float32)
    return table


def _as_tensor(planes: Planes, out: Planes | None) -> Any:
    if planes is out:
        return out
    import torch

    return torch.from_numpy(np.ascontiguousarray(planes))
