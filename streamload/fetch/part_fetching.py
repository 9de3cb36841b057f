"""Fetching single parts, by a download or from the disk cache, and whole compressed shards."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

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
        """Write bytes to the disk cache, and publish the file with the last ones."""
        assert self._cache is not None
        try:
            await on_thread(partial(file.write, offset, piece))
            if not file.missing:
                await on_thread(partial(self._cache.publish, file))
        except OSError as exc:
            self._cache.turn_off(exc)
            file.close()


@dataclass(slots=True, eq=False)
class _Filling:
    """A shard whose file is being filled.

    Attributes:
        state: the shard.
        file: its file.
        users: the jobs that were begun on the file, or will be even if the shard is closed.
        is_open: the shard has memory; if not, all that is missing has to be fetched.
    """

    state: FetchedShard
    file: CacheFile
    users: int = 0
    is_open: bool = True


@dataclass(slots=True, eq=False)
class _Job:
    """Something to write.

    Attributes:
        filling: the shard.
        part: the part; None for all that are missing, which are fetched if they are not there.
        holds: the part is kept until it is written.
    """

    filling: _Filling
    part: int | None
    holds: bool = False


class CacheFilling:
    """Writes parts to the files of their shards, on a thread, and makes files durable, on another one.

    A part that has come stays until it is written, so a slow disk holds up what finds no room.

    Args:
        cache: the cache.
        events: notified of what happens.
        fetch: gives the bytes of a shard from one place to another, in pieces that lie within one part.
    """

    def __init__(
        self,
        cache: DiskCache,
        events: PartFetcherEvents,
        fetch: Callable[[FetchedShard, int, int], AsyncGenerator[bytes]],
    ) -> None:
        self._cache = cache
        self._events = events
        self._fetch = fetch
        self._fillings: dict[FetchedShard, _Filling] = {}
        self._writing = _Worker(self._write)
        self._publishing = _Worker(self._publish)
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether there is anything to be written."""
        return self._writing.busy or self._publishing.busy

    def begin(self, state: FetchedShard, file: CacheFile) -> None:
        """Fill a file, which is owned here from now on, with what comes of a shard."""
        self._fillings[state] = _Filling(state, file)

    def arrived(self, state: FetchedShard, number: int) -> None:
        """A part has come."""
        filling = self._fillings.get(state)
        if filling is not None and number in filling.file.missing and self._events.hold(state, number):
            self._writing.add(_Job(filling, number, holds=True))

    def finish(self, state: FetchedShard) -> None:
        """Nothing more is needed of a shard: if half of it or more has come, the rest is fetched for later epochs."""
        filling = self._fillings.get(state)
        if filling is None or any(job.part is None for job in self._writing.jobs):
            return
        missing = filling.file.missing - self._queued(filling)
        if missing and 2 * len(missing) <= filling.file.n_parts:
            self._complete(filling)

    def complete(self, states: Iterable[FetchedShard]) -> bool:
        """Fetch what is missing of that shard of which least is, so that it takes no memory; False if there is none."""
        fillings = [self._fillings[state] for state in states if state in self._fillings]
        if fillings:
            self._complete(min(fillings, key=lambda filling: len(filling.file.missing)))
        return bool(fillings)

    def abandon(self, state: FetchedShard) -> None:
        """The memory of a shard is closed. The loop need not be running."""
        filling = self._fillings.pop(state, None)
        if filling is not None:
            filling.is_open = False
            self._close_unless_used(filling)

    async def close(self) -> None:
        """Write the shards of which all has come, without making them durable, and leave the others. Idempotent.

        What a crash of the machine leaves of such a file is found by its checksums.
        """
        self._closing = True
        for job in [job for job in self._writing.jobs if job.part is None]:
            self._writing.jobs.remove(job)
            job.filling.users -= 1
            self._close_unless_used(job.filling)
        for filling in [*self._fillings.values()]:
            if not filling.file.missing <= self._queued(filling):
                self._give_up(filling)
        await self._writing.finish(cancel=lambda job: job.part is None)
        await self._publishing.finish()
        for filling in [*self._fillings.values()]:
            self._give_up(filling)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _complete(self, filling: _Filling) -> None:
        filling.users += 1
        self._writing.add(_Job(filling, None))

    def _queued(self, filling: _Filling) -> set[int]:
        jobs = [self._writing.in_hand, *self._writing.jobs]
        return {job.part for job in jobs if job is not None and job.filling is filling and job.part is not None}

    def _release(self, job: _Job) -> None:
        if job.holds and job.part is not None:
            job.holds = False
            self._events.release(job.filling.state, job.part)

    async def _write(self, job: _Job) -> None:
        filling = job.filling
        filling.users += job.part is not None
        missed = bool(filling.file.missing)
        try:
            with self._failing(filling):
                for part in sorted(filling.file.missing) if job.part is None else [job.part]:
                    await self._write_part(job, part)
                if missed and not filling.file.missing:
                    self._publishing.add(_Job(filling, None))
                    filling.users += 1
        finally:
            self._release(job)
            self._done(filling)

    async def _write_part(self, job: _Job, part: int) -> None:
        state, file = job.filling.state, job.filling.file
        if part not in file.missing:
            return
        if job.filling.is_open and (job.holds or self._events.hold(state, part)):
            try:
                await on_thread(partial(file.copy, part, state.descriptor()))
            finally:
                if not job.holds:
                    self._events.release(state, part)
        elif job.part is None and not (job.filling.is_open and part in self._events.in_flight(state)):
            offset, end = file.edges(part)
            async with aclosing(self._fetch(state, offset, end)) as pieces:
                async for piece in pieces:
                    await on_thread(partial(file.write, offset, piece))
                    offset += len(piece)

    async def _publish(self, job: _Job) -> None:
        filling, state = job.filling, job.filling.state
        publish = partial(self._cache.publish, filling.file, durable=not self._closing)
        try:
            with self._failing(filling):
                await on_thread(publish)
                if filling.is_open:
                    del self._fillings[state]
                    self._events.on_disk(state, filling.file)
        finally:
            self._done(filling)

    @contextmanager
    def _failing(self, filling: _Filling) -> Iterator[None]:
        try:
            yield
        except StreamloadError:
            self._give_up(filling)  # whoever needs the shard is told so
        except OSError as exc:
            self._cache.turn_off(exc)
            for each in [*self._fillings.values(), filling]:
                self._give_up(each)

    def _done(self, filling: _Filling) -> None:
        filling.users -= 1
        self._close_unless_used(filling)
        self._events.cache_changed()

    def _give_up(self, filling: _Filling) -> None:
        filling.state.refused = True
        for job in [job for job in self._writing.jobs if job.filling is filling]:
            self._writing.jobs.remove(job)
            self._release(job)
            filling.users -= job.part is None
        self.abandon(filling.state)
        self._close_unless_used(filling)

    def _close_unless_used(self, filling: _Filling) -> None:
        """Close a file that nobody fills any more; one that was published belongs to the shard's state."""
        if not filling.is_open and not filling.users:
            filling.file.close()


