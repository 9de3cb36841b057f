"""The feeder of one trainer: it plans, fetches and schedules, and sends the trainer its batches in order.

It does not know where it runs: `send` may lead to a socket, or to the caller's own thread. Only where it fetches does
it need a running event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, perf_counter, process_time
from typing import Any, Literal

from streamload.decode.failure import Attempt, failure_of
from streamload.decode.tasks import RowsDone, RowTask, ScanDone, ScanTask, Task
from streamload.errors import without_secrets
from streamload.feeder.messages import (
    COUNT_SAMPLES,
    AbandonEpoch,
    Acknowledge,
    Answer,
    Call,
    Configure,
    Failed,
    Ready,
    ReadyBatch,
    Scanning,
    Send,
    Tracing,
)
from streamload.feeder.scans import Scans
from streamload.feeder.stream import BatchStream
from streamload.fetch.budget import bytes_for_parts, requests_at_once
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.fetched_listing import Fetching, fetched_shards, waits_for_index
from streamload.fetch.fetcher import Fetcher, Prerequisites
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.resident import ResidentShards
from streamload.fetch.transfers import TransferCounts
from streamload.index.dataset import Dataset
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.limits import DECOMPRESSED_AT_ONCE, SCANNED_PARTS, SCANNED_PARTS_SHARE
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.memory.slots import Slots
from streamload.memory.unnamed import naming_the_limit
from streamload.order.sampling import Sampled
from streamload.order.share import EpochStart
from streamload.text import counted
from streamload.totals import TimeIntegral, Totals, duration_bucket
from streamload.trace import Event
from streamload.workers.caller_pool import CallerPool
from streamload.workers.protocol import Pool, WorkerActivity

# Totals go with batches, and a message with them takes a hundredth of a millisecond more.
_SENT_EVERY_S = 0.02

_Reason = Literal["work", "memory", "network", "scan"]


class FeederMeter:
    """Adds up, in `totals`, what a feeder and its workers do.

    While the loop waits, it adds up where the workers' time goes, as "awaited_s/REASON": "work"; or what idle workers
    wait for: the "network", a "scan" of a shard, or room in memory_budget ("memory"). If one of three workers is at
    work and the others wait for the network, a third of that time counts as work. So does all time in which the
    batches after the awaited one are ready. The loop counts as waiting as soon as it has so few batches that it need
    not acknowledge any.

    Args:
        totals: where to add.
        pool: the workers.
        stream: says whether the loop waits.
        scans: which are outstanding.
        fetcher: of remote bytes, or None.

    Attributes:
        totals: as given.
        events: for a trace, since the last message; None where there is none.
    """

    def __init__(
        self,
        totals: Totals,
        pool: Pool,
        *,
        stream: BatchStream,
        scans: Scans,
        fetcher: Fetcher | None,
    ) -> None:
        self.totals = totals
        self._pool = pool
        self._stream = stream
        self._scans = scans
        self._fetcher = fetcher
        self._started_s = self._noted_s = perf_counter()
        self._sent_s = -math.inf
        self._shares: tuple[tuple[str, float], ...] = ()
        self._used_bytes = TimeIntegral()
        self.events: list[Event] | None = None

    def add(self, done: RowsDone | ScanDone) -> None:
        """Add what a task has taken."""
        costs, totals = done.costs, self.totals
        if isinstance(done, RowsDone):
            totals["payload_bytes"] += done.payload_bytes
            totals["made_samples"] += done.rows
        totals["scan_s"] += costs.scan
        totals["decode_s"] += costs.decode
        totals["transform_s"] += costs.transform
        totals["collate_s"] += costs.collate
        totals["workers_waited_s"] += costs.waited
        totals["workers_busy_s"] += costs.whole
        totals["workers_processor_s"] += costs.processor
        totals["workers_delayed_s"] += costs.delayed
        totals[duration_bucket("task", costs.whole)] += 1
        totals.add(costs.named)
        if self.events is not None:
            kind, details = _described(done)
            self.events.append(Event(kind, f"worker {costs.process}", costs.started, costs.whole, details))

    def trace(self, *, on: bool) -> None:
        """Note events from now on, or no more."""
        if not on:
            self.events = None
        elif self.events is None:
            self.events = []
        self.watch_transfers()

    def watch_transfers(self) -> None:
        """Have transfers noted as well, as soon as there are any; to be called after each of them has begun."""
        if self._fetcher is None:
            return
        counts = self._fetcher.counts
        if self.events is None:
            counts.ended = None
        elif counts.ended is None:
            counts.ended = []

    def take_events(self) -> tuple[Event, ...]:
        """The events since the last call; none unless they are noted."""
        if self.events is None:
            return ()
        if self._fetcher is not None and (ended := self._fetcher.counts.ended):
            self.events += [
                Event("fetch", "connection", began_s, ended_s - began_s, {"url": url, "start": start, "bytes": size})
                for url, start, began_s, ended_s, size in ended
            ]
            ended.clear()
        taken, self.events = tuple(self.events), []
        return taken

    def note_state(self) -> None:
        """Add the time since the last call, for the reason that held then; to be called after every event."""
        now_s = perf_counter()
        for name, share in self._shares:
            self.totals[name] += share * (now_s - self._noted_s)
        self._noted_s = now_s
        if self._fetcher is not None:
            self._used_bytes.set(self._fetcher.used_bytes)
        self._shares = tuple(self._reasons()) if self._stream.awaited else ()

    def to_send(self, *, always: bool, in_own_process: bool) -> Totals | None:
        """The totals until now, if it is time to send them.

        Args:
            always: it is.
            in_own_process: the processor time of this process is the feeder's.
        """
        now_s, totals = perf_counter(), self.totals
        if not always and now_s - self._sent_s < _SENT_EVERY_S:
            return None
        self._sent_s = now_s
        totals["feeder_s"] = now_s - self._started_s
        totals["worker_s"] = totals["feeder_s"] * self._pool.workers_with_tasks()[0]
        if in_own_process:
            totals["feeder_processor_s"] = process_time()
        if self._fetcher is not None:
            totals.update(_of_transfers(self._fetcher.counts))
            totals["memory_byte_s"] = self._used_bytes.now()
            totals["memory_limit_byte_s"] = self._fetcher.window.budget_bytes * totals["feeder_s"]
        return totals

    def _reasons(self) -> Iterator[tuple[str, float]]:
        workers, with_tasks = self._pool.workers_with_tasks()
        if with_tasks:
            yield "awaited_s/work", with_tasks / workers
        if with_tasks < workers:
            yield f"awaited_s/{self._why_idle()}", 1 - with_tasks / workers

    def _why_idle(self) -> _Reason:
        if self._stream.full:
            return "work"  # one batch takes longer than those after it
        if self._fetcher is None:
            return "scan"
        if self._fetcher.counts.in_flight or not self._scans.outstanding:
            return "memory" if self._fetcher.lacks_room else "network"
        return "scan"


def _described(done: RowsDone | ScanDone) -> tuple[str, dict[str, float]]:
    costs = done.costs
    if isinstance(done, ScanDone):
        return "scan", {"shards": len(done.found)}
    return "task", {
        "samples": done.rows,
        "decode_s": costs.decode,
        "transform_s": costs.transform,
        "collate_s": costs.collate,
        "processor_s": costs.processor,
    }


def _of_transfers(counts: TransferCounts) -> dict[str, float]:
    return {
        "fetched_bytes": counts.received_bytes,
        "cached_bytes": counts.cached_bytes,
        "requests": counts.requests,
        "throttled_requests": counts.throttled,
        "broken_requests": counts.broken,
        "answered_requests": counts.answered,
        "answer_s": counts.answer_s,
        "connection_s": counts.connection_s,
        "connection_limit_s": counts.limit_s,
        "connections_full_s": counts.full_s,
    }


# Of a shard, before the first answer has stated a size.
_FIRST_GUESS_PARTS = 4


# Of a shard: its turn, where its next scan begins, its size, how often its parts have come or gone, and whether the
# first shard comes before its rest.
_State = tuple[int, int, int | None, int, bool]


class ScanFeed:
    """Requests the parts that scans need, from where each shard's next scan begins; notifies scans of what has come.

    Args:
        scans: the shards to scan.
        fetcher: fetches the parts.
    """

    def __init__(self, scans: Scans, fetcher: Fetcher) -> None:
        self._scans = scans
        self._fetcher = fetcher
        self._requested: dict[int, tuple[int, range]] = {}
        self._looked: dict[int, tuple[_State, int]] = {}
        # Those that come later must not take the room of those that come first.
        most_bytes = fetcher.window.budget_bytes // SCANNED_PARTS_SHARE
        self._parts_ahead = max(1, min(SCANNED_PARTS, most_bytes // PART_BYTES))
        self._usual_parts = _FIRST_GUESS_PARTS
        self._first_is_unknown = False
        self._decompressed_at_once = max(1, min(DECOMPRESSED_AT_ONCE, most_bytes // (2 * PART_BYTES)))

    def pump(self) -> bool:
        """Request the parts needed now, and notify the scans of what has come.

        Returns:
            Whether a shard needs no scan any more, since a part of it cannot be fetched.
        """
        for shard in [shard for shard in self._requested if not self._scans.is_wanted(shard)]:
            self._request(shard, range(0))
        found, left, looked_at = False, self._parts_ahead, set[int]()
        decompressed = self._decompressed_at_once
        wanted = self._scans.wanted()
        self._first_is_unknown = bool(wanted) and self._is_unknown(wanted[0])
        for shard in wanted:
            if left <= 0 or decompressed <= 0:
                break  # thousands may follow, of which nothing has been requested
            looked_at.add(shard)
            failed, left = self._look(shard, left)
            found = found or failed
            decompressed -= self._fetcher.state_of(shard).compression is not None
        for shard in sorted(self._requested.keys() - looked_at):
            found = self._look(shard, 0)[0] or found
        return found

    def _look(self, shard: int, left: int) -> tuple[bool, int]:
        """Notify the scans of what has come of a shard, and request more of it.

        Returns:
            Whether the scan has failed, and how many parts may still be requested.
        """
        with Attempt() as attempt:
            return False, self._look_at(shard, left)
        assert attempt.error is not None
        if self._scans.is_scanning(shard):  # it is met again when that is done
            return False, left
        self._request(shard, range(0))
        self._scans.fail(shard, attempt.error)
        return True, left

    def _look_at(self, shard: int, left: int) -> int:
        start, window = self._scans.next_bytes(shard)[0], self._fetcher.window
        total = self._fetcher.state_of(shard).total_bytes
        state = self._scans.turn_of(shard), start, total, window.changes_of(shard), self._first_is_unknown
        before, missing = self._looked.get(shard, (None, 0))
        if state == before:
            return left - missing
        end, total = self._fetcher.arrived_from(shard, start)
        self._scans.available(shard, end, total)
        if left > 0:
            missing = self._request_from(shard, start // PART_BYTES, -(-end // PART_BYTES), total, left)
            if missing < left:  # else not all of them have been requested
                self._looked[shard] = state, missing
            left -= missing
        return left

    def _request_from(self, shard: int, first: int, missing: int, total: int | None, most: int) -> int:
        """Request the parts from the first missing one on: a single one where the end of the shard, or of the first of
        all shards, is unknown, so that the rest of that one finds connections free.

        What has come from `first` on is needed until it has been scanned.

        Returns:
            How many are missing, at most `most`. Where the end is unknown, as many as the last shard has whose size
            became known: the answer states the size, and the rest is requested before later shards.
        """
        if shard in self._fetcher.compressed:
            self._request(shard, range(1))
            self._fetcher.window.are_present([part_key(shard, 0)])  # raises why it cannot be decompressed
            return 1
        missing = max(first, missing)
        end = missing + 1 if total is None else max(missing, min(missing + most, -(-total // PART_BYTES)))
        now = min(end, missing + 1) if self._first_is_unknown else end
        self._request(shard, range(min(first, now), now))
        requested = [part_key(shard, number) for number in range(missing, now)]
        self._fetcher.window.are_present(requested)  # raises why one of them cannot be fetched
        if total is not None:
            self._usual_parts = max(1, -(-total // PART_BYTES))
        return self._usual_parts if self._is_unknown(shard) else end - missing

    def _is_unknown(self, shard: int) -> bool:
        """Whether the first answer is about to state the size of a shard."""
        state = self._fetcher.state_of(shard)
        return state.total_bytes is None and state.compression is None

    def _request(self, shard: int, wanted: range) -> None:
        turn_before, before = self._requested.pop(shard, (0, range(0)))
        turn = self._scans.turn_of(shard) if wanted else turn_before
        if wanted:
            self._requested[shard] = turn, wanted
        else:
            self._looked.pop(shard, None)
        if (turn, wanted) == (turn_before, before):
            return  # to notify the fetcher would wake it, and that this feed, without end
        window = self._fetcher.window
        for number in set(before).difference(wanted):
            window.withdraw(part_key(shard, number))
        for number in wanted if turn != turn_before else set(wanted).difference(before):
            window.request(part_key(shard, number), turn)
        self._fetcher.notify()


_SHOWN_WORKERS = 2


async def what_holds_up(pool: Pool, tables: Dataset, prerequisites: Prerequisites | None) -> str:
    """What the next batch waits for now; empty where nothing shows."""
    busy = await pool.inspect()
    if busy:
        others = len(busy) - _SHOWN_WORKERS
        shown = [_doing(worker, tables) for worker in busy[:_SHOWN_WORKERS]]
        return "\n".join([*shown, *([f"{counted(others, 'more worker')} at work"] if others > 0 else [])])
    return "" if prerequisites is None else _fetching(prerequisites)


def _doing(worker: WorkerActivity, tables: Dataset) -> str:
    if worker.stopped:
        return f"{worker.name} is stopped, by a signal (SIGSTOP) or a debugger, {_work(worker, tables)}"
    stack = f":\n{worker.stack}" if worker.stack else ""
    return f"{worker.name} is at work, {_work(worker, tables)}{stack}"


def _work(worker: WorkerActivity, tables: Dataset) -> str:
    task = worker.task
    if task is None:
        return "still starting: it imports the modules that the user's functions need"
    if not isinstance(task, RowTask):
        return f"scanning the shard {without_secrets(tables.url(task.shards[0]))!r}"
    if worker.row < 0:
        return "before or after the samples of a batch, as in collating"
    shard, sample = int(task.table.shards[worker.row]), int(task.table.samples[worker.row])
    table = tables.at_hand(shard)
    key = "" if table is None else f", sample {table.key(sample)!r}"
    return f"decoding or transforming shard {without_secrets(tables.url(shard))!r}{key}"


def _fetching(prerequisites: Prerequisites) -> str:
    fetcher = prerequisites.fetcher
    slowest, counts = fetcher.slowest(), fetcher.counts
    if slowest is None:
        return prerequisites.loading_now()
    failed = counts.broken + counts.throttled
    return (
        f"the storage: a request for {without_secrets(slowest.url)!r} from byte {slowest.start} on has taken "
        f"{slowest.seconds:.1f} s, in which {slowest.received_bytes:,} bytes came; "
        f"{failed:,} of {counted(counts.requests, 'request')} have failed so far"
    )


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
        tables, scans, prerequisites, pool: see `BatchStream`.
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
        self._turn_is_due = False
        self._totals = Totals()
        self._counting: int | None = None  # the number of the call that waits for all counts
        self._reported_s = 0.0
        self.tables = Dataset(
            listing,
            configure.fetching.storages,
            indexes=indexes,
            budget_bytes=configure.fetching.budget_bytes,
        )
        self.prerequisites = self._make_prerequisites(configure.fetching, listing) if shards is None else None
        self.scans = Scans(self.tables, fetcher=self.fetcher)
        self._feed = None if self.fetcher is None else ScanFeed(self.scans, self.fetcher)
        self.pool = start_pool(self, ResidentShards(listing.numbered, self.fetcher) if shards is None else shards)
        self._stream = BatchStream(
            self._settings,
            tables=self.tables,
            scans=self.scans,
            pool=self.pool,
            slots=slots,
            totals=self._totals,
            prerequisites=self.prerequisites,
            send_ready=self._send_ready,
            works_ahead=configure.workers > 0 and not isinstance(self._settings.order.sampling, Sampled),
        )
        self._meter = FeederMeter(self._totals, self.pool, stream=self._stream, scans=self.scans, fetcher=self.fetcher)

    @property
    def fetcher(self) -> Fetcher | None:
        """Fetches remote bytes; None where there are none."""
        return None if self.prerequisites is None else self.prerequisites.fetcher

    def close(self) -> None:
        """End the workers and close the slots. Idempotent."""
        self.pool.close()
        self._slots.close()

    async def aclose(self) -> None:
        """End everything."""
        self.close()
        if self.prerequisites is not None:
            await self.prerequisites.close()

    # -- the trainer -----------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Take a message from the trainer, and do what can be done now. Whatever fails is sent, not raised."""
        if isinstance(self.pool, CallerPool) and isinstance(message, RowsDone | ScanDone):
            self.pool.on_done(message)
            return
        with self._failing():
            self._take(message)
        self.pump()

    def _take(self, message: Any) -> None:
        match message:
            case EpochStart():
                self.scans.try_again()  # what has failed: the storage may have come back
                if self.prerequisites is not None:
                    self.prerequisites.try_again()
                if self.fetcher is not None:
                    order, counts = self._settings.order, self.tables.counts.values
                    self.fetcher.expect(order, counts, message.epoch, message.position)
                self._stream.request(message)
                self.pool.abandon_unwanted()
            case Tracing():
                self._meter.trace(on=message.on)
            case AbandonEpoch():
                self._stream.abandon(message.number)
                self.pool.abandon_unwanted()
            case Acknowledge():
                self._slots.note_taken(message.batches)
                self._slots.note_released(message.released)
                self._stream.take_acknowledged(message.batches)
            case Call() if message.function == COUNT_SAMPLES:
                self._counting = message.number
                self.scans.request(range(len(self.tables.counts)))

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""
        return await what_holds_up(self.pool, self.tables, self.prerequisites)

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
        is_awaited = self._stream.awaited or self._counting is not None
        if not is_awaited or monotonic() - self._reported_s < _REPORTED_EVERY_S:
            return
        self._reported_s = monotonic()
        values = self.tables.counts.values
        self._send(Scanning(int((values >= 0).sum()), len(values)), ())

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
        failed_for = self._stream.newest
        self._stream.stop()
        self._counting = None
        self._send(Failed(failure_of(naming_the_limit(error)), failed_for), ())

    # -- events of the pool ----------------------------------------------------------------------------------------

    def on_done(self, done: RowsDone | ScanDone) -> None:
        """A task has come back from the pool."""
        with self._failing():
            self._meter.add(done)
            if isinstance(done, RowsDone):
                self._stream.end_task(done.number, done)
            else:
                self.scans.on_done(done)
                self._report_scans()
        self.pump()

    def is_wanted(self, task: Task) -> bool:
        """Whether anyone waits for the result of a task; if not, what it needs may be nowhere, and will never come."""
        return isinstance(task, ScanTask) or self._stream.waits_for(task.number)

    def on_dropped(self, task: Task) -> None:
        """A task is not in flight any more."""
        self._stream.end_task(task.number, None)

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
            self._stream.pump()
        if self._feed is not None and self._feed.pump():
            self._take_turn_soon()  # the epoch may have waited for just that, and nothing else may come
        while self.pool.has_room() and (task := self.scans.next_task()) is not None:
            self.scans.submit(task, self.pool)
        self._answer_count()

    def _check_room(self) -> None:
        """Fail if what is needed at once does not fit, and nothing is running that could make room."""
        if self.fetcher is None:
            return
        fetcher = self.fetcher
        if not fetcher.stalled or self.scans.in_flight or self._stream.busy:
            return
        if self._stream.has_abandoned:
            self.pool.drop_unwanted()
        if self._stream.has_abandoned or not fetcher.stalled:
            return
        counting = self._counting is not None
        if counting and fetcher.unkeep():  # the loop takes no batch meanwhile
            return
        if counting or self._stream.blocked:
            self._fail(fetcher.too_small(counting=counting, expands=self._expands))

    # -- fetching --------------------------------------------------------------------------------------------------

    def _make_prerequisites(self, fetching: Fetching, listing: Listing) -> Prerequisites | None:
        """What fetches shards, if there are any that need that."""
        fetched = fetched_shards(listing, fetching.storages)
        if not fetched and not waits_for_index(listing, fetching.storages):
            return None
        folder = fetching.cache_folder
        fetcher = Fetcher(
            listing,
            fetched,
            fetching.storages,
            budget_bytes=bytes_for_parts(fetching.budget_bytes, expands=fetching.expands),
            wake=self._take_turn_soon,
            progress=self._take_turn_soon,
            cache=None if folder is None else DiskCache(folder, fetching.cache_bytes, part_bytes=PART_BYTES),
            most_requests=requests_at_once(fetching.budget_bytes),
        )
        return Prerequisites(fetcher, self.tables, wake=self._take_turn_soon, progress=self._take_turn_soon)

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
