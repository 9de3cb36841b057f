"""Planned rows: a block of the epoch's order, with where each field lies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.tasks import SAMPLE_NAMES, Column, ColumnKind, RowTable, by_shard
from streamload.errors import DatasetIndexError
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import parts_of_batches
from streamload.index.dataset import Dataset
from streamload.order.plan import RowBlock
from streamload.order.shard_counts import distinct
from streamload.tar.table import MISSING, ShardTable, joined_tables


@dataclass(frozen=True, slots=True, eq=False)
class PlannedRows:
    """Located rows of consecutive batches.

    Attributes:
        block: the rows.
        table: where each wanted field lies.
        keys: the samples' keys, if they are wanted.
        parts: for each batch the keys of the parts that it reads.
    """

    block: RowBlock
    table: RowTable
    keys: tuple[str, ...] | None
    parts: tuple[list[int], ...] = ()

    @property
    def batches(self) -> int:
        """The number of batches."""
        return len(self.block.ends)

    def edges(self, batch: int) -> tuple[int, int]:
        """The rows of a batch."""
        return int(self.block.batch_edges[batch]), int(self.block.batch_edges[batch + 1])


def locate(
    block: RowBlock,
    tables: Dataset,
    fields: tuple[str, ...] | None,
    *,
    verify: bool,
    fetcher: Fetcher | None = None,
) -> PlannedRows:
    """Look up where the fields of planned rows lie.

    Args:
        block: the rows.
        tables: has every shard of the block.
        fields: the wanted ones, with or without `SAMPLE_NAMES`; None for all that the samples have, in alphabetical
            order, and the keys.
        verify: look up the checksums too.
        fetcher: fetches the parts of some shards.

    Raises:
        DatasetIndexError: `verify` is set, and a shard's table has no checksums.
    """
    groups = _groups(block, tables)
    if fields is None:
        names = tuple(sorted({name for group in groups for name in group.table.fields}))
    else:
        names = tuple(name for name in fields if name not in SAMPLE_NAMES)
    elsewhere = frozenset(tables.listing.sidecar_fields)
    located = RowTable.empty(len(block.shard), tuple(_kind(name, elsewhere, verify=verify) for name in names))
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
    parts = () if fetcher is None else _parts(block, located, fetcher)
    return PlannedRows(block, located, None if keys is None else tuple(keys), parts)


# Tables of so few samples are joined: NumPy takes as long for one of them as for many together.
_FEW_SAMPLES = 64


class _Group(NamedTuple):
    """Rows that one table locates: their samples' numbers in the table, and their numbers in the block.

    The table is that of `shard`, or has the samples of other shards too.
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
    groups: list[_Group] = []
    small: dict[tuple[tuple[str, ...], bool], list[_Group]] = {}
    for number, rows in by_shard(number_of_shard[shard_of_row]):
        table = located[number][0]
        group = _Group(table, int(shards[number]), block.sample[rows] + first_of_shard[shard_of_row[rows]], rows)
        if len(table) <= _FEW_SAMPLES and table.member_shard is None:
            small.setdefault((table.fields, table.member_crc32 is None), []).append(group)
        else:
            groups.append(group)
    return groups + [_joined(alike) if len(alike) > 1 else alike[0] for alike in small.values()]


def _joined(groups: Sequence[_Group]) -> _Group:
    firsts = [*accumulate((len(group.table) for group in groups[:-1]), initial=0)]
    return _Group(
        joined_tables([group.table for group in groups]),
        groups[0].shard,
        np.concatenate([group.samples for group in groups]) + np.repeat(firsts, [len(group.rows) for group in groups]),
        np.concatenate([group.rows for group in groups]),
    )


def _parts(block: RowBlock, located: RowTable, fetcher: Fetcher) -> tuple[list[int], ...]:
    """Return the parts that each batch reads, in the order of its rows."""
    read = located.read_shards()
    here = [shard for shard in read if shard not in fetcher.fetched]
    whole = [shard for shard in read if shard in fetcher.compressed]
    places = []
    for column in located.columns():
        shards, sizes = column.shards, column.sizes
        starts = np.where(np.isin(shards, here), MISSING, column.offsets) if here else column.offsets
        is_whole = np.isin(shards, whole) & (starts >= 0) if whole else np.zeros(len(starts), np.bool_)
        places.append((shards, np.where(is_whole, 0, starts), np.where(is_whole, np.minimum(sizes, 1), sizes)))
    return parts_of_batches(places, block.batch_edges)


def _kind(name: str, elsewhere: Collection[str], *, verify: bool) -> ColumnKind:
    alternatives = tuple(name.split(";"))
    in_sidecar = any(field in elsewhere for field in alternatives)
    return ColumnKind(name, alternatives, has_which=len(alternatives) > 1, has_crc32=verify, has_shard=in_sidecar)


def _fill(column: Column, group: _Group, own: NDArray[np.int64]) -> None:
    table, rows = group.table, group.rows
    members = table.column(column.alternatives)[group.samples]
    column.shards[rows] = own[rows]
    if len(table.member_offset) == 0:
        column.offsets[rows] = MISSING
        return
    present = members != MISSING
    column.offsets[rows] = np.where(present, table.member_offset[members], MISSING)
    column.sizes[rows] = np.where(present, table.member_size[members], 0)
    if column.which is not None:
        column.which[rows] = _numbers_of(column.alternatives, table.fields)[table.member_field[members]]
    if column.crc32 is not None and table.member_crc32 is not None:
        column.crc32[rows] = table.member_crc32[members]
    if table.member_shard is not None:
        column.shards[rows[present]] = table.member_shard[members[present]]


def _numbers_of(alternatives: Sequence[str], fields: Sequence[str]) -> NDArray[np.uint8]:
    """Return, for each field of a shard, the number of its alternative; 0 if it is not one."""
    return np.array([alternatives.index(name) if name in alternatives else 0 for name in fields], np.uint8)
