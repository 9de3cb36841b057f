"""Fetching single parts, by a download or from the disk cache, and whole compressed shards."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from streamload.errors import StreamloadError
from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import CacheOpenings, DiskCache, on_thread
from streamload.fetch.fetched_shard import Decompression, FetchedShard
from streamload.fetch.parts import part_edges
from streamload.fetch.transfers import Part, Source, TransferCounts, Transfers, Waiting
from streamload.limits import DECOMPRESSED_AT_ONCE, MOST_REQUESTS, SMALL_REQUESTS
from streamload.storage.download import Downloaded
from streamload.storage.storages import Storages
from streamload.tar.decompression import Compression, Decompressor

if TYPE_CHECKING:
    from streamload.fetch.fetcher import Fetcher

_PIECE_BYTES = 2 << 20
_PIECES_AHEAD = 3
# About how much memory a shard takes besides its part while it is decompressed.
_HELD_BYTES = (_PIECES_AHEAD + 2) * _PIECE_BYTES


async def _file_body(descriptor: int, end: int | None = None) -> AsyncIterator[bytes]:
    """What is in a file, which stays the caller's, up to a place or to its end."""
    offset, end = 0, sys.maxsize if end is None else end
    while data := await asyncio.to_thread(os.pread, descriptor, min(_PIECE_BYTES, end - offset), offset):
        yield data
        offset += len(data)


