"""Fetching single parts: by a download, from the disk cache, or by decompressing what comes before them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from streamload.errors import DatasetIndexError, StreamloadError
from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import CacheOpenings, DiskCache, on_thread
from streamload.fetch.fetched_shard import (
    COMPRESSED_BYTES_HELD,
    DecompressedParts,
    FetchedShard,
    RemoteBody,
    local_body,
)
from streamload.fetch.parts import part_edges
from streamload.fetch.transfers import Part, Source, TransferCounts, Transfers, Waiting
from streamload.limits import MOST_REQUESTS, SMALL_REQUESTS
from streamload.storage.download import Downloaded
from streamload.storage.storages import Storages
from streamload.tar.decompression import Decompressor


class CompressedBodies:
    """Opens compressed shards for reading from their start, and takes in what is fetched for them.

    Each body that is fetched has a negative number of its own, which its parts bear as that of their shard. So what
    still comes for an earlier body of a shard is not taken for a later one's.

    Args:
        storages: where shards lie.
        cache: the disk cache, which keeps them as they are, compressed; or None.
        openings: of that.
        open_local: opens a local shard by its number; gives a descriptor.
        start: begins to fetch a part.
    """

    def __init__(
        self,
        storages: Storages,
        cache: DiskCache | None,
        openings: CacheOpenings,
        open_local: Callable[[int], int],
        start: Callable[[Part], None],
    ) -> None:
        self._storages = storages
        self._cache = cache
        self._openings = openings
        self._open_local = open_local
        self._start = start
        self._bodies: dict[int, tuple[FetchedShard, RemoteBody]] = {}
        self._numbers = itertools.count(-1, -1)

    def held_bytes(self, begun: Iterable[FetchedShard]) -> int:
        """What they take of memory.

        Args:
            begun: shards whose body has been opened; one of which nothing has been read yet is about to take its share.
        """
        fetched = {state.number for state, _ in self._bodies.values()}
        to_come = [state for state in begun if state.number not in fetched and not self._storages.is_local(state.url)]
        return (len(self._bodies) + len(to_come)) * COMPRESSED_BYTES_HELD

    def open(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        """The bytes of a shard.

        Raises:
            StorageError: they cannot be had.
        """
        return self._local(state) if self._storages.is_local(state.url) else self._remote(state)

    # -- what is fetched -------------------------------------------------------------------------------------------

    def shard_of(self, number: int) -> FetchedShard:
        """The shard that a body is of."""
        return self._bodies[number][0]

    def write(self, part: Part, offset: int, data: bytes) -> None:
        """Bytes of a part have come."""
        if part.shard in self._bodies:
            self._bodies[part.shard][1].write(part, offset, data)

    def done(self, part: Part, done: Downloaded) -> None:
        """All of a part has come."""
        if part.shard in self._bodies:
            self._bodies[part.shard][1].done(part, done)

    def failed(self, part: Part, error: BaseException) -> None:
        """A part cannot be fetched."""
        if part.shard in self._bodies:
            self._bodies[part.shard][1].failed(part, error)

    # -- bodies ----------------------------------------------------------------------------------------------------

    async def _local(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        descriptor = self._open_local(state.number)
        try:
            async for piece in local_body(descriptor):
                yield piece
        finally:
            os.close(descriptor)

    async def _remote(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        file = await self._openings.open(state.url, state.pin)
        position = 0
        try:
            if file is not None and file.whole:
                with suppress(OSError):  # the disk cannot read it any more
                    async for piece in local_body(file.descriptor, state.pin.total_bytes):
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
        """The bytes of a remote shard as it lies there, from one place to another or to its end, a few requests ahead.

        Raises:
            StorageError: they cannot be fetched.
        """
        number = next(self._numbers)
        body = RemoteBody(number, state.pin, self._start, start, end)
        self._bodies[number] = state, body
        try:
            async with aclosing(body.chunks()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            del self._bodies[number]

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


_MOST_EVICTIONS = 8


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

    def has(self, state: FetchedShard, number: int, /) -> bool:
        """Whether a part is there."""

    def is_wanted(self, state: FetchedShard, number: int, /) -> bool:
        """Whether a part is there, in flight, or wanted."""

    def sized(self) -> None:
        """An answer has begun that states the size of a shard, which was not known."""

    def arrived(self, state: FetchedShard, number: int, size_bytes: int, /) -> None:
        """A part is there, and takes so much memory."""

    def failed(self, state: FetchedShard, number: int, error: Exception, /) -> None:
        """A part cannot be fetched."""

    def not_coming(self, state: FetchedShard, /) -> None:
        """What is in flight of a shard will not come: it is not in the disk cache, or its decompression was ended."""

    def has_room(self) -> None:
        """More parts can be fetched at once."""


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
        callbacks = self._source, self._write, self._on_done, self._on_failed
        self._transfers = Transfers(*callbacks, retries=storages.retries, most=most_requests)
        self._openings = CacheOpenings(cache, storages)
        self._bodies = CompressedBodies(storages, cache, self._openings, open_local, self._transfers.start)
        self._filling = None if cache is None else CacheFilling(cache, events, self._bodies.fetch)
        self._lookups: dict[FetchedShard, asyncio.Task[None]] = {}
        self._evictions_for: Counter[int | None] = Counter()
        self._decompressions: list[tuple[FetchedShard, DecompressedParts]] = []
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
        return self._bodies.held_bytes(state for state, each in self._decompressions if not each.over)

    def opening_bytes(self, state: FetchedShard) -> int:
        """What fetching a part of this shard takes besides it, where a decompression begins beside another one."""
        begins = state.compression is not None and state.decompressing is None
        is_beside = any(not decompressing.over for _, decompressing in self._decompressions)
        return COMPRESSED_BYTES_HELD if begins and is_beside else 0

    def takes(self, state: FetchedShard) -> bool:
        """Whether a part of this shard can be fetched now."""
        if self._is_unknown(state):
            return state in self._lookups or len(self._lookups) < SMALL_REQUESTS
        return not self.takes_memory(state) or state.compression is not None or self._transfers.room() > 0

    def takes_memory(self, state: FetchedShard) -> bool:
        """Whether a part of this shard needs memory to be fetched: False where it is, or may be, in the disk cache."""
        return state.file is None and not self._is_unknown(state)

    def fetch(self, state: FetchedShard, number: int) -> None:
        """Fetch a part."""
        if state.compression is not None:
            self._decompressing(state).grant(number)
        elif state.file is not None:
            self._events.arrived(state, number, 0)
        elif not self._is_unknown(state):
            self._download(state, number)
        elif state not in self._lookups:
            self._start_lookup(state)

    def would_begin_again(self, state: FetchedShard, number: int) -> bool:
        """Whether a running decompression is behind a part already, so that it would be restarted for that part."""
        decompressing = state.decompressing
        if decompressing is None or decompressing.ended or decompressing.over or decompressing.waits_for_room:
            return False
        return decompressing.next_number > number

    def parts_before(self, state: FetchedShard, number: int) -> range:
        """The parts of a compressed shard that decompressing goes through before it comes to this one."""
        decompressing = state.decompressing
        if decompressing is not None and (
            decompressing.next_number > number or decompressing.ended or decompressing.over
        ):
            self.forget(state)  # it has been here before, or has failed: once more from the start
        return range(0 if state.decompressing is None else state.decompressing.next_number, number)

    def evict(self, needed: int | None) -> bool:
        """End the decompressions that wait for room, but not that of the shard that is needed.

        They begin again, from the start, when their turn comes. It is done some times only for a shard of which nothing
        comes all the same, so that two of them cannot go on ending each other.

        Returns:
            Whether there were any; their memory is freed soon, and `has_room` is called then.
        """
        others = [
            state
            for state, decompressing in self._decompressions
            if state.decompressing is decompressing and not decompressing.over
        ]
        waiting = [state for state in others if state.number != needed and state.waits_for_room]
        if not waiting or self._evictions_for[needed] >= _MOST_EVICTIONS:
            return False
        self._evictions_for[needed] += 1
        for state in waiting:
            self._events.not_coming(state)
            self.forget(state)
        return True

    @property
    def is_decompressing(self) -> bool:
        """Whether decompressions go on, or are ending; when one waits for room or has ended, `has_room` is called."""
        return any(not each.over and (each.ends or not each.waits_for_room) for _, each in self._decompressions)

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
        if state.decompressing is not None:
            state.decompressing.cancel()
            state.decompressing = None

    async def close(self) -> None:
        """Stop everything. Idempotent."""
        for lookup in self._lookups.values():
            lookup.cancel()
        await asyncio.gather(*self._lookups.values(), return_exceptions=True)
        for _, decompressing in self._decompressions:  # also running ones: they request more
            await decompressing.close()
        if self._filling is not None:
            await self._filling.close()
        await self._transfers.close()
        self._allocator.shutdown(cancel_futures=True)

    # -- downloads -------------------------------------------------------------------------------------------------

    def _download(self, state: FetchedShard, number: int) -> None:
        part = _part(state, number)
        self._transfers.start(part)
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

    def _source(self, shard: int) -> Source:
        state = self._events.state_of(shard) if shard >= 0 else self._bodies.shard_of(shard)
        return Source(self._storages.for_url(state.url), state.url, state.pin)

    def _write(self, part: Part, offset: int, data: bytes) -> None:
        if part.shard < 0:
            self._bodies.write(part, offset, data)
        elif (state := self._state_for(part)) is not None:
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
        if part.shard < 0:
            self._bodies.done(part, done)
            self._events.has_room()
            return
        state = self._state_for(part)
        if state is None:
            self._events.has_room()
            return
        state.total_bytes = state.pin.total_bytes
        self._evictions_for.pop(state.number, None)
        self._events.arrived(state, part.number, done.end - done.start)
        if self._filling is not None:
            self._filling.arrived(state, part.number)

    def _on_failed(self, part: Part, error: BaseException) -> None:
        self._stop_allocating(part)
        if part.shard < 0:
            self._bodies.failed(part, error)
            self._events.has_room()
            return
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

    def _decompressing(self, state: FetchedShard) -> DecompressedParts:
        if state.decompressing is None:
            assert state.compression is not None
            granted = self._events.in_flight(state)
            decompressor = Decompressor(state.compression, state.url)
            state.decompressing = DecompressedParts(
                self._bodies.open(state), decompressor, _Decompressed(self, state), granted
            )
            self._decompressions = [each for each in self._decompressions if not each[1].over]
            self._decompressions.append((state, state.decompressing))
        return state.decompressing

    def decompressed(self, state: FetchedShard, number: int, size_bytes: int) -> None:
        """Note that a part is there whole."""
        self._evictions_for.pop(state.number, None)
        self._events.arrived(state, number, size_bytes)

    def has(self, state: FetchedShard, number: int) -> bool:
        """Return True if a part is there already, so that it needs no room."""
        return self._events.has(state, number)

    def is_wanted(self, state: FetchedShard, number: int) -> bool:
        """Return True if room was granted for a part that is not there, or will be."""
        return self._events.is_wanted(state, number)

    def decompressing_waits(self) -> None:
        """Note that decompression waits for room, or has ended."""
        self._events.has_room()

    def decompressing_ended(self, state: FetchedShard, total_bytes: int) -> None:
        """Note that the shard was decompressed whole."""
        state.total_bytes = total_bytes
        error = DatasetIndexError("the index points behind the end of the shard", url=state.url)
        for number in sorted(self._events.in_flight(state)):
            if part_edges(number, None)[0] >= total_bytes:
                self._events.failed(state, number, error)

    def decompressing_failed(self, state: FetchedShard, error: Exception) -> None:
        """Note that the shard cannot be decompressed any further."""
        for number in sorted(self._events.in_flight(state)):
            self._events.failed(state, number, error)


class _Decompressed:
    """One shard's events, for the part fetcher."""

    def __init__(self, part_fetcher: PartFetcher, state: FetchedShard) -> None:
        self._part_fetcher = part_fetcher
        self._state = state

    def has(self, number: int, /) -> bool:
        return self._part_fetcher.has(self._state, number)

    def is_wanted(self, number: int, /) -> bool:
        return self._part_fetcher.is_wanted(self._state, number)

    def waits(self) -> None:
        self._part_fetcher.decompressing_waits()

    def write(self, offset: int, data: bytes, /) -> None:
        self._state.write(offset, data)

    def decompressed(self, number: int, size_bytes: int, /) -> None:
        self._part_fetcher.decompressed(self._state, number, size_bytes)

    def ended(self, total_bytes: int, /) -> None:
        self._part_fetcher.decompressing_ended(self._state, total_bytes)

    def failed(self, error: Exception, /) -> None:
        self._part_fetcher.decompressing_failed(self._state, error)


def _part(state: FetchedShard, number: int) -> Part:
    start, end = part_edges(number, state.total_bytes)
    return Part(state.number, number, start, end, state.generation)
