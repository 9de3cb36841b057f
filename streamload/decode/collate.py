"""Collating: rows to a slot's memory in the worker, and the slot's memory to a batch of tensors in the trainer.

The rules are those of torch's `default_collate`; only the last step, from arrays to tensors, needs torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import NoneType
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from streamload.decode.batch_layout import (
    ArrayLeaf,
    Layout,
    MappingNode,
    Node,
    SequenceNode,
    ValueLeaf,
    as_array,
    assemble,
    is_plain_array,
    is_tensor,
    is_tensor_class,
    slot_views,
)
from streamload.decode.columns import PlacedRows, Rows, StoredBytes, StoredRows, copied_together
from streamload.decode.tasks import StoredColumn, ValueKind
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
    """

    def __init__(self, columns: Iterable[Sequence[Any]]) -> None:
        self._columns = [_column(values) for values in columns]
        self.size_bytes = sum(column.size_bytes for column in self._columns)

    def write(self, memory: Bytes, start: int) -> tuple[StoredColumn, ...]:
        """Write all columns from `start` on, a multiple of 64; returns where they lie.

        Raises:
            UnreadableError: a stored field cannot be read.
        """
        stored = []
        for column in self._columns:
            stored.append(column.write(memory, start))
            start += column.size_bytes
        return tuple(stored)


class _PickledColumn:
    """All values of a column as one pickle."""

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


def load_values(columns: Sequence[StoredColumn], memory: Bytes) -> list[list[Any]]:
    """The columns of values in a slot's memory; arrays view it, all else is copied to this process's heap."""
    return [_load(column, memory) for column in columns]


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


class LayoutMismatchError(Exception):
    """A row does not fit the layout."""


def write_rows(layout: Layout, rows: Rows, memory: Bytes) -> list[Sequence[Any]]:
    """Write the arrays of a batch to their places in its slot.

    Args:
        layout: of rows.
        rows: to write, as many as its capacity or fewer.
        memory: of the slot.

    Returns:
        For each column of values of unlike sizes these rows' values; `StoredBytes` have not been read yet.

    Raises:
        LayoutMismatchError: a row has another structure, dtype or shape; the slot is then undefined.
    """
    places = slot_views(layout, memory, rows.count)
    values: list[Sequence[Any]] = [()] * layout.value_columns
    tree = layout.tree
    if rows.columns is None:
        _write(tree, rows.values, places, values)
        return values
    if not isinstance(tree, MappingNode | SequenceNode) or len(tree.children) != len(rows.columns):
        raise LayoutMismatchError
    if tree.keys != rows.keys if isinstance(tree, MappingNode) else rows.kind is dict:
        raise LayoutMismatchError
    for number, (child, part) in enumerate(zip(tree.children, rows.columns, strict=True)):
        _write(child, part, places, values, may_be_none=number in rows.optional)
    return values


def _write(
    node: Node, column: Any, places: list[NDArray[Any]], values: list[Sequence[Any]], *, may_be_none: bool = False
) -> None:
    if isinstance(column, StoredBytes) and not isinstance(node, ValueLeaf):
        raise LayoutMismatchError
    if isinstance(node, ArrayLeaf):
        _write_column(node, column, places[node.number])
    elif isinstance(node, ValueLeaf):
        kinds = () if isinstance(column, StoredBytes) else set(map(type, column))
        if not all(issubclass(kind, str | bytes) or (may_be_none and kind is NoneType) for kind in kinds):
            raise LayoutMismatchError
        values[node.column] = column
    elif isinstance(node, MappingNode | SequenceNode):
        for child, part in zip(node.children, _transpose(node, column), strict=True):
            _write(child, part, places, values)


def _transpose(node: MappingNode | SequenceNode, column: Any) -> list[list[Any]]:
    if isinstance(column, np.ndarray | StoredRows):
        raise LayoutMismatchError
    kinds = set(map(type, column))
    if isinstance(node, MappingNode):
        keys = set(node.keys)
        if kinds != {node.kind} or not all(value.keys() == keys for value in column) or tuple(column[0]) != node.keys:
            raise LayoutMismatchError  # the first row sets the order of the keys
        return [[value[key] for value in column] for key in node.keys]
    length = len(node.children)
    if not kinds <= ({list, tuple} if node.kind is list else {node.kind}):
        raise LayoutMismatchError
    if not all(len(value) == length for value in column):
        raise LayoutMismatchError
    return [[value[number] for value in column] for number in range(length)]


