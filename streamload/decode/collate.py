"""Collating: rows to a slot's memory in the worker, and the slot's memory to a batch of tensors in the trainer.

The rules are those of torch's `default_collate`; only the last step, from arrays to tensors, needs torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Container, Sequence
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
    is_named_tuple,
    is_plain_array,
    is_tensor_class,
    slot_views,
)
from streamload.decode.columns import Rows, StoredBytes, copied_together
from streamload.decode.tasks import StoredColumn
from streamload.memory.mapped import Bytes
from streamload.memory.slots import ALIGNMENT_BYTES, round_up

# Values that are smaller on average are copied all at once: that takes fewer calls.
_SMALL_BYTES = 512


def store_values(
    columns: Sequence[Sequence[Any]], memory: Callable[[int], Bytes], start: int
) -> tuple[tuple[StoredColumn, ...], int]:
    """Write columns of values to a slot; return where they lie, and where the last one ends.

    Args:
        columns: each a list of values, or `StoredBytes`, which may raise an UnreadableError. Values that are not bytes
            become a single one, the pickle of their list.
        memory: returns the slot's memory, with at least the given number of bytes.
        start: where the first column begins; a multiple of 64.
    """
    stored, end = [], start
    for column in columns:
        values: Any = column
        is_pickle = not isinstance(values, StoredBytes) and set(map(type, values)) != {bytes}
        if is_pickle:
            values = [dump_values(list(values))]
        sizes = [size for *_, size in values.places] if isinstance(values, StoredBytes) else map(len, values)
        offsets = np.fromiter(accumulate(sizes, initial=0), np.int64)
        stored.append(StoredColumn(end, len(offsets) - 1, is_pickle))
        end += round_up(offsets.nbytes, ALIGNMENT_BYTES) + round_up(int(offsets[-1]), ALIGNMENT_BYTES)
        head, data = _views(stored[-1], memory(end))
        head[:] = offsets
        data = data[: offsets[-1]]
        if isinstance(values, StoredBytes):
            values.read_to(data, offsets.tolist())
        elif len(data) < _SMALL_BYTES * len(values):
            data[:] = b"".join(values)
        else:
            for value, (begin, behind) in zip(values, pairwise(offsets.tolist()), strict=True):
                data[begin:behind] = value
    return tuple(stored), end


def _views(column: StoredColumn, memory: Bytes) -> tuple[NDArray[np.int64], memoryview]:
    """Return the offsets of a column in a slot, and the memory from its data on."""
    offsets: NDArray[np.int64] = np.ndarray((column.length + 1,), np.int64, memory, column.start)
    return offsets, memoryview(memory.data)[column.start + round_up(offsets.nbytes, ALIGNMENT_BYTES) :]


def load_values(columns: Sequence[StoredColumn], memory: Bytes) -> list[list[Any]]:
    """Copy the columns of values in a slot to the heap."""
    loaded = []
    for column in columns:
        offsets, data = _views(column, memory)
        data = data[: offsets[-1]]
        if column.is_pickle:
            loaded.append(pickle.loads(data))
        else:
            whole = bytes(data) if len(data) < _SMALL_BYTES * column.length else data
            loaded.append([bytes(whole[start:end]) for start, end in pairwise(offsets.tolist())])
    return loaded


def dump_values(values: Any) -> bytes:
    """Pickle values; classes defined in the user's script need cloudpickle, which is ten times slower."""
    try:
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled: bytes = cloudpickle.dumps(values)
        return pickled


class LayoutMismatchError(Exception):
    """A row does not fit the layout."""


