"""The layout of a batch: its tree of containers, and where each array lies in the slot.

The inner nodes of the tree are mappings and sequences. Its leaves are arrays, or values of unlike sizes, which lie
behind them in columns (see `collate.py`). `describe_rows` finds the layout from one row (all later batches of rows that
fit have it), `describe_batch` from a whole batch that a `collate_fn` has made, and `assemble` builds the batch in the
trainer.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.memory.mapped import Bytes
from streamload.memory.slots import ALIGNMENT_BYTES, round_up

_TENSOR_ITEM_BYTES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}


class ArrayLeaf(NamedTuple):
    """An array in the slot.

    Attributes:
        number: its number in the tree.
        dtype: as NumPy writes it.
        shape: in memory (C order); of one row, or of the whole array where the layout has no rows.
        axes: the permutation of these axes to the logical shape; None for the identity.
        torch_dtype: the name of a torch dtype that NumPy lacks and `dtype` replaces.
        tensor: it becomes a tensor; otherwise it stays an array, which a `collate_fn` may return.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    torch_dtype: str | None = None
    tensor: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (or of the whole array)."""
        count = 1
        for length in self.shape:
            count *= length
        return count * np.dtype(self.dtype).itemsize


class ValueLeaf(NamedTuple):
    """A value that is no array, or a list of values.

    Attributes:
        column: its number.
        row: of the value in the column; None for the whole column, one value for each row of the batch.
    """

    column: int
    row: int | None = None


class MappingNode(NamedTuple):
    """A mapping of class `kind`."""

    kind: type
    keys: tuple[Any, ...]
    children: tuple[Node, ...]


class SequenceNode(NamedTuple):
    """A list, a tuple or a named tuple of class `kind`."""

    kind: type
    children: tuple[Node, ...]


class RaggedLeaf(NamedTuple):
    """A list or tuple of arrays that differ in their shapes alone.

    Attributes:
        column: the column of values that they are.
        kind: list or tuple.
        array: what they have in common; its number and shape mean nothing.
    """

    column: int
    kind: type
    array: ArrayLeaf


Node = ArrayLeaf | ValueLeaf | RaggedLeaf | MappingNode | SequenceNode


@dataclass(frozen=True)
class Layout:
    """The tree of a batch and its place in a slot.

    Attributes:
        tree: the root.
        arrays: the tree's array leaves, by number.
        value_columns: how many columns of values of unlike sizes there are.
        capacity: the rows that the slot has room for; None where each leaf is a whole array.
    """

    tree: Node
    arrays: tuple[ArrayLeaf, ...]
    value_columns: int
    capacity: int | None

    def with_capacity(self, rows: int) -> Layout:
        """Return the layout for a slot with room for `rows` rows."""
        return replace(self, capacity=rows)

    def offsets(self) -> tuple[list[int], int]:
        """The offset of each array in the slot, and the bytes of all."""
        return self._offsets

    @cached_property
    def _offsets(self) -> tuple[list[int], int]:
        starts, end = [], 0
        for leaf in self.arrays:
            starts.append(end)
            end += leaf.row_bytes * (1 if self.capacity is None else self.capacity)
            end = round_up(end, ALIGNMENT_BYTES) if end else 0
        return starts, end


class _Builder:
    """Collects and numbers the leaves of a tree."""

    def __init__(self) -> None:
        self.arrays: list[ArrayLeaf] = []
        self.columns: list[list[Any]] = []
        self._column_of: dict[type, int] = {}

    def array(self, value: NDArray[Any], *, tensor: bool = True, torch_dtype: str | None = None) -> ArrayLeaf:
        leaf = _array_leaf(len(self.arrays), value, tensor=tensor, torch_dtype=torch_dtype)
        self.arrays.append(leaf)
        return leaf

    def column(self, values: list[Any]) -> int:
        """The number of a new column."""
        self.columns.append(values)
        return len(self.columns) - 1

    def value(self, value: Any) -> ValueLeaf:
        """A value of its own, in a column with all others of the batch that are stored in the same way."""
        kind = type(value) if type(value) in (bytes, str) else object
        number = self._column_of.get(kind)
        if number is None:
            number = self._column_of[kind] = self.column([])
        self.columns[number].append(value)
        return ValueLeaf(number, len(self.columns[number]) - 1)


def _array_leaf(number: int, value: NDArray[Any], *, tensor: bool, torch_dtype: str | None) -> ArrayLeaf:
    axes = _memory_order(value)
    stored = value.transpose(axes).shape if axes else value.shape
    inverse = tuple(int(axis) for axis in np.argsort(axes)) if axes else None
    return ArrayLeaf(number, value.dtype.str, tuple(stored), inverse, torch_dtype, tensor)


def _memory_order(value: NDArray[Any]) -> tuple[int, ...] | None:
    """The axes from slowest to fastest in memory, where the array is dense but not in C order; else None."""
    if value.flags.c_contiguous or value.ndim < 2:
        return None
    axes = tuple(int(axis) for axis in np.argsort([-stride for stride in value.strides], kind="stable"))
    return axes if value.transpose(axes).flags.c_contiguous else None


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor; does not import torch."""
    return is_tensor_class(type(value))


