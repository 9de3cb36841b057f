"""Fetch the parts of remote and compressed shards in the order of need, within the byte budget.

`Fetcher` decides which parts to fetch, and `Transfers` runs its requests. `RangeReader` reads single ranges, without a
budget.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import NamedTuple

from streamload.errors import DatasetIndexError, StorageError, without_secrets
from streamload.fetch.budget import budget_for, requests_bytes, shown_bytes
from streamload.fetch.disk_cache import CacheFile, DiskCache, ShardIdentity
from streamload.fetch.resident import open_listed
from streamload.fetch.window import LAST, PART_BYTES, PartWindow, part_edges, part_key, raise_first, shard_and_number
from streamload.index.dataset import Dataset
from streamload.index.listing import Listing
from streamload.limits import DECOMPRESSED_AT_ONCE, FETCHED_SHARDS_SHARE, FIRST_REQUESTS, MOST_REQUESTS, SMALL_REQUESTS
from streamload.memory.unnamed import descriptor_limit, new_memory, write_fully
from streamload.storage.download import Pin, RequestCounts, Retries, download, read_range
from streamload.storage.protocol import Storage
from streamload.storage.storages import Storages
from streamload.tar.decompression import Compression, Decompressor, compression_of, decompress
from streamload.tar.scan import ShardTable
from streamload.totals import Event, TimeIntegral

# The size of the requests for a compressed shard, and how many of them are in flight ahead of the decompression.
_PIECE_BYTES = 2 << 20
_PIECES_AHEAD = 3
# Approximate memory that a decompression needs besides its part.
_BESIDE_BYTES = (_PIECES_AHEAD + 2) * _PIECE_BYTES
# Maximum number of files of the disk cache that are verified at the same time.
_VERIFIED_AT_ONCE = 2
# The first size of a shard's memory, if its final size is unknown.
_FIRST_BYTES = 64 << 20
# The largest gap between two ranges that are read with one request.
_GAP_BYTES = 128 << 10


class Fetcher:
    """Fetch the shards that workers cannot open by themselves, part by part.

    A caller states its needs in `window`, and then calls `notify`. Only `pump` begins to fetch parts, in one running
    event loop.

    Args:
        tables: the index tables of the shards.
        fetched: the numbers of the shards to fetch.
        storages: the storages of the shards' URLs.
        budget_bytes: maximum bytes of all parts together.
        wake: called when a part or a table arrives or fails, or `pump` has work.
        cache: the disk cache, if any.
        most_requests: maximum number of uncompressed parts in flight. The limit begins lower, because requests share
            the bandwidth and the first batch needs the first parts; each part that arrives raises it by one.

    Attributes:
        compressed: the shards of `fetched` that are compressed, each with a single part.
        window: the parts that are present, in flight or needed.
        transfers: the requests for parts.
        index_tables: loads the tables of remote indexes.
        lacking: a part that waits for room, and the bytes that it needs; None if no part waits.
    """

    def __init__(
        self,
        tables: Dataset,
        fetched: frozenset[int],
        storages: Storages,
        *,
        budget_bytes: int,
        wake: Callable[[], None],
        cache: DiskCache | None = None,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        self._tables = tables
        self.fetched = fetched
        self.compressed = frozenset(each for each in fetched if compression_of(tables.url(each)) is not None)
        self.window = PartWindow(budget_bytes)
        self.transfers = Transfers(storages.retries)
        self.index_tables = TableLoader(tables, wake)
        self.lacking: tuple[int, int] | None = None
        self._storages = storages
        self._wake = wake
        self._cache = cache
        self.most_requests = most_requests
        self._requests_now = min(FIRST_REQUESTS, most_requests)
        self._most_open = max(1, descriptor_limit() // FETCHED_SHARDS_SHARE)
        self._shards: dict[int, FetchedShard] = {}
        # Open shards, with True if finished. A finished shard stays open while it has parts, which a new epoch may use.
        self._open: dict[int, bool] = {}
        self._closed: set[int] = set()
        self._tasks: dict[asyncio.Task[int], FetchedShard] = {}
        self._decompressions: dict[int, _Decompression] = {}
        self._largest_bytes = 0
        # One thread allocates: several would clear pages no faster. One thread writes: writes must keep their order.
        self._allocator = ThreadPoolExecutor(1, "streamload-allocate")
        self._writer = ThreadPoolExecutor(1, "streamload-cache")
        self._opener = ThreadPoolExecutor(_VERIFIED_AT_ONCE, "streamload-verify")

    # -- needs -----------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Call `wake` after a change of the window, if parts must be fetched or freed, or decompressions run."""
        self.lacking = None
        if self.window.missing.ranks or self.window.free or self._decompressions:
            self._wake()

    def retry_failed(self) -> None:
        """Retry failed parts and tables that are still needed."""
        self.index_tables.errors.clear()
        self.window.retry_failed()
        self.notify()

    def finish(self, shards: Iterable[int]) -> None:
        """Close shards that are not needed soon, each as soon as its last part is dropped.

        If at least half of a shard is in the disk cache, the rest is fetched for later epochs.
        """
        for shard in [each for each in shards if each in self._open]:
            self._open[shard] = True
            file = self._shards[shard].file
            missing = () if file is None else tuple(file.missing)
            if file is not None and 2 * len(missing) <= file.n_parts:
                for number in missing:
                    self.window.request(part_key(shard, number), scan=None)
            self._close_if_unused(shard)
        self.notify()

    # -- contents --------------------------------------------------------------------------------------------------

    def state_of(self, shard: int) -> FetchedShard:
        """Return a shard's state, creating it if needed."""
        state = self._shards.get(shard)
        if state is None:
            url, pin = self._tables.url(shard), self._tables.listing.pin(shard)
            total_bytes = None if shard in self.compressed else pin.total_bytes
            state = self._shards[shard] = FetchedShard(shard, url, pin, compression_of(url), total_bytes)
        return state

    def arrived_from(self, shard: int, start: int) -> tuple[int, int | None]:
        """Return the end of the contiguous bytes present from `start` on, and the shard's size if known."""
        number, total_bytes = start // PART_BYTES, self.state_of(shard).total_bytes
        if shard in self.compressed:
            is_present = total_bytes is not None and part_key(shard, 0) in self.window.present
            return (total_bytes or 0, total_bytes) if is_present else (0, None)
        while part_key(shard, number) in self.window.present:
            number += 1
        end = number * PART_BYTES
        return end if total_bytes is None else min(end, total_bytes), total_bytes

    def keys_between(self, shard: int, start: int, end: int) -> list[int]:
        """Return the keys of the parts that overlap a range of a shard."""
        if shard in self.compressed:
            return [part_key(shard, 0)]
        return [part_key(shard, number) for number in range(start // PART_BYTES, -(-end // PART_BYTES))]

    def pop_closed(self) -> list[int]:
        """Return the shards that were closed since the last call and not reopened; workers must unmap them."""
        closed = sorted(self._closed - self._open.keys())
        self._closed.clear()
        return closed

    # -- work ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Start all work that there is room for."""
        for free_key in list(self.window.free):
            self._drop(free_key)
        self.lacking = None
        for job in sorted(self._decompressions.values(), key=lambda each: self.window.turn_of(each.key)):
            # A more urgent decompression may just have released this shard.
            if job.growing and job.state.number in self._decompressions and self._grow(job):
                job.growing.set_result(None)
                job.growing = None
        while (key := next(iter(self.window.missing), None)) is not None and self._begin(key):
            pass

    def stalled(self) -> bool:
        """Return True if a part does not fit, and everything in flight waits for room too."""
        waiting = {job.key for job in self._decompressions.values() if job.growing}
        return self.lacking is not None and self.window.sizes.keys() - self.window.present <= waiting

    def too_small(self, enough_bytes: int) -> StorageError:
        """Return the error that names the limit that stops the epoch, and a sufficient value.

        Args:
            enough_bytes: a memory_budget that would hold the shuffle window, estimated from the shards known so far.
        """
        key, missing_bytes = self.lacking or (0, 0)
        shard = shard_and_number(key)[0]
        if self._to_close(key) is None:
            limit = descriptor_limit()
            return StorageError(
                f"more than {self._most_open} shards are needed at once for the shuffle window, but this process may "
                f"have only {limit} files open. Raise that limit (`ulimit -n {FETCHED_SHARDS_SHARE * limit}`, before "
                "the program is started), give a smaller window (shuffle=N), or pack fewer and larger shards"
            )
        kept_bytes = self.window.used_bytes - sum(self.window.sizes[each] for each in self.window.evictable(key))
        budget_bytes = budget_for(self.window.budget_bytes)
        enough_bytes = max(enough_bytes, budget_for(missing_bytes + kept_bytes))
        # The disk cache would not help a compressed shard, which it stores compressed.
        cache = "" if shard in self.compressed else ", or a cache_dir on a disk with more room"
        return StorageError(
            f"memory_budget of {shown_bytes(budget_bytes)} is too small: {shown_bytes(missing_bytes)} more are needed "
            f"now, but {shown_bytes(kept_bytes)} are held for other samples of the batches or the shuffle window, and "
            f"{shown_bytes(requests_bytes(budget_bytes))} are reserved for requests. Give a memory_budget of at least "
            f"{shown_bytes(enough_bytes, math.ceil)}, a smaller window (shuffle=N), or a smaller batch_size{cache}"
        )

    async def close(self) -> None:
        """Cancel all work, finish writes, and release all memory. Idempotent."""
        lookups = [state.lookup for state in self._shards.values() if state.lookup is not None]
        tasks = [*self._tasks, *lookups, *self.index_tables.loading.values()]
        for task in tasks:
            task.cancel()
        await self.transfers.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        for threads in (self._opener, self._writer):
            threads.shutdown()
        self._allocator.shutdown(cancel_futures=True)
        for state in self._shards.values():
            state.release()
        self._open.clear()
        await self._storages.aclose()

    def _begin(self, key: int) -> bool:
        shard, number = shard_and_number(key)
        state = self.state_of(shard)
        if state.compression is not None:
            # While other decompressions run, require room for the largest so far, so that none displaces another.
            room_bytes = PART_BYTES + (_BESIDE_BYTES + self._largest_bytes if self._decompressions else 0)
            is_busy = len(self._decompressions) >= DECOMPRESSED_AT_ONCE
            if is_busy or not self._admit(key, PART_BYTES + _BESIDE_BYTES, room_bytes):
                return False
            job = _Decompression(state, key, Decompressor(state.compression, state.url))
            self._decompressions[shard] = job
            self._start(state, number, self._decompress(job))
            return True
        start, end = part_edges(number, state.total_bytes)
        size_bytes = 0 if state.file is not None and number not in state.file.missing else max(0, end - start)
        is_busy = len(self._tasks) - len(self._decompressions) >= self._requests_now
        if is_busy or not self._admit(key, size_bytes, size_bytes):
            return False
        self._start(state, number, self._fetch(state, number))
        return True

    def _admit(self, key: int, size_bytes: int, room_bytes: int) -> bool:
        """Make `room_bytes` free for a part and count `size_bytes` as in flight; return False if that fails."""
        if not self._make_room(key, room_bytes):
            self.lacking = self.lacking or (key, room_bytes)
            return False
        shard = shard_and_number(key)[0]
        self._open[shard] = self._open.get(shard, False) and self.window.turn_of(key) == LAST
        self.window.admit(key, size_bytes)
        return True

    def _start(self, state: FetchedShard, number: int, work: Coroutine[None, None, int]) -> None:
        """Run `work`, which fetches a part and returns its size in memory, and record the result."""
        key, generation = part_key(state.number, number), state.generation

        def on_end(task: asyncio.Task[int]) -> None:
            del self._tasks[task]
            error = None if task.cancelled() else task.exception()
            if not task.cancelled() and state.generation == generation:
                self._decompressions.pop(state.number, None)
                if isinstance(error, Exception):
                    state.free(number)
                    self.window.fail(key, error)
                    self._close_if_unused(state.number)
                else:
                    size_bytes = task.result()
                    state.total_bytes = state.pin.total_bytes if state.compression is None else size_bytes
                    if state.compression is not None:
                        self._largest_bytes = max(self._largest_bytes, size_bytes)
                    self.window.arrive(key, size_bytes)
                    self._requests_now = min(self._requests_now + 1, self.most_requests)
            self.lacking = None
            self._wake()

        task = asyncio.create_task(work)
        self._tasks[task] = state
        task.add_done_callback(on_end)

    # -- room ------------------------------------------------------------------------------------------------------

    def _to_close(self, key: int) -> list[int] | None:
        """Return the shards to close before a part's shard is opened; None if no shard can be closed."""
        if shard_and_number(key)[0] in self._open or len(self._open) < self._most_open:
            return []
        parts = self.window.of_shard
        if len(parts) < len(self._open):
            return [next(each for each in self._open if each not in parts)]
        evictable: Counter[int] = Counter()
        for each in self.window.evictable(key):
            other = shard_and_number(each)[0]
            evictable[other] += 1
            if evictable[other] == len(parts[other]):
                return [other]
        return None

    def _make_room(self, key: int, size_bytes: int) -> bool:
        """Evict parts of later turns, and stop decompressions of later turns, until a part fits.

        Return False if it cannot fit now.
        """
        turn = self.window.turn_of(key)
        while (others := self._to_close(key)) is None or self.window.room_for(key, size_bytes) is None:
            last = max((job.key for job in self._decompressions.values()), key=self.window.turn_of, default=key)
            if self.window.turn_of(last) <= turn:
                return False
            self._release(shard_and_number(last)[0])  # the decompression restarts at its turn
        for other in others:
            self._release(other)
        for each in self.window.room_for(key, size_bytes) or ():
            self._drop(each)
        return True

    def _drop(self, key: int) -> None:
        shard, number = shard_and_number(key)
        self._shards[shard].free(number)
        self.window.drop(key)
        self._close_if_unused(shard)

    def _close_if_unused(self, shard: int) -> None:
        if not self._open.get(shard) or shard in self.window.of_shard:
            return
        if all(shard_and_number(key)[0] != shard for key in self.window.missing.ranks):
            self._release(shard)

    def _release(self, shard: int) -> None:
        """Close a shard; parts that are still needed are fetched again."""
        state = self._shards[shard]
        self._decompressions.pop(shard, None)
        for task in [task for task, fetched in self._tasks.items() if fetched is state]:
            task.cancel()
        for key in list(self.window.of_shard.get(shard, ())):
            self.window.drop(key)
        if state.file is not None:
            for key in [part_key(shard, number) for number in tuple(state.file.missing)]:
                if self.window.turn_of(key) == LAST:
                    self.window.withdraw(key)
            self._writer.submit(state.file.close)  # after pending writes
            state.file = None
        state.release()
        self._open.pop(shard, None)
        self._closed.add(shard)

    # -- one part --------------------------------------------------------------------------------------------------

    async def _fetch(self, state: FetchedShard, number: int) -> int:
        """Fetch a part to its shard's memory, or to its file in the disk cache; return its size in memory."""
        if self._cache is not None:
            lookup = state.lookup = state.lookup or asyncio.create_task(self._look_up(state))
            await asyncio.wait((lookup,))
            lookup.result()
        start, end = part_edges(number, state.total_bytes)
        if start >= end:
            raise DatasetIndexError("the index points past the end of the shard", url=state.url)
        if state.file is not None:
            await self._fetch_to_file(state, state.file, number)
            return 0
        memory = state.ensure_memory()

        def write(offset: int, data: bytes) -> None:
            if state.total_bytes is None:  # the first response stated the size
                state.total_bytes = state.pin.total_bytes
                self._wake()
            memory.write(offset, data)

        download = self.transfers.begin(self._source(state), start, end, write)
        allocation: Future[None] | None = None
        if state.total_bytes is not None:
            allocation = self._allocator.submit(memory.allocate, start, end)
        try:
            return await download - start
        finally:
            if allocation is not None and not allocation.cancel():
                await asyncio.wrap_future(allocation)  # else it could allocate pages again after they are freed

    async def _fetch_to_file(self, state: FetchedShard, file: CacheFile, number: int) -> None:
        start, end = part_edges(number, state.total_bytes)
        if number not in file.missing:
            self.transfers.counts.cached_bytes += end - start
            return
        pieces: list[bytes] = []
        await self.transfers.begin(self._source(state), start, end, lambda _, piece: pieces.append(piece))
        if not await self._write(file, start, pieces):
            self._release(state.number)  # so that its parts are fetched to memory

    async def _write(self, file: CacheFile, offset: int, pieces: Iterable[bytes]) -> bool:
        assert self._cache is not None
        try:
            await asyncio.wrap_future(self._writer.submit(self._cache.write, file, offset, pieces))
        except OSError as exc:
            self._cache.turn_off(exc)
            return False
        return True

    def _source(self, state: FetchedShard) -> Source:
        return Source(self._storages.for_url(state.url), state.url, state.pin)

    # -- the disk cache --------------------------------------------------------------------------------------------

    async def _look_up(self, state: FetchedShard) -> None:
        try:
            state.file = await self._open_cached(state)
        except BaseException:
            state.lookup = None  # the next part tries again
            raise
        state.total_bytes = state.pin.total_bytes

    async def _open_cached(self, state: FetchedShard) -> CacheFile | None:
        """Open a shard's file in the disk cache; return None if there is no cache, or `DiskCache.open` returns None.

        A shard for which the storage states neither ETag nor date is not cached: a later run could not detect a
        rewrite.
        """
        cache, url, pin = self._cache, state.url, state.pin
        if cache is None:
            return None
        if pin.total_bytes is None or pin.etag is None:
            # Any response states them; a byte is read because some URLs are signed for GET only, not for HEAD.
            await self.transfers.read(self._source(state), 0, 1)
        if pin.etag is None or pin.total_bytes is None:
            cache.warn_once(
                "does not keep %s, nor any other shard for which the storage states neither ETag nor date: it could "
                "not detect a rewritten shard. Copy such shards to a local folder",
                without_secrets(url),
            )
            return None
        opening = self._opener.submit(cache.open, ShardIdentity(url, pin.etag, pin.total_bytes))
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise

    # -- compressed shards -----------------------------------------------------------------------------------------

    def _grow(self, job: _Decompression) -> bool:
        """Admit another `PART_BYTES` of a decompressed shard; return False if they do not fit."""
        key, done = job.key, job.decompressor
        if not self._make_room(key, PART_BYTES):
            # This assumes that the rest is compressed equally well.
            expected_bytes = done.decompressed_bytes * (job.state.pin.total_bytes or 0) // max(1, done.compressed_bytes)
            self.lacking = self.lacking or (key, max(PART_BYTES, expected_bytes - job.room_bytes))
            return False
        self.window.admit(key, PART_BYTES)
        job.room_bytes += PART_BYTES
        return True

    async def _decompress(self, job: _Decompression) -> int:
        """Fetch a compressed shard, decompress it to its memory as it arrives, and return its decompressed size."""
        memory = job.state.ensure_memory()

        async def write(offset: int, piece: bytes) -> None:
            while offset + len(piece) > job.room_bytes:
                if not self._grow(job):
                    job.growing = asyncio.get_running_loop().create_future()
                    self._wake()  # fails the epoch if nothing can make room
                    await job.growing
            memory.write(offset, piece)

        async with aclosing(self._compressed(job.state)) as body:
            return await decompress(body, job.decompressor, write)

    async def _compressed(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        """Yield a compressed shard's bytes from disk, or from the storage, filling any disk cache."""
        if not self._storages.costs_requests(state.url):
            with open(open_listed(self._tables.listing.shard(state.number)), "rb") as local:
                async for piece in _read_file(local.fileno()):
                    yield piece
            return
        file, offset = await self._open_cached(state), 0
        try:
            if file is not None and not file.missing:
                async for piece in _read_file(file.descriptor, state.pin.total_bytes or 0):
                    yield piece
                    offset += len(piece)
                return
            async with aclosing(self.transfers.read_all(self._source(state))) as body:
                async for piece in body:
                    if file is not None and file.missing and not await self._write(file, offset, (piece,)):
                        file.close()
                        file = None
                    yield piece
                    offset += len(piece)
        except OSError as exc:
            if self._cache is None:
                raise
            self._cache.turn_off(exc)
            message = f"the disk cache cannot be read ({exc.strerror}) and is off from now on; iterate again"
            raise StorageError(message, url=state.url, offset=offset) from exc
        finally:
            if file is not None:
                self._writer.submit(file.close)  # after pending writes


@dataclass(slots=True, eq=False)
class FetchedShard:
    """A shard to fetch, and its state.

    Attributes:
        number: the shard's number in the listing.
        pin: the version to read.
        compression: None for a plain shard. A compressed one is decompressed as a whole, into the single part 0.
        total_bytes: the shard's size, after any decompression; None while unknown.
        generation: how often the memory or the file was released.
        memory: receives the parts.
        file: receives the parts instead of `memory`, in the disk cache.
        lookup: the task that opens `file`.
    """

    number: int
    url: str
    pin: Pin
    compression: Compression | None
    total_bytes: int | None
    generation: int = 0
    memory: SparseMemory | None = None
    file: CacheFile | None = None
    lookup: asyncio.Task[None] | None = None

    @property
    def version(self) -> tuple[int, int]:
        """Return the generation and the number of mappable bytes; if either changes, workers need a new descriptor."""
        return self.generation, self.total_bytes or self.ensure_memory().size_bytes

    def ensure_memory(self) -> SparseMemory:
        """Return the memory, creating it if needed."""
        if self.memory is None:
            self.memory = SparseMemory(self.total_bytes)
        return self.memory

    def free(self, part: int) -> None:
        """Free a part's pages, if it lies in memory."""
        if self.memory is None:
            return
        if self.compression is not None:
            self.memory.free(0, self.memory.size_bytes)
        else:
            self.memory.free(*part_edges(part, self.total_bytes))

    def release(self) -> None:
        """Close the memory or the file."""
        self.generation += 1
        for each in (self.memory, self.file):
            if each is not None:
                each.close()
        self.memory = self.file = self.lookup = None


@dataclass(slots=True, eq=False)
class _Decompression:
    """A shard that is being decompressed to its memory.

    Attributes:
        key: the shard's single part.
        decompressor: counts the compressed and decompressed bytes.
        room_bytes: decompressed bytes that have been admitted.
        growing: done as soon as there is more room; None unless the decompression waits for it.
    """

    state: FetchedShard
    key: int
    decompressor: Decompressor
    room_bytes: int = PART_BYTES
    growing: asyncio.Future[None] | None = None


class SparseMemory:
    """Memory that is allocated only where written; other processes read it through a copied descriptor.

    Args:
        size_bytes: the final size; None if unknown, so that the memory grows with the writes.

    Attributes:
        descriptor: owned by this object; -1 once closed.
        size_bytes: the current size, which never shrinks.
    """

    def __init__(self, size_bytes: int | None) -> None:
        self.size_bytes = size_bytes or _FIRST_BYTES
        self.descriptor = new_memory(self.size_bytes)
        self._closing = Lock()

    def allocate(self, start: int, end: int) -> None:
        """Allocate the pages of a range, so that `write` only copies. Thread-safe; errors are left to `write`."""
        if hasattr(os, "posix_fallocate"):
            with suppress(OSError), self._closing:  # another file may get the descriptor's number after a close
                os.posix_fallocate(self.descriptor, start, end - start)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset. Raises OSError if memory is exhausted."""
        if offset + len(data) > self.size_bytes:
            self.size_bytes = max(offset + len(data), 2 * self.size_bytes)
            os.ftruncate(self.descriptor, self.size_bytes)
        write_fully(self.descriptor, data, offset)

    def free(self, start: int, end: int) -> None:
        """Free the pages of a range, on Linux. The range consists of whole pages, or ends with the memory."""
        end = min(end, self.size_bytes)
        if end > start and hasattr(mmap, "MADV_REMOVE"):
            with mmap.mmap(self.descriptor, self.size_bytes) as mapped:
                mapped.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Close the descriptor; copies keep the memory. Idempotent."""
        if self.descriptor < 0:
            return
        with self._closing:
            os.close(self.descriptor)
            self.descriptor = -1


class TableLoader:
    """Load the tables of remote indexes ahead of need; call `wake` when one arrives or fails."""

    def __init__(self, tables: Dataset, wake: Callable[[], None]) -> None:
        self.loading: dict[int, asyncio.Task[None]] = {}
        self.errors: dict[int, Exception] = {}
        self._tables = tables
        self._wake = wake
        self._at_once = asyncio.Semaphore(SMALL_REQUESTS)

    def has(self, shards: Collection[int]) -> bool:
        """Return True if the tables of all given shards are loaded; otherwise start loading them, in this order.

        Loaded tables stay at least until the next call.

        Raises:
            DatasetIndexError, StorageError: a table cannot be loaded.
        """
        missing = self._tables.hold(self._tables.with_sidecars(shards))
        raise_first(self.errors, missing)
        for shard in missing:
            if shard not in self.loading:
                self.loading[shard] = task = asyncio.create_task(self._load(shard))
                task.add_done_callback(partial(self._ended, shard))
        return not missing

    async def _load(self, shard: int) -> None:
        async with self._at_once:
            if self._tables.needs_read(shard):  # it may have been read together with another table
                await self._tables.fetch(shard)

    def _ended(self, shard: int, task: asyncio.Task[None]) -> None:
        """Record any error, even a bug of this library, for `has` to raise."""
        del self.loading[shard]
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.errors[shard] = error
        self._wake()


class Transfers:
    """Run and count concurrent downloads, in a running event loop, until `close`.

    Attributes:
        running: the downloads in flight, oldest first.
        counts: requests and bytes.
        in_flight: the number of downloads in flight, integrated over time.
        events: receives an event for each ended download; None without a trace.
    """

    def __init__(self, retries: Retries) -> None:
        self.running: dict[asyncio.Task[int], Download] = {}
        self.counts = TransferCounts()
        self.events: list[Event] | None = None
        self._retries = retries
        self._loop = asyncio.get_running_loop()
        self.in_flight = TimeIntegral(self._loop.time)

    def begin(self, source: Source, start: int, end: int, write: Callable[[int, bytes], None]) -> asyncio.Task[int]:
        """Start `download`, and return its task."""
        storage, url, pin = source
        running = Download(url, start, self._loop.time())

        def receive(offset: int, piece: bytes) -> None:
            self.counts.received_bytes += len(piece)
            running.received_bytes += len(piece)
            write(offset, piece)

        task = asyncio.create_task(
            download(storage, url, start, end, receive, pin=pin, retries=self._retries, counts=self.counts)
        )
        self.running[task] = running
        self.in_flight.set(len(self.running))
        task.add_done_callback(partial(self._ended, end - start))
        return task

    def _ended(self, part_bytes: int, task: asyncio.Task[int]) -> None:
        ended = self.running.pop(task)
        self.in_flight.set(len(self.running))
        if self.events is not None:
            details = {"url": ended.url, "start": ended.start, "bytes": part_bytes}
            seconds = self._loop.time() - ended.started_s
            self.events.append(Event("fetch", "connection", ended.started_s, seconds, details))

    async def read(self, source: Source, start: int, end: int) -> bytes:
        """Fetch a range, clipped to the shard. Raises what `download` raises."""
        content = bytearray()
        await self.begin(source, start, end, lambda _, piece: content.extend(piece))
        return bytes(content)

    async def read_all(self, source: Source) -> AsyncGenerator[bytes]:
        """Fetch a whole shard, a few requests ahead of the consumer. Raises what `download` raises."""
        ahead: deque[asyncio.Task[bytes]] = deque()
        start = 0
        try:
            while True:
                end = source.pin.total_bytes  # unknown until the first response, so a single request comes first
                while not ahead if end is None else len(ahead) <= _PIECES_AHEAD and start < end:
                    ahead.append(asyncio.create_task(self.read(source, start, start + _PIECE_BYTES)))
                    start += _PIECE_BYTES
                if not ahead:
                    return
                yield await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def close(self) -> None:
        """Cancel downloads in flight, and wait for them. Idempotent."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)


class Source(NamedTuple):
    """The source of a shard's bytes; all downloads of a shard share its pin."""

    storage: Storage
    url: str
    pin: Pin


@dataclass(slots=True)
class TransferCounts(RequestCounts):
    """Requests and bytes since the start.

    Attributes:
        received_bytes: all bytes, including those that arrived twice.
        cached_bytes: bytes of parts that were in the disk cache when needed.
    """

    received_bytes: int = 0
    cached_bytes: int = 0


@dataclass(slots=True)
class Download:
    """A download in flight; `started_s` is by the loop's clock."""

    url: str
    start: int
    started_s: float
    received_bytes: int = 0


async def _read_file(descriptor: int, end: int = sys.maxsize) -> AsyncGenerator[bytes]:
    offset = 0
    while data := await asyncio.to_thread(os.pread, descriptor, min(_PIECE_BYTES, end - offset), offset):
        yield data
        offset += len(data)


def _close_opened(opening: Future[CacheFile | None]) -> None:
    file = None if opening.cancelled() or opening.exception() else opening.result()
    if file is not None:
        file.close()


class RangeReader:
    """Read tables and ranges of a listing's shards on demand, with many concurrent requests."""

    def __init__(self, listing: Listing, storages: Storages) -> None:
        self._listing = listing
        self.storages = storages
        self._tables = Dataset(listing, storages)
        self._at_once = asyncio.Semaphore(SMALL_REQUESTS)
        self._pins: dict[int, Pin] = {}

    async def table(self, shard: int) -> ShardTable | None:
        """Return a shard's table; None if it is in no index. Raises what `Dataset.load` raises."""
        async with self._at_once:
            return await self._tables.load(shard)

    async def read(self, wanted: ByteRange) -> bytes:
        """Return the bytes of a range, clipped to the shard. Raises what `download` raises.

        All reads of a shard must find the listed version, or if the listing states none, the version of the first read.
        """
        shard, start, end = wanted
        url = self._listing.shard(shard).url
        pin = self._pins.setdefault(shard, self._listing.pin(shard))
        async with self._at_once:
            storage, retries = self.storages.for_url(url), self.storages.retries
            return await read_range(storage, url, start, end, pin=pin, retries=retries)


class ByteRange(NamedTuple):
    """The bytes `[start, end)` of a shard."""

    shard: int
    start: int
    end: int


def joined_ranges(places: Sequence[tuple[int, int, int]]) -> list[ByteRange]:
    """Return ranges that cover all places with few requests: neighbours are joined, up to the size of a part.

    Args:
        places: the shard, start and end of each, in any order; empty places are skipped.
    """
    joined: list[ByteRange] = []
    for shard, start, end in sorted(places):
        if start >= end:
            continue
        last = joined[-1] if joined else None
        if last is not None and last.shard == shard and start <= last.end + _GAP_BYTES:
            longer = max(last.end, end)
            if end <= last.end or longer - last.start <= PART_BYTES:
                joined[-1] = ByteRange(shard, last.start, longer)
                continue
        joined.append(ByteRange(shard, start, end))
    return joined