def write_rows(layout: Layout, rows: Rows, memory: Bytes) -> list[Sequence[Any]]:
    """Write the arrays of a batch to their places in its slot; return the other values, column by column.

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
    if rows.keys != (tree.keys if isinstance(tree, MappingNode) else None):
        raise LayoutMismatchError
    for number, (child, part) in enumerate(zip(tree.children, rows.columns, strict=True)):
        _write(child, part, places, values, may_be_none=number in rows.optional)
    return values


def _write(
    node: Node, column: Any, places: list[NDArray[Any]], values: list[Any], *, may_be_none: bool = False
) -> None:
    """Write a column of consecutive rows: a list, an array with a leading axis of rows, or `StoredBytes`."""
    if isinstance(column, StoredBytes) and not isinstance(node, ValueLeaf):
        raise LayoutMismatchError
    if isinstance(node, ArrayLeaf):
        out = places[node.number]
        if not isinstance(column, np.ndarray):
            _write_values(node, column, out)
        elif column.dtype != out.dtype or column.shape != out.shape:
            raise LayoutMismatchError
        elif column.ctypes.data != out.ctypes.data:
            out[...] = column
    elif isinstance(node, ValueLeaf):
        kinds = () if isinstance(column, StoredBytes) else set(map(type, column))
        if not all(issubclass(kind, str | bytes) or (may_be_none and kind is NoneType) for kind in kinds):
            raise LayoutMismatchError
        values[node.column] = column
    else:
        for child, part in zip(node.children, _transpose(node, column), strict=True):
            _write(child, part, places, values)


def _transpose(node: MappingNode | SequenceNode, column: Any) -> list[list[Any]]:
    kinds = set(map(type, column))
    if isinstance(node, MappingNode):
        keys = set(node.keys)
        if kinds != {node.kind} or not all(value.keys() == keys for value in column) or tuple(column[0]) != node.keys:
            raise LayoutMismatchError  # the first row sets the order of the keys
        return [[value[key] for value in column] for key in node.keys]
    length = len(node.children)
    allowed = {list, tuple} if node.kind is list else {node.kind}
    if not kinds <= allowed or not all(len(value) == length for value in column):
        raise LayoutMismatchError
    return [[value[number] for value in column] for number in range(length)]


def _write_values(leaf: ArrayLeaf, values: list[Any], out: NDArray[Any]) -> None:
    shape, dtype = out.shape[1:], out.dtype
    kinds = set(map(type, values))
    if not shape and kinds <= _SCALARS_OF.get(dtype.str, frozenset()):
        try:
            out[:] = values
        except OverflowError as error:
            raise LayoutMismatchError from error
        return
    if any(map(is_tensor_class, kinds)):
        if not all(map(is_tensor_class, kinds)):
            raise LayoutMismatchError
        memories = [as_array(value) for value in values]
        if any(torch_dtype != leaf.torch_dtype for _, torch_dtype in memories):
            raise LayoutMismatchError
        values = [memory for memory, _ in memories]
    elif not all(map(is_plain_array, kinds)):
        raise LayoutMismatchError
    if shape and out.flags.c_contiguous:
        if not copied_together(values, out):
            raise LayoutMismatchError
        return
    for number, value in enumerate(values):
        if value.dtype != dtype or value.shape != shape:
            raise LayoutMismatchError
        out[number] = value


_SCALARS_OF: dict[str, frozenset[type]] = {
    np.dtype(np.int64).str: frozenset({int}),
    np.dtype(np.float64).str: frozenset({float}),
    np.dtype(np.bool_).str: frozenset({bool}),
}


def build_batch(layout: Layout, memory: Bytes, rows: int, columns: Sequence[list[Any]]) -> Any:
    """Build the user's batch of `rows` rows on the slot's memory, without a copy; `columns` are its other values."""
    of_rows = layout.capacity is not None
    return _build(layout.tree, slot_views(layout, memory, rows if of_rows else None), columns, of_rows=of_rows)


def _build(node: Node, arrays: Sequence[Any], columns: Sequence[Sequence[Any]], *, of_rows: bool) -> Any:
    # Not nested in `build_batch`: a recursive closure is a reference cycle, which would keep the slot until the next
    # garbage collection.
    if isinstance(node, ArrayLeaf):
        array = arrays[node.number]
        if not node.tensor:
            return array
        import torch

        tensor = torch.from_numpy(array)
        return tensor if node.torch_dtype is None else tensor.view(getattr(torch, node.torch_dtype))
    if isinstance(node, ValueLeaf):
        return columns[node.column] if node.row is None else columns[node.column][node.row]
    children = [_build(child, arrays, columns, of_rows=of_rows) for child in node.children]
    if isinstance(node, MappingNode):
        mapping = dict(zip(node.keys, children, strict=True))
        return mapping if node.kind is dict else node.kind(mapping)
    if of_rows:  # torch transposes sequences with `zip`, which makes tuples
        pairs = zip(node.children, children, strict=True)
        children = [tuple(value) if isinstance(child, ValueLeaf) else value for child, value in pairs]
    return node.kind(*children) if is_named_tuple(node.kind) else node.kind(children)


def choose_rows(count: int, failed: Container[int], on_error: str) -> list[int]:
    """Return the good rows of a batch; with "replace" the next good row, wrapping around, replaces a failed one."""
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
    """Collate rows that have no regular layout by torch's own `default_collate`; raises what that raises."""
    from torch.utils.data import default_collate

    return default_collate(rows.as_list())
