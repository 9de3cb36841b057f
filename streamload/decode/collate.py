"""Collate rows into a slot's memory in the worker, and build the batch on that memory in the trainer.

The rules are those of torch's `default_collate`. torch itself is needed only to make tensors of arrays, and to collate
rows that do not fit one layout.

A layout is a batch's tree of containers, with each array's place in the slot; other values are stored in columns after
the arrays.
"""

from __future__ import annotations

import math
import operator
import pickle
import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from types import NoneType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import StoredColumn
from streamload.memory.mapped import Bytes
from streamload.memory.slots import ALIGNMENT_BYTES, round_up

ABSENT: Any = type("Absent", (), {})()
"""Stands for a field that a sample lacks."""

# Sizes in bytes of the numbers that tensors can hold, by NumPy's dtype kind.
_TENSOR_ITEM_BYTES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}
_SCALARS_OF: dict[str, frozenset[type]] = {
    np.dtype(np.int64).str: frozenset({int}),
    np.dtype(np.float64).str: frozenset({float}),
    np.dtype(np.bool_).str: frozenset({bool}),
}

# Columns whose values are smaller than this on average are copied in one call.
_SMALL_BYTES = 512


class ArrayLeaf(NamedTuple):
    """An array in the slot.

    Attributes:
        number: its index in `Layout.arrays`.
        dtype: the dtype in NumPy's notation.
        shape: the shape in memory (C order), of one row, or of the whole array if the layout has no rows.
        axes: the permutation to the logical shape; None for the identity.
        torch_dtype: a torch dtype that NumPy lacks, stored as `dtype`; else None.
        tensor: the array becomes a tensor.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[int, ...] | None = None
    torch_dtype: str | None = None
    tensor: bool = True


class ValueLeaf(NamedTuple):
    """The value at `row` of a column; if `row` is None, the whole column as a list, one value per row."""

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
    """The tree of a batch, and its arrays' places in a slot.

    Attributes:
        arrays: the tree's array leaves, by number.
        value_columns: the number of columns of other values.
        capacity: the number of rows that fit; None if leaves are whole arrays.
    """

    tree: Node
    arrays: tuple[ArrayLeaf, ...]
    value_columns: int
    capacity: int | None

    @cached_property
    def offsets(self) -> list[int]:
        """Return each array's offset in the slot, followed by the size of all arrays in bytes."""
        offsets = [0]
        for leaf in self.arrays:
            entries = math.prod(leaf.shape) * (1 if self.capacity is None else self.capacity)
            end = offsets[-1] + entries * np.dtype(leaf.dtype).itemsize
            offsets.append(round_up(end, ALIGNMENT_BYTES) if end else 0)
        return offsets

    @property
    def size_bytes(self) -> int:
        """Return the size of all arrays."""
        return self.offsets[-1]


class _Builder:
    """Collect and number the leaves of a tree."""

    def __init__(self) -> None:
        self.leaves: list[ArrayLeaf] = []
        self.arrays: list[NDArray[Any]] = []
        self.columns: list[list[Any]] = []

    def array(self, value: NDArray[Any], *, tensor: bool = True, torch_dtype: str | None = None) -> ArrayLeaf:
        stored, inverse = value, None
        if not value.flags.c_contiguous and value.ndim > 1:
            # Sort the axes from slowest to fastest in memory; the array may be dense in that order.
            axes = np.argsort([-stride for stride in value.strides], kind="stable")
            if value.transpose(axes).flags.c_contiguous:
                stored, inverse = value.transpose(axes), tuple(np.argsort(axes).tolist())
        leaf = ArrayLeaf(len(self.leaves), value.dtype.str, stored.shape, inverse, torch_dtype, tensor)
        self.leaves.append(leaf)
        self.arrays.append(value)
        return leaf


def is_tensor_class(kind: type) -> bool:
    """Return True for torch's tensor class and its subclasses, without importing torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # None while another thread imports torch
    return tensor is not None and issubclass(kind, tensor)


def is_named_tuple(kind: type) -> bool:
    """Return True for classes of `collections.namedtuple` or `typing.NamedTuple`."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_plain_array(kind: type) -> bool:
    """Return True for `ndarray`, `memmap` and scalar classes, not for other subclasses of `ndarray`."""
    return kind in (np.ndarray, np.memmap) or issubclass(kind, np.generic)


def _is_dense(tensor: Any) -> bool:
    return bool(
        tensor.layout == sys.modules["torch"].strided and tensor.device.type == "cpu" and not tensor.is_quantized
    )


