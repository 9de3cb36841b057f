"""The fetcher: fetches the parts of remote and compressed shards in the order of need, within the byte budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError, StorageError, without_secrets
from streamload.fetch.budget import budget_error, budget_for
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.next_use import OrderNextUse, numbers_by_key
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.part_fetching import PartFetcher
from streamload.fetch.parts import PART_BYTES, part_edges, part_key, shard_and_number
from streamload.fetch.resident import OpenShard, open_listed
from streamload.fetch.transfers import TransferCounts, Waiting
from streamload.fetch.window import PartWindow
from streamload.index.dataset import Dataset
from streamload.index.listing import Listing
from streamload.limits import FETCHED_SHARDS_SHARE, MOST_REQUESTS, SMALL_REQUESTS
from streamload.memory.unnamed import descriptor_limit
from streamload.order.options import OrderOptions
from streamload.storage.download import Pin
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of


class Failures:
    """Errors by the numbers of what they were met for. It is not tried again before they are taken."""

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._errors

    def note(self, number: int, error: Exception) -> None:
        """Something cannot be fetched."""
        self._errors[number] = error

    def check(self, numbers: Collection[int]) -> None:
        """Raise the error that was met for the first of some numbers that have one."""
        for number in numbers if self._errors else ():
            if number in self._errors:
                raise self._errors[number].with_traceback(None)  # it would grow each time

    def take(self) -> set[int]:
        """Forget all of them; gives their numbers."""
        taken, self._errors = set(self._errors), {}
        return taken


class FetchedShards:
    """Shards by number, from the first time that anything is needed of them until they are closed.

    A shard that is finished with is *kept* as long as some of it is there, since the next epoch may use that.

    Args:
        listing: the shards.
        most_open: how many may be open at once; by default a sixth of what this process may have open.
    """

    def __init__(self, listing: Listing, most_open: int | None = None) -> None:
        self.most_open = max(1, descriptor_limit() // FETCHED_SHARDS_SHARE) if most_open is None else most_open
        self._listing = listing
        self._states: dict[int, FetchedShard] = {}
        self._pins: dict[int, Pin] = {}
        self._open: dict[int, None] = {}
        self._finished: dict[int, None] = {}
        self._generations = 0
        self._closed: list[int] = []

    def __contains__(self, shard: int) -> bool:
        return shard in self._states

    def __getitem__(self, shard: int) -> FetchedShard:
        """A shard; made if it is not known."""
        state = self._states.get(shard)
        if state is None:
            listed = self._listing.shard(shard)
            compression = compression_of(listed.url)
            # It outlives the shard's memory: where samples lie was found in the version that was read first.
            pin = self._pins.setdefault(shard, self._listing.pin(shard))
            total_bytes = None if compression is not None else pin.total_bytes
            state = FetchedShard(shard, listed.url, pin, compression, self.new_generation(), total_bytes)
            self._states[shard] = state
        return state

    def new_generation(self) -> int:
        """A number that no memory of a shard has had."""
        self._generations += 1
        return self._generations

    def opened(self, shard: int) -> None:
        """Some of it is in flight, so it is open now, and not finished with."""
        self._open[shard] = None
        self._finished.pop(shard, None)

    def to_close(self, shard: int, window: PartWindow) -> list[int] | None:
        """What to `release` so that a shard may be open: one of which nothing is needed, or that is needed last.

        Args:
            shard: the shard, of which a part is fetched next.
            window: knows who needs what of the others.

        Returns:
            The numbers of shards; None where none can be closed.
        """
        if shard in self._open or len(self._open) < self.most_open:
            return []
        if window.shards_present < len(self._open):
            return [next(each for each in self._open if not window.parts_of(each))]
        evictable: Counter[int] = Counter()
        for key in window.evictable():
            other = shard_and_number(key)[0]
            evictable[other] += 1
            if evictable[other] == len(window.parts_of(other)):
                return [other]
        return None

    def release(self, shard: int) -> None:
        """Let go of a shard's memory, of which nothing is there any more; what its answers said of it stays known."""
        self._states[shard].release(self.new_generation())
        self._open.pop(shard, None)
        self._closed.append(shard)

    def finish(self, shard: int) -> None:
        """Nothing of it will be wanted soon."""
        if shard in self._states:
            self._finished.pop(shard, None)
            self._finished[shard] = None

    def take_if_finished(self, shard: int) -> FetchedShard | None:
        """Forget a shard that is finished with, for whoever closes it; None for any other."""
        if shard not in self._finished:
            return None
        del self._finished[shard]
        self._open.pop(shard, None)
        self._closed.append(shard)
        return self._states.pop(shard)

    def take_closed(self) -> list[int]:
        """The shards whose memory was released since the last call, and that have no other one now."""
        closed, self._closed = self._closed, []
        return [shard for shard in closed if shard not in self._open]

    def close(self) -> None:
        """Let go of all memory."""
        while self._states:
            self._states.popitem()[1].close()
        self._open.clear()

    def too_many(self) -> StorageError:
        """The error to raise where no shard can be closed, and another one is needed."""
        limit = descriptor_limit()
        enough = FETCHED_SHARDS_SHARE * limit
        return StorageError(
            f"more than {self.most_open} shards are needed at once, because samples in them are yet to be drawn within "
            f"the shuffle window, and this process may have only {limit} files open. Raise that limit (`ulimit -n "
            f"{enough}`, before the program is started), give a smaller window (shuffle=N), or pack "
            "fewer and larger shards"
        )


