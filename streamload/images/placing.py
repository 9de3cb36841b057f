"""Write an operation's result into an array that the caller offers, or into a new one.

The protocol of `out=`, which every operation with the attribute `writes_into_out` takes, in its call and in
`from_encoded`: if `out` is a writable array of the result's shape and dtype, the result is written into it, and the
returned array *is* `out`. Otherwise `out` is left as it was, and a new array is returned. The values are the same.
`out` may have any strides; if it is contiguous (for the float operations: as (height, width, channels)), nothing is
copied on the way. It must not share memory with the operation's argument. After an exception it is undefined.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array: TypeAlias = NDArray[Any]


def takes_out(operation: object) -> bool:
    """Return True if an operation says that it follows the protocol, and has the parameter (a subclass may not)."""
    return getattr(operation, "writes_into_out", False) is True and _has_parameter(operation, "out")


def takes_rng(operation: object) -> bool:
    """Return True if an operation has a parameter `rng`."""
    return _has_parameter(operation, "rng")


def _has_parameter(operation: object, name: str) -> bool:
    try:
        return callable(operation) and name in inspect.signature(operation).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return False


def fits(out: object, shape: tuple[int, ...], dtype: DTypeLike) -> TypeGuard[Array]:
    """Return True if a result of this shape and dtype can be written into `out`."""
    return isinstance(out, np.ndarray) and out.shape == shape and out.dtype == dtype and out.flags.writeable


def writable_in_order(out: Array | None, shape: tuple[int, ...], dtype: DTypeLike) -> Array | None:
    """Return `out` if a result can be written straight into it because it is C-contiguous too, else None."""
    return out if fits(out, shape, dtype) and out.flags.c_contiguous else None


def placed(result: Array, out: Array | None) -> Array:
    """Move a result, an array of its own or `out` itself, into `out` if that fits."""
    if result is out or not fits(out, result.shape, result.dtype):
        return result
    out[...] = result
    return out


def target_of(shape: tuple[int, ...], dtype: DTypeLike, out: Array | None) -> Array:
    """Return memory for a result: `out` if that fits, else a new array."""
    return out if fits(out, shape, dtype) else np.empty(shape, dtype)


def copied(part: Array, out: Array | None) -> Array:
    """Copy a view of an argument into `out` if that fits, else into a new array."""
    if not fits(out, part.shape, part.dtype):
        return part.copy()
    out[...] = part
    return out
