"""Planned rows: a block of the epoch's order with the place of every field, ready to be cut into tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.dataset.table import MISSING, ShardTable
from streamload.decode.tasks import SAMPLE_NAMES, Column
from streamload.errors import DatasetIndexError
from streamload.fetch.tables import Tables
from streamload.order.plan import RowBlock

__all__ = ["PlannedRows", "locate"]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRows:
    """Rows of consecutive batches, located.

    Attributes:
        block: the rows.
        shards: int32[rows].
        columns: where each wanted field lies.
        keys: the samples' keys, where they are wanted.
    """

    block: RowBlock
    shards: NDArray[np.int32]
    columns: tuple[Column, ...]
    keys: tuple[str, ...] | None

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self.block.ends)

    def edges(self, batch: int) -> tuple[int, int]:
        """The rows of a batch."""
        return int(self.block.batch_edges[batch]), int(self.block.batch_edges[batch + 1])


@dataclass(slots=True)
class _Places:
    """A column while it is filled in."""

    alternatives: tuple[str, ...]
    which: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crc32: NDArray[np.uint32] | None


def locate(block: RowBlock, tables: Tables, fields: tuple[str, ...] | None, *, verify: bool) -> PlannedRows:
    """Look up where the fields of planned rows lie.

    Args:
        block: the rows.
        tables: must have every shard of the block.
        fields: the wanted ones, `SAMPLE_NAMES` among them or not; None for all that the samples have, in alphabetical
            order, and the keys.
        verify: look up the checksums too.

    Raises:
        DatasetIndexError: `verify` is asked for, and a shard's table has no checksums.
    """
    groups = [(_table(tables, shard), shard, rows) for shard, rows in _by_shard(block.shard)]
    if fields is None:
        names = tuple(sorted({name for table, _, _ in groups for name in table.fields}))
    else:
        names = tuple(name for name in fields if name not in SAMPLE_NAMES)
    places = [_new_places(name, len(block.shard), verify=verify) for name in names]
    keys: list[str] | None = [""] * len(block.shard) if fields is None or "__key__" in fields else None
    for table, shard, rows in groups:
        samples = block.sample[rows]
        if verify and table.member_crc32 is None:
            raise DatasetIndexError(
                "verify=True needs the checksums of an index; make one with `streamload index`", url=tables.url(shard)
            )
        for place in places:
            _fill(place, table, tables.column(shard, table, place.alternatives)[samples], rows)
        if keys is not None:
            for row, sample in zip(rows.tolist(), samples.tolist(), strict=True):
                keys[row] = table.key(sample)
    columns = tuple(
        Column(name, p.alternatives, p.which if p.which.any() else None, p.offsets, p.sizes, p.crc32)
        for name, p in zip(names, places, strict=True)
    )
    return PlannedRows(block, block.shard.astype(np.int32), columns, None if keys is None else tuple(keys))


def _table(tables: Tables, shard: int) -> ShardTable:
    table = tables.find(shard)
    assert table is not None, "a shard was planned before it was scanned"
    return table


def _by_shard(shards: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    order = np.argsort(shards, kind="stable")
    edges = np.flatnonzero(np.diff(shards[order])) + 1
    for rows in np.split(order, edges):
        if len(rows):
            yield int(shards[rows[0]]), rows


def _new_places(name: str, rows: int, *, verify: bool) -> _Places:
    return _Places(
        tuple(name.split(";")),
        np.zeros(rows, np.uint8),
        np.full(rows, MISSING, np.int64),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.uint32) if verify else None,
    )


def _fill(place: _Places, table: ShardTable, members: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    if len(table.member_offset) == 0:
        return
    present = members != MISSING
    place.offsets[rows] = np.where(present, table.member_offset[members], MISSING)
    place.sizes[rows] = np.where(present, table.member_size[members], 0)
    if len(place.alternatives) > 1:
        place.which[rows] = _numbers_of(place.alternatives, table.fields)[table.member_field[members]]
    if place.crc32 is not None and table.member_crc32 is not None:
        place.crc32[rows] = table.member_crc32[members]


def _numbers_of(alternatives: Sequence[str], fields: Sequence[str]) -> NDArray[np.uint8]:
    """For each field of a shard which alternative it is; 0 where it is none."""
    return np.array([alternatives.index(name) if name in alternatives else 0 for name in fields], np.uint8)
