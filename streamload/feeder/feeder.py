"""The feeder of one trainer: it plans, fetches and schedules, and sends the trainer its batches in order.

It does not know where it runs: `send` may lead to a socket, or to the caller's own thread. Only where it fetches does
it need a running event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

from streamload.decode.failure import Attempt, failure_of
from streamload.decode.tasks import RowsDone, ScanDone, ScanTask, Task
from streamload.feeder.calls import COUNT_SAMPLES
from streamload.feeder.epoch import Epoch, Epochs, OrphanedTasks, ReadyBatch
from streamload.feeder.feeder_meter import FeederMeter
from streamload.feeder.hold_up import what_holds_up
from streamload.feeder.messages import (
    AbandonEpoch,
    Acknowledge,
    Answer,
    Call,
    Configure,
    Failed,
    Ready,
    Scanning,
    Send,
    Tracing,
)
from streamload.feeder.scan_feed import ScanFeed
from streamload.feeder.scans import Scans
from streamload.feeder.scheduler import Learned, Resources, RowBatcher
from streamload.fetch.budget import bytes_for_parts, requests_at_once
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.fetch_options import Fetching
from streamload.fetch.fetched_listing import fetched_shards
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES
from streamload.fetch.prerequisites import Prerequisites
from streamload.fetch.resident import ResidentShards
from streamload.fetch.window import Turns
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.index.tables import Tables
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.memory.slots import Slots
from streamload.memory.unnamed import naming_the_limit
from streamload.order.epoch_start import EpochStart
from streamload.order.sampling import Sampled
from streamload.totals import Totals
from streamload.workers.protocol import Pool

_REPORTED_EVERY_S = 0.5


class Feeder:
    """Makes the plans of one trainer's epochs, has their tasks done, and sends the batches in order.

    Args:
        configure: what to do.
        listing: the shards.
        slots: whose memory the batches lie in.
        send: takes messages for the trainer, with descriptors.
        start_pool: starts the workers; gets this object for their events, and where shards are.
        shards: opens them all, where nothing is to be fetched; None fetches what is no file.
        indexes: those of the listing's indexes that have been read already, by folder.

    Attributes:
        tables, scans, prerequisites, pool: see `Resources`, `Prerequisites`, `Pool`. Close `prerequisites` after this.
    """

    def __init__(
        self,
        configure: Configure,
        listing: Listing,
        slots: Slots,
        send: Send,
        start_pool: StartPool,
        *,
        shards: ResidentShards | None = None,
        indexes: Mapping[str, DatasetIndex] | None = None,
    ) -> None:
        self._settings = configure.settings
        self._slots = slots
        self._send = send
        self._owns_process = shards is None
        self._expands = configure.fetching.expands
        self._learned = Learned()
        self._turn_is_due = False
        self._totals = Totals()
        self._counting: int | None = None  # the number of the call that waits for all counts
        self._reported_s = 0.0
        self.tables = Tables(
            listing,
            storages=configure.fetching.storages,
            indexes=indexes,
            budget_bytes=configure.fetching.budget_bytes,
        )
        self.prerequisites = self._make_prerequisites(configure.fetching, listing) if shards is None else None
        self.scans = Scans(self.tables, fetcher=self.fetcher)
        self._feed = None if self.fetcher is None else ScanFeed(self.scans, self.fetcher)
        self._orphaned = OrphanedTasks(self.fetcher)
        self._epochs = Epochs(
            self._begin,
            self._send_ready,
            works_ahead=configure.workers > 0 and not isinstance(self._settings.order.sampling, Sampled),
        )
        self.pool = start_pool(self, ResidentShards(listing.numbered, self.fetcher) if shards is None else shards)
        self._meter = FeederMeter(self._totals, self.pool, epochs=self._epochs, scans=self.scans, fetcher=self.fetcher)
        self._resources = Resources(
            self.tables,
            self.scans,
            self.pool,
            slots,
            self._learned,
            self.prerequisites,
            itertools.count(),
            Turns(),
        )

    @property
    def fetcher(self) -> Fetcher | None:
        """Fetches remote bytes; None where there are none."""
        return None if self.prerequisites is None else self.prerequisites.fetcher

    def close(self) -> None:
        """End the workers and close the slots. Idempotent."""
        self.pool.close()
        self._slots.close()

    # -- the trainer -----------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Take a message from the trainer, and do what can be done now. Whatever fails is sent, not raised."""
        with self._failing():
            self._take(message)
        self.pump()

    def _take(self, message: Any) -> None:
        match message:
            case EpochStart():
                self._try_again()
                if self.fetcher is not None:
                    order, counts = self._settings.order, self.tables.counts.values
                    self.fetcher.foresight.begin(order, counts, message.epoch, message.position)
                self._epochs.request(message)
                self.pool.abandon_unwanted()
            case Tracing():
                self._meter.trace(on=message.on)
            case AbandonEpoch():
                self._epochs.abandon(message.number)
                self.pool.abandon_unwanted()
            case Acknowledge():
                self._slots.note_taken(message.batches)
                self._slots.note_released(message.released)
                self._epochs.note_taken(message.batches)
            case Call() if message.function == COUNT_SAMPLES:
                self._counting = message.number
                self.scans.request(range(len(self.tables.counts)))

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""
        return await what_holds_up(self.pool, self.tables, self.prerequisites)

    def _try_again(self) -> None:
        """Try once more what has failed: the storage may have come back."""
        met = self.scans.try_again()
        if self.prerequisites is not None:
            met += self.prerequisites.try_again()
        self._epochs.forgive(met)

    def _answer_count(self) -> None:
        """Answer the trainer that waits for the counts of all shards, once they are known."""
        if self._counting is None:
            return
        counts = self.tables.counts
        with self._failing():
            self.scans.check(range(len(counts)))
            if counts.complete:
                self._send(Answer(self._counting, tuple(counts.values.tolist())), ())
                self._counting = None

    def _report_scans(self) -> None:
        """Say how far scans are, where the trainer waits for them."""
        is_awaited = self._epochs.awaited or self._counting is not None
        if not is_awaited or monotonic() - self._reported_s < _REPORTED_EVERY_S:
            return
        self._reported_s = monotonic()
        values = self.tables.counts.values
        self._send(Scanning(int((values >= 0).sum()), len(values)), ())

    def _begin(self, start: EpochStart, before: RowBatcher | None) -> Epoch:
        return Epoch(
            self._settings, start, self._resources, totals=self._totals, orphaned=self._orphaned, before=before
        )

    def _send_ready(self, start: EpochStart, batches: list[ReadyBatch], last: bool, acknowledge_after: int) -> None:
        """Send batches, as many with one message as its descriptors allow."""
        for first in range(0, max(1, len(batches)), MAX_DESCRIPTORS):
            end = first + MAX_DESCRIPTORS
            part = batches[first:end]
            opened = tuple(batch.slot for batch in part if self._slots.announce(batch.slot, batch.size_bytes))
            descriptors = [self._slots.descriptor(slot) for slot in opened]
            retired = tuple(self._slots.take_retired())
            self.pool.forget_slots(retired)
            ends = last and end >= len(batches)
            ready = Ready(
                start.identity,
                tuple(part),
                opened,
                retired,
                last=ends,
                acknowledge_after=acknowledge_after,
                totals=self._meter.to_send(always=ends, in_own_process=self._owns_process),
                skipped_members=self.tables.skipped,
                events=self._meter.take_events(),
            )
            self._send(ready, descriptors)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Send what is raised inside to the trainer: it would wait forever."""
        with Attempt() as attempt:
            yield
        if attempt.error is not None:
            self._fail(attempt.error)

    def _fail(self, error: Exception) -> None:
        """Nothing can go on: say so, and do nothing more."""
        failed_for = self._epochs.newest
        self._epochs.stop()
        self._counting = None
        self._send(Failed(failure_of(naming_the_limit(error)), failed_for), ())

    # -- events of the pool ----------------------------------------------------------------------------------------

    def on_done(self, done: RowsDone | ScanDone) -> None:
        """A task has come back from the pool."""
        with self._failing():
            self._orphaned.release(done.number)
            self._meter.add(done)
            if isinstance(done, RowsDone):
                self._epochs.on_done(done)
            else:
                self.scans.on_done(done)
                self._report_scans()
        self.pump()

    def is_wanted(self, task: Task) -> bool:
        """Whether anyone waits for the result of a task; if not, what it needs may be nowhere, and will never come."""
        return isinstance(task, ScanTask) or self._epochs.waits_for(task.number)

    def on_dropped(self, task: Task) -> None:
        """A task is not in flight any more."""
        self._epochs.drop(task.number)
        self._orphaned.release(task.number)

    def on_room(self) -> None:
        """The pool takes tasks again."""
        self.pump()

    def on_restarted(self) -> None:
        """A worker has died and was replaced."""
        self._totals["restarted_workers"] += 1

    def on_broken(self, error: Exception) -> None:
        """The pool cannot go on."""
        self._fail(error)

    # -- work ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Do what can be done now. Whatever fails is sent to the trainer."""
        with self._failing():
            self._schedule()
            self._meter.note_state()
            self._check_room()

    def _schedule(self) -> None:
        with self._failing():
            self._epochs.pump()
        if self._feed is not None and self._feed.pump():
            self._take_turn_soon()  # the epoch may have waited for just that, and nothing else may come
        while self.pool.has_room() and (task := self.scans.next_task()) is not None:
            self.scans.submit(task, self.pool)
        self._answer_count()

    def _check_room(self) -> None:
        """Go on fetching where batches were released; where what is needed at once does not fit, fail."""
        if self.fetcher is None:
            return
        fetcher = self.fetcher
        if fetcher.stalled:
            self._slots.discard_free()
        fetcher.follow_slots()
        if not fetcher.stalled or self.scans.in_flight or self._epochs.busy:
            return
        if self._orphaned:
            self.pool.drop_unwanted()
        if self._orphaned or not fetcher.stalled:
            return
        counting = self._counting is not None
        if not counting and self._epochs.trainer_is_busy:
            return
        if counting and fetcher.unkeep():  # the loop takes no batch meanwhile
            return
        if (counting or self._epochs.blocked) and not fetcher.stop_caching() and not fetcher.evict():
            self._fail(fetcher.too_small(counting=counting, expands=self._expands))

    # -- fetching --------------------------------------------------------------------------------------------------

    def _make_prerequisites(self, fetching: Fetching, listing: Listing) -> Prerequisites | None:
        """What fetches shards, if there are any that need that."""
        fetched = fetched_shards(listing, fetching.storages)
        if not fetched and not any(map(self.tables.is_remote, range(len(listing.shards)))):
            return None
        folder = fetching.cache_folder
        fetcher = Fetcher(
            listing,
            fetched,
            fetching.storages,
            budget_bytes=bytes_for_parts(fetching.budget_bytes, expands=fetching.expands),
            slot_bytes=self._bytes_for_batches,
            wake=self._take_turn_soon,
            progress=self._take_turn_soon,
            cache=None if folder is None else DiskCache(folder, fetching.cache_bytes, part_bytes=PART_BYTES),
            most_requests=requests_at_once(fetching.budget_bytes),
        )
        return Prerequisites(fetcher, self.tables, wake=self._take_turn_soon, progress=self._take_turn_soon)

    def _bytes_for_batches(self) -> int:
        """What batches take, or will take when as many exist as may."""
        return max(self._slots.held_bytes() + self._learned.values_bytes, self._learned.reserved_bytes)

    def _take_turn_soon(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        """Go on with fetching, and with what has come."""
        self._turn_is_due = False
        with self._failing():
            assert self.prerequisites is not None
            self.prerequisites.pump()
            self._meter.watch_transfers()
            self.pool.drop_shards(self.prerequisites.fetcher.take_closed())
        self.pump()


StartPool = Callable[[Feeder, ResidentShards], Pool]
