"""Fetching single parts: by a download, from the disk cache, or by decompressing what comes before them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Protocol

from streamload.errors import DatasetIndexError
from streamload.fetch.cache.cached_shard import CacheDamagedError, CachedShard, CacheOffError
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.openings import CacheOpenings
from streamload.fetch.compressed_bodies import CompressedBodies
from streamload.fetch.decompressed_parts import DecompressedParts
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.parts import part_edges
from streamload.fetch.transfers import Part, Source, TransferCounts, Transfers
from streamload.limits import MOST_REQUESTS
from streamload.storage.download import Downloaded
from streamload.storage.storages import Storages
from streamload.tar.decompression import Decompressor

__all__ = ["PartFetcher", "PartFetcherEvents"]


_MOST_EVICTIONS = 8


class PartFetcherEvents(Protocol):
    """Who wants the parts. Everything is called in the loop."""

    def state_of(self, shard: int, /) -> FetchedShard:
        """A shard."""

    def has(self, state: FetchedShard, number: int, /) -> bool:
        """Whether a part is there."""

    def is_wanted(self, state: FetchedShard, number: int, /) -> bool:
        """Whether a part is there, in flight, or wanted."""

    def in_flight(self, state: FetchedShard, /) -> set[int]:
        """The parts of a shard that are to be fetched and have not come."""

    def arrived(self, state: FetchedShard, number: int, size_bytes: int, /) -> None:
        """A part is there, and takes so much memory."""

    def failed(self, state: FetchedShard, number: int, error: Exception, /) -> None:
        """A part cannot be fetched."""

    def not_coming(self, state: FetchedShard, /) -> None:
        """What is in flight of a shard will not come."""

    def left_cache(self, state: FetchedShard, /) -> None:
        """The disk cache takes no more of a shard; what was there of it is not any more."""

    def has_room(self) -> None:
        """More parts can be fetched at once."""


class PartFetcher:
    """Fetches parts, in a running loop.

    Args:
        storages: where shards lie.
        cache: files on the disk to fetch into, or None.
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
        self._bodies = CompressedBodies(storages, self._openings, open_local, self._transfers.start)
        self._evictions_for: Counter[int | None] = Counter()
        self._claims: set[asyncio.Task[None]] = set()
        self._decompressions: list[tuple[FetchedShard, DecompressedParts]] = []

    @property
    def at_once(self) -> int:
        """How many parts may be in flight."""
        return self._transfers.room() + self._transfers.in_flight

    @property
    def counts(self) -> TransferCounts:
        """What has happened to requests so far."""
        return self._transfers.counts

    @property
    def held_bytes(self) -> int:
        """What fetching takes besides the parts."""
        return self._bodies.held_bytes

    def takes(self, state: FetchedShard) -> bool:
        """Whether a part of this shard can be fetched now."""
        return state.compression is not None or self._transfers.room() > len(self._claims)

    def fetch(self, state: FetchedShard, number: int) -> None:
        """Fetch a part."""
        if state.compression is not None:
            self._decompressing(state).grant(number)
        elif self._cache is not None and (state.cached is not None or not state.cache_requested):
            self._run(self._claim(state, number), state, number)
        else:
            self._transfers.start(_part(state, number))

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
    def ends_some(self) -> bool:
        """Whether decompressions are ending and still hold memory."""
        return any(decompressing.ends for _, decompressing in self._decompressions)

    def forget(self, state: FetchedShard) -> None:
        """Nothing more of this shard is wanted. The loop need not be running."""
        if state.decompressing is not None:
            state.decompressing.cancel()
            state.decompressing = None

    async def close(self) -> None:
        """Stop everything. Idempotent."""
        for claim in self._claims:
            claim.cancel()
        await asyncio.gather(*self._claims, return_exceptions=True)
        for _, decompressing in self._decompressions:  # also running ones: they request more
            await decompressing.close()
        await self._transfers.close()

    # -- downloads -------------------------------------------------------------------------------------------------

    def _source(self, shard: int) -> Source:
        state = self._events.state_of(shard) if shard >= 0 else self._bodies.shard_of(shard)
        return Source(self._storages.for_url(state.url), state.url, state.pin)

    def _write(self, part: Part, offset: int, data: bytes) -> None:
        if part.shard < 0:
            self._bodies.write(part, offset, data)
        elif (state := self._state_for(part)) is not None:
            state.write(offset, data)

    def _on_done(self, part: Part, done: Downloaded) -> None:
        if part.shard < 0:
            self._bodies.done(part, done)
            self._events.has_room()
            return
        state = self._state_for(part)
        if state is None:
            self._events.has_room()
            return
        state.total_bytes = state.pin.total_bytes
        if state.cached is not None:
            self._run(self._finish(state, state.cached, part.number), state, part.number)
            return
        self._evictions_for.pop(state.number, None)
        self._events.arrived(state, part.number, done.end - done.start)

    def _on_failed(self, part: Part, error: BaseException) -> None:
        if part.shard < 0:
            self._bodies.failed(part, error)
            self._events.has_room()
            return
        state = self._state_for(part)
        if state is None:
            self._events.has_room()
        elif isinstance(error, CacheOffError):
            self._leave_cache(state)
        elif isinstance(error, Exception):
            if state.cached is not None:
                state.cached.abandon(part.number)
            self._events.failed(state, part.number, error)
        else:
            raise error

    def _state_for(self, part: Part) -> FetchedShard | None:
        """A part's shard; None where its memory is another one by now, in which the part is fetched anew.

        What was written of the part lies in the old memory, so the new one would get only the rest of it.
        """
        state = self._events.state_of(part.shard)
        return state if state.generation == part.generation else None

    # -- the disk cache --------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[None, None, None], state: FetchedShard, number: int) -> None:
        task = asyncio.create_task(work)
        self._claims.add(task)
        task.add_done_callback(partial(self._claimed, state, number, state.generation))

    async def _finish(self, state: FetchedShard, cached: CachedShard, number: int) -> None:
        """Record a part that has been written to the disk cache."""
        generation = state.generation
        try:
            crc32 = await cached.checksum(number)
            if state.generation != generation:
                return  # its file is closed
            cached.finish(number, crc32)
        except CacheOffError:
            if state.generation == generation:
                self._leave_cache(state)
            return
        self._evictions_for.pop(state.number, None)
        self._events.arrived(state, number, 0)

    async def _claim(self, state: FetchedShard, number: int) -> None:
        """Find a part in the disk cache, or begin to fetch it into that."""
        generation = state.generation
        async with state.opening:
            if not state.cache_requested and self._cache is not None:
                state.cached = await self._openings.open(state.url, state.pin)
                state.total_bytes = state.pin.total_bytes
            state.cache_requested = True
        try:
            present = state.cached is not None and not await state.cached.claim(number)
        except CacheOffError as off:
            if state.generation == generation:
                self._leave_cache(state)
                state.cache_requested = not isinstance(off, CacheDamagedError)  # then it is fetched into another file
            return
        except RuntimeError:
            if state.generation == generation:
                raise
            present = False  # closed meanwhile
        if state.generation != generation:
            return  # the part is fetched anew, or not wanted any more
        if present:
            self._events.arrived(state, number, 0)
        else:
            self._transfers.start(_part(state, number))

    def _claimed(self, state: FetchedShard, number: int, generation: int, claim: asyncio.Task[None]) -> None:
        """Pass on what was raised, a mistake of ours too: nothing else would tell of it."""
        self._claims.discard(claim)
        self._events.has_room()  # for another claim; and where it failed the part is fetched anew, or not wanted
        error = None if claim.cancelled() else claim.exception()
        if isinstance(error, Exception) and state.generation == generation:
            self._events.failed(state, number, error)

    def _leave_cache(self, state: FetchedShard) -> None:
        if state.cached is not None:
            state.cached.close()
            state.cached = None
            self._events.left_cache(state)

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
        """See `DecompressionEvents.decompressed`."""
        self._evictions_for.pop(state.number, None)
        self._events.arrived(state, number, size_bytes)

    def has(self, state: FetchedShard, number: int) -> bool:
        """See `DecompressionEvents.has`."""
        return self._events.has(state, number)

    def is_wanted(self, state: FetchedShard, number: int) -> bool:
        """See `DecompressionEvents.is_wanted`."""
        return self._events.is_wanted(state, number)

    def decompressing_waits(self) -> None:
        """See `DecompressionEvents.waits`."""
        self._events.has_room()

    def decompressing_ended(self, state: FetchedShard, total_bytes: int) -> None:
        """See `DecompressionEvents.ended`."""
        state.total_bytes = total_bytes
        error = DatasetIndexError("the index points behind the end of the shard", url=state.url)
        for number in sorted(self._events.in_flight(state)):
            if part_edges(number, None)[0] >= total_bytes:
                self._events.failed(state, number, error)

    def decompressing_failed(self, state: FetchedShard, error: Exception) -> None:
        """See `DecompressionEvents.failed`."""
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
