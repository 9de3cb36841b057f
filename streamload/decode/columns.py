"""Values of rows, column by column."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import by_shard

if TYPE_CHECKING:
    from streamload.decode.field_reader import ShardReader

# Larger rows are copied one by one; smaller ones by one indexing operation for each shard.
_ROW_BY_ROW_BYTES = 1024

# Smaller values of functions are copied to their batch together, which takes less time for each.
_COPIED_TOGETHER_BYTES = 4 << 10


def windows(data: memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    """View every run of bytes as long as an item of `dtype`, by where it begins."""
    return np.ndarray((len(data) - dtype.itemsize + 1,), dtype, data, 0, (1,))


def copy_stored(
    shards: NDArray[np.int64], starts: NDArray[np.int64], memory: Mapping[int, memoryview], out: NDArray[Any]
) -> None:
    """Copy the stored elements of arrays to `out`, which is C-contiguous and has one entry for each of them.

    Args:
        shards: int64[n], the shard of each array.
        starts: int64[n], its first byte in the shard's memory.
        memory: of each shard.
        out: takes the arrays.
    """
    row_bytes = out.nbytes // max(1, len(out))
    if row_bytes == 0:
        return
    target = out.reshape(-1).view(np.uint8)
    if row_bytes < _ROW_BY_ROW_BYTES:
        items = target.view(f"V{row_bytes}")
        for shard, rows in by_shard(shards):
            items[rows] = windows(memory[shard], items.dtype)[starts[rows]]
        return
    # Slices of memoryviews cost half as much as slices of arrays.
    written, end = target.data, 0
    for shard, start in zip(shards.tolist(), starts.tolist(), strict=True):
        begin, end = end, end + row_bytes
        written[begin:end] = memory[shard][start : start + row_bytes]


class UnreadableError(Exception):
    """A field that was left in its shard cannot be read, or only in part."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredBytes:
    """A column of undecoded fields, left in their shards until they are written to a slot.

    Attributes:
        places: each row's shard, first byte of its field and number of bytes, all within the shard.
        reader: reads the fields.
    """

    places: list[tuple[int, int, int]]
    reader: ShardReader

    def __getitem__(self, row: int) -> bytes:
        """Read one row; an UnreadableError if that fails."""
        own = bytearray(self.places[row][2])
        self._read(row, memoryview(own))
        return bytes(own)

    def slice(self, start: int, end: int) -> StoredBytes:
        """Return consecutive rows."""
        return StoredBytes(self.places[start:end], self.reader)

    def read_to(self, target: memoryview, offsets: Sequence[int]) -> None:
        """Read all rows to `target`, each to its offset; an UnreadableError if that fails."""
        for row, start in enumerate(offsets[:-1]):
            self._read(row, target[start : offsets[row + 1]])

    def _read(self, row: int, target: memoryview) -> None:
        shard, start, size = self.places[row]
        try:
            count = self.reader.read_into(target, shard, start)
        except OSError as error:
            raise UnreadableError from error
        if count != size:
            raise UnreadableError


class PlacedRows(list[Any]):
    """A column whose values are copied to their batches' memory as they are made, so that they do not pile up.

    Args:
        blocks: for each batch the memory for its values.

    Attributes:
        places: for each row the array that its value is copied to if dtype and shape are the same.
    """

    def __init__(self, blocks: Sequence[NDArray[Any]]) -> None:
        self.places = [place for block in blocks for place in block]
        self._blocks = by_first_row(blocks)
        super().__init__([None] * len(self.places))

    def __setitem__(self, row: Any, value: Any) -> None:
        place = self.places[row]
        if type(value) is np.ndarray and value.dtype == place.dtype and value.shape == place.shape:
            if value is not place:
                place[...] = value
            value = place
        list.__setitem__(self, row, value)

    def slice(self, start: int, end: int) -> list[Any] | NDArray[Any]:
        """Return the rows of one batch: their memory, or the values if one of them is not there."""
        values = self[start:end]
        return self._blocks[start] if all(map(operator.is_, values, self.places[start:end])) else values


