"""Decodes one field of many samples at once, for the kinds where a call per sample would cost more than the work.

The mapped shard is read as overlapping windows, one beginning at every byte, so that a single indexing operation
collects the bytes of all samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.array_files import NpyLayout, npy_layout

__all__ = ["INTEGER_EXTENSIONS", "decode_column", "decode_column_into"]

INTEGER_EXTENSIONS = frozenset({"cls", "cls2", "index", "inx", "id"})
"""Fields with these last extensions hold one decimal integer as text."""

_INT64_DIGITS = 18  # every number of so many digits fits an int64
_ROW_BY_ROW_BYTES = 4096  # above this, moving the bytes twice costs more than a Python loop


def decode_column(
    field: str, data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[Any] | None:
    """Decodes one field of n samples, exactly as the built-in decoder would one by one, or declines.

    Only for fields that are decoded by the library's own decoder (`decodes_as_built_in`) and have no transform.

    Args:
        field: the field's full name; its last extension decides.
        data: uint8[shard bytes], the mapped shard, contiguous. Only read.
        offsets: int64[n], first byte of each sample's payload.
        sizes: int64[n], payload bytes of each sample.

    Returns:
        An array of shape (n, *shape) in memory of its own, or None where the fast way does not apply: other kinds
        of field, npy headers that differ between samples, column-major arrays, numbers with spaces or of more than 18
        characters, anything out of bounds or damaged. The caller then decodes sample by sample, which raises the
        proper errors.
    """
    extension = field.rpartition(".")[2]
    if extension in INTEGER_EXTENSIONS:
        return _integers(data, offsets, sizes) if _inside(data, offsets, sizes) else None
    if extension != "npy":
        return None
    layout = _shared_layout(data, offsets, sizes)
    if layout is None:
        return None
    payload_bytes = layout.end - layout.start
    shape = (len(offsets), *layout.shape)
    if payload_bytes == 0:
        return np.empty(shape, layout.dtype)
    return _windows(data, payload_bytes)[offsets + layout.start].view(layout.dtype).reshape(shape)


def decode_column_into(
    field: str,
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    sizes: NDArray[np.int64],
    out: NDArray[Any],
) -> bool:
    """As `decode_column`, but writes into `out`; large npy payloads are copied once, straight to their row.

    Args:
        field: the field's full name; its last extension decides.
        data: uint8[shard bytes], the mapped shard, contiguous. Only read.
        offsets: int64[n], first byte of each sample's payload.
        sizes: int64[n], payload bytes of each sample.
        out: array of shape (n, *shape), C-contiguous, of the dtype that decoding gives.

    Returns:
        True if `out` was filled; False where the fast way does not apply or `out` does not fit, with `out` as it was.
    """
    if field.rpartition(".")[2] == "npy" and out.flags.c_contiguous:
        layout = _shared_layout(data, offsets, sizes)
        if layout is None or out.dtype != layout.dtype or out.shape != (len(offsets), *layout.shape):
            return False
        payload_bytes = layout.end - layout.start
        if payload_bytes >= _ROW_BY_ROW_BYTES:
            rows = out.reshape(-1).view(np.uint8).reshape(len(offsets), payload_bytes)
            for row, start in enumerate((offsets + layout.start).tolist()):
                rows[row] = data[start : start + payload_bytes]
            return True
    column = decode_column(field, data, offsets, sizes)
    if column is None or column.dtype != out.dtype or column.shape != out.shape:
        return False
    out[...] = column
    return True


def _inside(data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    if len(offsets) == 0 or not data.flags.c_contiguous:
        return False
    return bool(offsets.min() >= 0 and sizes.min() > 0 and (offsets + sizes).max() <= data.size)


def _windows(data: NDArray[np.uint8], window_bytes: int) -> NDArray[np.void]:
    """All windows of one size into `data`, as opaque items; indexing them copies."""
    return np.ndarray((data.size - window_bytes + 1,), f"V{window_bytes}", data, 0, (1,))


def _shared_layout(data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NpyLayout | None:
    """The layout that all samples have byte for byte in common, or None."""
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
    starts = offsets + sizes - width  # numbers are set flush right, so a shorter one has foreign bytes before it
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
    digits = characters - np.uint8(ord("0"))  # wraps round for what is no digit, to more than 9
    if digits.max() > 9:
        return None
    values: NDArray[np.int64] = digits[:, 0].astype(np.int64)
    for position in range(1, width):
        values *= 10
        values += digits[:, position]
    values[negative] *= -1
    return values
