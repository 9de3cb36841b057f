"""The pipeline: what the ranks of one feeder share, which are one trainer's, or all of a machine's.

One listing and its tables, one fetcher with its budget, one pool of workers; see `Feeder` for what each rank has of its
own. It does not know where it runs. Only where it fetches does it need a running event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from streamload.decode.failure import Attempt
from streamload.decode.tasks import RowsDone, ScanDone, ScanTask, Task
from streamload.environment.launchers import available_processors, processors_of_rank
from streamload.feeder.feeder_meter import FeederMeter, observed_of
from streamload.feeder.hold_up import what_holds_up
from streamload.feeder.messages import Configure
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
from streamload.memory.slots import Slots
from streamload.schedule.epoch import Epochs, OrphanedTasks
from streamload.schedule.scan_feed import ScanFeed
from streamload.schedule.scans import Scans
from streamload.schedule.scheduler import Learned, Resources
from streamload.totals import Totals
from streamload.workers.protocol import Pool
from streamload.workers.worker_number import WorkerNumber

__all__ = ["Pipeline"]

_ADAPTS_EVERY_S = 1.0


class Served(Protocol):
    """The feeder of a rank; see `Feeder`.

    Attributes:
        epochs: the rank's.
        meter: what its trainer is told of the work done for it.
        slots: whose memory its batches lie in.
    """

    epochs: Epochs
    meter: FeederMeter
    slots: Slots

    @property
    def counts(self) -> bool:
        """Whether the trainer waits for the counts of all shards."""

    def pump(self, most: float = ...) -> int:
        """Announce batches, and have at most so many tasks done; returns how many. Failures are sent."""

    def answer_count(self) -> None:
        """Answer the trainer that waits for the counts of all shards, once they are known."""

    def report_scans(self) -> None:
        """Say how far scans are, where the trainer waits for them."""

    def is_blocked(self) -> bool:
        """Whether the trainer waits for a batch, and nothing can be done of it before more bytes are resident."""

    def failing(self) -> AbstractContextManager[None]:
        """Send what is raised inside to the trainer."""

    def fail(self, error: Exception) -> None:
        """The rank cannot go on."""


class Pipeline:
    """Has the tasks of its feeders done: those of the one with the fewest batches ahead first.

    Args:
        configure: what to do, which is the same for all ranks.
        start_pool: starts the workers; gets this object for their events, and where shards are.
        listing: the shards.
        shards: opens them all, where nothing is to be fetched; None fetches what is no file.
        indexes: those of the listing's indexes that have been read already, by folder.

    Attributes:
        settings: of every epoch.
        ranks: how many ranks are to share this; those that get the same batches have one feeder.
        feeders: those of the ranks that are here.
        meters: of these.
        tables, scans, prerequisites, orphaned, pool: see `Resources`, `Prerequisites`, `OrphanedTasks`, `Pool`.
        broken: why the workers cannot go on; None while they can.
    """

    def __init__(
        self,
        configure: Configure,
        start_pool: StartPool,
        *,
        listing: Listing,
        shards: ResidentShards | None = None,
        indexes: Mapping[str, DatasetIndex] | None = None,
    ) -> None:
        self.settings = configure.settings
        self.ranks = configure.ranks
        self._groups = -(-configure.ranks // configure.shared_by)
        self.feeders: list[Served] = []
        self._in_turn: list[Served] = []
        self.meters: list[FeederMeter] = []
        self.owns_process = shards is None
        self.broken: Exception | None = None
        self._expands = configure.fetching.expands
        self._learned = Learned()
        self._turn_is_due = False
        self._turns: list[Turns] = []
        self._batch_numbers = itertools.count()
        self._of_gone_feeders = Totals()
        self._observed = Totals()
        self._adapting: asyncio.TimerHandle | None = None
        self.tables = Tables(
            listing,
            strict=configure.settings.strict,
            storages=configure.fetching.storages,
            indexes=indexes,
            budget_bytes=configure.fetching.budget_bytes,
        )
        self.prerequisites = self._make_prerequisites(configure.fetching, listing) if shards is None else None
        self.scans = Scans(self.tables, strict=configure.settings.strict, fetcher=self.fetcher)
        self._feed = None if self.fetcher is None else ScanFeed(self.scans, self.fetcher)
        self.orphaned = OrphanedTasks(self.fetcher)
        self.pool = start_pool(self, ResidentShards(listing.numbered, self.fetcher) if shards is None else shards)
        if configure.most_workers is not None:
            number = WorkerNumber(configure.workers, most=configure.most_workers, processors=self._processors())
            self._adapt_later(number)

    @property
    def fetcher(self) -> Fetcher | None:
        """Fetches remote bytes; None where there are none."""
        return None if self.prerequisites is None else self.prerequisites.fetcher

    # -- ranks -----------------------------------------------------------------------------------------------------

    def join(self, feeder: Served, slots: Slots) -> Resources:
        """Serve another rank from now on; returns what its epochs are made with.

        Args:
            feeder: the rank's.
            slots: whose memory its batches lie in.

        Raises:
            Exception: what has broken the workers, whom nobody would tell this rank of any more.
        """
        if self.broken is not None:
            raise self.broken
        self.feeders.append(feeder)
        self._in_turn.append(feeder)
        return Resources(
            self.tables,
            self.scans,
            self.pool,
            slots,
            self._learned,
            self.prerequisites,
            self._batch_numbers,
            Turns(self._turns),
            self._groups,
        )

    def leave(self, feeder: Served, turns: Turns | None) -> None:
        """Serve a rank no more, whose epochs have been abandoned. Idempotent."""
        if feeder not in self.feeders:
            return
        self.feeders.remove(feeder)
        self._in_turn.remove(feeder)
        self.meters.remove(feeder.meter)
        self._of_gone_feeders.add(feeder.meter.until_now())
        if turns is not None:
            turns.leave()
        self.pool.abandon_unwanted()
        self.pump()

    def try_again(self) -> None:
        """Try once more what has failed: the storage may have come back."""
        met = self.scans.try_again()
        if self.prerequisites is not None:
            met += self.prerequisites.try_again()
        for feeder in self.feeders:
            feeder.epochs.forgive(met)

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""
        return await what_holds_up(self.pool, self.tables, self.prerequisites)

    def close(self) -> None:
        """End the workers. Idempotent. `prerequisites` is closed by whoever has the loop."""
        if self._adapting is not None:
            self._adapting.cancel()
        self.pool.close()

    # -- events of the pool ----------------------------------------------------------------------------------------

    def on_done(self, done: RowsDone | ScanDone) -> None:
        """A task has come back from the pool."""
        with self._failing():
            self.orphaned.release(done.number)
            if isinstance(done, RowsDone):
                self._take_rows(done)
            else:
                self.scans.on_done(done)
                for feeder in self.feeders:
                    feeder.meter.add(done, 1 / self.ranks)
                    feeder.report_scans()
        self.pump()

    def _take_rows(self, done: RowsDone) -> None:
        owners = [feeder for feeder in self.feeders if feeder.epochs.owns(done.number)]
        for feeder in owners or self.feeders[:1]:
            feeder.meter.add(done)
        for feeder in owners:
            with feeder.failing():
                feeder.epochs.on_done(done)

    def is_wanted(self, task: Task) -> bool:
        """Whether anyone waits for the result of a task; if not, what it needs may be nowhere, and will never come."""
        return isinstance(task, ScanTask) or any(feeder.epochs.waits_for(task.number) for feeder in self.feeders)

    def on_dropped(self, task: Task) -> None:
        """A task is not in flight any more."""
        for feeder in self.feeders:
            feeder.epochs.drop(task.number)
        self.orphaned.release(task.number)

    def on_room(self) -> None:
        """The pool takes tasks again."""
        self.pump()

    def on_restarted(self) -> None:
        """A worker has died and was replaced."""
        for feeder in self.feeders[:1]:  # so that the sum over ranks is right
            feeder.meter.totals["restarted_workers"] += 1

    def on_broken(self, error: Exception) -> None:
        """The pool cannot go on."""
        self.broken = error
        self.fail(error)

    # -- work ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Do what can be done now. Whatever fails is sent to the rank that needs it."""
        with self._failing():
            self._schedule()
            for feeder in self.feeders:
                feeder.meter.note_state()
            self._check_room()

    def fail(self, error: Exception) -> None:
        """No rank can go on."""
        for feeder in list(self.feeders):
            feeder.fail(error)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Send what is raised inside to all trainers: they would wait forever."""
        with Attempt() as attempt:
            yield
        if attempt.error is not None:
            self.fail(attempt.error)

    def _schedule(self) -> None:
        if len(self.feeders) == 1:
            self.feeders[0].pump()
        else:
            self._schedule_by_need()
        if self._feed is not None and self._feed.pump():
            self._take_turn_soon()  # the epoch may have waited for just that, and nothing else may come
        while self.pool.has_room() and (task := self.scans.next_task()) is not None:
            self.scans.submit(task, self.pool)
        for feeder in self.feeders:
            feeder.answer_count()

    def _schedule_by_need(self) -> None:
        """A task at a time for the rank with the fewest batches ahead of its loop, as long as there is one.

        Of those that have as many it is the one that has waited longest: else the first of them would be done first.
        """
        waiting = list(self._in_turn)
        while waiting:
            feeder = min(waiting, key=lambda each: each.epochs.outstanding)
            if not feeder.pump(most=1):
                waiting.remove(feeder)
                continue
            for order in (waiting, self._in_turn):
                order.remove(feeder)
                order.append(feeder)

    def _check_room(self) -> None:
        """Go on fetching where batches were released; where what a rank needs at once does not fit, it fails."""
        if self.fetcher is None:
            return
        fetcher = self.fetcher
        if fetcher.stalled:
            for feeder in self.feeders:
                feeder.slots.discard_free()
        fetcher.follow_slots()
        if not fetcher.stalled or self.scans.in_flight or any(feeder.epochs.busy for feeder in self.feeders):
            return
        if self.orphaned:
            self.pool.drop_unwanted()
        if self.orphaned or not fetcher.stalled:
            return
        counting = [feeder for feeder in self.feeders if feeder.counts]
        if not counting and any(feeder.epochs.trainer_is_busy for feeder in self.feeders):
            return
        if counting and fetcher.unkeep():  # the loop takes no batch meanwhile
            return
        waiting = counting or [feeder for feeder in self.feeders if feeder.is_blocked()]
        if waiting and not fetcher.stop_caching() and not fetcher.evict():
            error = fetcher.too_small(counting=bool(counting), expands=self._expands)
            for feeder in waiting:
                feeder.fail(error)

    def _processors(self) -> int:
        return processors_of_rank() if self.ranks == 1 else available_processors()

    def _adapt_later(self, wanted: WorkerNumber) -> None:
        """Adapt the number of workers to what they do, from now on."""
        self._adapting = asyncio.get_running_loop().call_later(_ADAPTS_EVERY_S, self._adapt, wanted)

    def _adapt(self, wanted: WorkerNumber) -> None:
        with self._failing():
            now = Totals(self._of_gone_feeders)
            for meter in self.meters:
                now.add(meter.until_now())
            seen, self._observed = now.since(self._observed), now
            wanted.processors = self._processors()  # a rank that joins may bring some
            self.pool.resize(wanted.observe(observed_of(seen, max(1, len(self.meters)))))
            for meter in self.meters:
                meter.resized()
        self.pump()
        self._adapt_later(wanted)

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
        held_bytes = sum(feeder.slots.held_bytes() + self._learned.values_bytes for feeder in self.feeders)
        return max(held_bytes, len(self.feeders) * self._learned.reserved_bytes)

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
            for meter in self.meters:
                meter.watch_transfers()
            self.pool.drop_shards(self.prerequisites.fetcher.take_closed())
        self.pump()


StartPool = Callable[[Pipeline, ResidentShards], Pool]
