"""The layout of a batch: its tree of containers, and where each array lies in the slot.

Leaves of the tree are arrays, or other values, which lie after the arrays in columns (see `collate.py`). A batch of
rows gets its layout from one row, by `describe_rows`; what a `collate_fn` returns, by `describe_batch`.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from dataclasses import dataclass
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
        shape: in memory (C order); of one row, or of the whole array if the layout has no rows.
        axes: the permutation to the logical shape; None for the identity.
        torch_dtype: the name of a torch dtype that NumPy lacks and `dtype` replaces.
        tensor: it becomes a tensor; otherwise it stays an array.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    torch_dtype: str | None = None
    tensor: bool = True


class ValueLeaf(NamedTuple):
    """A value in a column: that of one row, or (`row` is None) the whole column as a list, one value per row."""

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


Node = ArrayLeaf | ValueLeaf | MappingNode | SequenceNode


@dataclass(frozen=True)
class Layout:
    """The tree of a batch and its place in a slot.

    Attributes:
        arrays: the tree's array leaves, by number.
        value_columns: the number of columns of other values.
        capacity: in rows; None if each leaf is a whole array.
    """

    tree: Node
    arrays: tuple[ArrayLeaf, ...]
    value_columns: int
    capacity: int | None

    @cached_property
    def offsets(self) -> list[int]:
        """The offset of each array in the slot, and the bytes of all arrays."""
        offsets = [0]
        for leaf in self.arrays:
            entries = math.prod(leaf.shape) * (1 if self.capacity is None else self.capacity)
            end = offsets[-1] + entries * np.dtype(leaf.dtype).itemsize
            offsets.append(round_up(end, ALIGNMENT_BYTES) if end else 0)
        return offsets

    @property
    def size_bytes(self) -> int:
        """The bytes of all arrays."""
        return self.offsets[-1]


class _Builder:
    """Collects and numbers the leaves of a tree."""

    def __init__(self) -> None:
        self.leaves: list[ArrayLeaf] = []
        self.arrays: list[NDArray[Any]] = []
        self.columns: list[list[Any]] = []
        self._column_of: dict[type, int] = {}

    def array(self, value: NDArray[Any], *, tensor: bool = True, torch_dtype: str | None = None) -> ArrayLeaf:
        stored, inverse = value, None
        if not value.flags.c_contiguous and value.ndim > 1:
            # The axes from slowest to fastest in memory; of use if the array is dense in this order.
            axes = np.argsort([-stride for stride in value.strides], kind="stable")
            if value.transpose(axes).flags.c_contiguous:
                stored, inverse = value.transpose(axes), tuple(np.argsort(axes).tolist())
        leaf = ArrayLeaf(len(self.leaves), value.dtype.str, stored.shape, inverse, torch_dtype, tensor)
        self.leaves.append(leaf)
        self.arrays.append(value)
        return leaf

    def column(self) -> int:
        """Add an empty column and return its number."""
        self.columns.append([])
        return len(self.columns) - 1

    def value(self, value: Any) -> ValueLeaf:
        """Add a single value to the column of all values of the batch that are stored alike."""
        kind = type(value) if type(value) in (bytes, str) else object
        number = self._column_of.get(kind)
        if number is None:
            number = self._column_of[kind] = self.column()
        self.columns[number].append(value)
        return ValueLeaf(number, len(self.columns[number]) - 1)


def is_tensor_class(kind: type) -> bool:
    """Return True for the class of torch tensors or a subclass; does not import torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # None while another thread imports torch
    return tensor is not None and issubclass(kind, tensor)