def as_array(tensor: Any) -> tuple[NDArray[Any], str | None]:
    """View a dense CPU tensor as an array; also return its dtype's name if NumPy lacks it."""
    tensor, torch = tensor.detach(), sys.modules["torch"]
    if not _is_dense(tensor):
        raise TypeError(f"a batch takes dense CPU tensors, got {tensor.layout} of {tensor.dtype} on {tensor.device}")
    try:
        return tensor.resolve_conj().resolve_neg().numpy(), None
    except TypeError:
        same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return tensor.view(same_size).numpy(), str(tensor.dtype).removeprefix("torch.")


def describe_rows(row: Any) -> Layout:
    """Return the layout of a batch of one row, by the rules of torch's `default_collate`.

    Raises:
        TypeError: `default_collate` refuses a value of the row, or is needed to collate it.
    """
    builder = _Builder()
    tree = _describe_row(row, builder)
    return Layout(tree, tuple(builder.leaves), len(builder.columns), capacity=1)


def _describe_row(row: Any, builder: _Builder, place: str = "") -> Node:
    kind = type(row)
    if is_tensor_class(kind):
        value, torch_dtype = as_array(row)
        return builder.array(value, torch_dtype=torch_dtype)
    if is_plain_array(kind):
        value = np.asarray(row)
        if value.dtype.itemsize in _TENSOR_ITEM_BYTES.get(value.dtype.kind, ()):
            return builder.array(value.astype(value.dtype.newbyteorder("="), copy=False))
    elif isinstance(row, bool | int | float) and not (isinstance(row, int) and not -(1 << 63) <= row < 1 << 63):
        dtype = np.bool_ if isinstance(row, bool) else np.int64 if isinstance(row, int) else np.float64
        return builder.array(np.empty((), dtype))
    elif isinstance(row, str | bytes):
        builder.columns.append([])
        return ValueLeaf(len(builder.columns) - 1)
    elif kind in (dict, OrderedDict):
        return MappingNode(
            kind, tuple(row), tuple(_describe_row(row[key], builder, f"{place}[{key!r}]") for key in row)
        )
    elif kind in (tuple, list) or is_named_tuple(kind):
        children = tuple(_describe_row(item, builder, f"{place}[{number}]") for number, item in enumerate(row))
        return SequenceNode(list if kind is tuple else kind, children)
    raise TypeError(
        f"it holds {outline(row)}{place and f' in {place}'}, which cannot become a tensor; convert it in decode= or "
        "transform=, leave it out of fields=, or give a collate_fn="
    )


