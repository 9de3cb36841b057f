"""Provide the tables and columns of a dataset's shards, from an index or a scan."""

from __future__ import annotations

import asyncio
import difflib
import io
import json
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import did_you_mean
from streamload.errors import (
    DatasetIndexError,
    ShardChangedError,
    ShardFormatError,
    ShardNotFoundError,
    StorageError,
    StreamloadError,
    without_secrets,
)
from streamload.index.dataset_index import (
    MOST_INDEX_BYTES,
    DatasetIndex,
    TableGroup,
    TableRun,
    index_error,
    locked_folder,
    read_if_there,
)
from streamload.index.listing import Listing
from streamload.limits import LEAST_TABLES_BYTES, MOST_TABLES_BYTES, SMALL_REQUESTS, TABLES_SHARE
from streamload.order.sampling import group_sizes
from streamload.order.shard_counts import ShardCounts
from streamload.storage.download import Pin, download, read_range
from streamload.storage.local_files import LocalStorage, open_regular
from streamload.storage.protocol import UNKNOWN_BYTES, Storage
from streamload.storage.storages import Storages
from streamload.tar.decompression import Decompressor, compression_of
from streamload.tar.header_chain import BLOCK_BYTES
from streamload.tar.scan import LABEL_FIELD, MISSING, ScannedPiece, Scanner, ShardTable, scan_file, starts_of, stretches
from streamload.text import listed

Columns = dict[str, NDArray[Any]]

COLUMNS_FILE = "columns.npz"
CLASSES_FILE = "classes.json"
MOST_CLASSES_BYTES = 256 << 20
# Names of the columns that are derived from tables; the last two are prefixes of a field's name.
KEY, KEY_HASH, LABEL, SIZE, PRESENT = "key", "key hash", "label", "size.", "has."

_TO_THE_END = 1 << 62
_GONE = (
    "this file of the index no longer exists (if the index was rewritten while in use, make a new loader, and give "
    "every version of a dataset its own folder)"
)
_NOT_OF_FIELDS = (KEY, KEY_HASH, LABEL)
# Names that conditions can use without metadata columns, besides `size.<field>` and `"<field>"`.
_BUILT_IN = ("key", "label", "class_name", "fraction")
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
_SHARDS, _CRC32, _STARTS = "shards", "table_crc32", "starts"
_OF_SAMPLES = "column:"
_IN_NO_INDEX = "this shard is in no index"
_UNREADABLE = (ValueError, KeyError, OSError, EOFError, zlib.error)
_NEAR = 3
_SHOWN = 20