class OwnValues(list[Any]):
    """A column whose arrays are copied as they are made: a function may return the same one every time.

    Attributes:
        are_apart: two arrays in turn did not share memory.
    """

    def __init__(self, count: int) -> None:
        super().__init__([None] * count)
        self.are_apart = False
        self._previous: NDArray[Any] | None = None

    def __setitem__(self, row: Any, value: Any) -> None:
        if type(value) is np.ndarray:
            if not self.are_apart and self._previous is not None:
                self.are_apart = not np.may_share_memory(self._previous, value)
            self._previous, value = value, value.copy()
        list.__setitem__(self, row, value)


def values_of(count: int, blocks: list[NDArray[Any]] | None, *, may_be_small: bool = True) -> list[Any]:
    """Return a list for a column's values, which are written row by row.

    Args:
        count: of rows.
        blocks: for each batch the memory for its values; None if it is not known, and one axis for numbers.
        may_be_small: small arrays may be copied together at the end of their batch.
    """
    if blocks is None and count > 1:
        return OwnValues(count)
    if blocks is None or blocks[0].ndim == 1:
        return [None] * count
    if may_be_small and blocks[0].nbytes < _COPIED_TOGETHER_BYTES * len(blocks[0]):
        return OwnValues(count)
    return PlacedRows(blocks)


def by_first_row(blocks: Sequence[NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """Return the blocks of consecutive rows by the number of their first row."""
    return dict(zip(accumulate(map(len, blocks), initial=0), blocks, strict=False))


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
        columns: for each field a list, an array with a leading axis of rows, `StoredBytes`, or for several batches
            `PlacedRows`, or a dict that has for the first row of each batch one of the others.
        keys: the names of the fields if a row is a dict; None for tuples.
        optional: the numbers of the columns in which None stands for a missing optional field.
    """

    count: int
    values: list[Any] | None = None
    columns: list[Any] | None = None
    keys: tuple[str, ...] | None = None
    optional: frozenset[int] = frozenset()

    def row(self, number: int, *, alike: bool = False) -> Any:
        """Return one row, as the user sees it; `alike` with text for missing fields and unread bytes."""
        if self.columns is None:
            assert self.values is not None
            return self.values[number]
        items = []
        for place, column in enumerate(self.columns):
            item = b"" if alike and isinstance(column, StoredBytes) else column[number]
            items.append("" if alike and item is None and place in self.optional else item)
        return tuple(items) if self.keys is None else dict(zip(self.keys, items, strict=True))

    def as_list(self) -> list[Any]:
        """Return all rows, as the user sees them."""
        return [self.row(number) for number in range(self.count)] if self.values is None else self.values

    def slice(self, start: int, end: int) -> Rows:
        """Return the rows of one batch."""

        def part(column: Any) -> Any:
            if isinstance(column, dict):
                return column[start]
            return column.slice(start, end) if isinstance(column, PlacedRows | StoredBytes) else column[start:end]

        return self._some(end - start, part)

    def take(self, numbers: Sequence[int]) -> Rows:
        """Return some of the rows of a batch, in the order given."""
        return self._some(len(numbers), lambda column: _chosen(column, list(numbers)))

    def _some(self, count: int, part: Callable[[Any], Any]) -> Rows:
        values = None if self.values is None else part(self.values)
        columns = None if self.columns is None else [part(column) for column in self.columns]
        return replace(self, count=count, values=values, columns=columns)


def _chosen(column: Any, numbers: list[int]) -> Any:
    if isinstance(column, np.ndarray):
        return column[numbers]
    if isinstance(column, StoredBytes):
        return StoredBytes([column.places[number] for number in numbers], column.reader)
    # Arrays may lie in the batch's memory, which is written over, one place after the other.
    values = [column[number] for number in numbers]
    return [value.copy() if type(value) is np.ndarray else value for value in values]
