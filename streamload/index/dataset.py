"""Provide the tables of a dataset's shards, from an index or a scan."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.errors import (
    DatasetIndexError,
    ShardChangedError,
    ShardNotFoundError,
    StorageError,
    without_secrets,
)
from streamload.index.dataset_index import TableGroup, TableRun, index_error
from streamload.index.listing import Listing
from streamload.limits import LEAST_TABLES_BYTES, MOST_TABLES_BYTES, TABLES_SHARE
from streamload.order.shard_counts import ShardCounts
from streamload.storage.download import Pin, read_range
from streamload.storage.local_files import open_regular
from streamload.storage.storages import Storages
from streamload.tar.header_chain import BLOCK_BYTES
from streamload.tar.scan import ScannedPiece, Scanner
from streamload.tar.table import MISSING, ShardTable, starts_of, stretches

_GONE = (
    "the index has no such file any more (if it was written anew while in use, make a new loader, and give every "
    "version of a dataset a folder of its own)"
)


class _Joined(NamedTuple):
    """A shard's table with the fields of its sidecars.

    Attributes:
        tables: of the shard and its sidecars.
        table: the joined one.
        matched: for each sidecar, the number of each of the shard's samples there, or MISSING.
    """

    tables: list[ShardTable]
    table: ShardTable
    matched: dict[int, NDArray[np.int64]]


class Dataset:
    """The shards of a listing, the counts of their samples, and the tables that locate samples.

    Tables of an index are read on demand, many neighbours at once, and dropped if they take too much memory. Tables
    from scans are kept.

    Args:
        listing: the shards.
        storages: of the indexes.
        budget_bytes: the memory budget; tables of indexes take a sixteenth, within 32 and 256 MiB, unless more are
            needed.

    Attributes:
        counts: the samples of each shard, as far as known.
        skipped: the number of skipped members, by reason, in the shards scanned so far.
    """

    def __init__(self, listing: Listing, storages: Storages | None = None, *, budget_bytes: int | None = None) -> None:
        share_bytes = MOST_TABLES_BYTES if budget_bytes is None else budget_bytes // TABLES_SHARE
        self.listing = listing
        self.storages = Storages() if storages is None else storages
        counts = listing.counts
        self.counts = ShardCounts(len(listing.shards)) if counts is None else ShardCounts.of(counts)
        self.skipped: dict[str, int] = {}
        self._locks: dict[TableGroup, asyncio.Lock] = {}
        self._runs: dict[TableGroup, list[tuple[TableRun, int] | DatasetIndexError]] = {}
        self._cut: dict[TableGroup, dict[int, ShardTable]] = {}  # shards' own tables, cut from runs
        self._tables: dict[int, ShardTable] = {}  # from `add` and `add_piece`
        self._sizes_bytes: OrderedDict[TableGroup | int, int] = OrderedDict()  # least recently used first
        self._most_bytes = max(LEAST_TABLES_BYTES, min(share_bytes, MOST_TABLES_BYTES))
        self._needed: frozenset[TableGroup | int] = frozenset()
        self._joined: dict[int, _Joined] = {}
        self._growing: dict[int, Scanner] = {}
        self._sidecars: dict[int, list[int]] = {}
        for number, owner in enumerate(listing.owners, start=len(listing.shards)):
            self._sidecars.setdefault(owner, []).append(number)

    # -- the listing -----------------------------------------------------------------------------------------------

    def url(self, shard: int) -> str:
        """Return a shard's url."""
        return self.listing.shard(shard).url

    def with_sidecars(self, shards: Iterable[int]) -> list[int]:
        """Return shards with their sidecars."""
        return [number for shard in shards for number in (shard, *self._sidecars.get(shard, ()))]

    def is_growing(self, shard: int) -> bool:
        """Return True until a shard has been scanned; sidecars have an index."""
        return shard < len(self.counts) and bool(self.counts.values[shard] < 0)

    # -- tables ----------------------------------------------------------------------------------------------------

    def find(self, shard: int) -> ShardTable | None:
        """Return a shard's table, and record its count; None if it must be scanned. Blocks unless fetched.

        Raises:
            DatasetIndexError: the index is damaged or of another shard.
            StorageError: the index cannot be read.
        """
        if shard in self._tables:
            if shard in self._sizes_bytes:
                self._sizes_bytes.move_to_end(shard)
            return self._tables[shard]
        if (found := self._run(shard)) is None:
            return None
        cut = self._cut.setdefault(self._place(shard)[0], {})
        if shard not in cut:
            run, number = found
            cut[shard] = run.table_of(number)
            self._count(shard, cut[shard])
        return cut[shard]

    def find_joined(self, shard: int) -> ShardTable | None:
        """Return a shard's table, with its sidecars' fields.

        Raises:
            DatasetIndexError: as for `find`; or a sidecar's samples are others, or in another order, or it has a field
                of the shard.
        """
        table = self.find(shard)
        return table if table is None or shard not in self._sidecars else self._join(shard, table).table

    def locate(self, shard: int) -> tuple[ShardTable, int]:
        """Return a table with a shard's samples, and the number of its first one; raise as `find_joined`.

        Shards of one index may share a table; its offsets are relative to each sample's shard.
        """
        if shard not in self._sidecars and shard not in self._tables and (found := self._run(shard)) is not None:
            run, number = found
            return run.table, run.firsts[number]
        table = self.find_joined(shard)
        assert table is not None, "a shard was planned before it was scanned"
        return table, 0

    def _run(self, shard: int) -> tuple[TableRun, int] | None:
        """Return the run with a shard's table, and the table's number in it; None for a shard in no index."""
        if self.listing.shard(shard).index_folder is None:
            return None
        group, number = self._place(shard)
        if group not in self._runs:
            self._read_now(shard, group)
        if group in self._sizes_bytes:
            self._sizes_bytes.move_to_end(group)
        found = self._runs[group][number]
        if isinstance(found, DatasetIndexError):
            raise found.with_traceback(None)
        return found

    def at_hand(self, shard: int) -> ShardTable | None:
        """Return a shard's table, unless it must be read first."""
        return None if self.needs_read(shard) else self.find(shard)

    def hold(self, shards: Collection[int]) -> list[int]:
        """Keep these shards' tables instead of the last call's; return the shards to read first."""
        indexed = (shard for shard in shards if self.listing.shard(shard).index_folder is not None)
        self._needed = frozenset([*shards, *(self._place(shard)[0] for shard in indexed)])
        return [shard for shard in shards if self.needs_read(shard)]

    def needs_read(self, shard: int) -> bool:
        """Return True if a shard's table must first be read from an index."""
        if self.listing.shard(shard).index_folder is None or shard in self._tables:
            return False
        return self._place(shard)[0] not in self._runs

    async def fetch(self, shard: int, storages: Storages | None = None) -> None:
        """Read the bytes for `find` on the running loop: one request for neighbouring tables.

        Raises:
            DatasetIndexError: the index is damaged or of another shard.
            StorageError: the index cannot be read.
        """
        if not self.needs_read(shard):
            return
        (group, _), storages = self._place(shard), storages or self.storages
        async with self._locks.setdefault(group, asyncio.Lock()):
            if group not in self._runs:
                self._unpack(group, await _download(storages, group))

    async def load(self, shard: int) -> ShardTable | None:
        """Fetch and return a shard's table as `find` does. Raises what `fetch` raises."""
        await self.fetch(shard)
        return self.find(shard)

    def add(self, shard: int, table: ShardTable) -> None:
        """Keep the table of a whole shard."""
        self._count(shard, table)
        self._tables[shard] = table
        if self.listing.shard(shard).index_folder is not None:  # read elsewhere; it can be read again
            self._drop_others(shard, 36 * len(table.member_offset) + 16 * len(table) + 2 * len(table.key_bytes))

    def _count(self, shard: int, table: ShardTable) -> None:
        if self.is_growing(shard):
            for reason, count in table.skipped.items():
                self.skipped[reason] = self.skipped.get(reason, 0) + count
            self.counts.set(shard, len(table))

    def add_piece(self, shard: int, piece: ScannedPiece) -> None:
        """Add the next piece of a shard that is scanned on arrival; raise as `Scanner.add`."""
        growing = self._growing.setdefault(shard, Scanner(self.url(shard)))
        growing.add(piece)
        table = growing.table()
        if growing.needs is None:
            del self._growing[shard]
            self.add(shard, table)
        elif self.counts.values[shard] < 0:
            self._tables[shard] = table
            self.counts.at_least(shard, len(table))

    def next_scan(self, shard: int) -> tuple[int, int]:
        """Return the start of a shard's next scan, and the end of the bytes it needs."""
        growing = self._growing.get(shard)
        if growing is None or growing.needs is None:
            return 0, BLOCK_BYTES
        return growing.resume, growing.needs

    def stretches(self, number: int, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Convert ranges `[start, end)` of a shard's samples to ranges of its sidecar `number`, if known."""
        owner = self.listing.owner(number)
        table = self.at_hand(owner)
        if owner == number or table is None or any(map(self.needs_read, self._sidecars[owner])):
            return samples
        matched = self._join(owner, table).matched[number]
        present = [rows[rows != MISSING] for rows in (matched[start:end] for start, end in samples)]
        return [(int(rows[0]), int(rows[-1]) + 1) for rows in present if len(rows)]

    def _join(self, shard: int, table: ShardTable) -> _Joined:
        others = {number: other for number in self._sidecars[shard] if (other := self.find(number)) is not None}
        tables = [table, *others.values()]
        known = self._joined.get(shard)
        if known is not None and all(one is now for one, now in zip(known.tables, tables, strict=True)):
            return known
        matched: dict[int, NDArray[np.int64]] = {}
        for number, other in others.items():
            url = self.url(number)
            twice = next((name for name in other.fields if name in table.fields), None)
            if twice is not None:
                raise DatasetIndexError(
                    f"this sidecar has the field {twice!r}, which its shard has too; a sidecar holds other fields",
                    url=url,
                )
            matched[number] = rows = _matched_samples(table, other, url)
            nothing = not self.is_growing(shard) and len(other) and len(rows) and (rows == MISSING).all()
            if nothing:
                raise DatasetIndexError(
                    f"this sidecar has no field of any sample of {without_secrets(self.url(shard))!r}, its shard; "
                    "shards and sidecars belong together by their names, or by their order where the names differ",
                    url=url,
                )
        joined = _joined_table([shard, *others], tables, [np.arange(len(table)), *matched.values()])
        self._joined[shard] = _Joined(tables, joined, matched)
        return self._joined[shard]

    # -- reading an index ------------------------------------------------------------------------------------------

    def _place(self, shard: int) -> tuple[TableGroup, int]:
        """Return the group with a shard's table, and its number there."""
        listed = self.listing.shard(shard)
        return self.listing.indexes[listed.index_folder or ""].place(listed.name)

    def _read_now(self, shard: int, group: TableGroup) -> None:
        if not self.storages.costs_requests(group.url):  # a loop would cost more than the read
            self._unpack(group, _read_range(group))
            return

        async def read_alone() -> None:
            storages = self.storages.copy()  # connections belong to the loop that opened them
            try:
                await self.fetch(shard, storages)
            finally:
                await storages.aclose()

        with ThreadPoolExecutor(1) as thread:  # the caller may be in a running loop
            thread.submit(asyncio.run, read_alone()).result()

    def _unpack(self, group: TableGroup, content: bytes) -> None:
        self._runs[group] = group.unpack(content)
        self._drop_others(group, 2 * len(content))  # plus about as much for the shards' own tables

    def _drop_others(self, held: TableGroup | int, size_bytes: int) -> None:
        self._sizes_bytes[held] = size_bytes
        excess_bytes = sum(self._sizes_bytes.values()) - self._most_bytes
        for oldest in [each for each in self._sizes_bytes if each not in self._needed and each != held]:
            if excess_bytes <= 0:
                break
            excess_bytes -= self._sizes_bytes.pop(oldest)
            if isinstance(oldest, TableGroup):
                del self._runs[oldest]
                shards = [*self._cut.pop(oldest, ())]
            else:
                del self._tables[oldest]
                shards = [oldest]
            for shard in shards:
                self._joined.pop(self.listing.owner(shard), None)


def _read_range(group: TableGroup) -> bytes:
    try:
        descriptor, status = open_regular(group.url)
        with open(descriptor, "rb", buffering=0):
            return os.pread(descriptor, max(0, min(group.end, status.st_size) - group.start), group.start)
    except ShardNotFoundError as exc:
        raise index_error(_GONE, group.url) from exc
    except OSError as exc:
        raise StorageError(f"cannot be read: {exc.strerror}; check the disk", url=group.url) from exc


async def _download(storages: Storages, group: TableGroup) -> bytes:
    url, storage = group.url, storages.for_url(group.url)
    try:
        return await read_range(storage, url, group.start, group.end, pin=Pin(), retries=storages.retries)
    except ShardNotFoundError as exc:
        raise index_error(_GONE, url) from exc
    except ShardChangedError as exc:
        raise index_error(f"the file of the index is cut ({exc.message})", url, group.start) from exc


def _matched_samples(table: ShardTable, sidecar: ShardTable, url: str) -> NDArray[np.int64]:
    """Return the sample with the same key in a sidecar for each sample of a table, int64[S], or MISSING.

    Raises:
        DatasetIndexError: the sidecar's samples are in another order.
    """
    starts = table.key_start
    same_lengths = np.array_equal(sidecar.key_start[: len(starts)], starts)
    if same_lengths and np.array_equal(sidecar.key_bytes[: len(table.key_bytes)], table.key_bytes):
        return np.arange(len(table))
    keys, sidecar_keys = table.keys(), sidecar.keys()
    numbers = {key: number for number, key in enumerate(sidecar_keys)}
    matched = np.array([numbers.get(key, MISSING) for key in keys], np.int64)
    if (np.diff(matched[matched != MISSING]) < 0).any():
        raise DatasetIndexError(
            "the samples of this sidecar are in another order than those of its shard; write it with `streamload map "
            "--sidecar`, or in the order of the shard",
            url=url,
        )
    return matched


def _joined_table(
    numbers: Sequence[int], tables: Sequence[ShardTable], matched: Sequence[NDArray[np.int64]]
) -> ShardTable:
    """Return a shard's table with its sidecars' fields; the shard comes first in each argument."""
    fields = tuple(dict.fromkeys(name for table in tables for name in table.fields))
    members, samples, of_field = [], [], []
    for table, theirs in zip(tables, matched, strict=True):
        rows = np.flatnonzero(theirs != MISSING)
        first, after = table.sample_start[theirs[rows]], table.sample_start[theirs[rows] + 1]
        members.append(stretches(first, after))
        samples.append(np.repeat(rows, after - first))
        renumbered = np.array([fields.index(name) for name in table.fields], np.uint16)
        of_field.append(renumbered[table.member_field[members[-1]]])
    order = np.argsort(np.concatenate(samples), kind="stable")

    def joined(column: str) -> NDArray[Any]:
        parts = [getattr(table, column)[chosen] for table, chosen in zip(tables, members, strict=True)]
        return np.concatenate(parts)[order]

    return replace(
        tables[0],
        fields=fields,
        member_offset=joined("member_offset"),
        member_size=joined("member_size"),
        member_field=np.concatenate(of_field)[order],
        member_crc32=None if any(table.member_crc32 is None for table in tables) else joined("member_crc32"),
        member_shard=np.repeat(numbers, [len(chosen) for chosen in members])[order],
        sample_start=starts_of(np.bincount(np.concatenate(samples), minlength=len(tables[0]))),
    )
