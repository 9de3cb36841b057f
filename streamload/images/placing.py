"""Check the images given to operations, and write results into given arrays or new ones.

Operations with the attribute `writes_into_out` take `out=`, in calls and in `from_encoded`. If `out` is a writable
array of the result's shape and dtype, the result is written into it, and the returned array *is* `out`; otherwise a new
array is returned and `out` is unchanged. The values are the same either way. `out` may have any strides; to avoid a
copy, it must be C-contiguous (for float operations, after `transpose(1, 2, 0)`). `out` must not share memory with the
operation's argument. After an exception the contents of `out` are undefined.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import DTypeLike, NDArray

Image: TypeAlias = NDArray[Any]
"""uint8 or uint16 array (height, width, channels) of 1, 3 or 4 channels, or (height, width) of any numbers."""

MODES = {1: "L", 3: "RGB", 4: "RGBX"}  # RGBX: in resampling, RGBA would be weighted by alpha
_CHANNEL_DTYPES = (np.uint8, np.uint16)


def takes(operation: object, parameter: str) -> bool:
    """Return True if an operation has a parameter; for `out` it must also declare `writes_into_out`."""
    if parameter == "out" and getattr(operation, "writes_into_out", False) is not True:
        return False
    try:
        return callable(operation) and parameter in inspect.signature(operation).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False


def fits(out: object, shape: tuple[int, ...], dtype: DTypeLike) -> TypeGuard[Image]:
    """Return True if a result of this shape and dtype can be written into `out`."""
    return isinstance(out, np.ndarray) and out.shape == shape and out.dtype == dtype and out.flags.writeable


def writable_in_order(out: Image | None, shape: tuple[int, ...], dtype: DTypeLike) -> Image | None:
    """Return `out` if it fits and is C-contiguous, for writing a result directly; else None."""
    return out if fits(out, shape, dtype) and out.flags.c_contiguous else None


def placed(result: Image, out: Image | None) -> Image:
    """Move a result (a new array, or `out` itself) into `out` if it fits."""
    if result is out or not fits(out, result.shape, result.dtype):
        return result
    out[...] = result
    return out


def copied(part: Image, out: Image | None) -> Image:
    """Copy a view of an argument into `out` if it fits, else into a new array."""
    target = out if fits(out, part.shape, part.dtype) else np.empty(part.shape, part.dtype)
    target[...] = part
    return target


def check_image(operation: str, image: Any) -> None:
    """Raise TypeError or ValueError unless `image` is an `Image`.

    Three-dimensional floats are refused, since `ToFloat` returns channels first.
    """
    expected = f"{operation} takes a uint8 or uint16 array (height, width, channels), or an array (height, width)"
    if isinstance(image, bytes):
        raise TypeError(
            f"{expected}, got bytes; give a decoder for the field with decode={{...}}, or store it as jpg or png"
        )
    if not isinstance(image, np.ndarray):
        raise TypeError(f"{expected}, got {type(image).__name__}")
    if image.dtype.kind not in "buif" or (image.ndim > 2 and image.dtype not in _CHANNEL_DTYPES):
        raise TypeError(f"{expected} of numbers, got {image.dtype} of shape {image.shape}")
    if image.ndim not in (2, 3) or image.shape[2:] not in ((), *((count,) for count in MODES)) or image.size == 0:
        raise ValueError(f"{expected}, with 1, 3 or 4 channels and at least one pixel, got shape {image.shape}")


@lru_cache(maxsize=1)
def opencv() -> Any:
    """Import `cv2` and turn its threads off."""
    import cv2

    cv2.setNumThreads(0)  # the workers already use all CPUs
    return cv2