class _Worker:
    """Does jobs one after the other, in a running loop.

    Attributes:
        jobs: those that wait.
        in_hand: the one that is being done.
    """

    def __init__(self, work: Callable[[_Job], Coroutine[None, None, None]]) -> None:
        self.jobs: deque[_Job] = deque()
        self.in_hand: _Job | None = None
        self._work = work
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self.jobs) or self.in_hand is not None

    def add(self, job: _Job) -> None:
        self.jobs.append(job)
        self._start()

    async def finish(self, cancel: Callable[[_Job], bool] = lambda _: False) -> None:
        """Wait until nothing is left to do; the job in hand may be cancelled."""
        if self.in_hand is not None and self._task is not None and cancel(self.in_hand):
            self._task.cancel()
        while self.busy:
            self._start()
            assert self._task is not None
            await asyncio.wait((self._task,))

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_raise_mistakes)

    async def _run(self) -> None:
        while self.jobs:
            self.in_hand = self.jobs.popleft()
            try:
                await self._work(self.in_hand)
            finally:
                self.in_hand = None


def _raise_mistakes(task: asyncio.Task[None]) -> None:
    """Have the loop tell of a mistake of ours."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        raise error


class PartFetcherEvents(Protocol):
    """What a `PartFetcher` notifies, in the loop, of the parts that it fetches and the files that it fills."""

    def in_flight(self, state: FetchedShard, /) -> set[int]:
        """The parts of a shard that are to be fetched and have not come."""

    def hold(self, state: FetchedShard, number: int, /) -> bool:
        """Keep a part until it is released, if it is there; False if it is not."""

    def release(self, state: FetchedShard, number: int, /) -> None:
        """Undo `hold`."""

    def on_disk(self, state: FetchedShard, file: CacheFile, /) -> None:
        """All of a shard is in a file, which its state owns from now on."""

    def cache_changed(self) -> None:
        """Something was written, or cannot be, so more may fit."""

    def state_of(self, shard: int, /) -> FetchedShard:
        """A shard."""

    def sized(self) -> None:
        """An answer has begun that states the size of a shard, which was not known."""

    def arrived(self, state: FetchedShard, number: int, size_bytes: int, /) -> None:
        """A part is there, and takes so much memory."""

    def failed(self, state: FetchedShard, number: int, error: Exception, /) -> None:
        """A part cannot be fetched."""

    def not_coming(self, state: FetchedShard, /) -> None:
        """What is in flight of a shard will not come: it is not in the disk cache."""

    def has_room(self) -> None:
        """More parts can be fetched at once."""

    def grow(self, state: FetchedShard, /) -> bool:
        """Give a shard that is being decompressed room for a part more; return False where there is none."""


class PartFetcher:
    """Fetches parts, in a running loop.

    Args:
        storages: where shards lie.
        cache: shards on the disk, or None.
        open_local: opens a local shard by its number; gives a descriptor.
        events: notified of what happens.
        most_requests: how many may be in flight.
    """

    def __init__(
        self,
        storages: Storages,
        cache: DiskCache | None,
        open_local: Callable[[int], int],
        events: PartFetcherEvents,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        self._storages = storages
        self._cache = cache
        self._events = events
        self._open_local = open_local
        self._transfers = Transfers(
            self._write, self._on_done, self._on_failed, events.has_room, retries=storages.retries, most=most_requests
        )
        self._openings = CacheOpenings(cache, storages)
        self._bodies = ShardBodies(self._transfers, self._source, cache, self._openings)
        self._filling = None if cache is None else CacheFilling(cache, events, self._bodies.fetch)
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
        return not self.takes_memory(state) or self._transfers.room() > 0

    def takes_memory(self, state: FetchedShard) -> bool:
        """Whether a part of this shard needs memory to be fetched: False where it is, or may be, in the disk cache."""
        return state.file is None and not self._is_unknown(state)

    def fetch(self, state: FetchedShard, number: int) -> None:
        """Fetch a part."""
        if state.compression is not None:
            self._decompress(state, state.compression)
        elif state.file is not None:
            self._events.arrived(state, number, 0)
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

    @property
    def fills_cache(self) -> bool:
        """Whether what is written to the disk cache, or comes for it, may make room."""
        return self._filling is not None and (self.writes_to_disk or self._transfers.in_flight > 0)

    def make_room(self, needed: FetchedShard, others: Iterable[FetchedShard]) -> None:
        """Have a shard written to the disk cache as a whole, so that it takes no memory: the needed one, or another."""
        if self._filling is None or self.writes_to_disk or self._transfers.in_flight:
            return  # there may be room as soon as that is over
        states = [each for each in (needed, *others) if self._may_be_cached(each)]
        if not self._filling.complete(states):
            for state in [each for each in states if not each.refused][:1]:
                self._start_lookup(state, concurrently=True)

    @property
    def writes_to_disk(self) -> bool:
        """Whether shards are being written to the disk cache, which may make room."""
        return bool(self._lookups) or (self._filling is not None and self._filling.busy)

    def finish(self, state: FetchedShard) -> None:
        """Nothing more of this shard is needed soon."""
        if self._filling is not None:
            self._filling.finish(state)

    def forget(self, state: FetchedShard) -> None:
        """Nothing more of this shard is wanted, and its memory is about to be closed. The loop need not be running."""
        if self._filling is not None:
            self._filling.abandon(state)
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
        if (state := self._state_for(part)) is not None:
            if state.total_bytes is None:
                self._note_size(state, part)
            state.write(offset, data)

    def _note_size(self, state: FetchedShard, part: Part) -> None:
        """The first answer of all has begun."""
        state.total_bytes = state.pin.total_bytes
        self._allocate(state, part)
        self._events.sized()

    def _on_done(self, part: Part, done: Downloaded) -> None:
        self._stop_allocating(part)
        state = self._state_for(part)
        if state is None:
            self._events.has_room()
            return
        state.total_bytes = state.pin.total_bytes
        self._events.arrived(state, part.number, done.end - done.start)
        if self._filling is not None:
            self._filling.arrived(state, part.number)

    def _on_failed(self, part: Part, error: BaseException) -> None:
        self._stop_allocating(part)
        state = self._state_for(part)
        if state is None:
            self._events.has_room()
        elif isinstance(error, Exception):
            self._events.failed(state, part.number, error)
        else:
            raise error

    def _state_for(self, part: Part) -> FetchedShard | None:
        """A part's shard; None where its memory is another one by now, or a file.

        What was written of the part lies in the old memory, so the new one would get only the rest of it.
        """
        state = self._events.state_of(part.shard)
        return state if state.generation == part.generation else None

    # -- the disk cache --------------------------------------------------------------------------------------------

    def _is_unknown(self, state: FetchedShard) -> bool:
        """Whether a shard may be in the disk cache, and was not looked up."""
        return self._cache is not None and state.compression is None and not state.looked_up

    def _may_be_cached(self, state: FetchedShard) -> bool:
        return state.compression is None and state.looked_up and state.file is None

    def _start_lookup(self, state: FetchedShard, *, concurrently: bool = False) -> None:
        self._lookups[state] = lookup = asyncio.create_task(self._look_up(state, concurrently=concurrently))
        lookup.add_done_callback(partial(self._looked_up, state, state.generation))

    async def _look_up(self, state: FetchedShard, *, concurrently: bool) -> None:
        generation = state.generation
        file = await self._openings.open(state.url, state.pin, concurrently=concurrently)
        if state.generation != generation:  # it was closed meanwhile
            if file is not None:
                file.close()
            return
        state.total_bytes = state.pin.total_bytes
        state.looked_up = True
        state.refused = concurrently and file is None
        if file is not None and file.whole:
            self.counts.cached_bytes += state.total_bytes or 0
            self._events.on_disk(state, file)
            return
        if file is not None and self._filling is not None:
            self._filling.begin(state, file)
        if not concurrently:
            self._events.not_coming(state)

    def _looked_up(self, state: FetchedShard, generation: int, lookup: asyncio.Task[None]) -> None:
        """Pass on what was raised, a mistake of ours too: nothing else would tell of it."""
        del self._lookups[state]
        error = None if lookup.cancelled() else lookup.exception()
        if state.generation != generation:
            if self._events.in_flight(state) and not lookup.cancelled():
                self._start_lookup(state, concurrently=False)  # they waited for this one, of earlier memory
        elif isinstance(error, Exception):
            for number in sorted(self._events.in_flight(state)):
                self._events.failed(state, number, error)
        self._events.cache_changed()

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
            partial(self._events.grow, state),
            partial(self._decompressed, state),
        )
        self._decompressions.append((state, state.decompression))

    def _decompressed(self, state: FetchedShard, result: int | Exception | None) -> None:
        if isinstance(result, int):
            state.total_bytes = result
            self._largest_bytes = max(self._largest_bytes, result)
            self._events.arrived(state, 0, result)
        elif result is not None:
            self._events.failed(state, 0, result)
        if result is not None:
            state.decompression = None
        self._events.has_room()


def _part(state: FetchedShard, number: int) -> Part:
    start, end = part_edges(number, state.total_bytes)
    return Part(state.number, number, start, end, state.generation)
