"""Plan, fetch and schedule the batches of one trainer, and send them in order.

The feeder may run in a process of its own, or in the trainer's thread. Only fetches and worker processes need a running
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic, perf_counter, process_time
from typing import Any

from streamload.decode.failure import Attempt, failure_of
from streamload.decode.tasks import RowsDone, RowTask, ScanDone, ScanTask, WorkerSetup
from streamload.errors import without_secrets
from streamload.feeder import messages
from streamload.feeder.stream import BatchStream, Engine, Scans
from streamload.fetch.budget import budget_for, bytes_for_parts, requests_at_once
from streamload.fetch.disk_cache import DiskCache
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.resident import Fetching, ResidentShards, fetched_shards, waits_for_index
from streamload.fetch.window import PART_BYTES
from streamload.index.dataset import Dataset
from streamload.index.listing import Listing
from streamload.limits import CALLER_SHARDS_SHARE
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import keep_freed_memory, with_limit_named
from streamload.order.sampling import Sampled
from streamload.order.share import EpochStart
from streamload.totals import Event, Totals
from streamload.workers.launch import Child
from streamload.workers.pool import Pool, PoolEvents, WorkerActivity, WorkerLink
from streamload.workers.process_pool import ProcessPool

_KEPT_BYTES = 256 << 20  # memory that the allocator keeps, for the buffers of later requests
_MARGIN = 1.05  # factor of an advised budget, since samples may exceed the mean


class Feeder:
    """Plan one trainer's epochs, have workers run the tasks, and send the batches in order.

    Args:
        send: sends messages to the trainer, as `AsyncChannel.send` does.
        launched: worker processes to use, started earlier.
        shards: opens all shards; given only in the trainer's process.
    """

    def __init__(
        self,
        configure: messages.Configure,
        send: Callable[..., None],
        launched: Sequence[Child] = (),
        *,
        shards: ResidentShards | None = None,
    ) -> None:
        settings, fetching, listing = configure.settings, configure.fetching, configure.listing
        self._send = send
        self._fetch_is_due = self._closed = False
        self.tables = Dataset(listing, fetching.storages, budget_bytes=fetching.budget_bytes)
        self.fetcher = self._make_fetcher(fetching, listing) if shards is None else None
        if self.fetcher is not None:
            keep_freed_memory(_KEPT_BYTES)
        keeps = settings.order.lanes == 1 and settings.order.sampling is None
        self.scans = Scans(self.tables, self.fetcher, keeps=keeps)
        slots, opening = SlotPool(configure.descriptors), shards or ResidentShards(listing.numbered, self.fetcher)
        events = PoolEvents(
            is_wanted=lambda task: isinstance(task, ScanTask) or self._stream.is_wanted(task.number),
            dropped=lambda task: self._stream.end_task(task.number, None),
            done=self._on_done,
            has_room=self.pump,
            broken=self._fail,
        )
        if configure.workers:
            self.pool: Pool = ProcessPool(
                configure.workers,
                WorkerSetup(0, configure.job, configure.import_path, configure.log_levels),
                opening,
                slots,
                events,
                ends_at_failure=configure.ends_at_failure,
                launched=launched,
            )
        else:
            most_open = configure.descriptors // CALLER_SHARDS_SHARE
            self.pool = Pool([WorkerLink(partial(send, close=True), opening, slots, most_open)], opening, events)
        self._engine = Engine(settings, self.tables, self.scans, self.pool, slots, Totals(), self.fetcher)
        works_ahead = configure.workers > 0 and not isinstance(settings.order.sampling, Sampled)
        self._stream = BatchStream(self._engine, self._send_ready, works_ahead=works_ahead)
        self._meter = FeederMeter(self._engine, self._stream, in_own_process=shards is None)

    def close(self) -> None:
        """End the workers and close the slots. Idempotent."""
        self._closed = True
        self.pool.close()
        self._engine.slots.close()

    async def aclose(self) -> None:
        """Close the feeder, and end all fetches."""
        self.close()
        if self.fetcher is not None:
            await self.fetcher.close()

    # -- the trainer -----------------------------------------------------------------------------------------------

    def handle(self, message: Any) -> None:
        """Handle a message from the trainer, and call `pump`. Failures are sent, not raised."""
        if isinstance(message, RowsDone | ScanDone):  # the trainer does the tasks itself
            self.pool.end_task(message)
            return
        with self._failing():
            match message:
                case EpochStart():
                    self.scans.retry_failed()  # the storage may have recovered
                    if self.fetcher is not None:
                        self.fetcher.retry_failed()
                    self._stream.request(message)
                    self.pool.abandon_unwanted()
                case messages.Tracing():
                    self._meter.trace(on=message.on)
                case messages.AbandonEpoch():
                    self._stream.abandon(message.number)
                    self.pool.abandon_unwanted()
                case messages.Acknowledge():
                    self._engine.slots.record_taken(message.batches)
                    self._engine.slots.record_released(message.released)
                    self._stream.untaken -= message.batches
        self.pump()

    async def wait_reason(self) -> str:
        """Describe why the next batch has not come: the oldest task, or a request; empty if unknown."""
        worker = await self.pool.inspect()
        if worker is not None:
            return work_in_words(worker, self.tables)
        return "" if self.fetcher is None else fetching_in_words(self.fetcher)

    def _send_ready(self, batches: list[messages.ReadyBatch], last: bool) -> None:
        """Send batches in one message; the caller limits them to `MAX_DESCRIPTORS`."""
        slots, start, counts = self._engine.slots, self._stream.requested, self.tables.counts
        are_new = last and counts.complete and self.tables.listing.counts is None
        assert start is not None
        opened = tuple(batch.slot for batch in batches if slots.announce(batch.slot, batch.done.size_bytes))
        descriptors = [slots.descriptors[slot] for slot in opened]
        retired = tuple(slots.take_retired())
        self.pool.drop(slots=retired)
        ready = messages.Ready(
            start.identity,
            tuple(batches),
            opened,
            retired,
            last=last,
            acknowledge_after=self._stream.acknowledge_after,
            totals=self._meter.totals(),
            skipped_members=self.tables.skipped,
            events=self._meter.take_events(),
            counts=tuple(counts.values.tolist()) if are_new else None,
        )
        self._send(ready, descriptors)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Send an error raised in the block to the trainer, which would otherwise wait forever."""
        with Attempt() as attempt:
            yield
        if attempt.error is not None:
            self._fail(attempt.error)

    # -- events of the pool ----------------------------------------------------------------------------------------

    def _on_done(self, done: RowsDone | ScanDone) -> None:
        with self._failing():
            self._meter.add(done)
            if isinstance(done, RowsDone):
                self._stream.end_task(done.number, done)
            else:
                self.scans.on_done(done)
        self.pump()

    def _fail(self, error: Exception) -> None:
        requested = self._stream.requested
        self._stream.stop()
        failed_for = None if requested is None else requested.identity
        self._send(messages.Failed(failure_of(with_limit_named(error)), failed_for), ())

    def pump(self) -> None:
        """Announce ready batches, and schedule all possible tasks. Failures are sent to the trainer."""
        with self._failing():
            with self._failing():
                self._stream.pump()
            if self.scans.feed():
                self._fetch_soon()  # an epoch that waits for a failed shard might get no other event
            while self.pool.has_room() and self.scans.submit_next(self.pool):
                pass
            self._meter.record_state()
            self._check_room()

    # -- fetching --------------------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        """Fail if the parts needed together do not fit, and no work in progress can make room."""
        fetcher, stream = self.fetcher, self._stream
        if fetcher is not None and fetcher.stalled() and not self.scans.in_flight and stream.blocked:
            self._fail(fetcher.too_small(self._enough_for_window(fetcher)))

    def _enough_for_window(self, fetcher: Fetcher) -> int:
        """Return a budget that holds the shuffle window, estimated from the shards known so far; 0 if unknown.

        The budget covers the samples that wait to be drawn, and a part at each end of every lane's window.
        """
        order, counts, requested = self._engine.settings.order, self.tables.counts.values, self._stream.requested
        known = [(int(counts[shard]), fetcher.state_of(shard).total_bytes) for shard in fetcher.fetched]
        sizes = [(count, size) for count, size in known if count > 0 and size]
        if not order.shuffle or requested is None or not sizes:
            return 0
        samples, data_bytes = map(sum, zip(*sizes, strict=True))
        shards_per_known, lanes_read = len(counts) / len(sizes), -(-order.lanes // requested.world_size)
        waiting = min(order.window, samples * shards_per_known / order.lanes) * lanes_read
        edges_bytes = 2 * lanes_read * min(PART_BYTES, data_bytes / len(sizes))
        held_bytes = min(data_bytes * shards_per_known, waiting * data_bytes / samples + edges_bytes)
        return budget_for(int(_MARGIN * held_bytes))

    def _make_fetcher(self, fetching: Fetching, listing: Listing) -> Fetcher | None:
        """Return a fetcher, or None if workers can open all shards and no index is remote."""
        fetched = fetched_shards(listing, fetching.storages)
        if not fetched and not waits_for_index(listing, fetching.storages):
            return None
        cache = None
        if fetching.cache_folder is not None:
            urls = [shard.url for shard in listing.numbered]
            cache = DiskCache(fetching.cache_folder, fetching.cache_bytes, part_bytes=PART_BYTES, urls=urls)
        return Fetcher(
            self.tables,
            fetched,
            fetching.storages,
            budget_bytes=bytes_for_parts(fetching.budget_bytes),
            wake=self._fetch_soon,
            cache=cache,
            most_requests=requests_at_once(fetching.budget_bytes),
        )

    def _fetch_soon(self) -> None:
        """Call `_fetch_and_pump` once, after the current callback of the event loop."""
        if not self._fetch_is_due:
            self._fetch_is_due = True
            asyncio.get_running_loop().call_soon(self._fetch_and_pump)

    def _fetch_and_pump(self) -> None:
        self._fetch_is_due = False
        if self._closed:  # a new task would open memory that is never closed
            return
        with self._failing():
            assert self.fetcher is not None
            self.fetcher.pump()
            self.pool.drop(self.fetcher.pop_closed())
        self.pump()


class FeederMeter:
    """Add up the time and work of a feeder and its workers, in an engine's totals.

    While the trainer waits (`BatchStream.awaited`), time is added to "awaited_s/REASON". The reason is "work" while
    more than half of the workers are busy, or no further batch may be started; else it is "network", "scan" (of shards
    without an index) or "memory" (no room in memory_budget).
    """

    def __init__(self, engine: Engine, stream: BatchStream, *, in_own_process: bool) -> None:
        self._engine = engine
        self._totals = engine.totals
        self._stream = stream
        self._in_own_process = in_own_process
        self._started_s = self._recorded_s = perf_counter()
        self._awaited: str | None = None  # the name in the totals that the current time is added to
        self._events: list[Event] | None = None

    def add(self, done: RowsDone | ScanDone) -> None:
        """Add the costs of a task."""
        costs, totals = done.costs, self._totals
        for stage in ("scan", "decode", "transform", "collate"):
            totals[f"{stage}_s"] += getattr(costs, stage)
        for name in ("waited", "busy", "processor", "delayed"):
            totals[f"workers_{name}_s"] += getattr(costs, name)
        totals.add(costs.named)
        if isinstance(done, RowsDone):
            totals["payload_bytes"] += done.payload_bytes
            totals["made_samples"] += done.rows
            stages = "decode", "transform", "collate", "processor"
            kind, details = "task", {"samples": done.rows, **{f"{stage}_s": getattr(costs, stage) for stage in stages}}
        else:
            kind, details = "scan", {"shards": len(done.shards)}
        if self._events is not None:
            self._events.append(Event(kind, f"worker {costs.process}", costs.started, costs.busy, details))

    def trace(self, *, on: bool) -> None:
        """Start or stop recording events."""
        self._events = (self._events or []) if on else None
        if self._engine.fetcher is not None:
            self._engine.fetcher.transfers.events = self._events

    def take_events(self) -> tuple[Event, ...]:
        """Return and clear the recorded events."""
        events = tuple(self._events or ())
        if self._events:
            self._events.clear()
        return events

    def record_state(self) -> None:
        """Add the time since the last call, for the reason that held then. Call it after every event."""
        now_s = perf_counter()
        if self._awaited is not None:
            self._totals[self._awaited] += now_s - self._recorded_s
        self._recorded_s = now_s
        self._awaited = f"awaited_s/{self._reason()}" if self._stream.awaited else None

    def totals(self) -> Totals:
        """Return the totals so far."""
        totals, fetcher = self._totals, self._engine.fetcher
        totals["feeder_s"] = perf_counter() - self._started_s
        totals["worker_s"] = totals["feeder_s"] * len(self._engine.pool.workers)
        totals["restarted_workers"] = self._engine.pool.restarts
        if self._in_own_process:
            totals["feeder_processor_s"] = process_time()
        if fetcher is not None:
            counts = fetcher.transfers.counts
            totals["fetched_bytes"], totals["cached_bytes"] = counts.received_bytes, counts.cached_bytes
            totals["requests"], totals["answer_s"] = counts.requests, counts.answer_s
            for name in ("throttled", "broken", "answered"):
                totals[f"{name}_requests"] = getattr(counts, name)
            totals["connection_s"] = fetcher.transfers.in_flight.now()
        return totals

    def _reason(self) -> str:
        fetcher, pool = self._engine.fetcher, self._engine.pool
        if 2 * pool.n_with_tasks() > len(pool.workers) or self._stream.full:
            return "work"  # full, yet awaited: the next batch itself is being made
        if fetcher is not None and (fetcher.transfers.running or not self._engine.scans.requested):
            return "memory" if fetcher.lacking else "network"
        return "scan"


def work_in_words(worker: WorkerActivity, tables: Dataset) -> str:
    """Describe the work of a worker, for a log line."""
    task = worker.task
    if task is None:
        work = "still starting: it imports the modules that the user's functions need"
    elif not isinstance(task, RowTask):
        counts = tables.counts.values
        scanned = f"{int((counts >= 0).sum()):,} of {len(counts):,} shards are scanned; `streamload index` avoids scans"
        work = f"scanning the shard {without_secrets(tables.url(task.shards[0]))!r} ({scanned})"
    elif worker.row < 0:
        work = "on no particular sample, for example collating a batch"
    else:
        shard, sample = task.table.values[worker.row, :2].tolist()
        table = tables.at_hand(shard)
        key = "" if table is None else f", sample {table.key(sample)!r}"
        work = f"decoding or transforming shard {without_secrets(tables.url(shard))!r}{key}"
    return f"{worker.name} is at work, {work}" + (f":\n{worker.stack}" if worker.stack else "")


def fetching_in_words(fetcher: Fetcher) -> str:
    """Describe the oldest request or index load, for a log line; empty if there is none."""
    oldest = next(iter(fetcher.transfers.running.values()), None)
    if oldest is None:
        loading = next(iter(fetcher.index_tables.loading), None)
        url = "" if loading is None else repr(without_secrets(fetcher.state_of(loading).url))
        return url and f"the index of the shard {url} is still loading"
    return (
        f"the storage: a request for {without_secrets(oldest.url)!r} from byte {oldest.start} on has taken "
        f"{monotonic() - oldest.started_s:.1f} s and returned {oldest.received_bytes:,} bytes so far"
    )
