"""The fetcher: fetches the parts of remote and compressed shards in the order of need, within the byte budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial

from streamload.errors import DatasetIndexError, StorageError, without_secrets
from streamload.fetch.budget import budget_error, budget_for
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.part_fetching import PartFetcher
from streamload.fetch.parts import PART_BYTES, part_edges, part_key, shard_and_number
from streamload.fetch.resident import OpenShard, open_listed
from streamload.fetch.transfers import TransferCounts, Waiting
from streamload.fetch.window import PartWindow, raise_first
from streamload.index.dataset import Dataset
from streamload.index.listing import Listing
from streamload.limits import FETCHED_SHARDS_SHARE, MOST_REQUESTS, SMALL_REQUESTS
from streamload.memory.unnamed import descriptor_limit
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of


class Fetcher:
    """Fetches parts of the shards that workers cannot open by themselves.

    Its users request parts of its window, and are notified. Work is started by `pump` alone, in one running loop.

    Args:
        listing: the shards.
        fetched: the numbers of those that are fetched.
        storages: where they lie.
        budget_bytes: for parts.
        wake: called when there is something to pump.
        progress: called in the loop when parts have come or failed.
        cache: shards on the disk.
        most_requests: how many may be in flight.

    Attributes:
        compressed: the fetched shards that are compressed: each has a single part.
        window: which parts are present or in flight.
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
        self._missing: tuple[int, int] | None = None
        self._listing = listing
        self._storages = storages
        self._wake = wake
        self._progress = progress
        self._cache = cache
        self._part_fetcher = PartFetcher(storages, cache, self, most_requests)
        self._most_open = max(1, descriptor_limit() // FETCHED_SHARDS_SHARE)
        self._shards: dict[int, FetchedShard] = {}
        self._open: dict[int, None] = {}
        # These stay open as long as some of them is there, since the next epoch may use that.
        self._finished: set[int] = set()
        self._closed: set[int] = set()
        self._on_arrival: list[Callable[[int, int], None]] = []

    # -- what is needed --------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Note that the window has changed: something may have to be fetched, or to be freed."""
        self._missing = None
        if self.window.waiting or self.window.free or self._waiting:
            self._wake()

    def try_again(self) -> None:
        """Retry what has failed, if it is still needed."""
        self.window.try_again()
        self.notify()

    def below_watermark(self) -> bool:
        """Return True if more could be fetched at once than is needed."""
        transfers = self._part_fetcher.transfers
        return self.window.waiting < transfers.room() + len(transfers.running)

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

    # -- what is there ---------------------------------------------------------------------------------------------

    def state_of(self, shard: int) -> FetchedShard:
        """Return a shard."""
        state = self._shards.get(shard)
        if state is None:
            url, pin = self._listing.shard(shard).url, self._listing.pin(shard)
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

    def open_local(self, shard: int) -> int:
        """Open a compressed shard that is local, and return its descriptor."""
        return open_listed(self._listing.shard(shard))

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

    def size_by_index(self, shard: int) -> int:
        """Return the listed bytes of a fetched shard that lies there uncompressed; -1 for any other."""
        listed = self._listing.shard(shard)
        return listed.bytes if shard in self.fetched and shard not in self.compressed else -1

    @property
    def lacks_room(self) -> bool:
        """Whether what is needed next waits for room in the budget."""
        return self._missing is not None or bool(self._waiting)

    @property
    def used_bytes(self) -> int:
        """What counts against the budget now: parts and decompression."""
        return self.window.used_bytes + self._part_fetcher.held_bytes

    @property
    def counts(self) -> TransferCounts:
        """What has happened to requests so far."""
        return self._part_fetcher.transfers.counts

    def slowest(self) -> Waiting | None:
        """Return the request that has been in flight for the longest time; None if there is none."""
        return self._part_fetcher.transfers.slowest()

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
        self._missing = None
        for state in self._waiting:
            if state.decompression is not None:  # else the growth of one before has stopped it
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
            self._open[shard] = None
            if key not in state.completing:
                self._finished.discard(shard)
            self._part_fetcher.fetch(state, number)

    @property
    def stalled(self) -> bool:
        """Whether what is needed next does not fit, and nothing is in flight whose arrival could change that."""
        waiting = dict.fromkeys([part_key(state.number, 0) for state in self._waiting], PART_BYTES)
        needs = [*waiting.items(), *([] if self._missing is None else [self._missing])]
        if not needs or self._part_fetcher.is_ending or self.window.in_flight() - waiting.keys():
            return False
        return not any(self._has_room(*need) for need in needs)

    def unkeep(self) -> bool:
        """Drop what is kept for the rows of scans; return True if that may make room."""
        unkept = self.window.unkeep_all()
        if unkept:
            self.notify()
        return unkept

    def too_small(self, *, counting: bool, expands: bool = False) -> StorageError:
        """Make the error for a budget within which nothing goes on; `counting` says that `len()` waits."""
        key, missing_bytes = self._missing or (0, 0)
        for state in self._waiting[:1]:
            compressed_bytes, decompression = state.pin.total_bytes or 0, state.decompression
            assert decompression is not None
            left_bytes = decompression.expected_bytes(compressed_bytes) - decompression.room_bytes
            key, missing_bytes = part_key(state.number, 0), max(PART_BYTES, left_bytes)
        shard = shard_and_number(key)[0]
        if self._to_close(shard) is None:
            limit = descriptor_limit()
            return StorageError(
                f"more than {self._most_open} shards are needed at once, because samples in them are yet to be drawn "
                f"within the shuffle window, and this process may have only {limit} files open. Raise that limit "
                f"(`ulimit -n {FETCHED_SHARDS_SHARE * limit}`, before the program is started), give a smaller window "
                "(shuffle=N), or pack fewer and larger shards"
            )
        needs = missing_bytes, self.window.bytes_kept_from_next(), self._part_fetcher.held_bytes
        budget_bytes = budget_for(self.window.budget_bytes, expands=expands)
        helps = shard not in self.compressed
        return budget_error(budget_bytes, *needs, counting=counting, expands=expands, cache_helps=helps)

    async def close(self) -> None:
        """Stop everything and release all memory. Idempotent."""
        self._wake = self._progress = lambda: None
        await self._part_fetcher.close()
        for state in self._shards.values():
            state.release()
        self._open.clear()
        await self._storages.aclose()

    @property
    def _waiting(self) -> list[FetchedShard]:
        """The shards whose decompression waits for room, those needed first."""
        return sorted(self._part_fetcher.waiting, key=lambda state: self.window.turn_of(part_key(state.number, 0)))

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
        return self.window.room_for(size_bytes, self._part_fetcher.held_bytes, key) if size_bytes else []

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
            self._part_fetcher.forget(self.state_of(shard_and_number(last)[0]))  # begins again when its turn comes
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
        self._part_fetcher.forget(state)
        state.release()
        self._open.pop(shard, None)
        self._finished.discard(shard)
        self._closed.add(shard)

    # -- events of the part fetcher ------------------------------------------------------------------------------------

    def has_room(self) -> None:
        """Note that more parts can be fetched at once."""
        self._wake()

    def sized(self) -> None:
        """Note that the first answer has stated the size of a shard."""
        self._progress()

    def arrived(self, state: FetchedShard, number: int, size_bytes: int) -> None:
        """Note that a part is there, and how much memory it takes."""
        key = part_key(state.number, number)
        if key in self.window.parts_of(state.number):
            self.window.arrive(key, size_bytes)
            if key in state.completing:
                state.completing.discard(key)
                self.window.withdraw(key)
            for on_arrival in self._on_arrival:
                on_arrival(state.number, key)
            self._progress()
            self._wake()

    def failed(self, state: FetchedShard, number: int, error: Exception) -> None:
        """Note that a part cannot be fetched."""
        state.free(number)
        self.window.fail(part_key(state.number, number), error)
        self._close_if_unused(state.number)
        self._progress()

    def looked_up(self, state: FetchedShard, error: Exception | None) -> None:
        """Note that a shard was looked up in the disk cache, or why it was not."""
        for key in sorted(self.window.parts_of(state.number)):
            number = shard_and_number(key)[1]
            if error is not None:
                self.failed(state, number, error)
            elif state.file is not None and state.file.whole:
                self.arrived(state, number, 0)
            else:
                self.window.drop(key)

    def disk_refused(self) -> None:
        """Fetch what was to be written to the disk cache to memory."""
        for shard in list(self._open):
            file = self._shards[shard].file
            if file is not None and not file.whole:
                self._release(shard)
        self.notify()

    def grow(self, state: FetchedShard) -> bool:
        """Make room for a part more of a shard that is being decompressed; return False if there is none."""
        key = part_key(state.number, 0)
        if not self._make_room(key, PART_BYTES):
            self._wake()  # nothing may be left that makes room
            return False
        self.window.grow(key, PART_BYTES)
        assert state.decompression is not None
        state.decompression.add_room()
        return True


class Prerequisites:
    """A fetcher, and the loading of tables beside it; `progress` is called when tables have come or failed."""

    def __init__(self, fetcher: Fetcher, tables: Dataset, *, progress: Callable[[], None]) -> None:
        self.fetcher = fetcher
        self._tables = tables
        self._progress = progress
        self._at_once = asyncio.Semaphore(SMALL_REQUESTS)
        self._loading: dict[int, asyncio.Task[None]] = {}
        self._errors: dict[int, Exception] = {}

    def has_tables(self, shards: Collection[int]) -> bool:
        """Return True if the tables of some shards are at hand; if not, load them, in this order.

        None of them is dropped before this is called for others.

        Raises:
            DatasetIndexError, StorageError: one of them cannot be loaded.
        """
        missing = self._tables.hold(self._tables.with_sidecars(shards))
        raise_first(self._errors, missing)
        self.want_tables(shards)
        return not missing

    def want_tables(self, shards: Iterable[int]) -> None:
        """Load tables that will be needed."""
        for shard in self._tables.with_sidecars(shards):
            if shard not in self._loading and shard not in self._errors and self._tables.needs_read(shard):
                self._loading[shard] = task = asyncio.create_task(self._load(shard))
                task.add_done_callback(partial(self._loaded, shard))

    def loading_now(self) -> str:
        """Return in words which table is being loaded; empty if none is."""
        shard = next(iter(self._loading), None)
        return "" if shard is None else f"the index: where samples lie in {without_secrets(self._tables.url(shard))!r}"

    def try_again(self) -> None:
        """Forget what has failed, so that it is tried once more when it is needed."""
        self._errors.clear()
        self.fetcher.try_again()

    async def close(self) -> None:
        """Stop everything and release all memory. Idempotent."""
        loading = list(self._loading.values())
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        await self.fetcher.close()

    async def _load(self, shard: int) -> None:
        async with self._at_once:
            if self._tables.needs_read(shard):  # else it came with another
                await self._tables.fetch(shard)

    def _loaded(self, shard: int, task: asyncio.Task[None]) -> None:
        """Record what was raised, our own mistakes too, for `has_tables`."""
        del self._loading[shard]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._errors[shard] = error
        self._progress()
