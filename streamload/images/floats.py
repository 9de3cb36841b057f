"""Operations that turn bytes into float32 planes.

Results of `ToFloat`, and of `Normalize` after it, are transposed views (channels, height, width) of arrays that are
contiguous as (height, width, channels), so no time goes into moving pixels, and a batch of such images is a tensor in
torch's `channels_last` memory format. Results of `ToTensor` are contiguous tensors, as torchvision's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardNotFoundError, without_secrets
from streamload.images.placing import Image, check_image, opencv, placed, writable_in_order

STATISTICS_NAME = "statistics.json"
_MOST_BYTES = 1 << 20


Planes: TypeAlias = NDArray[np.float32]
"""float32 array (channels, height, width)."""


@dataclass(frozen=True, slots=True)
class ToFloat:
    """Convert bytes (height, width, channels), or (height, width), to float32 (channels, height, width) in [0, 1]."""

    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False

    def __call__(self, image: Image, out: Planes | None = None) -> Planes:
        """Return `image / 255`, float32 (channels, height, width), a transposed view.

        Raises:
            TypeError: not uint8; the range of other numbers is unknown.
            ValueError: of another shape.
        """
        pixels = _pixels("ToFloat", image)
        target = _target(pixels.shape, out)
        np.divide(pixels, np.float32(255), out=target, dtype=np.float32)
        return _planes(target, out)


@dataclass(frozen=True, slots=True)
class ToTensor:
    """Convert bytes as `ToFloat` does, to a contiguous torch tensor as torchvision's `ToTensor` makes it.

    For a `collate_fn` or another function that needs tensors. Without one, values go straight to the batch's memory, as
    those of `ToFloat` do, which is faster and does not import torch.
    """

    writes_into_out: ClassVar[bool] = True
    uses_global_generators: ClassVar[bool] = False

    def __call__(self, image: Image, out: Planes | None = None) -> Any:
        """Return `image / 255`, a float32 tensor (channels, height, width) in memory of its own; or `out`.

        Raises:
            TypeError, ValueError: as `ToFloat`.
        """
        return as_tensor(ToFloat()(_pixels("ToTensor", image), out), out)


@dataclass(frozen=True, slots=True)
class Normalize:
    """Subtract a mean from each channel and divide by a standard deviation.

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
    uses_global_generators: ClassVar[bool] = False

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
        """Normalize by the mean and deviation of a dataset's own images, as `streamload stats --pixels` saved them.

        Args:
            folder: of the shards, local or a url, or the JSON file.
            storage_options: as for `StreamLoader`.

        Raises:
            StorageError: there is no such file, or it cannot be read.
            ValueError: it is not from `streamload stats --pixels`.
        """
        from streamload.storage.storages import Storages  # takes as long to import as all the rest

        place = os.fspath(folder)
        url = place if place.endswith(".json") else f"{place.rstrip('/')}/{STATISTICS_NAME}"
        try:
            saved = json.loads(Storages(storage_options).for_url(url).read_bytes(url, most_bytes=_MOST_BYTES))
            mean, std = saved["mean"], saved["std"]
        except ShardNotFoundError:
            raise ShardNotFoundError(
                f"there is no {STATISTICS_NAME}; `streamload stats {without_secrets(place)} --pixels` makes it", url=url
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{without_secrets(url)!r} is not what `streamload stats --pixels` saves; make it again"
            ) from None
        return cls(mean, std)

    def __call__(self, image: Any, out: Planes | None = None) -> Any:
        """Normalize a result of `ToFloat` or `ToTensor`, or a uint8 image, bit for bit as after `ToFloat`.

        Returns:
            float32 (channels, height, width): a transposed view as from `ToFloat`, or for a tensor a tensor.

        Raises:
            TypeError: neither a uint8 nor a float32 array, nor a float32 tensor.
            ValueError: not of three dimensions, or of another number of channels than `mean` has.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(image, torch.Tensor):
            return as_tensor(self(image.numpy(), out), out)
        values: Any = image
        if not isinstance(values, np.ndarray) or values.dtype not in (np.float32, np.uint8):
            got = getattr(values, "dtype", type(values).__name__)
            raise TypeError(f"Normalize takes float32 (channels, height, width) or uint8 images, got {got}")
        is_bytes = values.dtype == np.uint8
        if is_bytes:
            values = _pixels("ToFloat", values).transpose(2, 0, 1)
        if values.ndim != 3 or values.shape[0] != len(self.mean):
            raise ValueError(
                f"Normalize has {len(self.mean)} channels and takes (channels, height, width), got {values.shape}"
            )
        pixels = values.transpose(1, 2, 0)
        target = _target(pixels.shape, out)
        if is_bytes:
            opencv().LUT(pixels, _normalized_bytes(tuple(self.mean), tuple(self.std)), dst=target)
            return _planes(target, out)
        height, width, channels = pixels.shape
        # Rows of whole pixels against a row of repeated constants: NumPy is slow at inner loops of three elements.
        rows = target.reshape(height, width * channels)
        np.subtract(pixels.reshape(rows.shape), np.tile(np.asarray(self.mean, np.float32), width), out=rows)
        np.divide(rows, np.tile(np.asarray(self.std, np.float32), width), out=rows)
        return _planes(target, out)


@lru_cache(maxsize=16)
def _normalized_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> Planes:
    """Return each byte's result in each channel, (1, 256, channels), by the steps and roundings of floats."""
    table = np.empty((1, 256, len(mean)), np.float32)
    table[:] = (np.arange(256, dtype=np.float32) / np.float32(255))[:, None]
    table -= np.asarray(mean, np.float32)
    table /= np.asarray(std, np.float32)
    return table


def as_tensor(planes: Planes, out: Planes | None) -> Any:
    """Return planes as a contiguous tensor; those that were written to `out` stay an array."""
    if planes is out:
        return out
    import torch

    return torch.from_numpy(np.ascontiguousarray(planes))


def _pixels(operation: str, image: Any) -> Image:
    """Return a checked image as (height, width, channels)."""
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
        got = f"an array of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise TypeError(f"{operation} takes a uint8 array (height, width, channels) or (height, width), got {got}")
    check_image(operation, image)
    return image if image.ndim == 3 else image[:, :, None]


def _target(shape: tuple[int, ...], out: Planes | None) -> Planes:
    """Return an array (height, width, channels) to compute planes in: that of `out` if it fits."""
    pixels = out.transpose(1, 2, 0) if isinstance(out, np.ndarray) and out.ndim == 3 else None
    target = writable_in_order(pixels, shape, np.float32)
    return np.empty(shape, np.float32) if target is None else target


def _planes(target: Planes, out: Planes | None) -> Planes:
    """Return the planes of an array from `_target`, in `out` if that fits."""
    if out is not None and np.may_share_memory(target, out):
        return out
    return placed(target.transpose(2, 0, 1), out)
