"""Rows and where their fields lie: what the plan hands to whoever makes the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.order.distinct import distinct

# Longer tables are packed when they are sent: what does not fit into a socket's buffer waits there until the worker
# reads it, which it does only when it has nothing else to do, and then it waits for the sender.
_PACKED_ROWS = 256

# NumPy sorts 16-bit integers by radix, in a fraction of the time.
_SORTED_BY_RADIX = np.iinfo(np.uint16).max


class ColumnKind(NamedTuple):
    """The field that a column of a `RowTable` locates.

    Attributes:
        name: as the user requested it, such as "jpg;png".
        alternatives: the fields that it may be, such as ("jpg", "png").
        has_which: the table holds for each row which alternative it has; otherwise all have the first.
        has_crc32: the table holds checksums.
        has_shard: the table holds for each row the shard in which the field lies; otherwise it is the row's own.
    """

    name: str
    alternatives: tuple[str, ...]
    has_which: bool = False
    has_crc32: bool = False
    has_shard: bool = False

    @property
    def width(self) -> int:
        """The integers that the column takes of each row."""
        return 2 + self.has_which + self.has_crc32 + self.has_shard


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Where one wanted field lies for every row.

    Attributes:
        name: as the user requested it, such as "jpg;png".
        alternatives: the fields that it may be, such as ("jpg", "png").
        which: int64[rows], which alternative each row has; None where all have the first.
        offsets: int64[rows], first byte within the shard; `MISSING` where the sample has none of the fields.
        sizes: int64[rows], bytes.
        crc32: int64[rows] to verify the bytes against, or None.
        shards: int64[rows], in which shard the field lies; None where it is the row's own.
    """

    name: str
    alternatives: tuple[str, ...]
    which: NDArray[np.int64] | None
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crc32: NDArray[np.int64] | None = None
    shards: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows and where their fields lie, in one array, because each array of a message costs microseconds.

    Attributes:
        values: int64[rows, width]: the number of the row's shard in the listing, the number of its sample in the shard,
            how often the sample occurred before in the epoch, and for each column offset and size, then alternative,
            crc32 and shard where the column has them.
        kinds: of the columns.
    """

    values: NDArray[np.int64]
    kinds: tuple[ColumnKind, ...]

    @classmethod
    def empty(cls, rows: int, kinds: tuple[ColumnKind, ...]) -> RowTable:
        """A table of zeros, to be filled in."""
        width = 3 + sum(kind.width for kind in kinds)
        return cls(np.zeros((rows, width), np.int64), kinds)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shards(self) -> NDArray[np.int64]:
        """int64[rows], each row's shard."""
        return self.values[:, 0]

    @property
    def samples(self) -> NDArray[np.int64]:
        """int64[rows], each row's sample in its shard."""
        return self.values[:, 1]

    @property
    def repeats(self) -> NDArray[np.int64]:
        """int64[rows], how often each row's sample occurred before in the epoch."""
        return self.values[:, 2]

    def columns(self) -> tuple[Column, ...]:
        """The columns, as views."""
        columns, at = [], 3
        for kind in self.kinds:
            offsets, sizes = self.values[:, at], self.values[:, at + 1]
            at += 2
            which = self.values[:, at] if kind.has_which else None
            at += kind.has_which
            crc32 = self.values[:, at] if kind.has_crc32 else None
            at += kind.has_crc32
            shards = self.values[:, at] if kind.has_shard else None
            at += kind.has_shard
            columns.append(Column(kind.name, kind.alternatives, which, offsets, sizes, crc32, shards))
        return tuple(columns)

    def places(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """The shards, the offsets and the sizes of each column, int64[rows]."""
        own = self.shards
        return [
            (own if column.shards is None else column.shards, column.offsets, column.sizes) for column in self.columns()
        ]

    def read_shards(self) -> list[int]:
        """The rows' own shards, and those in which their fields lie: each once."""
        others = [column.shards for column in self.columns() if column.shards is not None]
        found: list[int] = distinct(np.concatenate((self.shards, *others)) if others else self.shards).tolist()
        return found

    def rows(self, start: int, end: int) -> RowTable:
        """Consecutive rows, as a view."""
        return RowTable(self.values[start:end], self.kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        if len(self) < _PACKED_ROWS:
            return RowTable, (self.values, self.kinds)
        return _unpacked, (len(self), self.kinds, [_packed(column) for column in self.values.T])


def _packed(column: NDArray[np.int64]) -> tuple[int, str, bytes]:
    """The least of a column's integers, and what they have more than that, in the narrowest type."""
    least = int(column.min())
    narrowest = np.min_scalar_type(int(column.max()) - least)
    return least, narrowest.str, (column - least).astype(narrowest).tobytes()


def _unpacked(rows: int, kinds: tuple[ColumnKind, ...], columns: list[tuple[int, str, bytes]]) -> RowTable:
    table = RowTable(np.empty((rows, len(columns)), np.int64), kinds)
    for column, (least, narrowest, packed) in zip(table.values.T, columns, strict=True):
        np.add(np.frombuffer(packed, narrowest), least, out=column, dtype=np.int64, casting="unsafe")
    return table


def by_shard(shards: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The rows of each shard, ascending.

    Args:
        shards: int64[n], each row's shard.
    """
    small = len(shards) > 0 and int(shards.max()) <= _SORTED_BY_RADIX
    order = np.argsort(shards.astype(np.uint16) if small else shards, kind="stable")
    edges = np.flatnonzero(np.diff(shards[order])) + 1
    for rows in np.split(order, edges):
        if len(rows):
            yield int(shards[rows[0]]), rows
