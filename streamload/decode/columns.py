"""Values of rows, column by column. Arrays of one dtype and shape, and bytes, may stay in their shards until copied."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import by_shard

if TYPE_CHECKING:
    from streamload.decode.field_reader import ShardReader

# Larger rows are copied one by one; smaller ones by one indexing operation for each shard.
_ROW_BY_ROW_BYTES = 1024


def windows(data: memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    """View every run of bytes as long as an item of `dtype`, by where it begins."""
    return np.ndarray((len(data) - dtype.itemsize + 1,), dtype, data, 0, (1,))


@dataclass(frozen=True, slots=True, eq=False)
class StoredRows:
    """A column of n arrays of one dtype and shape (C order) in mapped shards.

    Attributes:
        shards, starts: int64[n], each row's shard and first byte; all arrays lie within their shards.
        memory: the shards' bytes.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    shards: NDArray[np.int64]
    starts: NDArray[np.int64]
    memory: Mapping[int, memoryview]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> NDArray[Any]:
        """Return one row, in memory of its own."""
        out = np.empty((1, *self.shape), self.dtype)
        self.slice(row, row + 1).copy_to(out)
        return out[0, ...]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    def slice(self, start: int, end: int) -> StoredRows:
        """Return consecutive rows."""
        return StoredRows(self.dtype, self.shape, self.shards[start:end], self.starts[start:end], self.memory)

    def take(self, rows: Sequence[int]) -> StoredRows:
        """Return some rows, in the order given."""
        chosen = list(rows)
        return StoredRows(self.dtype, self.shape, self.shards[chosen], self.starts[chosen], self.memory)

    def copy_to(self, out: NDArray[Any]) -> None:
        """Copy all rows to `out`, which is C-contiguous, of this dtype, and has one entry for each row."""
        count = len(self)
        row_bytes = out.nbytes // count if count else 0
        if row_bytes == 0:
            return
        target = out.reshape(-1).view(np.uint8)
        if row_bytes < _ROW_BY_ROW_BYTES:
            items = target.view(f"V{row_bytes}")
            for shard, rows in by_shard(self.shards):
                items[rows] = windows(self.memory[shard], items.dtype)[self.starts[rows]]
            return
        # Slices of memoryviews cost half as much as slices of arrays.
        memory, written, end = self.memory, memoryview(target.data), 0
        for shard, start in zip(self.shards.tolist(), self.starts.tolist(), strict=True):
            begin, end = end, end + row_bytes
            written[begin:end] = memory[shard][start : start + row_bytes]