class Dataset:
    """Locate the samples of a listing's shards by tables, from an index or a scan.

    Tables of an index are read on demand, many neighbours at once, and dropped if they take too much memory. Tables
    from scans are kept.

    Args:
        storages: for the indexes.
        budget_bytes: the memory budget; tables of indexes take up to a sixteenth of it, between 32 and 256 MiB, unless
            more are needed at once.

    Attributes:
        counts: the number of samples of each shard, as far as known.
        skipped: the number of skipped members, by reason, in the shards counted by this object.
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
        self._joined: dict[int, _Joined] = {}  # of shards with sidecars
        self._growing: dict[int, Scanner] = {}  # of shards that are scanned on arrival
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
        """Return True until a shard's number of samples is known; False for sidecars."""
        return shard < len(self.counts) and bool(self.counts.values[shard] < 0)

    # -- tables ----------------------------------------------------------------------------------------------------

    def find(self, shard: int) -> ShardTable | None:
        """Return a shard's table, and record its count; None if unscanned. Blocks unless `fetch` was called before.

        Raises:
            DatasetIndexError: the index is damaged, was replaced, or lacks the shard.
            StorageError: the index cannot be read.
        """
        if shard in self._tables:
            if shard in self._sizes_bytes:
                self._sizes_bytes.move_to_end(shard)
            return self._tables[shard]
        if (located := self._run(shard)) is None:
            return None
        cut = self._cut.setdefault(self._place(shard)[0], {})
        if shard not in cut:
            run, number = located
            cut[shard] = run.table_of(number)
            self._count(shard, cut[shard])
        return cut[shard]

    def find_joined(self, shard: int) -> ShardTable | None:
        """Return a shard's table, with its sidecars' fields.

        Raises:
            DatasetIndexError: as for `find`; or a sidecar matches no sample, is in another order, or repeats a field.
            StorageError: as for `find`.
        """
        table = self.find(shard)
        return table if table is None or shard not in self._sidecars else self._join(shard, table).table

    def locate(self, shard: int) -> tuple[ShardTable, int]:
        """Return a table that holds a shard, and the shard's first row in it; raise like `find_joined`.

        Shards of one index may share a table; its offsets are relative to each sample's shard.
        """
        if shard not in self._sidecars and shard not in self._tables and (located := self._run(shard)) is not None:
            run, number = located
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
        located = self._runs[group][number]
        if isinstance(located, DatasetIndexError):
            raise located.with_traceback(None)
        return located

    def at_hand(self, shard: int) -> ShardTable | None:
        """Return a shard's table; None if it must first be read or scanned. Raises as `find`."""
        return None if self.needs_read(shard) else self.find(shard)

    def hold(self, shards: Collection[int]) -> list[int]:
        """Retain the tables of these shards until the next call; return the shards whose tables must be read."""
        indexed = (shard for shard in shards if self.listing.shard(shard).index_folder is not None)
        self._needed = frozenset([*shards, *(self._place(shard)[0] for shard in indexed)])
        return [shard for shard in shards if self.needs_read(shard)]

    def needs_read(self, shard: int) -> bool:
        """Return True if a shard's table must first be read from an index."""
        if self.listing.shard(shard).index_folder is None or shard in self._tables:
            return False
        return self._place(shard)[0] not in self._runs

    async def fetch(self, shard: int, storages: Storages | None = None) -> None:
        """Fetch a shard's table for `find`, with its neighbours, on the running loop; raise like `find`."""
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
        """Add the table of a whole shard."""
        self._count(shard, table)
        self._tables[shard] = table
        if self.listing.shard(shard).index_folder is not None:  # its table was read elsewhere, and can be read again
            self._drop_others(shard, 36 * len(table.member_offset) + 16 * len(table) + 2 * len(table.key_bytes))

    def _count(self, shard: int, table: ShardTable) -> None:
        if self.is_growing(shard):
            for reason, count in table.skipped.items():
                self.skipped[reason] = self.skipped.get(reason, 0) + count
            self.counts.set(shard, len(table))

    def add_piece(self, shard: int, piece: ScannedPiece) -> None:
        """Add the next piece of a shard that is scanned on arrival; raise like `Scanner.add`."""
        growing = self._growing.pop(shard, None) or Scanner(self.url(shard))
        growing.add(piece)  # if this raises, the next scan begins again
        table = growing.table()
        if growing.needs is None:
            self.add(shard, table)
            return
        self._growing[shard] = growing
        if self.counts.values[shard] < 0 and len(table) >= self.counts.least(shard):  # else it is scanned anew
            self._tables[shard] = table
            self.counts.at_least(shard, len(table))

    def next_scan(self, shard: int) -> tuple[int, int]:
        """Return the start of a shard's next scan, and the end of the bytes that the scan needs."""
        growing = self._growing.get(shard)
        if growing is None or growing.needs is None:
            return 0, BLOCK_BYTES
        return growing.resume, growing.needs

    def stretches(self, number: int, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Convert ranges of samples to those of sidecar `number`; unchanged for a shard, or while tables are unread."""
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
                    f"this sidecar has the field {twice!r}, which its shard has too; a sidecar must hold other fields",
                    url=url,
                )
            matched[number] = rows = _matched_samples(table, other, url)
            is_unrelated = not self.is_growing(shard) and len(other) and len(rows) and (rows == MISSING).all()
            if is_unrelated:
                raise DatasetIndexError(
                    f"this sidecar matches no sample of its shard, {without_secrets(self.url(shard))!r}; "
                    "sidecars belong to the shards of the same names, or of the same positions if names differ",
                    url=url,
                )
        joined = _joined_table([shard, *others], tables, [np.arange(len(table)), *matched.values()])
        self._joined[shard] = _Joined(tables, joined, matched)
        return self._joined[shard]

    # -- reading an index ------------------------------------------------------------------------------------------

    def _place(self, shard: int) -> tuple[TableGroup, int]:
        """Return the group with a shard's table, and the table's number there."""
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
        self._drop_others(group, 2 * len(content))  # twice: the shards' own tables take about as much

    def _drop_others(self, newest: TableGroup | int, size_bytes: int) -> None:
        """Record the size of new tables, and drop the least recently used ones beyond the limit."""
        self._sizes_bytes[newest] = size_bytes
        excess_bytes = sum(self._sizes_bytes.values()) - self._most_bytes
        for oldest in [each for each in self._sizes_bytes if each not in self._needed and each != newest]:
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
        raise index_error(f"the file of the index was cut or changed ({exc.message})", url, group.start) from exc


class _Joined(NamedTuple):
    """A shard's table with the fields of its sidecars.

    Attributes:
        tables: the tables of the shard and its sidecars.
        table: the joined table.
        matched: for each sidecar, each sample's number in it, or MISSING.
    """

    tables: list[ShardTable]
    table: ShardTable
    matched: dict[int, NDArray[np.int64]]


def _matched_samples(table: ShardTable, sidecar: ShardTable, url: str) -> NDArray[np.int64]:
    """Return each sample's number in a sidecar, matched by key, int64[S], or MISSING.

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
            "the samples of this sidecar are ordered differently from those of its shard; write it with `streamload "
            "map --sidecar`, or in the order of the shard",
            url=url,
        )
    return matched


