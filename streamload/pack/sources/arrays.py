"""Read arrays in `.npy`, `.npz` and `.pt` files: each row is a sample, with an npy field for each array but the labels.

Arrays are mapped; those of a compressed `.npz` are loaded in each process. Nothing in a file is executed.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.decoders import npy_layout
from streamload.errors import StreamloadError
from streamload.pack.run import UsageError
from streamload.pack.sources.source import Source, SourceFile, SourceOptions, field_named
from streamload.pack.sources.table import Table, samples_of_table
from streamload.write.shard_writer import encode_field

ARRAYS_EXTENSIONS = (".npz", ".npy", ".pt", ".pth")

_LABEL_NAMES = ("y", "label", "labels")
_LONGEST_HEADER = 10_012  # of an npy file; `npy_layout` refuses longer ones
_LENGTHS_AT = 26  # in a zip's local header: the offset of the lengths of the name and the extra field
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error, ValueError)


def rows_of_arrays(path: str, options: SourceOptions) -> Source:
    """Return the rows of a file's arrays as samples; keys are nine-digit row numbers.

    Labels are taken from the array `label_column`, by default from the one-dimensional array of integers called `y`,
    `label` or `labels`, in this order. Raises OSError and UsageError.
    """
    mtime_ns = os.stat(path).st_mtime_ns
    arrays = _arrays_in(path, mtime_ns)
    for name, array in arrays.items():
        if not array.shape:
            raise UsageError(f"{path!r}: the array {name!r} is a single value and has no rows; leave it out")
    count = min(map(len, arrays.values()))
    if max(map(len, arrays.values())) != count:
        lengths = ", ".join(f"{name} {len(array):,}" for name, array in arrays.items())
        advice = "save arrays of equal length together, in a file for each length"
        raise UsageError(f"{path!r}: its arrays differ in their number of rows ({lengths}); {advice}")
    if not count:
        raise UsageError(f"{path!r} has no rows; there is nothing to pack")
    label = options.label_column
    if label is None:
        integers = [name for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "iu"]
        label = next((name for name in _LABEL_NAMES if name in integers), None)
    columns: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        field = None if "/" in name else field_named(f"{name}.npy" if name else "npy")
        if field is None:
            raise UsageError(f"{path!r}: {name!r}, the name of an array, cannot name a field; rename the array")
        first = np.asarray(array[0])
        size = len(_row_header(first.dtype, first.shape)) + first.nbytes
        rows = [SourceFile(path, field, size=size, mtime_ns=mtime_ns, array=name, row=row) for row in range(count)]
        columns[name] = array.tolist() if name == label else rows
    return samples_of_table(Table(path, columns, lambda row: f"row {row}", noun="array"), options)


@contextmanager
def closing_arrays() -> Iterator[None]:
    """Close the mapped files when the context ends."""
    try:
        yield
    finally:
        _arrays_in.cache_clear()


def row_content(row: SourceFile, *, check: bool) -> bytes:
    """Return a row as an npy file. Raises OSError; with `check`, StreamloadError if the arrays' file has changed."""
    if check and os.stat(row.path).st_mtime_ns != row.mtime_ns:
        raise StreamloadError(f"{row.path!r} changed while it was packed; run the same command again")
    values = np.asarray(_arrays_in(row.path, row.mtime_ns)[row.array or ""][row.row])
    return _row_header(values.dtype, values.shape) + values.tobytes()


@lru_cache
def _row_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header of a row's npy file, cached because NumPy is slow to write it."""
    row = np.empty(shape, dtype)
    return encode_field("npy", row)[: -row.nbytes or None]


@lru_cache(maxsize=1)
def _arrays_in(path: str, mtime_ns: int) -> dict[str, NDArray[Any]]:  # noqa: ARG001 (the key of the cache)
    """Return the arrays by name, cached for the tasks of a process."""
    arrays: dict[str, NDArray[Any]] = {}
    try:
        if path.lower().endswith((".pt", ".pth")):
            arrays = _tensors(path)
        elif path.lower().endswith(".npy"):
            with open(path, "rb") as file:
                arrays[""] = _mapped(path, file, 0)
        else:
            with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    name = entry.filename.removesuffix(".npy")
                    if entry.compress_type == zipfile.ZIP_STORED:
                        file.seek(entry.header_offset + _LENGTHS_AT)
                        name_bytes, extra_bytes = struct.unpack("<2H", file.read(4))
                        arrays[name] = _mapped(path, file, file.tell() + name_bytes + extra_bytes)
                    else:
                        with archive.open(entry) as member:
                            arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
    except _DAMAGED as exc:
        raise UsageError(f"{path!r} cannot be read as arrays: {exc}") from exc
    if not arrays:
        raise UsageError(f"{path!r} holds no arrays; there is nothing to pack")
    return arrays


def _mapped(path: str, file: io.BufferedReader, offset: int) -> NDArray[Any]:
    file.seek(offset)
    layout = npy_layout(memoryview(file.read(_LONGEST_HEADER)))
    if layout.start == layout.end:
        return np.empty(layout.shape, layout.dtype)
    return np.memmap(path, layout.dtype, "r", offset + layout.start, layout.shape, layout.order).view(np.ndarray)


def _tensors(path: str) -> dict[str, NDArray[Any]]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as exc:  # torch may raise anything for a damaged file
        reason = "is damaged, of an old format, or holds more than tensors; save only tensors with torch.save"
        raise UsageError(f"it {reason} ({type(exc).__name__})") from exc
    if isinstance(content, torch.Tensor):
        content = {"": content}
    elif isinstance(content, list | tuple):
        content = dict(zip(("x", "y") if len(content) == 2 else map(str, range(len(content))), content, strict=True))
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UsageError("it does not hold tensors alone; save a tensor, a dict, or a tuple such as (x, y)")
    try:
        return {str(name): tensor.detach().numpy() for name, tensor in content.items()}
    except (TypeError, RuntimeError) as exc:
        raise UsageError(f"{exc}; convert the tensor before saving it, for example with .float()") from exc
