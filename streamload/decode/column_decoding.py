"""Column decoding: one field of many samples at once, where a call for each sample would cost more than the work.

The bytes are viewed as overlapping windows, one starting at every byte, so that a single indexing operation collects
the bytes of all samples. On its own because it knows nothing of rows: arrays go in, arrays come out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.decode.array_files import NpyLayout, npy_layout
from streamload.tar.extensions import KIND_OF, Kind

__all__ = ["decode_integers", "may_be_integers", "may_share_layout", "shared_npy_layout"]

_INT64_DIGITS = 18  # every number of so many digits fits an int64


def may_be_integers(field: str, sizes: NDArray[np.int64]) -> bool:
    """Whether a field of these sizes is worth reading for `decode_integers`."""
    return _kind(field) is Kind.INTEGER and int(sizes.max(initial=0)) <= _INT64_DIGITS


def may_share_layout(field: str, sizes: NDArray[np.int64]) -> bool:
    """Whether a field of these sizes is worth reading for `shared_npy_layout`."""
    return _kind(field) is Kind.ARRAY and bool((sizes == sizes[:1]).all())


def decode_integers(
    field: str, data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Decode an integer field of n samples exactly as the built-in decoder would one by one, or decline.

    Only for fields that are decoded by the library's own decoder (`decodes_as_built_in`).

    Args:
        field: the field's full name; its last extension decides.
        data: uint8[m], contiguous bytes that contain the payloads, such as a mapped shard. Only read.
        offsets: int64[n], first byte of each sample's payload.
        sizes: int64[n], payload bytes of each sample.

    Returns:
        int64[n] in memory of its own, or None where this does not apply: other kinds of field, numbers with spaces or
        more than 18 digits, anything out of bounds or damaged. The caller then decodes sample by sample, which raises
        the proper errors.
    """
    if _kind(field) is not Kind.INTEGER or not _inside(data, offsets, sizes):
        return None
    return _integers(data, offsets, sizes)


def shared_npy_layout(
    field: str, data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NpyLayout | None:
    """The layout of an npy field whose payloads all have the same header, so that they need no decoding.

    The arguments are those of `decode_integers`.

    Returns:
        None where headers differ, or are column-major, damaged or out of bounds, or the field is of another kind.
    """
    if _kind(field) is not Kind.ARRAY:
        return None
    return _shared_layout(data, offsets, sizes)


def _inside(data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    if len(offsets) == 0 or not data.flags.c_contiguous:
        return False
    return bool(offsets.min() >= 0 and sizes.min() > 0 and (offsets + sizes).max() <= data.size)


def _windows(data: NDArray[np.uint8], window_bytes: int) -> NDArray[np.void]:
    """All windows of one size over `data`, as opaque items; indexing them copies."""
    return np.ndarray((data.size - window_bytes + 1,), f"V{window_bytes}", data, 0, (1,))


def _shared_layout(data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NpyLayout | None:
    """The layout of all samples, if their headers are equal byte for byte; else None."""
    if not _inside(data, offsets, sizes) or sizes.min() != sizes.max():
        return None
    first, size = int(offsets[0]), int(sizes[0])
    try:
        layout = npy_layout(data[first : first + size].data)
    except ValueError:
        return None
    if layout.end > size or layout.order == "F":
        return None
    headers = _windows(data, layout.start)[offsets].tobytes()
    return layout if headers == headers[: layout.start] * len(offsets) else None


def _integers(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    width = int(sizes.max())
    starts = offsets + sizes - width  # aligned at the right, so a shorter number has foreign bytes before it
    if width > _INT64_DIGITS or starts.min() < 0:
        return None
    characters = _windows(data, width)[starts].view(np.uint8).reshape(len(offsets), width)
    first = width - sizes
    if first.any():
        characters[np.arange(width) < first[:, None]] = ord("0")
    negative = np.flatnonzero(data[offsets] == ord("-"))
    if len(negative):
        if sizes[negative].min() < 2:
            return None
        characters[negative, first[negative]] = ord("0")
    digits = characters - np.uint8(ord("0"))  # wraps around to more than 9 for what is no digit
    if digits.max() > 9:
        return None
    values: NDArray[np.int64] = digits[:, 0].astype(np.int64)
    for position in range(1, width):
        values *= 10
        values += digits[:, position]
    values[negative] *= -1
    return values


def _kind(field: str) -> Kind | None:
    return KIND_OF.get(field.rpartition(".")[2])
