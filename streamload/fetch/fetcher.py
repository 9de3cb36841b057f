"""The fetcher: fetches the parts of remote and compressed shards in the order of need, within the byte budget."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from streamload.errors import DatasetIndexError, StorageError, without_secrets
from streamload.fetch.budget import budget_error, budget_for
from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import DiskCache, ShardIdentity
from streamload.fetch.compressed import BESIDE_BYTES, Decompression, fetch_pieces, read_file
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.parts import PART_BYTES, part_edges, part_key, shard_and_number
from streamload.fetch.resident import OpenShard, open_listed
from streamload.fetch.transfers import Source, TransferCounts, Transfers
from streamload.fetch.window import PartWindow, raise_first
from streamload.index.dataset import Dataset
from streamload.limits import DECOMPRESSED_AT_ONCE, FETCHED_SHARDS_SHARE, MOST_REQUESTS, SMALL_REQUESTS
from streamload.memory.unnamed import descriptor_limit
from streamload.storage.storages import Storages
from streamload.tar.decompression import Compression, compression_of

_Done = TypeVar("_Done")
_log = logging.getLogger("streamload")

# Parts that have come and are not written yet; more are not fetched before, which bounds what a slow disk holds up.
_MOST_UNWRITTEN = 4
# Cached files that are compared with their checksums at the same time; the threads do the disk's other work too.
_COMPARED_AT_ONCE = 2


class Fetcher:
    """Fetches parts of the shards that workers cannot open by themselves, and the tables of remote indexes.

    Its users request parts of its window, and are notified. Work is started by `pump` alone, in one running loop.

    Args:
        tables: of the shards.
        fetched: the numbers of those that are fetched.
        storages: where they lie.
        budget_bytes: for parts.
        wake: called when something has come or failed, or there is something to pump.
        cache: shards on the disk.
        most_requests: how many may be in flight.

    Attributes:
        compressed: the fetched shards that are compressed: each has a single part.
        window: which parts are present or in flight.
        transfers: the requests for parts.
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
        self._listing = tables.listing
        self.fetched = fetched
        self.compressed = frozenset(each for each in fetched if compression_of(tables.url(each)) is not None)
        self.window = PartWindow(budget_bytes)
        self.transfers = Transfers(wake, retries=storages.retries, most=most_requests)
        self._storages = storages
        self._wake = wake
        self._cache = cache
        self._lacking: tuple[int, int] | None = None  # the next part and its bytes, if there is no room for it
        self._most_open = max(1, descriptor_limit() // FETCHED_SHARDS_SHARE)
        self._shards: dict[int, FetchedShard] = {}
        self._open: dict[int, None] = {}
        # These stay open as long as some of them is there, since the next epoch may use that.
        self._finished: set[int] = set()
        self._closed: set[int] = set()
        self._on_arrival: list[Callable[[int, int], None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lookups: dict[FetchedShard, asyncio.Task[CacheFile | None]] = {}
        self._without_version: set[str] = set()
        self._comparing = asyncio.Semaphore(_COMPARED_AT_ONCE)
        self._unwritten = 0
        self._decompressions: list[Decompression] = []
        self._largest_bytes = 0
        # One thread each: the kernel clears pages no faster for several, and a file's parts are written in order.
        self._allocator = ThreadPoolExecutor(1, "streamload-allocate")
        self._writer = ThreadPoolExecutor(1, "streamload-cache")
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._tables_at_once = asyncio.Semaphore(SMALL_REQUESTS)
        self._table_errors: dict[int, Exception] = {}

    # -- what is needed --------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Note that the window has changed: something may have to be fetched, or to be freed."""
        self._lacking = None
        if self.window.waiting or self.window.free or self._waiting():
            self._wake()

    def try_again(self) -> None:
        """Retry what has failed, if it is still needed."""
        self._table_errors.clear()
        self.window.try_again()
        self.notify()

    def below_watermark(self) -> bool:
        """Return True if more could be fetched at once than is needed."""
        return self.window.waiting < max(self.transfers.most, len(self.transfers.running))

    def begin_epoch(self, on_arrival: Callable[[int, int], None]) -> None:
        """Call a function with the shard and the key of each part that comes, until `end_epoch`."""
        self._on_arrival.append(on_arrival)

    def end_epoch(self, on_arrival: Callable[[int, int], None]) -> None:
        """Undo `begin_epoch`, or do nothing."""
        if on_arrival in self._on_arrival:
            self._on_arrival.remove(on_arrival)

    def finish(self, shards: Iterable[int]) -> None:
        """Close shards that are not needed soon when their last part is dropped.

        If half of a shard or more is in its file of the disk cache, the rest is fetched for later epochs.
        """
        for shard in shards:
            if shard not in self._open:
                continue
            self._finished.add(shard)
            state = self._shards[shard]
            missing = () if state.file is None else tuple(state.file.missing)
            if state.file is not None and 2 * len(missing) <= state.file.n_parts:
                for key in {part_key(shard, number) for number in missing} - state.completing:
                    state.completing.add(key)
                    self.window.request(key, scan=None)
                self.notify()
            self._close_if_unused(shard)

    # -- tables of remote indexes ----------------------------------------------------------------------------------

    def has_tables(self, shards: Collection[int]) -> bool:
        """Return True if the tables of some shards are at hand; if not, load them, in this order.

        None of them is dropped before this is called for others.

        Raises:
            DatasetIndexError, StorageError: one of them cannot be loaded.
        """
        missing = self._tables.hold(self._tables.with_sidecars(shards))
        raise_first(self._table_errors, missing)
        self.want_tables(shards)
        return not missing

    def want_tables(self, shards: Iterable[int]) -> None:
        """Load tables that will be needed."""
        for shard in self._tables.with_sidecars(shards):
            if shard not in self._loading and shard not in self._table_errors and self._tables.needs_read(shard):
                self._loading[shard] = self._start(self._load_table(shard), partial(self._loaded, shard))

    def loading_now(self) -> str:
        """Return in words which table is being loaded; empty if none is."""
        shard = next(iter(self._loading), None)
        return "" if shard is None else f"the index: where samples lie in {without_secrets(self._tables.url(shard))!r}"

    async def _load_table(self, shard: int) -> None:
        async with self._tables_at_once:
            if self._tables.needs_read(shard):  # else it came with another
                await self._tables.fetch(shard)

    def _loaded(self, shard: int, result: Exception | None) -> None:
        """Record what was raised, our own mistakes too, for `has_tables`."""
        del self._loading[shard]
        if result is not None:
            self._table_errors[shard] = result

    # -- what is there ---------------------------------------------------------------------------------------------

    def state_of(self, shard: int) -> FetchedShard:
        """Return a shard."""
        state = self._shards.get(shard)
        if state is None:
            url, pin = self._tables.url(shard), self._listing.pin(shard)
            total_bytes = None if shard in self.compressed else pin.total_bytes
            state = self._shards[shard] = FetchedShard(shard, url, pin, compression_of(url), total_bytes)
        return state

    def open(self, shard: int) -> OpenShard:
        """Return the memory of a shard that has a part there."""
        state = self.state_of(shard)
        return OpenShard(state.url, state.size_bytes, state.descriptor())

    def version(self, shard: int) -> tuple[int, int]:
        """Return a value that changes with every memory that a shard gets, and with its size."""
        state = self.state_of(shard)
        return state.generation, state.size_bytes

    def arrived_from(self, shard: int, start: int) -> tuple[int, int | None]:
        """Return the end of what is there without a gap from a place on, and the shard's size if it is known."""
        number, total_bytes = start // PART_BYTES, self.state_of(shard).total_bytes
        if shard in self.compressed:
            is_present = total_bytes is not None and self.window.is_present(part_key(shard, 0))
            return (total_bytes or 0, total_bytes) if is_present else (0, None)
        while self.window.is_present(part_key(shard, number)):
            number += 1
        end = number * PART_BYTES
        return end if total_bytes is None else min(end, total_bytes), total_bytes

    def keys_between(self, shard: int, start: int, end: int) -> list[int]:
        """Return the keys of the parts that hold some bytes of a shard."""
        if shard in self.compressed:
            return [part_key(shard, 0)]
        return [part_key(shard, number) for number in range(start // PART_BYTES, -(-end // PART_BYTES))]

    @property
    def lacks_room(self) -> bool:
        """Whether what is needed next waits for room in the budget."""
        return self._lacking is not None or bool(self._waiting())

    @property
    def used_bytes(self) -> int:
        """What counts against the budget now: parts and decompression."""
        return self.window.used_bytes + self._beside_bytes()

    @property
    def counts(self) -> TransferCounts:
        """What has happened to requests so far."""
        return self.transfers.counts

    def take_closed(self) -> list[int]:
        """Return the shards whose memory was closed since the last call, and that have no other one now."""
        closed = sorted(self._closed - self._open.keys())
        self._closed.clear()
        return closed

    # -- work ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Start all that there is room for."""
        for free in self.window.free:
            self._drop(free)
        self._lacking = None
        for job in self._waiting():
            if not job.cancelled:  # the growth of one before may have stopped it
                self._grow(job)
        while (key := self.window.next_missing()) is not None:
            if not self._fetch(key):
                return

    def _fetch(self, key: int) -> bool:
        """Start fetching the part that is needed next; return False if it has to wait."""
        shard, number = shard_and_number(key)
        state = self.state_of(shard)
        start, end = part_edges(number, state.total_bytes)
        if start >= end:
            self._failed(state, number, DatasetIndexError("the index points behind the end", url=state.url))
            return True
        if state.compression is not None:
            running = self._running()
            beside_bytes = BESIDE_BYTES + self._largest_bytes if running else 0  # so that one does not stop another
            if len(running) >= DECOMPRESSED_AT_ONCE or not self._admit(key, end - start, beside_bytes):
                return False
            self._decompress(state, state.compression)
        elif self._cache is not None and not state.looked_up:
            begins = state not in self._lookups
            if (begins and len(self._lookups) >= SMALL_REQUESTS) or not self._admit(key, 0):
                return False
            if begins:
                self._lookups[state] = self._start(self._open_cached(state), partial(self._looked_up, state))
        elif state.file is not None and number not in state.file.missing:
            if not self._admit(key, 0):
                return False
            self._arrived(state, number, 0)
        else:
            has_place = self.transfers.room() > 0 and self._unwritten < _MOST_UNWRITTEN
            if not has_place or not self._admit(key, end - start if state.file is None else 0):
                return False
            self._download(state, number, start, end)
        return True

    def _admit(self, key: int, size_bytes: int, beside_bytes: int = 0) -> bool:
        """Make room for a part and count it; return False if there is no room."""
        shard = shard_and_number(key)[0]
        if not self._make_room(key, size_bytes + beside_bytes):
            self._lacking = key, size_bytes + beside_bytes
            return False
        self.window.admit(key, size_bytes)
        self._open[shard] = None
        if key not in self._shards[shard].completing:
            self._finished.discard(shard)
        return True

    @property
    def stalled(self) -> bool:
        """Whether what is needed next does not fit, and nothing is in flight whose arrival could change that."""
        waiting = dict.fromkeys([part_key(job.state.number, 0) for job in self._waiting()], PART_BYTES)
        needs = [*waiting.items(), *([] if self._lacking is None else [self._lacking])]
        is_ending = any(job.cancelled for job in self._running())  # and releases what it has held
        if not needs or is_ending or self.window.in_flight() - waiting.keys():
            return False
        return not any(self._has_room(*need) for need in needs)

    def unkeep(self) -> bool:
        """Drop what is kept for the rows of scans; return True if that may make room."""
        unkept = self.window.unkeep_all()
        if unkept:
            self.notify()
        return unkept

    def too_small(self, enough_bytes: int, *, counting: bool, expands: bool = False) -> StorageError:
        """Make the error for a budget within which nothing goes on.

        Args:
            enough_bytes: a budget that holds the shuffle's window, as far as shards are known.
            counting: `len()` waits.
            expands: fields are read that may expand.
        """
        key, missing_bytes = self._lacking or (0, 0)
        for job in self._waiting()[:1]:
            key, missing_bytes = part_key(job.state.number, 0), job.missing_bytes()
        shard = shard_and_number(key)[0]
        if self._to_close(shard) is None:
            limit = descriptor_limit()
            return StorageError(
                f"more than {self._most_open} shards are needed at once, because samples in them are yet to be drawn "
                f"within the shuffle window, and this process may have only {limit} files open. Raise that limit "
                f"(`ulimit -n {FETCHED_SHARDS_SHARE * limit}`, before the program is started), give a smaller window "
                "(shuffle=N), or pack fewer and larger shards"
            )
        needs = missing_bytes, self.window.bytes_kept_from_next(), self._beside_bytes()
        budget_bytes = budget_for(self.window.budget_bytes, expands=expands)
        helps = shard not in self.compressed
        return budget_error(budget_bytes, enough_bytes, *needs, counting=counting, expands=expands, cache_helps=helps)

    async def close(self) -> None:
        """Stop everything, write what has come, and release all memory. Idempotent."""
        self._wake = lambda: None
        for job in self._running():
            job.cancel()
        for task in (*self._lookups.values(), *self._loading.values()):
            task.cancel()
        await self.transfers.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.shutdown()
        self._allocator.shutdown(cancel_futures=True)
        for state in self._shards.values():
            state.release()
        self._open.clear()
        await self._storages.aclose()

    def _start(
        self, work: Coroutine[Any, Any, _Done], on_end: Callable[[_Done | Exception], None]
    ) -> asyncio.Task[_Done]:
        """Begin work; `on_end` gets its result or its error, unless it is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, on_end))
        return task

    def _ended(self, on_end: Callable[[_Done | Exception], None], task: asyncio.Task[_Done]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            on_end(error if isinstance(error, Exception) else task.result())
        self._wake()

    def _source(self, state: FetchedShard) -> Source:
        return Source(self._storages.for_url(state.url), state.url, state.pin)

    # -- room ------------------------------------------------------------------------------------------------------

    def _to_close(self, shard: int) -> list[int] | None:
        """Return what to `_release` so that a shard may be open; None if no shard can be closed."""
        if shard in self._open or len(self._open) < self._most_open:
            return []
        if self.window.shards_present < len(self._open):
            return [next(each for each in self._open if not self.window.parts_of(each))]
        evictable: Counter[int] = Counter()
        for key in self.window.evictable():
            other = shard_and_number(key)[0]
            evictable[other] += 1
            if evictable[other] == len(self.window.parts_of(other)):
                return [other]
        return None

    def _room_for(self, key: int, size_bytes: int) -> list[int] | None:
        return self.window.room_for(size_bytes, self._beside_bytes(), key) if size_bytes else []

    def _has_room(self, key: int, size_bytes: int) -> bool:
        """Return True if a part can come, in bytes and in open shards."""
        return self._to_close(shard_and_number(key)[0]) is not None and self._room_for(key, size_bytes) is not None

    def _make_room(self, key: int, size_bytes: int) -> bool:
        """Make room for a part, or for more of it; return False if that is not possible now."""
        while not self._has_room(key, size_bytes):
            in_flight = self.window.in_flight() if self.compressed else ()
            whole = [each for each in in_flight if shard_and_number(each)[0] in self.compressed]
            last = max(whole, key=self.window.turn_of, default=key)
            if self.window.turn_of(last) <= self.window.turn_of(key):
                return False
            self._forget(self.state_of(shard_and_number(last)[0]))  # begins again when its turn comes
            self._drop(last)
        for other in self._to_close(shard_and_number(key)[0]) or ():
            self._release(other)
        for each in self._room_for(key, size_bytes) or ():
            self._drop(each)
        return True

    def _drop(self, key: int) -> None:
        shard, number = shard_and_number(key)
        self._shards[shard].free(number)
        self.window.drop(key)
        self._close_if_unused(shard)

    def _close_if_unused(self, shard: int) -> None:
        if shard in self._finished and not self.window.uses(shard):
            self._release(shard)

    def _release(self, shard: int) -> None:
        """Close a shard; what is needed of it is fetched again."""
        state = self._shards[shard]
        for key in list(self.window.parts_of(shard)):
            self.window.drop(key)
        for key in state.completing:
            self.window.withdraw(key)
        state.completing.clear()
        self._forget(state)
        state.release()
        self._open.pop(shard, None)
        self._finished.discard(shard)
        self._closed.add(shard)

    def _forget(self, state: FetchedShard) -> None:
        """Stop the decompression of a shard whose memory is about to be closed, and close its file."""
        if state.file is not None:
            self._writer.submit(state.file.close)  # after what is being written
            state.file = None
        for job in self._running():
            if job.state is state:
                job.cancel()

    def _arrived(self, state: FetchedShard, number: int, size_bytes: int) -> None:
        """Note that a part is there, and how much memory it takes."""
        key = part_key(state.number, number)
        if key in self.window.parts_of(state.number):
            self.window.arrive(key, size_bytes)
            if key in state.completing:
                state.completing.discard(key)
                self.window.withdraw(key)
            for on_arrival in self._on_arrival:
                on_arrival(state.number, key)
            self._wake()

    def _failed(self, state: FetchedShard, number: int, error: Exception) -> None:
        """Note that a part cannot be fetched."""
        state.free(number)
        self.window.fail(part_key(state.number, number), error)
        self._close_if_unused(state.number)
        self._wake()

    # -- downloads -------------------------------------------------------------------------------------------------

    def _download(self, state: FetchedShard, number: int, start: int, end: int) -> None:
        """Fetch a part to the memory of its shard, or to its file in the disk cache."""
        generation, file, cache = state.generation, state.file, self._cache
        writes: list[Future[None]] = []

        def write(offset: int, data: bytes) -> None:
            if state.generation != generation:
                return  # what came before lies in the old memory
            if state.total_bytes is None:  # the first answer of all has begun
                state.total_bytes = state.pin.total_bytes
                self._wake()
            if file is None or cache is None:
                state.write(offset, data)
            else:
                writes.append(self._writer.submit(cache.write, file, offset, data))

        download = self.transfers.begin(self._source(state), start, end, write)
        allocation = None
        if file is None and state.total_bytes is not None:
            allocation = self._allocator.submit(state.ensure_memory().allocate, start, end)

        async def finish() -> int:
            try:
                size_bytes = await download - start
            finally:
                if allocation is not None and not allocation.cancel():
                    await asyncio.wrap_future(allocation)  # the pages may be freed from now on
            if file is None:
                return size_bytes
            await self._wait_for(writes)
            return 0

        def on_end(result: int | Exception) -> None:
            if state.generation != generation:
                return
            if isinstance(result, Exception):
                self._failed(state, number, result)
            else:
                state.total_bytes = state.pin.total_bytes
                self._arrived(state, number, result)

        self._start(finish(), on_end)

    async def _wait_for(self, writes: list[Future[None]]) -> None:
        """Wait until a part is in its file; go on without the disk cache if the disk refuses something."""
        assert self._cache is not None
        self._unwritten += 1
        try:
            for written in writes:
                await asyncio.wrap_future(written)
        except OSError as exc:
            self._cache.turn_off(exc)
            for shard in list(self._open):  # what was to be written is fetched to memory
                file = self._shards[shard].file
                if file is not None and not file.whole:
                    self._release(shard)
            self.notify()
        finally:
            self._unwritten -= 1

    # -- the disk cache --------------------------------------------------------------------------------------------

    def _looked_up(self, state: FetchedShard, result: CacheFile | Exception | None) -> None:
        """Take the file of a shard that was looked up in the disk cache, or what was raised."""
        del self._lookups[state]
        is_whole = isinstance(result, CacheFile) and result.whole
        if not isinstance(result, Exception):
            state.file, state.total_bytes, state.looked_up = result, state.pin.total_bytes, True
            if is_whole:
                self.counts.cached_bytes += state.total_bytes or 0
        for key in sorted(self.window.parts_of(state.number)):
            number = shard_and_number(key)[1]
            if isinstance(result, Exception):
                self._failed(state, number, result)
            elif is_whole:
                self._arrived(state, number, 0)
            else:
                self.window.drop(key)

    async def _open_cached(self, state: FetchedShard) -> CacheFile | None:
        """Open a shard's file in the disk cache, whole or to be filled, which the caller closes.

        None if there is no cache, or it does not take the shard. A shard is not cached if its storage states neither an
        ETag nor a date: a later run could not tell that it was rewritten.
        """
        cache, url, pin = self._cache, state.url, state.pin
        if cache is None or url in self._without_version:
            return None
        if pin.total_bytes is None or pin.etag is None:
            # By the first byte, since some urls are signed for reading only.
            await self.transfers.read(self._source(state), 0, 1)
        if pin.etag is None or pin.total_bytes is None:
            if not self._without_version:
                _log.warning(
                    "%s is not kept in cache_dir, nor is any other shard of which the storage states no ETag and no "
                    "date: a rewritten one would not be noticed. To keep them, copy the shards to a local folder",
                    without_secrets(url),
                )
            self._without_version.add(url)
            return None
        identity = ShardIdentity(url, pin.etag, pin.total_bytes)
        async with self._comparing:
            return await _on_thread(partial(cache.open, identity), _close)

    # -- compressed shards -----------------------------------------------------------------------------------------

    def _running(self) -> list[Decompression]:
        """The decompressions that have not ended, cancelled ones too: these still hold memory."""
        self._decompressions = [job for job in self._decompressions if not job.task.done()]
        return self._decompressions

    def _waiting(self) -> list[Decompression]:
        """The decompressions that wait for room, those needed first."""
        waiting = [job for job in self._running() if job.waits and not job.cancelled]
        return sorted(waiting, key=lambda job: self.window.turn_of(part_key(job.state.number, 0)))

    def _beside_bytes(self) -> int:
        """What fetching takes besides the parts."""
        return BESIDE_BYTES * len(self._running())

    def _grow(self, job: Decompression) -> bool:
        """Make room for a part more of a shard that is being decompressed; return False if there is none."""
        key = part_key(job.state.number, 0)
        if not self._make_room(key, PART_BYTES):
            self._wake()  # nothing may be left that makes room
            return False
        self.window.grow(key, PART_BYTES)
        job.add_room()
        return True

    def _decompress(self, state: FetchedShard, compression: Compression) -> None:
        """Fetch a compressed shard, and decompress it to its memory as it comes."""
        job = Decompression(state, compression, self._grow)

        async def work() -> int:
            async with aclosing(self._body(state)) as body:
                return await job.run(body)

        def on_end(result: int | Exception) -> None:
            if job.cancelled:
                return
            if isinstance(result, Exception):
                self._failed(state, 0, result)
            else:
                state.total_bytes = result
                self._largest_bytes = max(self._largest_bytes, result)
                self._arrived(state, 0, result)

        job.task = self._start(work(), on_end)
        self._decompressions.append(job)

    async def _body(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        """Yield the bytes of a compressed shard: of a remote one from the disk cache, or into it."""
        if self._storages.is_local(state.url):
            with open(open_listed(self._listing.shard(state.number)), "rb") as local:
                async for piece in read_file(local.fileno()):
                    yield piece
            return
        file = await self._open_cached(state)
        is_whole = file is not None and file.whole
        try:
            source, position = self._source(state), 0
            pieces = read_file(file.descriptor, state.pin.total_bytes or 0) if file is not None and is_whole else None
            async with aclosing(pieces or fetch_pieces(self.transfers, source)) as body:
                async for piece in body:
                    if file is not None and file.missing:
                        file = await self._keep(file, position, piece)
                    yield piece
                    position += len(piece)
        except OSError as exc:
            if self._cache is None:
                raise
            self._cache.turn_off(exc)
            what = f"the disk cache cannot be read ({exc.strerror}); it is not used any more, so iterate again to go on"
            raise StorageError(what, url=state.url, offset=position) from exc
        finally:
            _close(file)

    async def _keep(self, file: CacheFile, offset: int, piece: bytes) -> CacheFile | None:
        """Write bytes of a compressed shard to the disk cache; close the file if the disk refuses, and return None."""
        assert self._cache is not None
        try:
            await _on_thread(partial(self._cache.write, file, offset, piece))
        except OSError as exc:
            self._cache.turn_off(exc)
            file.close()
            return None
        return file


async def _on_thread(work: Callable[[], _Done], undo: Callable[[_Done], object] = lambda _: None) -> _Done:
    """Run in a thread. On cancellation, wait for the thread and roll back."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait((working,))
        except asyncio.CancelledError as exc:  # not passed on to the thread, which would work for nobody
            cancelled = exc
    done = working.result()
    if cancelled is None:
        return done
    undo(done)
    raise cancelled


def _close(file: CacheFile | None) -> None:
    if file is not None:
        file.close()