def _write_column(leaf: ArrayLeaf, column: Any, out: NDArray[Any]) -> None:
    """Write the values of one leaf for consecutive rows; `out` has one entry for each row."""
    if isinstance(column, np.ndarray):
        if column.dtype != out.dtype or column.shape != out.shape:
            raise LayoutMismatchError
        if column.ctypes.data != out.ctypes.data:
            out[...] = column
        return
    if isinstance(column, StoredRows):
        if column.dtype != out.dtype or column.shape != out.shape[1:] or not out.flags.c_contiguous:
            raise LayoutMismatchError
        column.copy_to(out)
        return
    if isinstance(column, PlacedRows) and column.are_at(out):
        return
    _write_values(leaf, list(column), out)


def _write_values(leaf: ArrayLeaf, column: list[Any], out: NDArray[Any]) -> None:
    """The same for values one by one."""
    kinds = set(map(type, column))
    if out.ndim == 1 and kinds <= _SCALARS_OF.get(out.dtype.str, frozenset()):
        try:
            out[:] = column
        except OverflowError as error:
            raise LayoutMismatchError from error
        return
    if any(map(is_tensor_class, kinds)):
        column = [_tensor_memory(leaf, value) for value in column]
    elif not all(map(is_plain_array, kinds)):
        raise LayoutMismatchError
    shape, dtype = out.shape[1:], out.dtype
    if shape and out.flags.c_contiguous:
        if not copied_together(column, out):
            raise LayoutMismatchError
        return
    for number, value in enumerate(column):
        if value.dtype != dtype or value.shape != shape:
            raise LayoutMismatchError
        out[number] = value


_SCALARS_OF: dict[str, frozenset[type]] = {
    np.dtype(np.int64).str: frozenset({int}),
    np.dtype(np.float64).str: frozenset({float}),
    np.dtype(np.bool_).str: frozenset({bool}),
}


def _tensor_memory(leaf: ArrayLeaf, value: Any) -> NDArray[Any]:
    if not is_tensor(value):
        raise LayoutMismatchError
    memory, torch_dtype = as_array(value)
    if torch_dtype != leaf.torch_dtype:
        raise LayoutMismatchError
    return memory


def build_batch(layout: Layout, memory: Bytes, rows: int, columns: Sequence[list[Any]]) -> Any:
    """The batch that the user gets, viewing the slot's memory without a copy.

    Args:
        layout: of the batch.
        memory: of its slot.
        rows: how many rows it has.
        columns: its values of unlike sizes.
    """
    arrays = slot_views(layout, memory, None if layout.capacity is None else rows)
    return assemble(layout, arrays, columns, _finish)


def choose_rows(count: int, failed: Container[int], on_error: str) -> list[int]:
    """The rows that make up a batch in which some have failed.

    With "skip" the good ones; with "replace" every failed row is replaced by the next good one, wrapping around, so
    that the batch keeps its length.
    """
    good = [row for row in range(count) if row not in failed]
    if on_error != "replace" or not good:
        return good
    chosen, following = [0] * count, good[0]
    for row in range(count - 1, -1, -1):
        if row not in failed:
            following = row
        chosen[row] = following
    return chosen


def torch_collate(rows: Rows) -> Any:
    """Collate rows by torch's own `default_collate`, for batches that have no regular layout.

    Raises:
        Exception: whatever `default_collate` raises.
    """
    from torch.utils.data import default_collate

    return default_collate(rows.as_list())


def _finish(leaf: ArrayLeaf, array: NDArray[Any]) -> Any:
    if not leaf.tensor:
        return array
    import torch

    tensor = torch.from_numpy(array)
    return tensor if leaf.torch_dtype is None else tensor.view(getattr(torch, leaf.torch_dtype))