def outline(value: Any) -> str:
    """Return a value's class, or an array's dtype and shape, for messages."""
    if is_plain_array(type(value)) or is_tensor_class(type(value)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "an integer beyond int64"
    return "None" if value is None else type(value).__name__


def describe_batch(batch: Any) -> tuple[Layout, list[NDArray[Any]], list[list[Any]]]:
    """Return the layout of a `collate_fn`'s result, its arrays and its columns of values.

    Arrays of numbers or bools and dense CPU tensors in plain dicts, lists, tuples and named tuples become arrays of the
    slot; all other values are stored in a column.
    """
    builder = _Builder()
    builder.columns.append([])
    tree = _describe_whole(batch, builder)
    columns = builder.columns if builder.columns[0] else []
    return Layout(tree, tuple(builder.leaves), len(columns), capacity=None), builder.arrays, columns


def _describe_whole(value: Any, builder: _Builder) -> Node:
    kind = type(value)
    if kind is np.ndarray and value.dtype.kind in _TENSOR_ITEM_BYTES:
        return builder.array(value, tensor=False)
    if is_tensor_class(kind) and kind is sys.modules["torch"].Tensor and _is_dense(value):
        array, torch_dtype = as_array(value)
        return builder.array(array, torch_dtype=torch_dtype)
    if kind is dict:
        return MappingNode(kind, tuple(value), tuple(_describe_whole(item, builder) for item in value.values()))
    if kind in (list, tuple) or is_named_tuple(kind):
        return SequenceNode(kind, tuple(_describe_whole(item, builder) for item in value))
    builder.columns[0].append(value)
    return ValueLeaf(0, len(builder.columns[0]) - 1)


def slot_views(layout: Layout, memory: Bytes, rows: int | None) -> list[NDArray[Any]]:
    """Return a layout's arrays in a slot's memory, in their logical shapes; `rows` is None if the layout has none."""
    views = []
    lead = () if rows is None else (rows,)
    for leaf, start in zip(layout.arrays, layout.offsets, strict=False):
        view: NDArray[Any] = np.ndarray(lead + leaf.shape, leaf.dtype, memory, start)
        if leaf.axes:
            view = view.transpose(leaf.axes if rows is None else (0, *(axis + 1 for axis in leaf.axes)))
        views.append(view)
    return views


class PlacedRows(list[Any]):
    """A column that copies each array when it is set, so that functions may reuse the memory of their results.

    Args:
        blocks: the memory for the values of each batch, if known.

    Attributes:
        places: the memory for each row's array, used if dtype and shape match; None to copy to new memory.
    """

    def __init__(self, count: int, blocks: Sequence[NDArray[Any]] | None) -> None:
        super().__init__([None] * count)
        self.places: list[Any] = [None] * count
        self._blocks = {}
        if blocks is not None and blocks[0].ndim > 1:
            self.places = [place for block in blocks for place in block]
            self._blocks = by_first_row(blocks)

    def __setitem__(self, row: Any, value: Any) -> None:
        if type(value) is np.ndarray and value is not (place := self.places[row]):
            if place is not None and value.dtype == place.dtype and value.shape == place.shape:
                place[...] = value
                value = place
            else:
                value = value.copy("K")
        list.__setitem__(self, row, value)

    def slice(self, start: int, end: int) -> list[Any] | NDArray[Any]:
        """Return one batch's values: its block if that holds them all, else a list."""
        values = self[start:end]
        is_placed = bool(self._blocks) and all(map(operator.is_, values, self.places[start:end]))
        return self._blocks[start] if is_placed else values


def owned(value: Any) -> Any:
    """Return a copy of an array, in the same memory order; any other value unchanged."""
    return value.copy("K") if type(value) is np.ndarray else value


def are_apart(arrays: Sequence[Any]) -> bool:
    """Return True if no two arrays share writable memory; False if that is uncertain."""
    bases = [array.base for array in arrays]
    kinds = set(map(type, bases))
    if kinds == {np.ndarray}:
        return are_apart(bases)
    owners = arrays if kinds == {NoneType} else bases
    are_known = kinds in ({NoneType}, {bytearray})
    return kinds == {bytes} or (are_known and len(set(map(id, owners))) == len(owners))


def by_first_row(blocks: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """Return the blocks of consecutive rows by their first row."""
    return dict(zip(accumulate(map(len, blocks), initial=0), blocks, strict=False))


def copy_together(arrays: Sequence[NDArray[Any]], out: NDArray[Any]) -> bool:
    """Copy arrays to the entries of `out`. Return False if `out` is 1-D or not contiguous, or the arrays do not fit."""
    if out.ndim == 1 or not out.flags.c_contiguous:
        return False
    length, *rest = out.shape[1:]
    try:
        if set(map(len, arrays)) != {length}:
            return False
        # NumPy itself checks the lengths of the other axes, and the dtypes except for their byte order.
        np.concatenate(arrays, out=out.reshape(len(arrays) * length, *rest), casting="equiv")
    except (TypeError, ValueError):
        return False
    return True


@dataclass(slots=True)
class Rows:
    """The values of rows: in columns until a function has seen whole samples, then row by row.

    Attributes:
        values: the rows, if not kept as columns.
        columns: for each field a list, an array with a leading axis of rows, or `PlacedRows`; or, for rows of several
            batches, a dict from each batch's first row to its list or array.
        keys: the names of the fields if a row is a dict; None for tuples.
        optional: the numbers of columns in which None stands for a missing field.
    """

    count: int
    values: list[Any] | None = None
    columns: list[Any] | None = None
    keys: tuple[str, ...] | None = None
    optional: frozenset[int] = frozenset()

    def row(self, number: int, *, alike: bool = False) -> Any:
        """Return one row as the user sees it; if `alike`, with empty strings for missing optional fields."""
        if self.columns is None:
            assert self.values is not None
            return self.values[number]
        items = []
        for place, column in enumerate(self.columns):
            item = column[number]
            items.append("" if alike and item is None and place in self.optional else item)
        if self.keys is None:
            return tuple(items)
        return {key: item for key, item in zip(self.keys, items, strict=True) if item is not ABSENT}

    def as_list(self) -> list[Any]:
        """Return all rows as the user sees them."""
        return [self.row(number) for number in range(self.count)] if self.values is None else self.values

    def slice(self, start: int, end: int) -> Rows:
        """Return the rows of one batch."""

        def part(column: Any) -> Any:
            if isinstance(column, dict):
                return column[start]
            return column.slice(start, end) if isinstance(column, PlacedRows) else column[start:end]

        return self._some(end - start, part)

    def take(self, numbers: Sequence[int]) -> Rows:
        """Return rows of a batch, in the order of `numbers`."""
        return self._some(len(numbers), lambda column: _chosen(column, list(numbers)))

    def _some(self, count: int, part: Callable[[Any], Any]) -> Rows:
        values = None if self.values is None else part(self.values)
        columns = None if self.columns is None else [part(column) for column in self.columns]
        return replace(self, count=count, values=values, columns=columns)


def _chosen(column: Any, numbers: list[int]) -> Any:
    if isinstance(column, np.ndarray):
        return column[numbers]
    # Arrays may lie in the batch's memory, which is overwritten next.
    return [owned(column[number]) for number in numbers]


def store_values(
    columns: Sequence[Sequence[Any]], memory: Callable[[int], Bytes], start: int
) -> tuple[tuple[StoredColumn, ...], int]:
    """Write columns of values to a slot; return their places and the end of the last one.

    Args:
        columns: lists of values; a column with values other than bytes is stored as one pickle.
        memory: returns the slot's memory, with at least the given number of bytes.
        start: the offset of the first column; a multiple of 64.
    """
    stored, end = [], start
    for column in columns:
        is_pickle = set(map(type, column)) != {bytes}
        values = [dump_values(list(column))] if is_pickle else column
        offsets = np.fromiter(accumulate(map(len, values), initial=0), np.int64)
        stored.append(StoredColumn(end, len(offsets) - 1, is_pickle))
        end += round_up(offsets.nbytes, ALIGNMENT_BYTES) + round_up(int(offsets[-1]), ALIGNMENT_BYTES)
        head, data = _views(stored[-1], memory(end))
        head[:] = offsets
        data = data[: offsets[-1]]
        if len(data) < _SMALL_BYTES * len(values):
            data[:] = b"".join(values)
        else:
            for value, (value_start, value_end) in zip(values, pairwise(offsets.tolist()), strict=True):
                data[value_start:value_end] = value
    return tuple(stored), end


def _views(column: StoredColumn, memory: Bytes) -> tuple[NDArray[np.int64], memoryview]:
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
    """Pickle values; use cloudpickle, ten times slower, only if classes of the user's script require it."""
    try:
        return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled: bytes = cloudpickle.dumps(values)
        return pickled


class LayoutMismatchError(Exception):
    """Raised for a row that does not fit the layout."""


def write_rows(layout: Layout, rows: Rows, memory: Bytes) -> list[Sequence[Any]]:
    """Write the arrays of a batch to its slot; return the other values, column by column.

    Raises:
        LayoutMismatchError: a row has another structure, dtype or shape; the slot's contents are then undefined.
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
    if isinstance(node, ArrayLeaf):
        out = places[node.number]
        if not isinstance(column, np.ndarray):
            _write_values(node, column, out)
        elif column.dtype != out.dtype or column.shape != out.shape:
            raise LayoutMismatchError
        elif column.ctypes.data != out.ctypes.data:
            out[...] = column
    elif isinstance(node, ValueLeaf):
        if not all(
            issubclass(kind, str | bytes) or (may_be_none and kind is NoneType) for kind in set(map(type, column))
        ):
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
            raise LayoutMismatchError  # torch takes the first row's order of keys
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
    if copy_together(values, out):
        return
    for number, value in enumerate(values):
        if not np.can_cast(value.dtype, dtype, "equiv") or value.shape != shape:
            raise LayoutMismatchError
        out[number] = value


def build_batch(layout: Layout, memory: Bytes, rows: int, columns: Sequence[list[Any]]) -> Any:
    """Build the user's batch: arrays on the slot's memory, without a copy, and other values from `columns`."""
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
    """Return the good rows of a batch; "replace" puts the next good row, wrapping around, in place of a failed one."""
    good = [row for row in range(count) if row not in failed]
    if on_error != "replace" or not good:
        return good
    return [good[bisect_left(good, row) % len(good)] for row in range(count)]


def torch_collate(samples: list[Any]) -> Any:
    """Collate samples without a common layout by torch's `default_collate`, which may raise."""
    from torch.utils.data import default_collate

    return default_collate(samples)
