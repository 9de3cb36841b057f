"""Arrays in `.npy` and `.npz` files row by row: each row is a sample with a field `.npy` for each array.

Rows of arrays that are stored as they lie in memory are ranges of bytes of the file, and read as such. Arrays that are
compressed or stored column by column have to be held in memory. Nothing is unpickled.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.array_files import NpyLayout, npy_layout
from streamload.errors import StreamloadError
from streamload.pack.sources.source import (
    ArrayRow,
    Source,
    SourceError,
    SourceSample,
    field_named,
    numbered_labels,
)
from streamload.text import listed
from streamload.write.encode import encode_field

ARRAYS_EXTENSIONS = (".npz", ".npy")

_LABEL_NAMES = ("y", "label", "labels")
_LONGEST_HEADER = 10_012
_LOCAL_HEADER_BYTES = 30
_lengths_of_name_and_extra = struct.Struct("<26x2H").unpack
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error, ValueError)


class _Stored(NamedTuple):
    """An array in a file.

    Attributes:
        layout: what its header says.
        offset: where its header stands in the file; None if it is compressed.
    """

    layout: NpyLayout
    offset: int | None

    @property
    def rows_are_ranges(self) -> bool:
        """Whether the bytes of a row stand together in the file."""
        return self.offset is not None and (self.layout.order == "C" or len(self.layout.shape) == 1)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.layout.shape[1:]) * self.layout.dtype.itemsize

    def head(self) -> bytes:
        """The header of the npy file of one row."""
        row = np.zeros(self.layout.shape[1:], self.layout.dtype)
        content = encode_field("npy", row)
        return content[: len(content) - row.nbytes]


def rows_of_arrays(
    path: str, label: str | None, *, as_names: bool = False, classes: tuple[str, ...] | None = None
) -> Source:
    """The rows of the arrays in a file, in their order; keys are their numbers, of nine digits: `000000000`.

    Args:
        path: a `.npz` of arrays with an equal number of rows, or a `.npy`.
        label: the array of labels; None for the first of integers, one per row, called `y`, `label` or `labels`.
        as_names: treat integers as names of classes.
        classes: the given names of the classes by number, or None.

    Raises:
        SourceError: the file is damaged, or its arrays are no rows of samples.
        OSError: it cannot be read.
    """
    arrays = _arrays_in(path)
    _check_rows(path, arrays)
    label_name = _label_name(path, arrays, label)
    count = next(iter(arrays.values())).layout.shape[0]
    labels: Sequence[int | None] = [None] * count
    names = None
    if label_name is not None:
        values = _values(path, label_name, arrays[label_name]).tolist()
        labels, names = numbered_labels(
            values, lambda row: f"{path!r}, row {row} of {label_name!r}", as_names=as_names, classes=classes
        )
    elif classes is not None:
        raise SourceError(f"{path!r} has no array of labels, which --classes numbers; name it with --label-column")
    columns = [
        (_field(path, name), name, len(stored.head()) + stored.row_bytes)
        for name, stored in arrays.items()
        if name != label_name
    ]
    fields = [field for field, _, _ in columns]
    if not columns:
        raise SourceError(f"{path!r} holds labels alone; there is nothing else to pack")
    if len(set(fields)) < len(fields):
        raise SourceError(f"{path!r}: the names of its arrays differ only in case ({listed(fields)}); rename them")
    samples = tuple(
        SourceSample(
            f"{row:09d}", tuple([ArrayRow(path, field, name, row, size) for field, name, size in columns]), label
        )
        for row, label in enumerate(labels)
    )
    notes = [
        "there are no labels; --label-column names their array"
        if label_name is None
        else f"labels are taken from the array {label_name!r}"
    ]
    in_memory = [name for name, stored in arrays.items() if name != label_name and not stored.rows_are_ranges]
    if in_memory:
        notes.append(
            f"{listed(in_memory)} {'is' if len(in_memory) == 1 else 'are'} compressed or stored column by column, "
            "and so held in memory, by one process; rows of what numpy.savez writes are read one by one"
        )
    return Source(
        samples, names, "sample", tuple(notes), None, tuple((field,) for field in fields), in_memory=bool(in_memory)
    )


class ArrayReader(ExitStack):
    """Reads rows of arrays, in any order; their files are open until its `with` block ends."""

    def __init__(self) -> None:
        super().__init__()
        self._arrays: dict[tuple[str, str], Callable[[int], bytes]] = {}

    def content(self, row: ArrayRow) -> bytes:
        """The npy file of a row.

        Raises:
            StreamloadError: the file of arrays is damaged, or changed since its rows were listed.
            OSError: it cannot be read.
        """
        read = self._arrays.get((row.path, row.array))
        if read is None:
            read = self._arrays[row.path, row.array] = self._opened(row.path, row.array)
        content = read(row.row)
        if len(content) != row.size:
            raise StreamloadError(f"{row.path!r} changed while it was packed; run the same command again")
        return content

    def _opened(self, path: str, name: str) -> Callable[[int], bytes]:
        try:
            stored = _arrays_in(path)[name]
            if stored.rows_are_ranges and stored.offset is not None:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self.callback(os.close, descriptor)
                return partial(_range, descriptor, stored.head(), stored.offset + stored.layout.start, stored.row_bytes)
            return partial(_part, stored.head(), _in_memory(path, name))
        except (SourceError, KeyError) as exc:
            raise StreamloadError(f"{path!r} changed while it was packed, or is damaged: {exc}") from exc


def _range(descriptor: int, head: bytes, start: int, size: int, row: int) -> bytes:
    return head + os.pread(descriptor, size, start + row * size)


def _part(head: bytes, array: NDArray[Any], row: int) -> bytes:
    return head + bytes(array[row].tobytes())


def _arrays_in(path: str) -> dict[str, _Stored]:
    """The arrays in a file by name; that of a `.npy` is "".

    Raises:
        SourceError: it is damaged, or holds something else than arrays of plain values.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            if path.lower().endswith(".npy"):
                layout = _layout(path, "", file.read(_LONGEST_HEADER), os.fstat(file.fileno()).st_size)
                return {"": _Stored(layout, 0)}
            with zipfile.ZipFile(file) as archive:
                return {
                    entry.filename.removesuffix(".npy"): _stored(path, file, archive, entry)
                    for entry in archive.infolist()
                }
    except _DAMAGED as exc:
        raise SourceError(f"{path!r} is no whole file of arrays: {exc}") from exc