class UnreadableError(Exception):
    """A field that was left in its shard cannot be read, or only in part."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBytes:
    """A column of undecoded fields, left in their shards until they are read, once.

    Attributes:
        shards, starts, sizes: each row's shard, first byte of its field and number of bytes, all within the shard.
        reader: reads the fields.
    """

    shards: Sequence[int]
    starts: Sequence[int]
    sizes: Sequence[int]
    reader: ShardReader

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, row: int) -> bytes:
        """Read one row; an UnreadableError if that fails."""
        own = bytearray(self.sizes[row])
        self._read(row, memoryview(own))
        return bytes(own)

    def __iter__(self) -> Iterator[bytes]:
        return (self[row] for row in range(len(self)))

    def slice(self, start: int, end: int) -> StoredBytes:
        """Return consecutive rows."""
        return StoredBytes(self.shards[start:end], self.starts[start:end], self.sizes[start:end], self.reader)

    def take(self, rows: Sequence[int]) -> StoredBytes | list[bytes]:
        """Return some rows, in the order given; they are read now if one of them comes twice."""
        if len(set(rows)) < len(rows):
            values = {row: self[row] for row in set(rows)}
            return [values[row] for row in rows]
        shards, starts, sizes = ([each[row] for row in rows] for each in (self.shards, self.starts, self.sizes))
        return StoredBytes(shards, starts, sizes, self.reader)

    def read_to(self, target: memoryview, offsets: Sequence[int]) -> None:
        """Read all rows to `target`, each to its offset; an UnreadableError if that fails."""
        for row, start in enumerate(offsets[:-1]):
            self._read(row, target[start : offsets[row + 1]])

    def _read(self, row: int, target: memoryview) -> None:
        try:
            found = self.reader.read_into(target, self.shards[row], self.starts[row])
        except OSError as error:
            raise UnreadableError from error
        if found != len(target):
            raise UnreadableError


class OwnValues(list[Any]):
    """A column whose arrays are copied as they are made: a function may return the same one every time."""

    def __setitem__(self, row: Any, value: Any) -> None:
        super().__setitem__(row, value.copy() if type(value) is np.ndarray else value)


class PlacedRows:
    """A column whose values are copied to their batches' memory as they are made, so that they do not pile up.

    Args:
        places: for each row the array to copy its value to.
        values: values that are there already, as views of their places.
    """

    __slots__ = ("_places", "_values")

    def __init__(self, places: list[NDArray[Any]], values: list[Any] | None = None) -> None:
        self._places = places
        self._values = [None] * len(places) if values is None else values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, row: int) -> Any:
        return self._values[row]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __setitem__(self, row: int, value: Any) -> None:
        """Copy a value to its place; a value of another class, dtype or shape is kept as it is."""
        place = self._places[row]
        if type(value) is np.ndarray and value.dtype == place.dtype and value.shape == place.shape:
            if value is not place:
                place[...] = value
            value = place
        self._values[row] = value

    def slice(self, start: int, end: int) -> PlacedRows:
        """Return consecutive rows."""
        return PlacedRows(self._places[start:end], self._values[start:end])

    def are_at(self, out: NDArray[Any]) -> bool:
        """Return True if all values are in `out`, which has one entry for each row."""
        if not self._places or self._places[0].ctypes.data != out.ctypes.data:
            return False
        return all(map(operator.is_, self._values, self._places))


class PlacedBlocks:
    """A column of small arrays, copied to the memory of a batch together, as soon as all of the batch are made.

    Copied one by one, each would cost a view; copied after all batches of a task, they would have left the caches.
    Until two consecutive values do not share memory, each is also copied at once: a function may return the same array
    always.

    Args:
        blocks: for each batch the memory for its values.
    """

    __slots__ = ("_are_apart", "_blocks", "_ends", "_previous", "_values")

    def __init__(self, blocks: Sequence[NDArray[Any]]) -> None:
        ends = accumulate(map(len, blocks))
        self._ends = {end - 1: (end - len(block), block) for end, block in zip(ends, blocks, strict=True)}
        self._blocks: dict[int, NDArray[Any]] = {}
        self._values: list[Any] = [None] * sum(map(len, blocks))
        self._previous: NDArray[Any] | None = None
        self._are_apart = False

    def __setitem__(self, row: int, value: Any) -> None:
        """Set a value. Rows come in order; some may be left out."""
        if not self._are_apart and type(value) is np.ndarray:
            value = self._own(value)
        self._values[row] = value
        if row in self._ends:
            self._copy(row)

    def _own(self, value: NDArray[Any]) -> NDArray[Any]:
        if self._previous is not None and not np.may_share_memory(self._previous, value):
            self._previous, self._are_apart = None, True
            return value
        self._previous = value
        return value.copy()

    def _copy(self, last: int) -> None:
        start, block = self._ends[last]
        values = self._values[start : last + 1]
        if set(map(type, values)) == {np.ndarray} and copied_together(values, block):
            self._blocks[start] = block
            self._values[start : last + 1] = [None] * len(block)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.slice(start, last + 1) for last, (start, _) in self._ends.items())

    def slice(self, start: int, end: int) -> list[Any] | NDArray[Any]:
        """Return the rows of one batch: their memory, or the values if they do not fit there."""
        block = self._blocks.get(start)
        return self._values[start:end] if block is None else block


def copied_together(arrays: Sequence[NDArray[Any]], out: NDArray[Any]) -> bool:
    """Copy arrays to the entries of `out`; False if one has another dtype or shape."""
    length, *rest = out.shape[1:]
    try:
        if set(map(len, arrays)) != {length}:
            return False
        # NumPy compares dtypes, and all but the length of the first axis.
        np.concatenate(arrays, out=out.reshape(len(arrays) * length, *rest), casting="no")
    except (TypeError, ValueError):
        return False
    return True


@dataclass(slots=True)
class Rows:
    """The values of rows: column by column unless a function has seen whole samples, otherwise row by row.

    Attributes:
        values: the rows themselves, if they are not kept as columns.
        columns: a list for each field, an array with a leading axis of rows, `PlacedRows`, `PlacedBlocks`,
            `StoredRows` or `StoredBytes`.
        kind: dict or tuple: what one row is.
        keys: the names of the fields, for dicts.
        optional: the numbers of the columns in which None stands for a missing optional field.
    """

    count: int
    values: list[Any] | None = None
    columns: list[Any] | None = None
    kind: type = tuple
    keys: tuple[str, ...] = ()
    optional: frozenset[int] = frozenset()

    def row(self, number: int) -> Any:
        """Return one row, as the user sees it."""
        if self.columns is None:
            assert self.values is not None
            return self.values[number]
        return self._row([column[number] for column in self.columns])

    def row_alike(self, number: int) -> Any:
        """Return a row of the same structure and types, with text for missing fields and unread bytes."""
        if self.columns is None:
            return self.row(number)
        items = [b"" if isinstance(column, StoredBytes) else column[number] for column in self.columns]
        return self._row(["" if place in self.optional and item is None else item for place, item in enumerate(items)])

    def _row(self, items: list[Any]) -> Any:
        return dict(zip(self.keys, items, strict=True)) if self.kind is dict else tuple(items)

    def as_list(self) -> list[Any]:
        """Return all rows, as the user sees them."""
        return [self.row(number) for number in range(self.count)] if self.values is None else self.values

    def slice(self, start: int, end: int) -> Rows:
        """Return consecutive rows."""
        return self._some(end - start, lambda column: _sliced(column, start, end))

    def take(self, numbers: Sequence[int]) -> Rows:
        """Return some of the rows, in the order given."""
        return self._some(len(numbers), lambda column: _chosen(column, numbers))

    def _some(self, count: int, part: Callable[[Any], Any]) -> Rows:
        values = None if self.values is None else part(self.values)
        columns = None if self.columns is None else [part(column) for column in self.columns]
        return Rows(count, values, columns, self.kind, self.keys, self.optional)


def _sliced(column: Any, start: int, end: int) -> Any:
    return column[start:end] if isinstance(column, list | np.ndarray) else column.slice(start, end)


def _chosen(column: Any, numbers: Sequence[int]) -> Any:
    if isinstance(column, StoredRows | StoredBytes):
        return column.take(numbers)
    if isinstance(column, PlacedRows):  # their memory is written over, one place after the other
        return [value.copy() if isinstance(value, np.ndarray) else value for value in map(column.__getitem__, numbers)]
    return column[list(numbers)] if isinstance(column, np.ndarray) else [column[number] for number in numbers]