def _joined_table(
    numbers: Sequence[int], tables: Sequence[ShardTable], matched: Sequence[NDArray[np.int64]]
) -> ShardTable:
    """Return a shard's table with its sidecars' fields; the shard comes first in each argument."""
    fields = tuple(dict.fromkeys(name for table in tables for name in table.fields))
    members, samples, of_field = [], [], []
    for table, own_numbers in zip(tables, matched, strict=True):
        rows = np.flatnonzero(own_numbers != MISSING)
        first, after = table.sample_start[own_numbers[rows]], table.sample_start[own_numbers[rows] + 1]
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


async def read_shard(
    storage: Storage,
    url: str,
    *,
    every_byte: bool = False,
    labels: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> ReadShard:
    """Scan a whole shard strictly, in a few megabytes of memory, plus the largest sample if remote or compressed.

    Args:
        storage: the shard's storage.
        url: the shard's url.
        every_byte: compute the crc32 of each member, and read the labels.
        labels: read the labels.
        on_bytes: called with the size of each downloaded piece; an exception stops the reading.

    Raises:
        StorageError: the shard cannot be read.
        ShardFormatError: the shard is damaged.
    """
    compression = compression_of(url)
    local = await asyncio.to_thread(scan_local, storage, url, every_byte=every_byte, labels=labels)
    if local is not None:
        return local
    pin = Pin()
    decompressor = None if compression is None else Decompressor(compression, url)
    scanner = Scanner(url, every_byte=every_byte or labels)

    def receive(_: int, piece: bytes) -> None:
        on_bytes(len(piece))
        for decompressed in (piece,) if decompressor is None else decompressor.feed(piece):
            scanner.feed(decompressed)

    await download(storage, url, 0, _TO_THE_END, receive, pin=pin)
    if decompressor is not None and pin.total_bytes != 0:
        decompressor.finish()
    return ReadShard(pin.total_bytes or 0, pin.etag, scanner.finish())


def scan_local(storage: Storage, url: str, *, every_byte: bool = False, labels: bool = False) -> ReadShard | None:
    """Scan a local uncompressed shard on this thread, with the options of `read_shard`; None for any other shard.

    Unless `every_byte` is set, only headers and requested labels are read.

    Raises:
        StorageError: the shard cannot be read.
        ShardFormatError: the shard is damaged.
    """
    if not isinstance(storage, LocalStorage) or compression_of(url) is not None:
        return None
    try:
        descriptor, status = open_regular(url)
        with open(descriptor, "rb", buffering=0) as file:
            labels = labels or every_byte
            table = scan_file(file.fileno(), status.st_size, url, crc32=every_byte, labels=labels)
    except OSError as exc:
        raise StorageError(f"the shard cannot be read ({exc.strerror}); check the disk", url=url) from exc
    return ReadShard(status.st_size, None, table)


class ReadShard(NamedTuple):
    """A shard that was read to its end.

    Attributes:
        bytes: the size.
        etag: the version, if known.
    """

    bytes: int
    etag: str | None
    table: ShardTable


def differences(url: str, table: ShardTable, known: ShardTable) -> Iterator[StreamloadError]:
    """Yield an error for each difference between a shard's own table and the one in its index."""
    rebuild = "restore the shard, or rebuild the index with `streamload index` if the shard is right"
    columns = ("member_offset", "member_size", "member_field", "sample_start", "key_bytes", "key_start")
    same = (np.array_equal(getattr(table, name), getattr(known, name)) for name in columns)
    if table.fields != known.fields or not all(same):
        yield DatasetIndexError(f"the samples in the index differ from those in the shard; {rebuild}", url=url)
        return
    if known.member_crc32 is not None and table.member_crc32 is not None:
        for member in np.flatnonzero(table.member_crc32 != known.member_crc32).tolist():
            sample = int(np.searchsorted(table.sample_start, member, side="right")) - 1
            field = table.fields[int(table.member_field[member])]
            yield ShardFormatError(
                f"the bytes of field {field!r} differ from the indexed ones (crc32); {rebuild}",
                url=url,
                key=table.key(sample),
                offset=int(table.member_offset[member]),
            )
    if known.labels is not None and not (table.labels is not None and np.array_equal(table.labels, known.labels)):
        yield DatasetIndexError(f"the labels in the index differ from those in the shard; {rebuild}", url=url)


def read_labels(listing: Listing, storages: Storages) -> Labels:
    """Read the labels of all samples from the index. Blocks.

    Raises:
        DatasetIndexError: a shard is in no index, or its index is damaged or has no labels.
        StorageError: an index cannot be read.
    """
    for shard in listing.shards:
        if shard.index_folder is None:
            raise _no_labels(f"this needs the labels in an index, but {_IN_NO_INDEX}", shard.url)

    labels = read_columns(listing, storages, [LABEL])[0][LABEL]
    values, number = np.unique(labels, return_inverse=True)
    return Labels(tuple(values.tolist()), number.astype(np.min_scalar_type(max(0, len(values) - 1))))


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The labels of a dataset.

    Attributes:
        values: the distinct labels, ascending.
        number: unsigned[N], each sample's label as an index into `values`, in the order of the listing.
    """

    values: tuple[int, ...]
    number: NDArray[np.unsignedinteger]

    def numbers_in(self, other: Labels) -> NDArray[np.unsignedinteger]:
        """Return each sample's label, unsigned[N], as an index into the values of `other`."""
        if other is self:
            return self.number
        dtype = np.min_scalar_type(len(other.values))
        numbers: NDArray[np.unsignedinteger] = np.searchsorted(other.values, self.values).astype(dtype)[self.number]
        return numbers

    def of(self, selected: NDArray[np.bool_]) -> Labels:
        """Return the labels of the samples for which `selected`, bool[N], is True."""
        numbers = self.number[selected]
        occurring = np.flatnonzero(group_sizes(numbers, len(self.values)))
        dtype = np.min_scalar_type(max(0, len(occurring) - 1))
        values = tuple(self.values[number] for number in occurring.tolist())
        return Labels(values, np.searchsorted(occurring, np.arange(len(self.values))).astype(dtype)[numbers])


def read_columns(listing: Listing, storages: Storages, names: Sequence[str]) -> tuple[Columns, NDArray[np.int64]]:
    """Read some columns of all samples. Blocks; shards without an index are scanned.

    Returns:
        The columns, in the order of the listing, and the number of samples of each shard, int64[shards].

    Raises:
        DatasetIndexError: a column does not exist, an index is damaged, or a sample has no label.
        ShardFormatError: a shard is damaged.
        StorageError: a shard or an index cannot be read, or a shard's size changed since it was listed.
    """
    stored = [name for name in names if name not in _NOT_OF_FIELDS and not name.startswith((SIZE, PRESENT))]
    others = [name for name in names if name not in stored]
    columns = _stored_columns(listing, storages, stored) if stored else {}
    if not others and listing.counts is not None:
        return columns, np.array(listing.counts, np.int64)
    fields: set[str] = set()
    dataset, limit, stopped = Dataset(listing, storages.copy()), asyncio.Semaphore(SMALL_REQUESTS), threading.Event()

    async def of_shard(shard: int) -> list[Any]:
        url = dataset.url(shard)
        async with limit:
            if stopped.is_set():
                raise asyncio.CancelledError
            table = await dataset.load(shard)
            if table is None:
                read = await read_shard(dataset.storages.for_url(url), url, labels=LABEL in names)
                if read.bytes != listing.shards[shard].bytes != UNKNOWN_BYTES:
                    raise ShardChangedError("the shard was cut or changed since it was listed; run again", url=url)
                table = read.table
            fields.update(table.fields)
            return [len(table), *(_values(table, name, url) for name in others)]

    async def read_all() -> list[list[Any]]:
        try:
            return await asyncio.gather(*map(of_shard, range(len(listing.shards))))
        finally:
            await dataset.storages.aclose()

    with ThreadPoolExecutor(1) as thread:  # the caller may be in a running loop
        try:
            counts, *values = zip(*thread.submit(asyncio.run, read_all()).result(), strict=True)
        finally:
            stopped.set()  # Ctrl-C does not wait for the remaining shards
    for field in (name.removeprefix(SIZE).removeprefix(PRESENT) for name in others if name not in _NOT_OF_FIELDS):
        if field not in fields:
            raise DatasetIndexError(
                f"where= names the field {field!r}, which no sample has; the fields are {listed(sorted(fields))}",
                url=listing.shards[0].url,
            )
    columns |= {name: np.concatenate(parts) for name, parts in zip(others, values, strict=True)}
    return columns, np.array(counts, np.int64)


def _values(table: ShardTable, name: str, url: str) -> NDArray[Any]:
    if name == KEY:
        return np.array(table.keys(), dtype=object)
    if name == KEY_HASH:
        return _key_hashes(table)
    if name == LABEL:
        if table.labels is None and len(table):
            raise _no_labels("this shard has no labels, since not every sample has a whole number as cls", url)
        return np.empty(0, np.int64) if table.labels is None else table.labels
    members = table.column([name.removeprefix(SIZE).removeprefix(PRESENT)])
    present: NDArray[np.bool_] = members != MISSING
    if name.startswith(PRESENT):
        return present
    sizes = np.full(len(table), np.nan)
    sizes[present] = table.member_size[members[present]]
    return sizes


def _no_labels(why: str, url: str) -> DatasetIndexError:
    return DatasetIndexError(
        f"{why}; write the class of each sample as a field cls and make an index with `streamload index` (or pack with "
        "shardify), or give weights= as one number per sample",
        url=url,
    )


def _key_hashes(table: ShardTable) -> NDArray[np.uint64]:
    """Hash each key by a polynomial of its bytes, evaluated at an odd number, modulo 2**64."""
    lengths = np.diff(table.key_start)
    if not len(lengths):
        return np.empty(0, np.uint64)
    within = np.arange(len(table.key_bytes)) - np.repeat(table.key_start[:-1], lengths)
    powers = np.cumprod(np.full(int(lengths.max()) + 1, _HASH_BASE))
    terms = np.append((table.key_bytes.astype(np.uint64) + np.uint64(1)) * powers[within], np.uint64(0))
    return np.add.reduceat(terms, table.key_start[:-1]) * (lengths > 0)


def _stored_columns(listing: Listing, storages: Storages, names: Sequence[str]) -> Columns:
    folders = dict.fromkeys(shard.index_folder for shard in listing.shards)
    files = {folder: _read_columns(listing.indexes[folder], storages) for folder in folders if folder is not None}
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for shard in listing.shards:
        fields, columns, rows = files.get(shard.index_folder or "", (None, {}, {}))
        for name in names:
            if name not in columns:
                raise DatasetIndexError(_no_column(name, fields, sorted(columns)), url=shard.url)
            if shard.name not in rows:
                raise DatasetIndexError(
                    f"the column {name!r} has no values for this shard, which is newer than the columns; make them "
                    "again with `streamload index` and its --columns",
                    url=shard.url,
                )
            parts[name].append(columns[name][rows[shard.name]])
    return {name: np.concatenate(each) for name, each in parts.items()}


def _read_columns(index: DatasetIndex, storages: Storages) -> tuple[tuple[str, ...], Columns, dict[str, slice]]:
    url = f"{index.folder}/{COLUMNS_FILE}"
    try:
        return index.fields, *_columns_in(read_if_there(storages.for_url(url), url, MOST_INDEX_BYTES), index)
    except _UNREADABLE as exc:
        raise DatasetIndexError(
            f"the columns cannot be read ({exc}); make them again with `streamload index` and its --columns",
            url=url,
        ) from exc


def _columns_in(content: bytes | None, index: DatasetIndex) -> tuple[Columns, dict[str, slice]]:
    """Return the columns in a file, and the rows of each shard whose table is still the same."""
    if not content:
        return {}, {}
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    shards, starts, crc32s = (arrays.pop(name).tolist() for name in (_SHARDS, _STARTS, _CRC32))
    rows = {}
    for name, start, end, crc32 in zip(shards, starts[:-1], starts[1:], crc32s, strict=True):
        entry = index.find(name)
        if entry is not None and (entry.table_crc32, entry.samples) == (crc32, end - start):
            rows[name] = slice(start, end)
    return {name.removeprefix(_OF_SAMPLES): values for name, values in arrays.items()}, rows


def _no_column(name: str, fields: Sequence[str] | None, columns: Sequence[str]) -> str:
    sizes = [f"{SIZE}{field}" for field in fields or ()]
    if name == LABEL_FIELD:
        hint = f" (write {LABEL}, which is the integer in the field {name})"
    elif name in (fields or ()):
        hint = f' (for the field {name}, write "{name}" in quotes for its presence, {SIZE}{name} for its size)'
    else:
        hint = did_you_mean(name, [*columns, *sizes, *_BUILT_IN], 0.5)
    has = f"the index has {listed(columns) or 'no columns of metadata'}" if fields is not None else _IN_NO_INDEX
    return (
        f'there is no column {name!r}{hint}: {has}; {", ".join(_BUILT_IN)}, size.<field> and "<field>" are built in, '
        f"and others are kept in an index: `streamload index --columns json:{name.removeprefix('json.')}`"
    )


def update_columns(storage: Storage, index: DatasetIndex, columns: Mapping[str, NDArray[Any]]) -> None:
    """Add or replace columns in an index's file of columns, an archive of NumPy arrays over all samples.

    Columns in a file that is damaged or of other shards are dropped.

    Raises:
        StorageError: the file cannot be read or written.
    """
    url, names = f"{index.folder}/{COLUMNS_FILE}", [entry.name for entry in index.shards]
    with locked_folder(os.path.dirname(index.folder)):
        try:
            kept, rows = _columns_in(read_if_there(storage, url, MOST_INDEX_BYTES), index)
        except _UNREADABLE:
            kept, rows = {}, {}
        arrays: dict[str, Any] = {
            _SHARDS: np.array(names, dtype=np.str_),
            _CRC32: np.array([entry.table_crc32 for entry in index.shards], np.uint32),
            _STARTS: starts_of([entry.samples for entry in index.shards]),
        }
        columns = {**(kept if [*rows] == names else {}), **columns}
        file = io.BytesIO()
        arrays |= {f"{_OF_SAMPLES}{name}": values for name, values in columns.items()}
        np.savez(file, **arrays)
        storage.write(url, file.getvalue())


def read_class_names(folders: Sequence[str], storages: Storages) -> tuple[str, ...] | None:
    """Read the names of classes by label; None if no folder has a `classes.json`. Blocks.

    Raises:
        DatasetIndexError: a file is damaged, or two folders have different names.
        StorageError: a file cannot be read.
    """
    urls = [f"{folder.rstrip('/')}/{CLASSES_FILE}" for folder in folders]

    def names_at(url: str) -> tuple[str, ...] | None:
        content = read_if_there(storages.for_url(url), url, MOST_CLASSES_BYTES)
        return None if content is None else parse_class_names(content, url)

    with ThreadPoolExecutor(SMALL_REQUESTS, "streamload-classes") as threads:
        contents = list(threads.map(names_at, urls))
    existing = [(url, names) for url, names in zip(urls, contents, strict=True) if names is not None]
    for other, other_names in existing[1:]:
        first, names = without_secrets(existing[0][0]), existing[0][1]
        for label, pair in enumerate(zip_longest(other_names, names)):
            if pair[0] != pair[1]:
                here, there = (f"is {name!r}" if name is not None else "has no name" for name in pair)
                raise DatasetIndexError(
                    f"the same label stands for different classes: {label} {here} here, but {there} in {first!r}; pack "
                    f"both with `shardify --classes {first}`, leave cls out of fields, read each "
                    "alone, or (in a Mixture) change labels in a Portion's transform",
                    url=other,
                )
    return existing[0][1] if existing else None


def parse_class_names(content: bytes, url: str) -> tuple[str, ...]:
    """Parse the content of a `classes.json`; DatasetIndexError if it is damaged."""
    try:
        names = json.loads(content)["classes"]
    except (ValueError, TypeError, KeyError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatasetIndexError('this is not the form that shardify writes: {"classes": ["name", ...]}', url=url)
    return tuple(names)


def unknown_class(name: str, names: Sequence[str]) -> str:
    """Describe an unknown class, with similar names or the existing ones, as the end of a message."""
    missing = f"{name!r}, which classes.json does not have;"
    alike = difflib.get_close_matches(name, names, _NEAR)
    if not alike:
        lowered = {other.lower(): other for other in names}
        alike = [lowered[close] for close in difflib.get_close_matches(name.lower(), list(lowered), _NEAR)]
    if alike:
        return f"{missing} did you mean {' or '.join(map(repr, alike))}?"
    return f"{missing} the classes are {', '.join(map(repr, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''}"
