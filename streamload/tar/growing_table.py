"""The table of a shard that is scanned piece by piece, while it grows and when it is whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.tar.end_marker import check_zeros_behind
from streamload.tar.grouping import refuse_many_fields, refuse_many_key_bytes, repeated_key
from streamload.tar.header import BLOCK_BYTES
from streamload.tar.prefix_scan import UNKNOWN_BYTES, ScannedPiece
from streamload.tar.table import ShardTable

__all__ = ["GrowingTable"]

_FIRST_ROOM = 1_024


class GrowingTable:
    """Takes a shard's pieces in their order. What all calls cost together is in proportion to the shard's members.

    Attributes:
        table: all samples so far. It is not changed when a piece is added but replaced by a longer one, in which
            samples and members keep their numbers. Its `shard_bytes` is UNKNOWN_BYTES while the size is not known.
        resume: where the next scan must begin.
        needs: the end of the bytes that the next scan needs; None when there is none.
    """

    def __init__(self, url: str, *, strict: bool = True) -> None:
        """Begin with no piece; `url` is the shard, for errors, and `strict` as for `scan_shard`."""
        self.resume = 0
        self.needs: int | None = BLOCK_BYTES
        self._url = url
        self._strict = strict
        self._end: int | None = None
        self._cut = False
        self._keys: set[bytes] = set()
        self._fields: dict[str, int] = {}
        self._skipped: dict[str, int] = {}
        self._offset = _Column(np.int64)
        self._size = _Column(np.int64)
        self._field = _Column(np.uint16)
        self._key_bytes = _Column(np.uint8)
        self._sample_start = _Column(np.int64)
        self._key_start = _Column(np.int64)
        self._sample_start.extend(np.zeros(1, np.int64))
        self._key_start.extend(np.zeros(1, np.int64))
        self.table = self._view(shard_bytes=UNKNOWN_BYTES, missing_end=False)

    @property
    def ended(self) -> bool:
        """Whether `table` is that of the whole shard."""
        return self.needs is None

    def add(self, piece: ScannedPiece) -> ShardTable:
        """Take in the next piece; all samples so far.

        Raises:
            ShardFormatError: a key comes again behind another key, there are too many different fields or too long
                keys, or more zeros behind the end than any writer puts there. No more pieces can be added then.
            ValueError: the piece does not begin where the last one ended.
        """
        if piece.start != self.resume:
            raise ValueError(f"a piece from {piece.start} on does not follow what ended at {self.resume}")
        table = piece.table
        refuse_many_key_bytes(table.key_start + self._key_bytes.count, _sample_offsets(table), self._url)
        self._note_keys(table)
        numbers = self._numbers_of(table.fields)
        self._sample_start.extend(table.sample_start[1:] + self._offset.count)
        self._key_start.extend(table.key_start[1:] + self._key_bytes.count)
        self._offset.extend(table.member_offset)
        self._size.extend(table.member_size)
        self._field.extend(numbers[table.member_field] if len(numbers) else table.member_field)
        self._key_bytes.extend(table.key_bytes)
        for reason, count in table.skipped.items():
            self._skipped[reason] = self._skipped.get(reason, 0) + count
        self.resume, self.needs = piece.resume, piece.needs
        if self._end is None:
            self._end, self._cut = piece.end, piece.cut
        self.table = self._view(shard_bytes=table.shard_bytes, missing_end=table.missing_end)
        if self.ended:
            if self._end is not None:
                check_zeros_behind(self._end, table.shard_bytes, self._url, strict=self._strict, cut=self._cut)
            self._keys.clear()
            self.table = _without_room(self.table)
        return self.table

    def _note_keys(self, table: ShardTable) -> None:
        """Remember a piece's keys, and refuse one that was there before."""
        keys = _keys_of(table)
        before = len(self._keys)
        self._keys.update(keys)
        if len(self._keys) == before + len(keys):
            return
        starts = (*_sample_offsets(self.table).tolist(), *_sample_offsets(table).tolist())
        first_of: dict[bytes, int] = {}
        for key, start in zip([*_keys_of(self.table), *keys], starts, strict=True):
            first = first_of.setdefault(key, start)
            if first != start:
                raise repeated_key(key, first, start, self._url)

    def _numbers_of(self, fields: tuple[str, ...]) -> NDArray[np.uint16]:
        """The numbers, in the whole table, of a piece's fields."""
        numbers = [self._fields.setdefault(name, len(self._fields)) for name in fields]
        refuse_many_fields(len(self._fields), self._url)
        return np.array(numbers, np.uint16)

    def _view(self, *, shard_bytes: int, missing_end: bool) -> ShardTable:
        return ShardTable(
            shard_bytes=shard_bytes,
            fields=tuple(self._fields),
            member_offset=self._offset.filled,
            member_size=self._size.filled,
            member_field=self._field.filled,
            sample_start=self._sample_start.filled,
            key_bytes=self._key_bytes.filled,
            key_start=self._key_start.filled,
            skipped=dict(self._skipped),
            missing_end=missing_end,
        )


class _Column:
    """An array with room behind it, which is doubled when it is used up. What is filled never changes."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self.count = 0
        self._values: NDArray[Any] = np.empty(_FIRST_ROOM, dtype)

    @property
    def filled(self) -> NDArray[Any]:
        return self._values[: self.count]

    def extend(self, values: NDArray[Any]) -> None:
        end = self.count + len(values)
        if end > len(self._values):
            longer = np.empty(max(end, 2 * len(self._values)), self._values.dtype)
            longer[: self.count] = self.filled
            self._values = longer
        self._values[self.count : end] = values
        self.count = end


def _keys_of(table: ShardTable) -> list[bytes]:
    joined = table.key_bytes.tobytes()
    return [joined[start:end] for start, end in pairwise(table.key_start.tolist())]


def _sample_offsets(table: ShardTable) -> NDArray[np.int64]:
    """int64[S], where the header of each sample's first member stands."""
    return table.member_offset[table.sample_start[:-1]] - BLOCK_BYTES


def _without_room(table: ShardTable) -> ShardTable:
    """The same table in memory of its own size."""
    return replace(
        table,
        member_offset=table.member_offset.copy(),
        member_size=table.member_size.copy(),
        member_field=table.member_field.copy(),
        sample_start=table.sample_start.copy(),
        key_bytes=table.key_bytes.copy(),
        key_start=table.key_start.copy(),
    )