def is_tensor_class(kind: type) -> bool:
    """Whether a class is that of torch tensors, or derived from it; does not import torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # None while another thread imports torch
    return tensor is not None and issubclass(kind, tensor)


def is_named_tuple(kind: type) -> bool:
    """Whether a class was made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_plain_array(kind: type) -> bool:
    """Whether a class is that of plain arrays or NumPy scalars, not a subclass with another meaning."""
    return kind in (np.ndarray, np.memmap) or issubclass(kind, np.generic)


def as_array(tensor: Any) -> tuple[NDArray[Any], str | None]:
    """A dense CPU tensor's memory as an array, without a copy, and its dtype's name where NumPy lacks it."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or tensor.layout != sys.modules["torch"].strided:
        raise TypeError(f"a batch is made of dense CPU tensors, got {tensor.layout} on {tensor.device}")
    try:
        return tensor.resolve_conj().resolve_neg().numpy(), None
    except TypeError:
        torch = sys.modules["torch"]
        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return tensor.view(same_size).numpy(), str(tensor.dtype).removeprefix("torch.")


def describe_rows(row: Any) -> Layout:
    """The layout of batches of rows like this one, as torch's `default_collate` would collate them.

    Arrays, tensors and numbers become arrays with a leading axis of rows; strings and bytes become lists, or tuples
    where they are items of sequences; dicts and named tuples keep their class; other tuples and lists become lists.

    Raises:
        TypeError: the row holds something that `default_collate` refuses, or must collate itself.
    """
    builder = _Builder()
    tree = _describe_row(row, builder)
    return Layout(tree, tuple(builder.arrays), len(builder.columns), capacity=1)


def _describe_row(row: Any, builder: _Builder) -> Node:
    kind = type(row)
    if is_tensor(row):
        value, torch_dtype = as_array(row)
        return builder.array(value, torch_dtype=torch_dtype)
    if is_plain_array(kind):
        value = np.asarray(row)
        if value.dtype.itemsize not in _TENSOR_ITEM_BYTES.get(value.dtype.kind, ()):
            raise TypeError(f"cannot collate arrays of dtype {value.dtype}; convert them in a transform")
        return builder.array(value.astype(value.dtype.newbyteorder("="), copy=False))
    if isinstance(row, bool | int | float):
        return builder.array(np.empty((), _scalar_dtype(kind)))
    if isinstance(row, str | bytes):
        return ValueLeaf(builder.column([]))
    if kind in (dict, OrderedDict):
        return MappingNode(kind, tuple(row), tuple(_describe_row(row[key], builder) for key in row))
    if is_named_tuple(kind):
        return SequenceNode(kind, tuple(_describe_row(item, builder) for item in row))
    if kind in (tuple, list):
        return SequenceNode(list, tuple(_describe_row(item, builder) for item in row))
    raise TypeError(
        "a batch is collated from arrays, tensors, numbers, strings, bytes, mappings and sequences; "
        f"got {kind.__module__}.{kind.__qualname__}. Convert it in a transform, or give a collate_fn"
    )


def _scalar_dtype(kind: type) -> np.dtype[Any]:
    if issubclass(kind, bool):
        return np.dtype(np.bool_)
    return np.dtype(np.int64 if issubclass(kind, int) else np.float64)


def describe_batch(batch: Any) -> tuple[Layout, list[NDArray[Any]], list[list[Any]]]:
    """The layout of one whole batch that a `collate_fn` has returned.

    Dense arrays and tensors in plain dicts, lists, tuples and named tuples are arrays of the slot. Those in one list
    that differ in shape alone are a column of values, and so is everything else.

    Returns:
        The layout, its arrays in their logical shapes, and its columns of values.
    """
    builder = _Builder()
    arrays: list[NDArray[Any]] = []
    tree = _describe_whole(batch, builder, arrays)
    return Layout(tree, tuple(builder.arrays), len(builder.columns), capacity=None), arrays, builder.columns


def _describe_whole(value: Any, builder: _Builder, arrays: list[NDArray[Any]]) -> Node:
    kind = type(value)
    found = _as_dense(value)
    if found is not None:
        array, torch_dtype = found
        arrays.append(array)
        return builder.array(array, tensor=kind is not np.ndarray, torch_dtype=torch_dtype)
    if kind is dict:
        return MappingNode(kind, tuple(value), tuple(_describe_whole(item, builder, arrays) for item in value.values()))
    if kind in (list, tuple) and (ragged := _describe_ragged(value, builder)) is not None:
        return ragged
    if kind in (list, tuple) or is_named_tuple(kind):
        return SequenceNode(kind, tuple(_describe_whole(item, builder, arrays) for item in value))
    return builder.value(value)


def _describe_ragged(items: Sequence[Any], builder: _Builder) -> RaggedLeaf | None:
    """The leaf of dense arrays, or tensors, that differ in their shapes alone; None where they differ otherwise."""
    stored: list[NDArray[Any]] = []
    common: ArrayLeaf | None = None
    for item in items:
        found = _as_dense(item)
        if found is None:
            return None
        leaf = _array_leaf(0, found[0], tensor=type(item) is not np.ndarray, torch_dtype=found[1])
        if common is not None and (len(leaf.shape) != len(common.shape) or leaf._replace(shape=common.shape) != common):
            return None
        common = common or leaf
        stored.append(found[0].transpose(np.argsort(leaf.axes)) if leaf.axes else found[0])
    if common is None or all(array.shape == common.shape for array in stored):
        return None
    return RaggedLeaf(builder.column(stored), type(items), common)


def _as_dense(value: Any) -> tuple[NDArray[Any], str | None] | None:
    """What `as_array` gives for a dense tensor, or a plain array of numbers; None for anything else."""
    kind = type(value)
    if kind is np.ndarray and value.dtype.kind in _TENSOR_ITEM_BYTES:
        return value, None
    if is_tensor(value) and kind is sys.modules["torch"].Tensor and _is_dense(value):
        return as_array(value)
    return None


def _is_dense(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return bool(tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized)


def slot_views(layout: Layout, memory: Bytes, rows: int | None) -> list[NDArray[Any]]:
    """The arrays of a layout in a slot's memory, in their logical shapes.

    Args:
        layout: where they lie.
        memory: of the slot, at least `layout.offsets()[1]` bytes.
        rows: the first so many of the capacity; None where the layout has no rows.
    """
    views = []
    lead = () if rows is None else (rows,)
    for leaf, start in zip(layout.arrays, layout.offsets()[0], strict=True):
        view: NDArray[Any] = np.ndarray(lead + leaf.shape, leaf.dtype, memory, start)
        if leaf.axes:
            view = view.transpose(leaf.axes if rows is None else (0, *(axis + 1 for axis in leaf.axes)))
        views.append(view)
    return views


def assemble(
    layout: Layout, arrays: Sequence[Any], columns: Sequence[Sequence[Any]], finish: Callable[[ArrayLeaf, Any], Any]
) -> Any:
    """Build a batch from its leaves.

    Args:
        layout: its tree.
        arrays: one for each array leaf.
        columns: of values of unlike sizes.
        finish: turns an array into what the user gets (a tensor).
    """
    return _build(layout.tree, arrays, columns, finish, of_rows=layout.capacity is not None)


def _build(
    node: Node,
    arrays: Sequence[Any],
    columns: Sequence[Sequence[Any]],
    finish: Callable[[ArrayLeaf, Any], Any],
    *,
    of_rows: bool,
) -> Any:
    # Not nested in `assemble`: a recursive closure is a reference cycle, which would keep the slot until the next
    # garbage collection.
    if isinstance(node, ArrayLeaf):
        return finish(node, arrays[node.number])
    if isinstance(node, ValueLeaf):
        return columns[node.column] if node.row is None else columns[node.column][node.row]
    if isinstance(node, RaggedLeaf):
        axes, items = node.array.axes, columns[node.column]
        return node.kind(finish(node.array, item.transpose(axes) if axes else item) for item in items)
    children = [_build(child, arrays, columns, finish, of_rows=of_rows) for child in node.children]
    if isinstance(node, MappingNode):
        return _as_mapping(node.kind, dict(zip(node.keys, children, strict=True)))
    if of_rows:  # torch transposes sequences with `zip`, which makes tuples
        children = [
            tuple(value) if isinstance(child, ValueLeaf) else value
            for child, value in zip(node.children, children, strict=True)
        ]
    return node.kind(*children) if is_named_tuple(node.kind) else _as_sequence(node.kind, children)


def _as_mapping(kind: type, items: dict[Any, Any]) -> Any:
    return items if kind is dict else kind(items)


def _as_sequence(kind: type, items: list[Any]) -> Any:
    return items if kind is list else kind(items)