def _stored(path: str, file: io.BufferedReader, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> _Stored:
    name = entry.filename.removesuffix(".npy")
    if name == entry.filename:
        raise SourceError(f"{path!r} holds {name!r}, which is no array; write it with numpy.savez")
    with archive.open(entry) as member:
        layout = _layout(path, name, member.read(_LONGEST_HEADER), entry.file_size)
    if entry.compress_type != zipfile.ZIP_STORED:
        return _Stored(layout, None)
    file.seek(entry.header_offset)
    lengths = _lengths_of_name_and_extra(file.read(_LOCAL_HEADER_BYTES))
    return _Stored(layout, entry.header_offset + _LOCAL_HEADER_BYTES + sum(lengths))


def _layout(path: str, name: str, head: bytes, size: int) -> NpyLayout:
    where = f"{path!r}: the array {name!r}" if name else repr(path)
    try:
        layout = npy_layout(memoryview(head))
    except ValueError as exc:
        reason = str(exc).partition(";")[0]
        raise SourceError(f"{where} cannot be used: {reason}; store numbers or fixed-width strings") from exc
    if layout.end > size:
        raise SourceError(f"{where} is cut short: {size:,} of {layout.end:,} bytes are there")
    return layout


def _check_rows(path: str, arrays: dict[str, _Stored]) -> None:
    if not arrays:
        raise SourceError(f"{path!r} holds no array; there is nothing to pack")
    shapes = {name: stored.layout.shape for name, stored in arrays.items()}
    for name, shape in shapes.items():
        if not shape:
            raise SourceError(f"{path!r}: the array {name!r} is a single value and has no rows; leave it out")
    if len({shape[0] for shape in shapes.values()}) > 1:
        lengths = ", ".join(f"{name} {shape[0]:,}" for name, shape in shapes.items())
        raise SourceError(
            f"{path!r}: its arrays differ in their number of rows ({lengths}); save those that belong together in a "
            "file of their own, such as one for each split"
        )
    if not next(iter(shapes.values()))[0]:
        raise SourceError(f"{path!r} holds no row; there is nothing to pack")


def _label_name(path: str, arrays: dict[str, _Stored], given: str | None) -> str | None:
    if given is None:
        return next((name for name in _LABEL_NAMES if name in arrays and _is_label(arrays[name], "iu")), None)
    if given not in arrays:
        raise SourceError(f"{path!r} has no array {given!r} (--label-column); it has {listed(list(map(repr, arrays)))}")
    if not _is_label(arrays[given], "iuU"):
        layout = arrays[given].layout
        raise SourceError(
            f"{path!r}: the array {given!r} has {layout.dtype} of shape {layout.shape}, and labels are integers or "
            "names of classes, one for each row"
        )
    return given


def _is_label(stored: _Stored, kinds: str) -> bool:
    return len(stored.layout.shape) == 1 and stored.layout.dtype.kind in kinds


def _field(path: str, name: str) -> str:
    field = None if "/" in name else field_named(f"{name}.npy" if name else "npy")
    if field is None:
        raise SourceError(f"{path!r}: the array {name!r} cannot be a field of samples; rename it")
    return field


def _values(path: str, name: str, stored: _Stored) -> NDArray[Any]:
    """All of a small array."""
    if stored.offset is None:
        return _in_memory(path, name)
    layout = stored.layout
    return np.fromfile(path, layout.dtype, layout.shape[0], offset=stored.offset + layout.start)


def _in_memory(path: str, name: str) -> NDArray[Any]:
    status = os.stat(path)
    return _loaded(path, name, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _loaded(path: str, name: str, size: int, time_ns: int) -> NDArray[Any]:
    """An array in memory, once for all tasks of a process, unless size and time of its file have changed."""
    del size, time_ns
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found as archive:
            array: NDArray[Any] = archive[name]
            return array
    except _DAMAGED as exc:
        raise StreamloadError(f"{path!r}: the array {name!r} is damaged: {exc}") from exc
