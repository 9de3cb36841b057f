"""Values of unlike sizes in a slot: bytes and ragged arrays as data and offsets, everything else as a pickle.

A column of n bytes or arrays is int64[n + 1], the offset of each value in the data and the end of the last; then the
shapes of arrays, int64[n, ndim]; then, from a multiple of 64 bytes on, the data. So a value is copied once into the
slot, by the worker, and once out of it, by the trainer; arrays are views of the slot.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from streamload.decode.columns import StoredBytes
from streamload.decode.tasks import StoredColumn, StoredValues, ValueKind
from streamload.memory.mapped import Bytes
from streamload.memory.slots import ALIGNMENT_BYTES, round_up

_LENGTH_BYTES = 8
# Values that are smaller on average are copied all at once: that takes fewer calls.
_SMALL_BYTES = 512

# Writes values to the memory of their column's data, at their offsets in it.
_Write = Callable[[memoryview, Sequence[int]], None]


class ValueBlock:
    """Columns of values, laid out one behind the other, to be written when their memory is there.

    Args:
        columns: each a list of values, or `StoredBytes`.

    Attributes:
        size_bytes: of all; a multiple of 64.
        copied_bytes: of all but arrays, which the trainer does not copy.
    """

    def __init__(self, columns: Iterable[Sequence[Any]]) -> None:
        self._columns = [_column(values) for values in columns]
        self.size_bytes = sum(column.size_bytes for column in self._columns)
        self.copied_bytes = sum(column.size_bytes for column in self._columns if not column.is_array)

    def write(self, memory: Bytes, start: int) -> StoredValues:
        """Write all columns from `start` on, a multiple of 64; returns where they lie.

        Raises:
            UnreadableError: a stored field cannot be read.
        """
        stored = []
        for column in self._columns:
            stored.append(column.write(memory, start))
            start += column.size_bytes
        return StoredValues(self.copied_bytes, tuple(stored))


class _PickledColumn:
    """All values of a column as one pickle."""

    is_array = False

    def __init__(self, values: Sequence[Any]) -> None:
        self._chunks = _pickled(list(values))
        self._length = sum(map(len, self._chunks))
        self.size_bytes = round_up(self._length, ALIGNMENT_BYTES)

    def write(self, memory: Bytes, start: int) -> StoredColumn:
        data = memoryview(memory.data)
        end = start
        for chunk in self._chunks:
            begin, end = end, end + len(chunk)
            data[begin:end] = chunk
        return StoredColumn("pickle", start, self._length)


class _Column:
    """Bytes or arrays: the data of all values behind their offsets."""

    def __init__(
        self,
        kind: ValueKind,
        sizes: Iterable[int],
        write: _Write,
        *,
        dtype: str = "",
        shapes: Sequence[tuple[int, ...]] = (),
    ) -> None:
        if shapes:
            sizes = [round_up(size, ALIGNMENT_BYTES) for size in sizes]
        self._offsets = list(accumulate(sizes, initial=0))
        self._stored = StoredColumn(kind, 0, len(self._offsets) - 1, dtype, len(shapes[0]) if shapes else 0)
        self._shapes = shapes
        self.is_array = kind == "array"
        self._write = write
        self.size_bytes = round_up(_data_start(self._stored) + self._offsets[-1], ALIGNMENT_BYTES)

    def write(self, memory: Bytes, start: int) -> StoredColumn:
        stored = self._stored._replace(start=start)
        offsets, shapes = _head(stored, memory)
        offsets[:] = self._offsets
        if stored.ndim:
            shapes[:] = self._shapes
        self._write(_data(stored, memory, self._offsets[-1]), self._offsets)
        return stored


def _data_start(column: StoredColumn) -> int:
    lengths = column.length + 1 + column.length * column.ndim
    return column.start + round_up(lengths * _LENGTH_BYTES, ALIGNMENT_BYTES)


def _head(column: StoredColumn, memory: Bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The offsets and the shapes of a column, in the slot."""
    offsets: NDArray[np.int64] = np.ndarray((column.length + 1,), np.int64, memory, column.start)
    return offsets, np.ndarray((column.length, column.ndim), np.int64, memory, column.start + offsets.nbytes)


def _data(column: StoredColumn, memory: Bytes, size_bytes: int) -> memoryview:
    start = _data_start(column)
    return memoryview(memory.data)[start : start + size_bytes]


def _column(values: Sequence[Any]) -> _Column | _PickledColumn:
    if isinstance(values, StoredBytes):
        return _Column("bytes", values.sizes, values.read_to)
    kinds = set(map(type, values))
    if kinds == {bytes}:
        return _Column("bytes", map(len, values), partial(_copy, values))
    if kinds == {np.ndarray} and _are_alike(values):
        sizes, shapes = [value.nbytes for value in values], [value.shape for value in values]
        return _Column("array", sizes, partial(_copy_arrays, values), dtype=values[0].dtype.str, shapes=shapes)
    return _PickledColumn(values)


def _are_alike(arrays: Sequence[NDArray[Any]]) -> bool:
    """Whether they are numbers of one dtype in one number of dimensions."""
    return arrays[0].dtype.kind in "biufc" and len({(array.dtype, array.ndim) for array in arrays}) == 1


def _copy(values: Sequence[bytes], data: memoryview, offsets: Sequence[int]) -> None:
    if len(data) < _SMALL_BYTES * len(values):
        data[:] = b"".join(values)
        return
    for value, start, end in zip(values, offsets, offsets[1:], strict=False):
        data[start:end] = value


def _copy_arrays(values: Sequence[NDArray[Any]], data: memoryview, offsets: Sequence[int]) -> None:
    for value, start in zip(values, offsets, strict=False):
        np.ndarray(value.shape, value.dtype, data, start)[...] = value


def load_values(stored: StoredValues, memory: Bytes) -> list[list[Any]]:
    """The columns of values in a slot's memory; arrays view it, all else is copied to this process's heap."""
    return [_load(column, memory) for column in stored.columns]


def _load(column: StoredColumn, memory: Bytes) -> list[Any]:
    if column.kind == "pickle":
        values: list[Any] = pickle.loads(memoryview(memory.data)[column.start : column.start + column.length])
        return values
    head, shapes = _head(column, memory)
    offsets = head.tolist()
    if column.kind == "array":
        start = _data_start(column)
        return [
            np.ndarray(shape, column.dtype, memory, start + offset)
            for shape, offset in zip(shapes.tolist(), offsets, strict=False)
        ]
    data = _data(column, memory, offsets[-1])
    whole = bytes(data) if len(data) < _SMALL_BYTES * column.length else data
    return [bytes(whole[start:end]) for start, end in pairwise(offsets)]


class _Chunks:
    """Collects what a pickler writes; large `bytes` are not copied."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    def write(self, data: bytes | memoryview) -> None:
        self.chunks.append(data if type(data) is bytes else bytes(data))


def dump_values(values: Any) -> bytes:
    """Pickle values; classes defined in the user's script need cloudpickle, which is ten times slower."""
    return b"".join(_pickled(values))


def _pickled(values: Any) -> list[bytes]:
    taken = _Chunks()
    try:
        pickle.Pickler(taken, pickle.HIGHEST_PROTOCOL).dump(values)
    except (pickle.PicklingError, AttributeError, TypeError):
        taken = _Chunks()
        cloudpickle.Pickler(taken).dump(values)
    return taken.chunks
