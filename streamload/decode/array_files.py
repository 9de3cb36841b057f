"""Decode `.npy` and `.npz` bytes to arrays, without pickle and without trusting the sizes in a header.

The layout of an npy file is described in `numpy.lib.format`. A header is parsed once and cached by its bytes, since the
members of a dataset nearly always share one.
"""

from __future__ import annotations

import ast
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.text import counted

DECOMPRESSED_LIMIT_BYTES = 513 << 20
"""Maximum excess of a decoded field over its stored bytes: a volume of 512 x 512 x 512 float32, or an image of
`PIXEL_LIMIT`."""

_MAGIC = b"\x93NUMPY"
_HEADER_LIMIT_BYTES = 10_000  # as in NumPy: parsing longer literals may take much time and memory
_version_and_length = struct.Struct("<6xBxH").unpack_from
_long_length = struct.Struct("<I").unpack_from


class ExpansionError(ValueError):
    """Raised for a field that would exceed its stored bytes by more than the limit."""


class NpyLayout(NamedTuple):
    """The contents of an npy header.

    Attributes:
        dtype: never of Python objects.
        order: "F" if the elements are stored column by column, else "C".
        start: offset of the first element, in bytes.
        end: offset after the last element, in bytes.
        aligned: elements at `start` are aligned if the buffer's first byte is.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    start: int
    end: int
    aligned: bool


def decode_npy(data: memoryview | bytearray) -> NDArray[Any]:
    """Decode an npy file (version 1, 2 or 3) to a writable array that owns its memory, or a given bytearray.

    Bytes after the last element are ignored, as by `numpy.load`.

    Raises:
        ValueError: `data` is not an npy file, holds Python objects, or is shorter than its header claims.
    """
    shape, dtype, order, start, end, aligned = npy_layout(data)
    if len(data) < end:
        raise ValueError(
            f"the npy file is cut off: its header announces {end - start} bytes for shape {shape} of {dtype}, "
            f"{max(len(data) - start, 0)} are there; write the sample again"
        )
    # One copy of the whole file and one array on it cost half of slicing, wrapping and copying the elements.
    memory = data if isinstance(data, bytearray) else bytearray(data)
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, start, None, order)
    return array if aligned else array.copy(order)


def npy_layout(data: memoryview | bytearray) -> NpyLayout:
    """Parse the npy header at the start of `data`.

    Raises:
        ValueError: not an npy header, or not one of plain elements.
    """
    if len(data) < 12:
        raise ValueError(f"not an npy file: {counted(len(data), 'byte')} cannot hold a header")
    version, header_bytes = _version_and_length(data)
    start: int = 10 + header_bytes
    if version != 1:
        start = 12 + _long_length(data, 8)[0]
    if start > len(data) or start > _HEADER_LIMIT_BYTES:
        _check_magic(bytes(data[:6]))
        raise ValueError(
            f"the npy file announces a header of {start} bytes; {len(data)} bytes are there and "
            f"{_HEADER_LIMIT_BYTES} are the limit"
        )
    return _parse_header(bytes(data[:start]))


def _check_magic(magic: bytes) -> None:
    if magic != _MAGIC:
        raise ValueError(f"not an npy file: it begins with {magic!r} instead of {_MAGIC!r}")


@lru_cache(maxsize=256)
def _parse_header(head: bytes) -> NpyLayout:
    _check_magic(head[:6])
    version = head[6]
    if version not in (1, 2, 3):
        raise ValueError(f"npy format version {version} is not known; write the file as version 1, 2 or 3")
    text = head[10 if version == 1 else 12 :]
    try:
        header = ast.literal_eval(text.decode("utf-8" if version == 3 else "latin-1").strip())
        shape, fortran, described = header["shape"], header["fortran_order"], header["descr"]
        dtype = np.lib.format.descr_to_dtype(described)
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError, MemoryError, RecursionError) as exc:
        raise ValueError(f"the npy header cannot be read ({exc}): {text[:80]!r}") from exc
    if not isinstance(shape, tuple) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"the npy header gives no valid shape: {text[:80]!r}")
    if not isinstance(fortran, bool):
        raise ValueError(f"the npy header gives no valid fortran_order: {text[:80]!r}")
    if dtype.hasobject:
        raise ValueError(
            f"the npy file holds Python objects (dtype {dtype}), which only pickle can read and which are refused; "
            "store plain numbers, or hand over a decoder for this field with decode={...}"
        )
    start = len(head)
    end = start + math.prod(shape) * dtype.itemsize
    return NpyLayout(shape, dtype, "F" if fortran else "C", start, end, start % dtype.alignment == 0)


def decode_npz(data: memoryview, limit_bytes: int = DECOMPRESSED_LIMIT_BYTES) -> dict[str, Any]:
    """Decode an npz file to a dict: arrays for members `name.npy` (as `name`), bytes for any other.

    Raises:
        ValueError: `data` is not a whole zip archive, a checksum is wrong, a name occurs twice, the compression is none
            of `numpy.savez`, or the contents exceed `data` by more than `limit_bytes`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            check_entries(entries, len(data), limit_bytes)
            values: dict[str, Any] = {}
            for entry in entries:
                name, content = entry.filename, archive.open(entry).read(entry.file_size)
                is_array = name.endswith(".npy")
                values[name.removesuffix(".npy")] = decode_npy(memoryview(content)) if is_array else content
            return values
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, struct.error) as exc:
        raise ValueError(f"not a whole npz file: {exc}") from exc


def check_entries(entries: Sequence[zipfile.ZipInfo], archive_bytes: int, limit_bytes: int) -> None:
    """Raise an error, before decompression, if a zip archive's contents exceed its size by more than the limit.

    Raises:
        ExpansionError: the contents are too large.
        ValueError: a name occurs twice, or the compression is unusual.
    """
    decompressed = sum(entry.file_size for entry in entries)
    if decompressed > archive_bytes + limit_bytes:
        raise ExpansionError(
            f"the archive decompresses to {decompressed} bytes; the limit is {archive_bytes + limit_bytes}. If it is "
            "no bomb, store the values uncompressed as npy, or hand over a decoder for this field with decode={...}"
        )
    if len({entry.filename for entry in entries}) != len(entries):
        raise ValueError("the archive holds two members with the same name")
    for entry in entries:
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"member {entry.filename!r} is compressed with zip method {entry.compress_type}; "
                "only stored and deflated members are read"
            )
