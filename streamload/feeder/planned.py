"""Locate the fields of planned rows: the shard, offset and size of each."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import SAMPLE_NAMES, Column, ColumnKind, RowTable, by_shard
from streamload.errors import DatasetIndexError
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.window import NUMBER_BITS, PART_BYTES
from streamload.index.dataset import Dataset
from streamload.order.plan import RowBlock
from streamload.order.shard_counts import distinct
from streamload.tar.scan import MISSING, ShardTable


class PlannedRows(NamedTuple):
    """Located rows of consecutive batches.

    Attributes:
        table: the places of the fields to read.
        keys: the samples' keys, if requested.
        parts: for each batch, the keys of the parts to read.
    """

    table: RowTable
    keys: tuple[str, ...] | None
    parts: tuple[list[int], ...]


def locate(
    block: RowBlock,
    tables: Dataset,
    fields: tuple[str, ...] | None,
    *,
    verify: bool,
    fetcher: Fetcher | None = None,
) -> PlannedRows:
    """Locate the fields of planned rows.

    Args:
        block: the rows.
        tables: the tables of at least the block's shards.
        fields: the fields to read, with or without `SAMPLE_NAMES`; None for all fields in the samples'
            tables, in alphabetical order, and the keys.
        verify: look up the checksums too.
        fetcher: fetches the parts of remote and compressed shards.

    Raises:
        DatasetIndexError, StorageError: as for `Dataset.locate`; or `verify` is set, and a table has no checksums.
    """
    groups = _groups(block, tables)
    if fields is None:
        names = tuple(sorted({name for group in groups for name in group.table.fields}))
    else:
        names = tuple(name for name in fields if name not in SAMPLE_NAMES)
    kinds = []
    for name in names:
        alternatives = tuple(name.split(";"))
        in_sidecar = not set(alternatives).isdisjoint(tables.listing.sidecar_fields)
        kinds.append(ColumnKind(name, alternatives, len(alternatives) > 1, has_crc32=verify, has_shard=in_sidecar))
    located = RowTable.empty(len(block.shard), tuple(kinds))
    located.values[:, 0], located.values[:, 1] = block.shard, block.sample
    located.values[:, 2] = 0 if block.repeat is None else block.repeat
    columns = located.columns()
    keys: list[str] | None = [""] * len(block.shard) if fields is None or "__key__" in fields else None
    for group in groups:
        if verify and group.table.member_crc32 is None:
            raise DatasetIndexError(
                "verify=True needs the checksums of an index; make one with `streamload index`",
                url=tables.url(group.shard),
            )
        for column in columns:
            _fill(column, group, block.shard)
        if keys is not None:
            for row, key in zip(group.rows.tolist(), group.table.keys(group.samples), strict=True):
                keys[row] = key
    parts = tuple([] for _ in block.ends) if fetcher is None else _parts(block, located, fetcher)
    return PlannedRows(located, None if keys is None else tuple(keys), parts)


class _Group(NamedTuple):
    """Rows that one table locates: their samples' numbers in the table, and the rows' numbers in the block.

    The table is that of `shard` alone, or of a run of shards that includes `shard`.
    """

    table: ShardTable
    shard: int
    samples: NDArray[np.int64]
    rows: NDArray[np.int64]


def _groups(block: RowBlock, tables: Dataset) -> list[_Group]:
    shards = distinct(block.shard)
    located = [tables.locate(shard) for shard in shards.tolist()]
    numbers = {id(table): number for number, (table, _) in enumerate(located)}
    number_of_shard = np.array([numbers[id(table)] for table, _ in located], np.int64)
    first_of_shard = np.array([first for _, first in located], np.int64)
    shard_of_row = np.searchsorted(shards, block.shard)
    groups = []
    for number, rows in by_shard(number_of_shard[shard_of_row]):
        samples = block.sample[rows] + first_of_shard[shard_of_row[rows]]
        groups.append(_Group(located[number][0], int(shards[number]), samples, rows))
    return groups


def _parts(block: RowBlock, located: RowTable, fetcher: Fetcher) -> tuple[list[int], ...]:
    """Return the distinct keys of the parts that each batch reads, in the order of its rows."""
    read = located.read_shards()
    local = [shard for shard in read if shard not in fetcher.fetched]
    whole = [shard for shard in read if shard in fetcher.compressed]
    keys, rows_of_keys = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for column in located.columns():
        rows = np.flatnonzero((column.offsets >= 0) & (column.sizes > 0))
        if local:
            rows = rows[~np.isin(column.shards[rows], local)]
        shards, starts = column.shards[rows], column.offsets[rows]
        first, last = starts // PART_BYTES, (starts + column.sizes[rows] - 1) // PART_BYTES
        if whole:
            is_whole = np.isin(shards, whole)
            first[is_whole] = last[is_whole] = 0
        for step in range(int((last - first).max(initial=-1)) + 1):
            reaching = first + step <= last
            keys.append(shards[reaching] << NUMBER_BITS | first[reaching] + step)
            rows_of_keys.append(rows[reaching])
    rows = np.concatenate(rows_of_keys)
    by_row = np.argsort(rows, kind="stable")
    joined = np.concatenate(keys)[by_row].tolist()
    ends = np.searchsorted(rows[by_row], block.batch_edges).tolist()
    return tuple(list(dict.fromkeys(joined[start:end])) for start, end in pairwise(ends))


def _fill(column: Column, group: _Group, row_shards: NDArray[np.int64]) -> None:
    table, rows = group.table, group.rows
    members = table.column(column.alternatives)[group.samples]
    column.shards[rows] = row_shards[rows]
    if len(table.member_offset) == 0:
        column.offsets[rows] = MISSING
        return
    present = members != MISSING
    column.offsets[rows] = np.where(present, table.member_offset[members], MISSING)
    column.sizes[rows] = np.where(present, table.member_size[members], 0)
    if column.which is not None:
        known = {name: number for number, name in enumerate(column.alternatives)}
        numbers = np.array([known.get(name, 0) for name in table.fields], np.uint8)
        column.which[rows] = numbers[table.member_field[members]]
    if column.crc32 is not None and table.member_crc32 is not None:
        column.crc32[rows] = table.member_crc32[members]
    if table.member_shard is not None:
        column.shards[rows[present]] = table.member_shard[members[present]]