class ShardBodies:
    """Opens shards for reading them as they are stored, from their start.

    Args:
        transfers: fetches their pieces.
        source: where a shard lies.
        cache: the disk cache, which keeps compressed shards as they are; or None.
        openings: of that.
    """

    def __init__(
        self,
        transfers: Transfers,
        source: Callable[[FetchedShard], Source],
        cache: DiskCache | None,
        openings: CacheOpenings,
    ) -> None:
        self._transfers = transfers
        self._source = source
        self._cache = cache
        self._openings = openings

    async def local(self, descriptor: int) -> AsyncGenerator[bytes]:
        """The bytes of a local shard, whose descriptor is closed here."""
        try:
            async for piece in _file_body(descriptor):
                yield piece
        finally:
            os.close(descriptor)

    async def remote(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        """The bytes of a remote shard, from the disk cache or into it.

        Raises:
            StorageError: they cannot be had.
        """
        file = await self._openings.open(state.url, state.pin)
        position = 0
        try:
            if file is not None and file.whole:
                with suppress(OSError):  # the disk cannot read it any more
                    async for piece in _file_body(file.descriptor, state.pin.total_bytes):
                        yield piece
                        position += len(piece)
            if position != state.pin.total_bytes:
                async with aclosing(self.fetch(state, position)) as pieces:
                    async for piece in pieces:
                        if file is not None and file.missing and file.descriptor >= 0:
                            await self._keep(file, position, piece)
                        yield piece
                        position += len(piece)
        finally:
            if file is not None:
                file.close()

    async def fetch(self, state: FetchedShard, start: int, end: int | None = None) -> AsyncGenerator[bytes]:
        """The bytes of a remote shard from one place to another or to its end, a few requests ahead.

        Raises:
            StorageError: they cannot be fetched.
        """
        ahead: deque[asyncio.Task[bytes]] = deque()
        try:
            while True:
                known_end = end if end is not None else state.pin.total_bytes  # the first answer states the size
                while not ahead if known_end is None else len(ahead) <= _PIECES_AHEAD and start < known_end:
                    piece_end = start // _PIECE_BYTES * _PIECE_BYTES + _PIECE_BYTES
                    piece_end = piece_end if known_end is None else min(piece_end, known_end)
                    ahead.append(asyncio.create_task(self._transfers.read(self._source(state), start, piece_end)))
                    start = piece_end
                if not ahead:
                    return
                yield await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _keep(self, file: CacheFile, offset: int, piece: bytes) -> None:
        """Write bytes to the disk cache, or go on without it."""
        assert self._cache is not None
        try:
            await on_thread(partial(self._cache.write, file, offset, piece))
        except OSError as exc:
            self._cache.turn_off(exc)
            file.close()


# Parts that have come and are not written yet; more are not fetched before, which bounds what a slow disk holds up.
_MOST_UNWRITTEN = 4


class CacheFilling:
    """Writes parts to the files of their shards in the disk cache, from which workers read them.

    All of that is done by one thread, one after the other.

    Args:
        cache: the cache.
        bodies: reads what is missing of a shard.
        fetcher: notified of what happens.
    """

    def __init__(self, cache: DiskCache, bodies: ShardBodies, fetcher: Fetcher) -> None:
        self._cache = cache
        self._bodies = bodies
        self._fetcher = fetcher
        self._thread = ThreadPoolExecutor(1, "streamload-cache")
        self._filled: set[FetchedShard] = set()
        self._writes: dict[Part, list[Future[None]]] = {}
        self._written: set[asyncio.Task[None]] = set()
        self._completed: dict[CacheFile, asyncio.Task[None]] = {}

    @property
    def takes_parts(self) -> bool:
        """Whether the disk keeps up."""
        return len(self._written) < _MOST_UNWRITTEN

    def begin(self, state: FetchedShard) -> None:
        """Fill the file of a shard with what comes of it."""
        self._filled.add(state)

    def completes(self, state: FetchedShard) -> bool:
        """Return True if all that is missing of a shard is being fetched."""
        return state.file in self._completed

    def write(self, file: CacheFile, part: Part, offset: int, data: bytes) -> None:
        """Bytes of a part have come."""
        self._writes.setdefault(part, []).append(self._thread.submit(self._cache.write, file, offset, data))

    def arrived(self, state: FetchedShard, part: Part) -> None:
        """All of a part has come; it is there when it is written."""
        task = asyncio.create_task(self._await_writes(state, part))
        self._written.add(task)
        task.add_done_callback(self._was_written)

    def failed(self, part: Part) -> None:
        """A part cannot be fetched; what came of it is written again."""
        self._writes.pop(part, None)

    def finish(self, state: FetchedShard) -> None:
        """Nothing more is needed of a shard: if half of it or more has come, the rest is fetched for later epochs."""
        file = state.file
        if state not in self._filled or file is None or file in self._completed:
            return
        if file.missing and 2 * len(file.missing) <= file.n_parts:
            self._completed[file] = asyncio.create_task(self._complete(state, file))

    def forget(self, state: FetchedShard) -> None:
        """Close the file of a shard, unless it is whole or being completed. The loop need not be running."""
        if state in self._filled:
            self._filled.remove(state)
            file, state.file = state.file, None
            if file is not None and file not in self._completed:
                self._thread.submit(file.close)

    async def close(self) -> None:
        """Write what has come, and stop. Idempotent."""
        for task in self._completed.values():
            task.cancel()
        await asyncio.gather(*self._completed.values(), *self._written, return_exceptions=True)
        self._thread.shutdown()

    async def _await_writes(self, state: FetchedShard, part: Part) -> None:
        file = state.file
        with self._failing():
            for write in self._writes.pop(part, []):
                await asyncio.wrap_future(write)
            if file is not None and state.file is file:
                self._fetcher.arrived(state, part.number, 0)

    def _was_written(self, task: asyncio.Task[None]) -> None:
        self._written.remove(task)
        self._fetcher.has_room()  # only now: before it counted as unwritten

    async def _complete(self, state: FetchedShard, file: CacheFile) -> None:
        try:
            with self._failing(), suppress(StreamloadError):  # whoever needs the shard is told so
                for part in sorted(file.missing - self._fetcher.in_flight(state)):
                    offset, end = file.edges(part)
                    async with aclosing(self._bodies.fetch(state, offset, end)) as pieces:
                        async for piece in pieces:
                            await asyncio.wrap_future(self._thread.submit(self._cache.write, file, offset, piece))
                            offset += len(piece)
        finally:
            del self._completed[file]
            if state.file is file:
                self._fetcher.not_coming(state)  # what was needed meanwhile is fetched, or is there
            else:
                self._thread.submit(file.close)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Go on without the cache where the disk refuses something."""
        try:
            yield
        except OSError as exc:
            self._cache.turn_off(exc)
            for state in [*self._filled]:
                self._fetcher.lost(state)


class PartFetcher:
    """Fetches parts, in a running loop.

    Args:
        storages: where shards lie.
        cache: shards on the disk, or None.
        open_local: opens a local shard by its number; gives a descriptor.
        fetcher: notified of what happens.
        most_requests: how many may be in flight.
    """

    def __init__(
        self,
        storages: Storages,
        cache: DiskCache | None,
        open_local: Callable[[int], int],
        fetcher: Fetcher,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        self._storages = storages
        self._cache = cache
        self._fetcher = fetcher
        self._open_local = open_local
        self._transfers = Transfers(
            self._write, self._on_done, self._on_failed, fetcher.has_room, retries=storages.retries, most=most_requests
        )
        self._openings = CacheOpenings(cache, storages)
        self._bodies = ShardBodies(self._transfers, self._source, cache, self._openings)
        self._filling = None if cache is None else CacheFilling(cache, self._bodies, fetcher)
        self._lookups: dict[FetchedShard, asyncio.Task[None]] = {}
        self._decompressions: list[tuple[FetchedShard, Decompression]] = []
        self._largest_bytes = 0
        # One thread: the kernel clears pages no faster for several.
        self._allocator = ThreadPoolExecutor(1, "streamload-allocate")
        self._allocations: dict[Part, Future[None]] = {}

    @property
    def at_once(self) -> int:
        """How many parts may be in flight."""
        return self._transfers.room() + self._transfers.in_flight

    def slowest(self) -> Waiting | None:
        """See `Transfers.slowest`."""
        return self._transfers.slowest()

    def asked_version(self) -> str | None:
        """The shard whose version has been requested for the longest time, for the disk cache; None where none is."""
        return next(iter(self._openings.asked), None)

    @property
    def counts(self) -> TransferCounts:
        """What has happened to requests so far."""
        return self._transfers.counts

    @property
    def held_bytes(self) -> int:
        """What fetching takes besides the parts."""
        return _HELD_BYTES * len(self._running())

    def opening_bytes(self, state: FetchedShard) -> int:
        """What else must be free to fetch a part of this shard, so that one decompression does not stop another."""
        is_beside = state.compression is not None and bool(self._running())
        return _HELD_BYTES + self._largest_bytes if is_beside else 0

    def takes(self, state: FetchedShard) -> bool:
        """Whether a part of this shard can be fetched now."""
        if self._is_unknown(state):
            return state in self._lookups or len(self._lookups) < SMALL_REQUESTS
        if state.compression is not None:
            return len(self._running()) < DECOMPRESSED_AT_ONCE
        if state.file is not None and state.file.whole:
            return True
        return self._transfers.room() > 0 and (self._filling is None or self._filling.takes_parts)

    def takes_memory(self, state: FetchedShard) -> bool:
        """Whether a part of this shard needs memory to be fetched: False where it is, or may be, in the disk cache."""
        return state.file is None and not self._is_unknown(state)

    def fetch(self, state: FetchedShard, number: int) -> None:
        """Fetch a part."""
        if state.compression is not None:
            self._decompress(state, state.compression)
        elif state.file is not None and number not in state.file.missing:
            self._fetcher.arrived(state, number, 0)
        elif self._filling is not None and self._filling.completes(state):
            return  # it comes with all that is missing
        elif not self._is_unknown(state):
            self._download(state, number)
        elif state not in self._lookups:
            self._start_lookup(state)

    @property
    def waiting(self) -> list[FetchedShard]:
        """The shards whose decompression waits for room."""
        return [state for state, decompression in self._running() if decompression.waits]

    @property
    def is_ending(self) -> bool:
        """Whether a cancelled decompression still holds memory; `has_room` is called when it does not."""
        return any(decompression.cancelled for _, decompression in self._running())

    def finish(self, state: FetchedShard) -> None:
        """Nothing more of this shard is needed soon."""
        if self._filling is not None:
            self._filling.finish(state)

    def forget(self, state: FetchedShard) -> None:
        """Nothing more of this shard is wanted, and its memory is about to be closed. The loop need not be running."""
        if self._filling is not None:
            self._filling.forget(state)
        if state.decompression is not None:
            state.decompression.cancel()
            state.decompression = None

    async def close(self) -> None:
        """Stop everything. Idempotent."""
        for lookup in self._lookups.values():
            lookup.cancel()
        await asyncio.gather(*self._lookups.values(), return_exceptions=True)
        for _, decompression in self._running():  # first, since they request more
            await decompression.close()
        if self._filling is not None:
            await self._filling.close()
        await self._transfers.close()
        self._allocator.shutdown(cancel_futures=True)

    # -- downloads -------------------------------------------------------------------------------------------------

    def _download(self, state: FetchedShard, number: int) -> None:
        part = _part(state, number)
        self._transfers.start(part, self._source(state))
        self._allocate(state, part)

    def _allocate(self, state: FetchedShard, part: Part) -> None:
        """Have the pages of a part in flight allocated, so that the loop only copies what comes of it."""
        memory = state.pages()
        if memory is not None:
            end = min(part.end, memory.size_bytes)
            self._allocations[part] = self._allocator.submit(memory.allocate, part.start, end)

    def _stop_allocating(self, part: Part) -> None:
        """It has ended, and its pages may be freed from now on."""
        allocation = self._allocations.pop(part, None)
        if allocation is not None and not allocation.cancel():
            allocation.result()  # it is nearly done: what was written is allocated

    def _source(self, state: FetchedShard) -> Source:
        return Source(self._storages.for_url(state.url), state.url, state.pin)

    def _write(self, part: Part, offset: int, data: bytes) -> None:
        if (state := self._state_for(part)) is None:
            return
        if state.total_bytes is None:
            self._note_size(state, part)
        if self._filling is not None and state.file is not None:
            self._filling.write(state.file, part, offset, data)
        else:
            state.write(offset, data)

    def _note_size(self, state: FetchedShard, part: Part) -> None:
        """The first answer of all has begun."""
        state.total_bytes = state.pin.total_bytes
        self._allocate(state, part)
        self._fetcher.sized()

    def _on_done(self, part: Part, done: Downloaded) -> None:
        self._stop_allocating(part)
        state = self._state_for(part)
        if state is None:
            self._fetcher.has_room()
            return
        state.total_bytes = state.pin.total_bytes
        if self._filling is not None and state.file is not None:
            self._filling.arrived(state, part)
        else:
            self._fetcher.arrived(state, part.number, done.end - done.start)

    def _on_failed(self, part: Part, error: BaseException) -> None:
        self._stop_allocating(part)
        if self._filling is not None:
            self._filling.failed(part)
        state = self._state_for(part)
        if state is None:
            self._fetcher.has_room()
        elif isinstance(error, Exception):
            self._fetcher.failed(state, part.number, error)
        else:
            raise error

    def _state_for(self, part: Part) -> FetchedShard | None:
        """A part's shard; None where its memory is another one by now, or a file.

        What was written of the part lies in the old memory, so the new one would get only the rest of it.
        """
        state = self._fetcher.state_of(part.shard)
        return state if state.generation == part.generation else None

    # -- the disk cache --------------------------------------------------------------------------------------------

    def _is_unknown(self, state: FetchedShard) -> bool:
        """Whether a shard may be in the disk cache, and was not looked up."""
        return self._cache is not None and state.compression is None and not state.looked_up

    def _start_lookup(self, state: FetchedShard) -> None:
        self._lookups[state] = lookup = asyncio.create_task(self._look_up(state))
        lookup.add_done_callback(partial(self._looked_up, state, state.generation))

    async def _look_up(self, state: FetchedShard) -> None:
        generation = state.generation
        file = await self._openings.open(state.url, state.pin)
        if state.generation != generation:  # it was closed meanwhile
            if file is not None:
                file.close()
            return
        state.total_bytes = state.pin.total_bytes
        state.file, state.looked_up = file, True
        if file is not None and file.whole:
            self.counts.cached_bytes += state.total_bytes or 0
            self._fetcher.on_disk(state)
            return
        if file is not None and self._filling is not None:
            self._filling.begin(state)
        self._fetcher.not_coming(state)

    def _looked_up(self, state: FetchedShard, generation: int, lookup: asyncio.Task[None]) -> None:
        """Pass on what was raised, a mistake of ours too: nothing else would tell of it."""
        del self._lookups[state]
        error = None if lookup.cancelled() else lookup.exception()
        if state.generation != generation:
            if self._fetcher.in_flight(state) and not lookup.cancelled():
                self._start_lookup(state)  # they waited for this one, of earlier memory
        elif isinstance(error, Exception):
            for number in sorted(self._fetcher.in_flight(state)):
                self._fetcher.failed(state, number, error)
        self._fetcher.has_room()

    # -- compressed shards -----------------------------------------------------------------------------------------

    def _running(self) -> list[tuple[FetchedShard, Decompression]]:
        self._decompressions = [each for each in self._decompressions if not each[1].over]
        return self._decompressions

    def _decompress(self, state: FetchedShard, compression: Compression) -> None:
        is_local = self._storages.is_local(state.url)
        state.decompression = Decompression(
            self._bodies.local(self._open_local(state.number)) if is_local else self._bodies.remote(state),
            Decompressor(compression, state.url),
            state.write,
            partial(self._fetcher.grow, state),
            partial(self._decompressed, state),
        )
        self._decompressions.append((state, state.decompression))

    def _decompressed(self, state: FetchedShard, result: int | Exception | None) -> None:
        if isinstance(result, int):
            state.total_bytes = result
            self._largest_bytes = max(self._largest_bytes, result)
            self._fetcher.arrived(state, 0, result)
        elif result is not None:
            self._fetcher.failed(state, 0, result)
        if result is not None:
            state.decompression = None
        self._fetcher.has_room()


def _part(state: FetchedShard, number: int) -> Part:
    start, end = part_edges(number, state.total_bytes)
    return Part(state.number, number, start, end, state.generation)
