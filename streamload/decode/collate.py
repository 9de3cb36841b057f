"""Collating: rows to a slot's memory in the worker, and the slot's memory to a batch of tensors in the trainer.

The rules are those of torch's `default_collate`; only the last step, from arrays to tensors, needs torch.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from types import NoneType
from typing import Any

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
from streamload.memory.mapped import Bytes


class LayoutMismatchError(Exception):
    """A row does not fit the layout; its batch must be collated as a whole."""


def write_rows(layout: Layout, rows: Rows, memory: Bytes, first_row: int) -> list[Sequence[Any]]:
    """Write the arrays of rows to their places in a slot.

    Args:
        layout: of rows; its capacity is the slot's.
        rows: to write.
        memory: of the slot.
        first_row: where in the batch they begin.

    Returns:
        For each column of values of unlike sizes these rows' values; `StoredBytes` have not been read yet.

    Raises:
        LayoutMismatchError: a row has another structure, dtype or shape; these rows of the slot are then undefined.
    """
    end = first_row + rows.count
    places = [view[first_row:end] for view in slot_views(layout, memory, layout.capacity)]
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
        if kinds != {node.kind} or not all(value.keys() == keys for value in column):
            raise LayoutMismatchError
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


def build_batch(
    layout: Layout,
    memory: Bytes,
    rows: int | None,
    columns: Sequence[list[Any]],
    chosen: Sequence[int] | None = None,
) -> Any:
    """The batch that the user gets, viewing the slot's memory without a copy.

    Args:
        layout: of the batch.
        memory: of its slot.
        rows: how many rows it has; None where the layout has none.
        columns: its values of unlike sizes.
        chosen: the rows to return, in order, where some failed; these are copied.
    """
    arrays: list[Any] = slot_views(layout, memory, rows)
    if chosen is not None:
        arrays = [array[list(chosen)] for array in arrays]
        columns = [[values[number] for number in chosen] for values in columns]
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
