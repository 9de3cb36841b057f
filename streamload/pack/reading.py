"""Reading whole shards, several at once, into tables; and comparing tables."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError, ShardFormatError, StorageError, StreamloadError
from streamload.index.listing import IndexLookup, Listing
from streamload.index.streamed_table import ReadShard, stream_shard
from streamload.pack.failures import UsageError
from streamload.pack.ray_pool import RayPool
from streamload.sampling.selection import Selection
from streamload.storage.local_storage import storage_for
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of
from streamload.tar.header_chain import RECORD_BYTES
from streamload.tar.scan import scan_file
from streamload.tar.table import ShardTable
from streamload.trainer.feeder_client import FeederClient, listing_places

_Result = TypeVar("_Result")


class _StoppedError(Exception):
    """Another shard failed, or the user interrupted."""


class Reader:
    """Reads whole shards on threads, or on the nodes of a Ray cluster.

    Args:
        storages: storages of the shards.
        workers: how many shards to read at once on threads.
        pool: does it on the nodes of a cluster instead.
        record_bytes: as for `scan_shard`.

    Attributes:
        storages: as given.
        workers: as given.
    """

    def __init__(
        self, storages: Storages, workers: int = 1, pool: RayPool | None = None, record_bytes: int = RECORD_BYTES
    ) -> None:
        self.storages = storages
        self.workers = workers
        self._pool = pool
        self._record_bytes = record_bytes
        self._advance: Callable[[int, int], None] = lambda *_: None
        self._stopped = threading.Event()
        self._counting = threading.Lock()

    def each(
        self, urls: Sequence[str], act: Callable[[Reader, str], _Result], advance: Callable[[int, int], None]
    ) -> Iterator[tuple[str, _Result]]:
        """Call a function for each shard, several at once; the results are in the order of the shards.

        An exception of `act`, or an interruption, stops all reads. No thread or task is left at the end.

        Args:
            urls: the shards.
            act: called on a thread, or picklable and called on a node; it may call `read` of the reader that it gets.
            advance: called with numbers of shards and bytes as they are read.
        """
        if self._pool is not None:
            calls = (partial(_acted_on_a_node, self.storages, self._record_bytes, act, url) for url in urls)
            yield from zip(urls, self._pool.results(calls, advance), strict=True)
            return
        self._advance = advance
        with ThreadPoolExecutor(min(self.workers, max(1, len(urls))), "streamload-reading") as threads:
            futures = deque(threads.submit(self._one, act, url) for url in urls)
            try:
                for url in urls:
                    yield url, futures.popleft().result()  # popped, so that results are not kept
            finally:
                self._stopped.set()
                threads.shutdown(wait=True, cancel_futures=True)

    def read(self, url: str, *, every_byte: bool = True, labels: bool = False) -> ReadShard:
        """Read one shard strictly, on the calling thread.

        Args:
            url: the shard.
            every_byte: also compute the members' crc32 and the labels.
            labels: also read the labels; of a local uncompressed shard, only these and the headers are read.

        Raises:
            StorageError: it cannot be read.
            ShardFormatError: it is damaged.
        """
        local = self.storages.is_local(url)
        mtime_ns = storage_for(url).info(url).mtime_ns if local else None
        if local and compression_of(url) is None:
            table = scanned_table(url, every_byte=every_byte, labels=labels, record_bytes=self._record_bytes)
            self._count(0, table.shard_bytes)
            return ReadShard(table.shard_bytes, mtime_ns, None, table)
        return asyncio.run(self._stream(url, every_byte or labels))._replace(mtime_ns=mtime_ns)

    async def _stream(self, url: str, every_byte: bool) -> ReadShard:
        # Storages of its own, since connections belong to the loop that opened them.
        storages = self.storages.copy()
        try:
            return await stream_shard(
                storages.for_url(url),
                url,
                every_byte=every_byte,
                record_bytes=self._record_bytes,
                on_bytes=self._on_bytes,
            )
        finally:
            await storages.aclose()

    def _one(self, act: Callable[[Reader, str], _Result], url: str) -> _Result:
        if self._stopped.is_set():
            raise _StoppedError
        result = act(self, url)
        self._count(1, 0)
        return result

    def _on_bytes(self, count: int) -> None:
        if self._stopped.is_set():
            raise _StoppedError
        self._count(0, count)

    def _count(self, shards: int, count_bytes: int) -> None:
        with self._counting:
            self._advance(shards, count_bytes)


def _acted_on_a_node(
    storages: Storages,
    record_bytes: int,
    act: Callable[[Reader, str], _Result],
    url: str,
    report: Callable[[int, int], None],
) -> _Result:
    ((_, result),) = Reader(storages, record_bytes=record_bytes).each([url], act, report)
    return result


def scanned_table(
    url: str, *, every_byte: bool = False, labels: bool = False, record_bytes: int = RECORD_BYTES
) -> ShardTable:
    """Scan a local uncompressed shard strictly.

    Args:
        url: the shard.
        every_byte: also compute the members' crc32 and the labels, by reading all of it.
        labels: also read the labels.
        record_bytes: as for `scan_shard`.

    Raises:
        StorageError: it cannot be opened.
        ShardFormatError: it is damaged.
    """
    descriptor = storage_for(url).open(url)
    try:
        size_bytes = os.fstat(descriptor).st_size
        labels = every_byte or labels
        return scan_file(descriptor, size_bytes, url, crc32=every_byte, labels=labels, record_bytes=record_bytes)
    except OSError as exc:
        raise StorageError(f"the shard cannot be read ({exc.strerror}); check the disk", url=url) from exc
    finally:
        os.close(descriptor)


def tables(
    listing: Listing,
    lookup: IndexLookup,
    reader: Reader,
    *,
    labels: bool = False,
    where: str | None = None,
    advance: Callable[[int, int], None] = lambda *_: None,
) -> Iterator[tuple[int, ShardTable]]:
    """The size in bytes and the table of each shard of a listing, from its index or, without one, by reading it.

    Args:
        listing: the shards.
        lookup: finds the indexes.
        reader: reads shards without an index.
        labels: also read the labels of these.
        where: a condition: then tables have the samples that meet it alone.
        advance: called with numbers of shards and bytes as they are read.
    """
    selected = None if where is None else _selected(where, listing, reader.storages)
    shards = {shard.url: shard for shard in listing.shards}
    pairs = [(shard, shard.index_folder) for shard in listing.shards]

    def known(_: Reader, url: str) -> ShardTable | None:
        return lookup.table_of(shards[url].folder, shards[url].name)

    from_index = Reader(reader.storages, reader.workers).each([s.url for s, index in pairs if index], known, advance)
    from_shard = reader.each([s.url for s, index in pairs if not index], partial(_headers, labels), advance)
    start = 0
    for shard, index in pairs:
        if index:
            (_, table), shard_bytes = next(from_index), shard.bytes
        else:
            _, (table, shard_bytes) = next(from_shard)
        assert table is not None
        end = start + len(table)
        yield shard_bytes, table if selected is None else table.only(np.flatnonzero(selected[start:end]))
        start = end


def _headers(labels: bool, reader: Reader, url: str) -> tuple[ShardTable, int]:
    read = reader.read(url, every_byte=False, labels=labels)
    return read.table, read.bytes


def _selected(where: str, listing: Listing, storages: Storages) -> NDArray[np.bool_]:
    """Which samples of a listing meet a condition, bool[N]. Raises UsageError for one that makes no sense."""
    with closing(FeederClient(storages, listing_places(listing))) as client:
        try:
            return client.select(Selection(where), listing)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from None


def differences(url: str, table: ShardTable, known: ShardTable) -> Iterator[StreamloadError]:
    """The differences between a shard's own table and the one in the index."""
    rebuild = "restore the shard, or rebuild the index with `streamload index` if the shard is right"
    same_places = (
        table.fields == known.fields
        and np.array_equal(table.member_offset, known.member_offset)
        and np.array_equal(table.member_size, known.member_size)
        and np.array_equal(table.member_field, known.member_field)
        and np.array_equal(table.sample_start, known.sample_start)
        and np.array_equal(table.key_bytes, known.key_bytes)
        and np.array_equal(table.key_start, known.key_start)
    )
    if not same_places:
        yield DatasetIndexError(f"the index lists other samples than the shard contains; {rebuild}", url=url)
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
        yield DatasetIndexError(f"the index has other labels than the shard; {rebuild}", url=url)
