"""Fetching single parts: by a download, from the disk cache, or by decompressing what comes before them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from streamload.errors import DatasetIndexError
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.filling import CacheFilling, FillingEvents
from streamload.fetch.cache.openings import CacheOpenings
from streamload.fetch.compressed_bodies import CompressedBodies
from streamload.fetch.compressed_body import COMPRESSED_BYTES_HELD
from streamload.fetch.decompressed_parts import DecompressedParts
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.parts import part_edges
from streamload.fetch.transfers import Part, Source, TransferCounts, Transfers, Waiting
from streamload.limits import MOST_REQUESTS, SMALL_REQUESTS
from streamload.storage.download import Downloaded
from streamload.storage.storages import Storages
from streamload.tar.decompression import Decompressor

__all__ = ["PartFetcher", "PartFetcherEvents"]


_MOST_EVICTIONS = 8


class PartFetcherEvents(FillingEvents, Protocol):
    """Who wants the parts. Everything is called in the loop."""

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

    def release_parts(self) -> bool:
        """Keep nothing for the disk cache, for somebody waits for room; whether there may be room because of it."""
        if self._filling is None:
            return False
        self._filling.release_parts()
        return self.writes_to_disk or self._transfers.in_flight > 0  # after which `make_room` is called

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