class Foresight:
    """What a cache knows of the future, from epoch to epoch.

    Args:
        cache: the cache; None if there is none, and then nothing is done.
        listing: the shards.
    """

    def __init__(self, cache: DiskCache | None, listing: Listing) -> None:
        self._cache = cache
        self._listing = listing
        self._numbers: dict[str, int] | None = None
        self._next_use: OrderNextUse | None = None

    def begin(self, options: OrderOptions, counts: NDArray[np.int64], epoch: int, start: int) -> None:
        """An epoch begins at a position of its order."""
        if self._cache is None:
            return
        if self._numbers is None:
            by_key = numbers_by_key(shard.url for shard in self._listing.numbered)  # a sidecar is used with its shard
            self._numbers = {key: self._listing.owner(number) for key, number in by_key.items()}
        self._next_use = OrderNextUse(self._numbers, options, counts, epoch, start=start)
        self._cache.expect(self._next_use)

    def passed(self, number: int) -> None:
        """Every lane has come to this number of its outputs."""
        if self._next_use is not None:
            self._next_use.advance(number)


def _open_local(listing: Listing, shard: int) -> int:
    return open_listed(listing.shard(shard))


class Fetcher:
    """Fetches parts of the shards that workers cannot open by themselves.

    Whoever uses it says what is wanted and is notified when something has come. Nothing is started but in `pump`, which
    must be called in a running loop, always the same one.

    Args:
        listing: the shards.
        fetched: the numbers of those that are fetched.
        storages: where they lie.
        budget_bytes: what parts may take together.
        wake: called when there is something to pump.
        progress: called in the loop when parts have come or failed.
        cache: shards on the disk.
        most_requests: how many may be in flight.

    Attributes:
        fetched: as given.
        compressed: those of them that are compressed: each has a single part.
        window: which parts are there or come.
        foresight: tells the disk cache what will be needed when.
    """

    def __init__(
        self,
        listing: Listing,
        fetched: frozenset[int],
        storages: Storages,
        *,
        budget_bytes: int,
        wake: Callable[[], None],
        progress: Callable[[], None],
        cache: DiskCache | None = None,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        self.fetched = fetched
        self.compressed = frozenset(each for each in fetched if compression_of(listing.shard(each).url) is not None)
        self.window = PartWindow(budget_bytes)
        self.foresight = Foresight(cache, listing)
        self._missing: tuple[int, int] | None = None
        self._listing = listing
        self._storages = storages
        self._wake = wake
        self._progress = progress
        open_local = partial(_open_local, listing)
        self._part_fetcher = PartFetcher(storages, cache, open_local, self, most_requests)
        self._shards = FetchedShards(listing)
        self._failures = Failures()
        self._on_arrival: list[Callable[[int, int], None]] = []

    # -- what is needed --------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """The window has changed: something may have to be fetched, or to be freed."""
        self._missing = None
        if self.window.waiting or self.window.has_free or self._waiting:
            self._wake()

    def are_present(self, keys: Collection[int]) -> bool:
        """Whether parts are all in memory, or in a file.

        Raises:
            StorageError, ShardFormatError: one of them cannot be fetched.
        """
        self._failures.check(keys)
        return self.window.are_present(keys)

    def try_again(self) -> None:
        """Have fetched once more what could not be, as far as it is still needed."""
        self.window.try_again(self._failures.take())
        self.notify()

    def below_watermark(self) -> bool:
        """Whether more could be fetched at once than is wanted."""
        return self.window.waiting < self._part_fetcher.at_once

    def begin_epoch(self, on_arrival: Callable[[int, int], None]) -> None:
        """Call a function with the shard and the key of each part that comes, until `end_epoch`."""
        self._on_arrival.append(on_arrival)

    def end_epoch(self, on_arrival: Callable[[int, int], None]) -> None:
        """Undo `begin_epoch`, or do nothing."""
        if on_arrival in self._on_arrival:
            self._on_arrival.remove(on_arrival)

    def finish(self, shards: Iterable[int]) -> None:
        """Nothing of these shards will be wanted soon: they are closed when their last part is given up."""
        for shard in shards:
            if shard in self._shards:
                self._part_fetcher.finish(self._shards[shard])
            self._shards.finish(shard)
            self._close_if_unused(shard)

    # -- what is there ---------------------------------------------------------------------------------------------

    def open(self, shard: int) -> OpenShard:
        """The memory of a shard, some part of which is there."""
        state = self._shards[shard]
        return OpenShard(state.url, state.size_bytes, state.descriptor())

    def version(self, shard: int) -> tuple[int, int]:
        """Another value for every memory that a shard has had, and for every size of it."""
        state = self._shards[shard]
        return state.generation, state.size_bytes

    def arrived_from(self, shard: int, start: int) -> tuple[int, int | None]:
        """The end of what is there without a gap from a place on, and the shard's size where that is known."""
        number, total_bytes = start // PART_BYTES, self.state_of(shard).total_bytes
        if shard in self.compressed:
            is_present = total_bytes is not None and self.window.is_present(part_key(shard, 0))
            return (total_bytes or 0, total_bytes) if is_present else (0, None)
        while self.window.is_present(part_key(shard, number)):
            number += 1
        end = number * PART_BYTES
        return end if total_bytes is None else min(end, total_bytes), total_bytes

    def keys_between(self, shard: int, start: int, end: int) -> list[int]:
        """The keys of the parts that hold some bytes of a shard."""
        if shard in self.compressed:
            return [part_key(shard, 0)]
        return [part_key(shard, number) for number in range(start // PART_BYTES, -(-end // PART_BYTES))]

    def size_by_index(self, shard: int) -> int:
        """The bytes of a fetched shard that has been listed with them and lies there as it is; -1 for any other."""
        listed = self._listing.shard(shard)
        return listed.bytes if shard in self.fetched and shard not in self.compressed else -1

    @property
    def lacks_room(self) -> bool:
        """Whether what is wanted next waits for room in the budget."""
        return self._missing is not None or bool(self._waiting)

    @property
    def used_bytes(self) -> int:
        """What counts against the budget now: parts and decompression."""
        return self.window.used_bytes + self._other_bytes

    @property
    def counts(self) -> TransferCounts:
        """What has happened to requests so far."""
        return self._part_fetcher.counts

    def slowest(self) -> Waiting | None:
        """The part that has been in flight for the longest time; None where there is none."""
        return self._part_fetcher.slowest()

    def asked_version(self) -> str | None:
        """The shard whose version has been requested for the longest time; None where none is."""
        return self._part_fetcher.asked_version()

    def take_closed(self) -> list[int]:
        """The shards whose memory has been closed since the last call, and that have no other one now."""
        return self._shards.take_closed()

    # -- work ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Start all that there is room for."""
        for free in self.window.take_free():
            self._drop(free)
        self._missing = None
        for state in self._waiting:
            self.grow(state)
        while (key := self.window.next_missing()) is not None:
            shard, number = shard_and_number(key)
            state = self.state_of(shard)
            start, end = part_edges(number, state.total_bytes)
            if start >= end:
                self.failed(state, number, DatasetIndexError("the index points behind the end", url=state.url))
                continue
            if not self._part_fetcher.takes(state):
                return
            size_bytes = end - start if self._part_fetcher.takes_memory(state) else 0
            needed_bytes = size_bytes + self._part_fetcher.opening_bytes(state)
            if not self._make_room(key, needed_bytes):
                self._missing = key, needed_bytes
                return
            self.window.admit(key, size_bytes)
            self._shards.opened(shard)
            self._part_fetcher.fetch(state, number)

    @property
    def stalled(self) -> bool:
        """Whether what is wanted next does not fit, and nothing is in flight whose arrival could change that."""
        waiting = dict.fromkeys([part_key(state.number, 0) for state in self._waiting], PART_BYTES)
        needs = [*waiting.items(), *([] if self._missing is None else [self._missing])]
        if not needs or self._part_fetcher.is_ending or self.window.in_flight() - waiting.keys():
            return False
        return not any(self._has_room(*need) for need in needs)

    def unkeep(self) -> bool:
        """Keep nothing for rows that scans will find, for somebody waits for the counts; whether it may make room."""
        unkept = self.window.unkeep_all()
        if unkept:
            self.notify()
        return unkept

    def too_small(self, *, counting: bool, expands: bool = False) -> StorageError:
        """The error to raise for a budget within which nothing goes on.

        Args:
            counting: `len()` waits for all shards.
            expands: a share of the budget is kept for what fields expand to.
        """
        key, missing_bytes = self._missing or (0, 0)
        for state in self._waiting[:1]:
            compressed_bytes, decompression = state.pin.total_bytes or 0, state.decompression
            assert decompression is not None
            left_bytes = decompression.expected_bytes(compressed_bytes) - decompression.room_bytes
            key, missing_bytes = part_key(state.number, 0), max(PART_BYTES, left_bytes)
        shard = shard_and_number(key)[0]
        if self._shards.to_close(shard, self.window) is None:
            return self._shards.too_many()
        needs = missing_bytes, self.window.bytes_kept_from_next(), self._other_bytes
        budget_bytes = budget_for(self.window.budget_bytes, expands=expands)
        helps = self._shards[shard].compression is None
        return budget_error(budget_bytes, *needs, counting=counting, expands=expands, cache_helps=helps)

    async def close(self) -> None:
        """Stop everything and release all memory. Idempotent."""
        await self._part_fetcher.close()
        self._shards.close()
        await self._storages.aclose()

    def _has_room(self, key: int, size_bytes: int) -> bool:
        """Whether a part can come, in bytes and in open shards."""
        closing = self._shards.to_close(shard_and_number(key)[0], self.window)
        return closing is not None and self._room_for(key, size_bytes) is not None

    def _make_room(self, key: int, size_bytes: int) -> bool:
        """See to it that a part, or more of it, can come; False where that is not possible now."""
        while not self._has_room(key, size_bytes):
            in_flight = self.window.in_flight() if self.compressed else ()
            whole = [each for each in in_flight if shard_and_number(each)[0] in self.compressed]
            last = max(whole, key=self.window.turn_of, default=key)
            if self.window.turn_of(last) <= self.window.turn_of(key):
                return False
            self._part_fetcher.forget(self.state_of(shard_and_number(last)[0]))  # begins again when its turn comes
            self._drop(last)
        shard = shard_and_number(key)[0]
        for other in self._shards.to_close(shard, self.window) or ():
            self._release(other)
        for each in self._room_for(key, size_bytes) or ():
            self._drop(each)
        return True

    def _room_for(self, key: int, size_bytes: int) -> list[int] | None:
        return self.window.room_for(size_bytes, self._other_bytes, key) if size_bytes else []

    @property
    def _waiting(self) -> list[FetchedShard]:
        """The shards whose decompression waits for room, first those that are needed first."""
        return sorted(self._part_fetcher.waiting, key=lambda state: self.window.turn_of(part_key(state.number, 0)))

    @property
    def _other_bytes(self) -> int:
        """What decompression takes of the budget."""
        return self._part_fetcher.held_bytes

    def _release(self, shard: int) -> None:
        """Let go of all that is there of a shard; what is needed of it is fetched again."""
        for key in list(self.window.parts_of(shard)):
            self.window.drop(key)
        self._part_fetcher.forget(self._shards[shard])
        self._shards.release(shard)

    def _drop(self, key: int) -> None:
        shard, number = shard_and_number(key)
        state = self.state_of(shard)
        state.free(number)
        self.window.drop(key)
        self._close_if_unused(shard)

    def _close_if_unused(self, shard: int) -> None:
        state = None if self.window.uses(shard) else self._shards.take_if_finished(shard)
        if state is not None:
            self._part_fetcher.forget(state)
            state.close()

    # -- events of the part fetcher ------------------------------------------------------------------------------------

    def state_of(self, shard: int) -> FetchedShard:
        """Return a shard."""
        return self._shards[shard]

    def in_flight(self, state: FetchedShard) -> set[int]:
        """Return the parts of a shard that are to be fetched and have not come."""
        parts = self.window.parts_of(state.number)
        return {shard_and_number(key)[1] for key in parts if not self.window.is_present(key)}

    def sized(self) -> None:
        """Note that an answer has begun that states the size of a shard, which was not known."""
        self._progress()

    def arrived(self, state: FetchedShard, number: int, size_bytes: int) -> None:
        """Note that a part is there, and takes so much memory."""
        key = part_key(state.number, number)
        if key in self.window.parts_of(state.number):
            self.window.arrive(key, size_bytes)
            for on_arrival in self._on_arrival:
                on_arrival(state.number, key)
            self._progress()
            self._wake()

    def failed(self, state: FetchedShard, number: int, error: Exception) -> None:
        """Note that a part cannot be fetched."""
        key = part_key(state.number, number)
        self._failures.note(key, error)
        state.free(number)
        self.window.fail(key)
        self._progress()

    def not_coming(self, state: FetchedShard) -> None:
        """Note that what is in flight of a shard will not come: it is not in the disk cache."""
        for key in self.window.in_flight() & self.window.parts_of(state.number):
            self.window.drop(key)

    def on_disk(self, state: FetchedShard) -> None:
        """Note that all of a shard is in its file."""
        for key in list(self.window.parts_of(state.number)):
            self.arrived(state, shard_and_number(key)[1], 0)

    def lost(self, state: FetchedShard) -> None:
        """Note that the file that a shard was written to is gone."""
        self._release(state.number)
        self.notify()

    def has_room(self) -> None:
        """Note that more parts can be fetched at once."""
        self._wake()

    def grow(self, state: FetchedShard) -> bool:
        """Give a shard that is being decompressed room for a part more; return False where there is none."""
        key = part_key(state.number, 0)
        if not self._make_room(key, PART_BYTES):
            self._wake()  # nothing may be left that makes room
            return False
        self.window.grow(key, PART_BYTES)
        assert state.decompression is not None
        state.decompression.add_room()
        return True


class Prerequisites:
    """A fetcher, and the loading of tables beside it.

    Args:
        fetcher: fetches parts.
        tables: takes the tables.
        wake: called when there is something to pump.
        progress: called in the loop when tables have come or failed.
    """

    def __init__(
        self, fetcher: Fetcher, tables: Dataset, *, wake: Callable[[], None], progress: Callable[[], None]
    ) -> None:
        self.fetcher = fetcher
        self._tables = tables
        self._wake = wake
        self._progress = progress
        self._wanted: dict[int, None] = {}
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._failures = Failures()

    def has_tables(self, shards: Collection[int]) -> bool:
        """Whether the tables of some shards can be had at once; if not, they are loaded, in this order.

        None of them is dropped before this is called for others.

        Raises:
            DatasetIndexError, StorageError: one of them cannot be loaded.
        """
        missing = self._tables.hold(self._tables.with_sidecars(shards))
        self._failures.check(missing)
        self.want_tables(shards)
        return not missing

    def want_tables(self, shards: Iterable[int]) -> None:
        """Have tables loaded that will be needed."""
        numbers = self._tables.with_sidecars(shards)
        new = [shard for shard in numbers if shard not in self._wanted and shard not in self._loading]
        wanted = [shard for shard in new if self._tables.needs_read(shard) and shard not in self._failures]
        self._wanted.update(dict.fromkeys(wanted))
        if wanted:
            self._wake()

    def loading_now(self) -> str:
        """Which table is being loaded, in words; empty where none is."""
        shard = next(iter(self._loading), None)
        return "" if shard is None else f"the index: where samples lie in {without_secrets(self._tables.url(shard))!r}"

    def try_again(self) -> None:
        """Forget what has failed, so that it is tried once more when it is needed."""
        self._failures.take()
        self.fetcher.try_again()

    def pump(self) -> None:
        """Start all that there is room for; in the running loop."""
        while self._wanted and len(self._loading) < SMALL_REQUESTS:
            shard = next(iter(self._wanted))
            del self._wanted[shard]
            if not self._tables.needs_read(shard):
                continue  # it came with another
            self._loading[shard] = task = asyncio.create_task(self._load(shard))
            task.add_done_callback(partial(self._loaded, shard))
        self.fetcher.pump()

    async def close(self) -> None:
        """Stop everything and release all memory. Idempotent."""
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await self.fetcher.close()

    async def _load(self, shard: int) -> None:
        try:
            await self._tables.fetch(shard)
        finally:
            del self._loading[shard]

    def _loaded(self, shard: int, task: asyncio.Task[None]) -> None:
        """Note what was raised, a mistake of ours too: `has_tables` raises it, and nothing else would tell of it."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._failures.note(shard, error)
        self._progress()
        self._wake()
