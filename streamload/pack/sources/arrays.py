"""Arrays in `.npy`, `.npz` and `.pt` files: each row is a sample, with a field `.npy` for each array.

Arrays are mapped; those in a compressed `.npz` are held in memory. Nothing in a file is executed.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.array_files import NpyLayout, npy_layout
from streamload.errors import StreamloadError
from streamload.pack.output import UsageError
from streamload.pack.sources.source import ArrayRow, Source, SourceOptions, field_named
from streamload.pack.sources.table import Table, samples_of_table
from streamload.write.encode import encode_field

ARRAYS_EXTENSIONS = (".npz", ".npy", ".pt", ".pth")

_LABEL_NAMES = ("y", "label", "labels")
_LONGEST_HEADER = 10_012
_LENGTHS_AT = 26  # in a zip's local header
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error, ValueError)


OpenArrays = dict[tuple[str, str], tuple[bytes, NDArray[Any]]]
"""Mapped arrays by file and name, each with the header of a row's npy file."""


def rows_of_arrays(path: str, options: SourceOptions) -> Source:
    """Return the rows of the arrays in a file, of equal number; keys are row numbers of nine digits.

    Labels are the array `label_column`, or the first array of integers called `y`, `label` or `labels`. Raises OSError,
    and UsageError for damage or other content.
    """
    arrays = _arrays_in(path)
    for name, array in arrays.items():
        if not array.shape:
            raise UsageError(f"{path!r}: the array {name!r} is a single value and has no rows; leave it out")
    count = min(map(len, arrays.values()))
    if max(map(len, arrays.values())) != count:
        lengths = ", ".join(f"{name} {len(array):,}" for name, array in arrays.items())
        raise UsageError(
            f"{path!r}: its arrays differ in their number of rows ({lengths}); save those that belong together in a "
            "file of their own, such as one for each split"
        )
    if not count:
        raise UsageError(f"{path!r} holds no row; there is nothing to pack")
    label = options.label_column
    if label is None:
        integers = [name for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "iu"]
        label = next((name for name in _LABEL_NAMES if name in integers), None)
    rows = {name: ArrayRow(path, _field(path, name), name, 0, len(_first_row(array))) for name, array in arrays.items()}

    def column(name: str) -> list[Any]:
        if name == label:
            values: list[Any] = arrays[name].tolist()
            return values
        return [rows[name]._replace(row=row) for row in range(count)]

    head = {name: arrays[name][0].tolist() if name == label else rows[name] for name in arrays}
    table = Table(path, list(arrays), count, lambda row: f"row {row}", head, column)
    source = samples_of_table(table, options)
    if not path.lower().endswith(".npz") or all(isinstance(array, np.memmap) for array in arrays.values()):
        return source
    note = "compressed arrays are held in memory, by one process; numpy.savez writes them uncompressed"
    return replace(source, notes=(*source.notes, note), in_memory=True)


def row_content(row: ArrayRow, arrays: OpenArrays) -> bytes:
    """Return the npy file of a row, from arrays that stay open while `arrays` exists.

    Raises StreamloadError if the file is damaged, or changed since its rows were listed; and OSError.
    """
    try:
        if (row.path, row.array) not in arrays:
            array = _arrays_in(row.path)[row.array].view(np.ndarray)
            arrays[row.path, row.array] = _first_row(array)[: -array[0].nbytes or None], array
        head, array = arrays[row.path, row.array]
        content: bytes = head + array[row.row].tobytes()
    except (UsageError, LookupError) as exc:
        raise StreamloadError(f"{row.path!r} changed while it was packed, or is damaged: {exc}") from exc
    if len(content) != row.size:
        raise StreamloadError(f"{row.path!r} changed while it was packed; run the same command again")
    return content


def _first_row(array: NDArray[Any]) -> bytes:
    return encode_field("npy", np.asarray(array[0], order="C"))


def _field(path: str, name: str) -> str:
    field = None if "/" in name else field_named(f"{name}.npy" if name else "npy")
    if field is None:
        raise UsageError(f"{path!r}: the array {name!r} cannot be a field of samples; rename it")
    return field


def _arrays_in(path: str) -> dict[str, NDArray[Any]]:
    """Map the arrays in a file by name, "" for a `.npy`. Raises UsageError, OSError."""
    lower = path.lower()
    try:
        if lower.endswith(".npz"):
            with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                arrays = {entry.filename.removesuffix(".npy"): _member(path, file, archive, entry) for entry in entries}
        elif lower.endswith(".npy"):
            with open(path, "rb") as file:
                arrays = {"": _mapped(path, npy_layout(memoryview(file.read(_LONGEST_HEADER))), 0)}
        else:
            arrays = _tensors(path)
    except _DAMAGED as exc:
        raise UsageError(f"{path!r} cannot be read as arrays: {exc}") from exc
    if not arrays:
        raise UsageError(f"{path!r} holds no array; there is nothing to pack")
    return arrays


def _mapped(path: str, layout: NpyLayout, offset: int) -> NDArray[Any]:
    if layout.start == layout.end:
        return np.empty(layout.shape, layout.dtype)
    return np.memmap(path, layout.dtype, "r", offset + layout.start, layout.shape, layout.order)


def _member(path: str, file: io.BufferedReader, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    name = entry.filename.removesuffix(".npy")
    try:
        with archive.open(entry) as member:
            layout = npy_layout(memoryview(member.read(_LONGEST_HEADER)))
    except ValueError as exc:
        raise UsageError(f"{path!r}: the array {name!r} cannot be used: {exc}") from exc
    if entry.compress_type != zipfile.ZIP_STORED:
        status = os.fstat(file.fileno())
        return _decompressed(path, entry.filename, status.st_size, status.st_mtime_ns)
    file.seek(entry.header_offset + _LENGTHS_AT)
    name_bytes, extra_bytes = struct.unpack("<2H", file.read(4))
    return _mapped(path, layout, entry.header_offset + _LENGTHS_AT + 4 + name_bytes + extra_bytes)


@lru_cache(maxsize=16)
def _decompressed(path: str, name: str, size: int, time_ns: int) -> NDArray[Any]:
    """Hold an array in memory for all tasks of a process, until size or time of its file change."""
    del size, time_ns
    with zipfile.ZipFile(path) as archive, archive.open(name) as member:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
        return array


def _tensors(path: str) -> dict[str, NDArray[Any]]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as exc:  # damaged files make torch raise nearly anything
        raise UsageError(
            f"{path!r} cannot be read without running code from it; save tensors alone ({type(exc).__name__})"
        ) from exc
    if isinstance(content, torch.Tensor):
        content = {"": content}
    elif isinstance(content, list | tuple):
        content = dict(zip(("x", "y") if len(content) == 2 else map(str, range(len(content))), content, strict=True))
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UsageError(f"{path!r} does not hold tensors alone; save a tensor, a dict, or a tuple such as (x, y)")
    try:
        return {str(name): tensor.detach().numpy() for name, tensor in content.items()}
    except (TypeError, RuntimeError) as exc:
        raise UsageError(f"{path!r}: {exc}; convert the tensor before saving it, as with .float()") from exc