def is_named_tuple(kind: type) -> bool:
    """Return True for a class made by `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_plain_array(kind: type) -> bool:
    """Return True for plain arrays and NumPy scalars; subclasses of arrays may have another meaning."""
    return kind in (np.ndarray, np.memmap) or issubclass(kind, np.generic)


def as_array(tensor: Any) -> tuple[NDArray[Any], str | None]:
    """View a dense CPU tensor as an array; the name is that of a dtype that NumPy lacks."""
    tensor, torch = tensor.detach(), sys.modules["torch"]
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TypeError(f"a batch is made of dense CPU tensors, got {tensor.layout} on {tensor.device}")
    try:
        return tensor.resolve_conj().resolve_neg().numpy(), None
    except TypeError:
        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return tensor.view(same_size).numpy(), str(tensor.dtype).removeprefix("torch.")


def describe_rows(row: Any) -> Layout:
    """Return the layout of batches of rows like this one, as torch's `default_collate` would collate them.

    Raises:
        TypeError: the row holds something that `default_collate` refuses, or must collate itself.
    """
    builder = _Builder()
    tree = _describe_row(row, builder)
    return Layout(tree, tuple(builder.leaves), len(builder.columns), capacity=1)


def _describe_row(row: Any, builder: _Builder) -> Node:
    kind = type(row)
    if is_tensor_class(kind):
        value, torch_dtype = as_array(row)
        return builder.array(value, torch_dtype=torch_dtype)
    if is_plain_array(kind):
        value = np.asarray(row)
        if value.dtype.itemsize not in _TENSOR_ITEM_BYTES.get(value.dtype.kind, ()):
            raise TypeError(f"cannot collate arrays of dtype {value.dtype}; convert them in a transform")
        return builder.array(value.astype(value.dtype.newbyteorder("="), copy=False))
    if isinstance(row, bool | int | float):
        dtype = np.bool_ if isinstance(row, bool) else np.int64 if isinstance(row, int) else np.float64
        return builder.array(np.empty((), dtype))
    if isinstance(row, str | bytes):
        return ValueLeaf(builder.column())
    if kind in (dict, OrderedDict):
        return MappingNode(kind, tuple(row), tuple(_describe_row(row[key], builder) for key in row))
    if kind in (tuple, list) or is_named_tuple(kind):
        children = tuple(_describe_row(item, builder) for item in row)
        return SequenceNode(list if kind is tuple else kind, children)
    raise TypeError(
        "a batch is collated from arrays, tensors, numbers, strings, bytes, mappings and sequences; "
        f"got {kind.__module__}.{kind.__qualname__}. Convert it in a transform, or give a collate_fn"
    )


def describe_batch(batch: Any) -> tuple[Layout, list[NDArray[Any]], list[list[Any]]]:
    """Return the layout of a batch that a `collate_fn` has made, its arrays and its columns of values.

    Dense arrays and tensors in plain dicts, lists, tuples and named tuples become arrays of the slot, all other values
    are stored in columns.
    """
    builder = _Builder()
    tree = _describe_whole(batch, builder)
    return Layout(tree, tuple(builder.leaves), len(builder.columns), capacity=None), builder.arrays, builder.columns


def _describe_whole(value: Any, builder: _Builder) -> Node:
    kind = type(value)
    dense = _as_dense(value)
    if dense is not None:
        array, torch_dtype = dense
        return builder.array(array, tensor=kind is not np.ndarray, torch_dtype=torch_dtype)
    if kind is dict:
        return MappingNode(kind, tuple(value), tuple(_describe_whole(item, builder) for item in value.values()))
    if kind in (list, tuple) or is_named_tuple(kind):
        return SequenceNode(kind, tuple(_describe_whole(item, builder) for item in value))
    return builder.value(value)


def _as_dense(value: Any) -> tuple[NDArray[Any], str | None] | None:
    """Return a dense tensor as by `as_array`, or a plain array of numbers; None for anything else."""
    kind = type(value)
    if kind is np.ndarray:
        return (value, None) if value.dtype.kind in _TENSOR_ITEM_BYTES else None
    torch = sys.modules.get("torch")
    if not is_tensor_class(kind) or torch is None or kind is not torch.Tensor:
        return None
    is_dense = value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized
    return as_array(value) if is_dense else None


def slot_views(layout: Layout, memory: Bytes, rows: int | None) -> list[NDArray[Any]]:
    """Return a layout's arrays in a slot's memory, in their logical shapes; `rows` is None if it has no rows."""
    views = []
    lead = () if rows is None else (rows,)
    for leaf, start in zip(layout.arrays, layout.offsets, strict=False):
        view: NDArray[Any] = np.ndarray(lead + leaf.shape, leaf.dtype, memory, start)
        if leaf.axes:
            view = view.transpose(leaf.axes if rows is None else (0, *(axis + 1 for axis in leaf.axes)))
        views.append(view)
    return views
