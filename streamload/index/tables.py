"""What is known of each shard's samples: from an index, from a scan, or not yet."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError, without_secrets
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.index.table_reader import TableReader
from streamload.limits import LEAST_TABLES_BYTES, MOST_TABLES_BYTES, TABLES_SHARE
from streamload.order.layout import ShardCounts
from streamload.storage.storages import Storages
from streamload.tar.header import BLOCK_BYTES
from streamload.tar.scan import GrowingTable, ScannedPiece
from streamload.tar.table import MISSING, ShardTable
from streamload.text import listed


def matched_samples(table: ShardTable, sidecar: ShardTable, url: str) -> NDArray[np.int64]:
    """For each sample of a table the number of the one with its key in a sidecar.

    Args:
        table: of a shard, or of the samples that are found so far.
        sidecar: of its sidecar, which may lack samples, or have more.
        url: of the sidecar, for errors.

    Returns:
        int64[S], ascending but for those that are MISSING.

    Raises:
        DatasetIndexError: the samples of the sidecar are in another order.
    """
    starts = table.key_start
    same_lengths = np.array_equal(sidecar.key_start[: len(starts)], starts)
    if same_lengths and np.array_equal(sidecar.key_bytes[: len(table.key_bytes)], table.key_bytes):
        return np.arange(len(table))
    wanted, there = table.keys(), sidecar.keys()
    numbers = dict(zip(there, range(len(there)), strict=True))
    found = np.array([numbers.get(key, MISSING) for key in wanted], np.int64)
    present = found[found != MISSING]
    if (np.diff(present) < 0).any():
        raise DatasetIndexError(
            "the samples of this sidecar are in another order than those of its shard; write it with `streamload map "
            "--sidecar`, or in the order of the shard",
            url=url,
        )
    return found


def joined_table(
    shard: int, table: ShardTable, sidecars: Mapping[int, tuple[ShardTable, NDArray[np.int64]]]
) -> ShardTable:
    """The table with the fields of sidecars; `member_shard` says where each lies.

    Args:
        shard: the shard's number.
        table: of the shard.
        sidecars: by number, the table and what `matched_samples` has found in it.
    """
    counts = np.diff(table.sample_start)
    fields = dict.fromkeys((*table.fields, *(name for other, _ in sidecars.values() for name in other.fields)))
    numbers = {name: number for number, name in enumerate(fields)}
    members = [(shard, table, np.repeat(np.arange(len(table)), counts), np.arange(len(table.member_offset)))]
    for number, (other, matched) in sidecars.items():
        rows = np.flatnonzero(matched != MISSING)
        of_sample = np.repeat(np.arange(len(other)), np.diff(other.sample_start))
        row_of = np.full(len(other), MISSING, np.int64)
        row_of[matched[rows]] = rows
        chosen = np.flatnonzero(row_of[of_sample] != MISSING)
        members.append((number, other, row_of[of_sample[chosen]], chosen))
    samples = np.concatenate([rows for _, _, rows, _ in members])
    order = np.argsort(samples, kind="stable")
    crc32s = [each.member_crc32[chosen] for _, each, _, chosen in members if each.member_crc32 is not None]
    renumbered = [
        np.array([numbers[name] for name in each.fields], np.uint16)[each.member_field[chosen]]
        for _, each, _, chosen in members
    ]
    return replace(
        table,
        fields=tuple(fields),
        member_offset=np.concatenate([each.member_offset[chosen] for _, each, _, chosen in members])[order],
        member_size=np.concatenate([each.member_size[chosen] for _, each, _, chosen in members])[order],
        member_field=np.concatenate(renumbered)[order],
        member_crc32=np.concatenate(crc32s)[order] if len(crc32s) == len(members) else None,
        member_shard=np.concatenate([np.full(len(chosen), number) for number, _, _, chosen in members])[order],
        sample_start=np.concatenate([[0], np.cumsum(np.bincount(samples, minlength=len(table)))]).astype(np.int64),
    )


_Result = TypeVar("_Result")

_log = logging.getLogger("streamload")


class Tables:
    """The tables of a listing's shards. Those from an index are read again after a while, those from scans are held.

    Args:
        listing: the shards, and which index knows them.
        storages: how indexes that lie remotely are read.
        indexes: those that have been read already, by folder.
        budget_bytes: of which tables from an index take a sixteenth, but at least 32 and at most 256 MiB, unless more
            are needed at once.

    Attributes:
        counts: the samples of each shard, as far as they are known; grows as tables come in.
        skipped: how many members were skipped, by reason, in the shards scanned so far.
        held_bytes: the memory of the tables from an index that are held now.
    """

    def __init__(
        self,
        listing: Listing,
        *,
        storages: Storages | None = None,
        indexes: Mapping[str, DatasetIndex] | None = None,
        budget_bytes: int | None = None,
    ) -> None:
        self._listing = listing
        share_bytes = MOST_TABLES_BYTES if budget_bytes is None else budget_bytes // TABLES_SHARE
        self._memory_bytes = max(LEAST_TABLES_BYTES, min(share_bytes, MOST_TABLES_BYTES))
        self._storages = Storages() if storages is None else storages
        self._reader = TableReader(self._storages, indexes)
        self._packed: OrderedDict[int, bytes] = OrderedDict()  # tables that were read beside others
        self._numbers: dict[tuple[str, str], int] = {}
        self._tables: OrderedDict[int, ShardTable] = OrderedDict()
        self._columns: dict[int, dict[tuple[str, ...], NDArray[np.int64]]] = {}
        self._growing: dict[int, GrowingTable] = {}
        self._sidecars: dict[int, list[int]] = {}
        for number, owner in enumerate(listing.sidecars.owners, start=len(listing.shards)):
            self._sidecars.setdefault(owner, []).append(number)
        self._first_keys: dict[tuple[str, str], int] = {}  # by folder and key
        self._warned = self._warned_of_unmatched = False
        self._joined: dict[int, _Joined[ShardTable]] = {}
        self._matches: dict[int, _Joined[NDArray[np.int64]]] = {}
        self.held_bytes = 0
        self._held: frozenset[int] = frozenset()
        self.skipped: dict[str, int] = {}
        counts = listing.counts
        self.counts = ShardCounts(len(listing.shards)) if counts is None else ShardCounts.of(counts)

    def find(self, shard: int) -> ShardTable | None:
        """A shard's table, and its count with it; None where the shard has to be scanned.

        While pieces of a shard come in, its table is that of the samples found so far, and its count is not known.

        Raises:
            DatasetIndexError: the index is damaged or does not belong to the shard.
        """
        table = self._tables.get(shard)
        if table is not None:
            self._tables.move_to_end(shard)
            return table
        folder = self._listing.index_folder(shard)
        if folder is None:
            return None
        table = self._from_index(shard, folder)
        self._keep(shard, table)
        return table

    def find_joined(self, shard: int) -> ShardTable | None:
        """`find`, with the fields that sidecars have of the shard's samples. Their tables must not be remote.

        Raises:
            DatasetIndexError: as `find`; or a sidecar has its samples in another order, or a field of the shard's.
        """
        table = self.find(shard)
        if table is None or shard not in self._sidecars:
            return table
        return self._join(shard, table)

    def with_sidecars(self, shards: Iterable[int]) -> list[int]:
        """The numbers of some shards and of their sidecars."""
        if not self._sidecars:
            return list(shards)
        return [number for shard in shards for number in (shard, *self._sidecars.get(shard, ()))]

    def owner(self, number: int) -> int:
        """The shard whose samples a shard or sidecar has fields of."""
        return self._listing.owner(number)

    def stretches(self, number: int, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Where the samples lie in a shard or sidecar that are `[start, end)` of its owner, as far as is known."""
        owner = self.owner(number)
        table, other = self._tables.get(owner), self._tables.get(number)
        if owner == number or table is None or other is None:
            return samples
        matched = self._matched(number, table, other)
        found = [rows[rows != MISSING] for rows in (matched[start:end] for start, end in samples)]
        return [(int(rows[0]), int(rows[-1]) + 1) for rows in found if len(rows)]

    def at_hand(self, shard: int) -> ShardTable | None:
        """A shard's table, if it is held now."""
        return self._tables.get(shard)

    def hold(self, shards: Iterable[int]) -> None:
        """Drop none of these, and no longer those of the call before: all of them are needed at once."""
        self._held = frozenset(shards)

    def is_remote(self, shard: int) -> bool:
        """Whether `find` would have to wait for a remote storage; then `load` does the same without blocking."""
        folder = self._listing.index_folder(shard)
        return (
            folder is not None
            and shard not in self._tables
            and shard not in self._packed
            and not self._reader.is_local(folder)
        )

    async def load(self, shard: int) -> ShardTable | None:
        """`find`, on the running loop. Of a remote index the list is one request, and tables beside each other are one.

        Raises:
            DatasetIndexError: the index is damaged or does not belong to the shard.
            StorageError: the index cannot be read.
        """
        await self.fetch(shard)
        return self.find(shard)

    async def fetch(self, shard: int) -> None:
        """Have what `find` needs here, on the running loop. Raises what `load` raises."""
        folder, name = self._listing.index_folder(shard), self._listing.shard(shard).name
        if folder is None or not self.is_remote(shard):
            return
        async with await self._reader.reading(folder, name):
            if self.is_remote(shard):  # else it came with another
                self._take(folder, await self._reader.load(folder, name), shard)

    def add(self, shard: int, table: ShardTable) -> None:
        """Take in a table that was scanned or loaded elsewhere."""
        self._keep(shard, table)

    def add_piece(self, shard: int, piece: ScannedPiece) -> None:
        """Take in the next piece of a shard that is scanned as its bytes come.

        Raises:
            ShardFormatError: see `GrowingTable.add`.
            ValueError: the piece does not begin where the one before it ended.
        """
        growing = self._growing.setdefault(shard, GrowingTable(self.url(shard)))
        table = growing.add(piece)
        self._columns.pop(shard, None)
        if growing.ended:
            del self._growing[shard]
            self.add(shard, table)
        elif self.counts.values[shard] < 0:
            self._tables[shard] = table
            self.counts.at_least(shard, len(table))

    def next_scan(self, shard: int) -> tuple[int, int]:
        """Where the next scan of a shard whose count is not known begins, and the end of the bytes that it needs."""
        growing = self._growing.get(shard)
        if growing is None or growing.needs is None:
            return 0, BLOCK_BYTES
        return growing.resume, growing.needs

    def column(self, shard: int, table: ShardTable, alternatives: Sequence[str]) -> NDArray[np.int64]:
        """`table.column` of a shard's table, kept for the next call while the table is held."""
        columns = self._columns.setdefault(shard, {}) if shard in self._tables else {}
        name = tuple(alternatives)
        if name not in columns:
            columns[name] = table.column(name)
        return columns[name]

    def is_growing(self, shard: int) -> bool:
        """Whether not all of a shard's samples are known yet; all those of a sidecar are."""
        return shard < len(self.counts) and bool(self.counts.values[shard] < 0)

    @property
    def sidecar_fields(self) -> frozenset[str]:
        """The fields that samples have in sidecars."""
        return frozenset(self._listing.sidecars.fields)

    def listed_bytes(self, shard: int) -> int:
        """A shard's size, as it was listed; negative where that is not known."""
        return self._listing.shard(shard).bytes

    def url(self, shard: int) -> str:
        """A shard's url."""
        return self._listing.shard(shard).url

    def _from_index(self, shard: int, folder: str) -> ShardTable:
        name = self._listing.shard(shard).name
        if shard not in self._packed:
            self._take(folder, self._reader.read(folder, name), shard)
        packed = self._packed.pop(shard)
        self.held_bytes -= len(packed)
        return self._reader.index(folder).table_of(name, packed)

    def _take(self, folder: str, packed: Mapping[str, bytes], wanted: int) -> None:
        """Keep tables that were read, until they are looked for or dropped."""
        if not self._numbers:
            index_of = self._listing.index_of + self._listing.sidecars.index_of
            shards = zip(index_of, self._listing.numbered, strict=True)
            self._numbers = {(of, shard.name): number for number, (of, shard) in enumerate(shards) if of is not None}
        found = {self._numbers.get((folder, name)): content for name, content in packed.items()}
        found[wanted] = packed[self._listing.shard(wanted).name]  # also of two that share a name
        for shard, content in found.items():
            if shard is not None and shard not in self._tables and shard not in self._packed:
                self._packed[shard] = content
                self.held_bytes += len(content)
        self._packed.move_to_end(wanted)
        self._drop_oldest()

    def _keep(self, shard: int, table: ShardTable) -> None:
        if self.is_growing(shard):
            for reason, count in table.skipped.items():
                self.skipped[reason] = self.skipped.get(reason, 0) + count
        if shard < len(self.counts):
            self.counts.set(shard, len(table))
            self._warn_of_sidecar(shard, table)
        self._tables[shard] = table
        if self._listing.index_folder(shard) is not None:
            self.held_bytes += _size_bytes(table)
            self._drop_oldest()

    def _warn_of_sidecar(self, shard: int, table: ShardTable) -> None:
        """Warn, once, where a shard begins with the key of another one in its folder, and has other fields."""
        if not len(table) or self._warned:
            return
        before = self._first_keys.setdefault((self._listing.shards[shard].folder, table.key(0)), shard)
        other = self._tables.get(before)
        if before == shard or other is None or not set(other.fields).isdisjoint(table.fields):
            return
        self._warned = True
        one, two = (without_secrets(self.url(number)) for number in (before, shard))
        _log.warning(
            "the shards %r and %r hold samples of the same keys, with other fields (%s; %s), and each counts as a "
            "sample of its own. If one is a sidecar, move it to a folder of its own and read it with join=",
            one,
            two,
            listed(other.fields),
            listed(table.fields),
        )

    def _join(self, shard: int, table: ShardTable) -> ShardTable:
        """The shard's table with those of its sidecars, made again where one of them is another one now."""
        sidecars = {}
        for number in self._sidecars[shard]:
            other = self.find(number)
            assert other is not None, "a sidecar has an index"
            sidecars[number] = other, self._matched(number, table, other)
        made_of = (table, *(other for other, _ in sidecars.values()))
        known = self._joined.get(shard)
        if known is None or any(one is not now for one, now in zip(known.made_of, made_of, strict=True)):
            known = self._joined[shard] = _Joined(made_of, joined_table(shard, table, sidecars))
            self._columns.pop(shard, None)
        return known.result

    def _matched(self, number: int, table: ShardTable, other: ShardTable) -> NDArray[np.int64]:
        """For each sample of a shard's table the number of that with its key in a sidecar."""
        known = self._matches.get(number)
        if known is None or known.made_of[0] is not table or known.made_of[1] is not other:
            twice = next((name for name in other.fields if name in table.fields), None)
            if twice is not None:
                raise DatasetIndexError(
                    f"this sidecar has the field {twice!r}, which its shard has too; a sidecar holds other fields",
                    url=self.url(number),
                )
            known = self._matches[number] = _Joined((table, other), matched_samples(table, other, self.url(number)))
            self._warn_of_unmatched(number, known.result, other)
        return known.result

    def _warn_of_unmatched(self, number: int, matched: NDArray[np.int64], other: ShardTable) -> None:
        """Warn, once, where a sidecar has samples, and none of them is one of its shard's."""
        owner = self.owner(number)
        if self._warned_of_unmatched or self.is_growing(owner) or not len(other) or not len(matched):
            return
        if (matched == MISSING).all():
            self._warned_of_unmatched = True
            _log.warning(
                "the sidecar %r has no field of any sample of its shard %r; shards and sidecars belong together by "
                "their names, or by their order where the names differ",
                without_secrets(self.url(number)),
                without_secrets(self.url(owner)),
            )

    def _drop_oldest(self) -> None:
        """Drop tables until the others fit: those that nobody has looked for yet, then the longest unused."""
        while self.held_bytes > self._memory_bytes:
            packed = next((shard for shard in self._packed if shard not in self._held), None)
            if packed is not None and packed != next(reversed(self._packed)):
                self.held_bytes -= len(self._packed.pop(packed))
                continue
            indexed = (shard for shard in self._tables if self._listing.index_folder(shard) is not None)
            oldest = next((shard for shard in indexed if shard not in self._held), None)
            if oldest is None or oldest == next(reversed(self._tables)):
                return
            self.held_bytes -= _size_bytes(self._tables.pop(oldest))
            self._columns.pop(oldest, None)
            self._joined.pop(self.owner(oldest), None)
            self._matches.pop(oldest, None)


class _Joined(NamedTuple, Generic[_Result]):
    """Something that was made of tables, and is good as long as these are the same objects."""

    made_of: tuple[ShardTable, ...]
    result: _Result


def _size_bytes(table: ShardTable) -> int:
    arrays = (table.member_offset, table.member_size, table.member_field, table.sample_start, table.key_bytes)
    return 2 * sum(array.nbytes for array in arrays)  # twice: the columns made of it take about as much again
