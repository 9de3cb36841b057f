"""A running epoch: its rows are cut into tasks, and its batches wait in one deque until the trainer's turn.

Nothing here waits or does I/O. The owner calls `pump` after every event (a task done, a batch taken, a worker ready),
and `pump` schedules whatever can be scheduled now. So the same code runs in the feeder's event loop and in the
caller's thread.

What happens when something fails:

- A failed sample travels with its batch; the loop raises the error, or leaves the sample out, at the batch's turn. So
  every batch before it is delivered, and what is raised does not depend on timing.
- A shard that cannot be read or scanned ends the epoch when the next batch to be scheduled needs it: `pump` raises,
  and the owner closes pool and slots. Nothing is retried here: retries belong to the storage and to the pool.
- The pool handles the death of a worker; it is not seen here unless the pool gives up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from streamload.decode.failure import Attempt
from streamload.decode.missing_field import with_fields
from streamload.decode.tasks import BatchDone, BatchSlot, RowFailure, RowsDone, RowTask, ScanTask
from streamload.feeder.lookahead import MAX_RUN_ROWS, Lookahead
from streamload.feeder.messages import FailedRow, PipelineSettings, ReadyBatch
from streamload.feeder.planned import PlannedRows
from streamload.feeder.scans import Scans
from streamload.fetch.fetcher import Prerequisites
from streamload.fetch.window import Turns
from streamload.index.dataset import Dataset
from streamload.limits import SCHEDULED_SHARDS_SHARE
from streamload.memory.slots import Slots
from streamload.memory.unnamed import descriptor_limit
from streamload.order.mixture_plan import MixturePlan
from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan, RankPlan
from streamload.order.sampling import Mixed
from streamload.order.share import EpochStart
from streamload.totals import Totals
from streamload.workers.protocol import Pool

# How often the trainer acknowledges, while it takes as many batches as may be outstanding.
_MESSAGES_PER_WINDOW = 5

# Half of the slots kept for a trainer that has not released them yet.
_MOST_UNACKNOWLEDGED = 64

# A shorter task costs more than it saves: a message wakes a worker and the feeder, with cold caches.
_RUN_S = 0.030
_RUN_BYTES = 20 << 20
_BATCHES_IN_FLIGHT = 512


@dataclass(slots=True)
class Pace:
    """What all epochs of a feeder share: how large tasks are to be, and how many batches there are.

    Attributes:
        row_s: seconds that a worker takes for a row; None while that is unknown.
        slot_bytes: what the largest batch until now has taken of its slot.
        outstanding: batches of all epochs that have a task, and that the trainer has not taken.
    """

    row_s: float | None = None
    slot_bytes: int = 1
    outstanding: int = 0

    def measure(self, done: RowsDone) -> None:
        """Learn from a task."""
        costs = done.costs
        row_s = (costs.decode + costs.transform + costs.collate) / max(1, done.rows)
        self.row_s = row_s if self.row_s is None else 0.7 * self.row_s + 0.3 * row_s
        self.slot_bytes = max(self.slot_bytes, *(batch.size_bytes for batch in done.batches))

    def run(self, batch_rows: int, tasks: int) -> int:
        """How many batches make a task of about thirty milliseconds; one if a batch takes longer.

        Args:
            batch_rows: rows of a batch.
            tasks: how many may be in flight or wait for the loop. A run is limited to 20 MiB, and so are they together
                to 20 MiB each.
        """
        if not self.row_s:
            return 1
        by_time = int(min(_RUN_S / (self.row_s * batch_rows), _BATCHES_IN_FLIGHT // tasks))
        return max(1, min(by_time, _RUN_BYTES // self.slot_bytes, MAX_RUN_ROWS // batch_rows))


class Resources(NamedTuple):
    """What all epochs of a feeder share.

    Attributes:
        tables: where samples lie.
        scans: scans the shards that have no table, before they can be planned.
        pool: does the tasks, and is notified of finished shards.
        slots: where batches are written.
        pace: of all epochs.
        totals: statistics to add to.
        prerequisites: fetches remote parts and tables; None where everything is local.
        turns: of the rank's batches in the order of need.
    """

    tables: Dataset
    scans: Scans
    pool: Pool
    slots: Slots
    pace: Pace
    totals: Totals
    prerequisites: Prerequisites | None
    turns: Turns


Source = tuple[PlannedRows, int]
"""A batch's rows: their block, and the number of the batch in it."""


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch from its task until it is announced.

    Attributes:
        source: where its rows come from.
        slot: where they are written.
        done: what the worker has answered.
    """

    source: Source
    slot: int
    done: BatchDone | None = None


class Epoch:
    """A running epoch.

    Args:
        settings: the loader's.
        start: which epoch, which position in it, which rank.
        resources: of the feeder.

    Attributes:
        start: which epoch this is.
    """

    def __init__(self, settings: PipelineSettings, start: EpochStart, resources: Resources) -> None:
        self.start = start
        self._settings = settings
        self._tables = tables = resources.tables
        self._scans = resources.scans
        self._pool = resources.pool
        self._slots = resources.slots
        self._pace = resources.pace
        self._totals = resources.totals
        self._batch_rows = settings.order.batch_size
        plan = _plan(settings.order, tables, start)
        self._ahead = Lookahead(
            plan,
            plan.shards_ahead(),
            settings.fields,
            verify=settings.verify,
            tables=tables,
            scans=resources.scans,
            pool=resources.pool,
            prerequisites=resources.prerequisites,
            turns=resources.turns,
        )
        # Each row may lie in another shard, and a worker must be able to open all shards of its tasks.
        shards_at_once = max(1, descriptor_limit() // SCHEDULED_SHARDS_SHARE)
        self._most_run_rows = shards_at_once if len(tables.counts) > shards_at_once else MAX_RUN_ROWS
        self._batches: deque[_Batch] = deque()
        self._tasks: dict[int, list[_Batch]] = {}

    @property
    def exhausted(self) -> bool:
        """Whether every batch has been scheduled."""
        return self._ahead.exhausted

    @property
    def ended(self) -> bool:
        """Whether every batch has been announced."""
        return self.exhausted and not self._batches

    @property
    def blocked(self) -> bool:
        """Whether nothing can be done of it before more bytes are resident.

        Raises:
            StreamloadError: they cannot be fetched.
        """
        return not self.busy and self._ahead.blocked

    @property
    def full(self) -> bool:
        """Whether as many batches are in flight, or wait for the loop, as may."""
        return self._pace.outstanding >= self._size()[1]

    @property
    def busy(self) -> bool:
        """Whether any task is in flight."""
        return bool(self._tasks)

    def has_task(self, number: int) -> bool:
        """Whether a task in flight is one of this epoch's."""
        return number in self._tasks

    def pump(self) -> None:
        """Schedule all that can be scheduled now.

        Raises:
            StreamloadError: a shard cannot be read, and every batch that does not need it has been made.
        """
        while self._pool.has_room():
            task = self._scans.next_task() or self._next_run() or self._scans.next_task()
            if task is None:
                break
            if isinstance(task, ScanTask):
                self._scans.submit(task, self._pool)
            else:
                self._pool.submit(task)
        self._totals["plan_s"] += self._ahead.plan_s
        self._ahead.plan_s = 0.0
        if self._ahead.error is not None and not self.busy:
            raise self._ahead.error

    def end_task(self, number: int, done: RowsDone | None) -> None:
        """Take the result of a task, if it has one; what its batches needed is released."""
        batches = self._tasks.pop(number)
        for batch in batches:
            self._ahead.release(batch.source)
        if done is not None and done.batches:
            self._pace.measure(done)
            for batch, made in zip(batches, done.batches, strict=True):
                batch.done = made

    def take_ready(self) -> tuple[list[ReadyBatch], int]:
        """The batches that are ready, in order, and how many the trainer may take before it acknowledges."""
        ready = []
        while self._batches and (done := self._batches[0].done) is not None:
            ready.append(self._ready(self._batches.popleft(), done))
        if not ready:
            return [], 1
        return ready, min(max(1, self._size()[1] // _MESSAGES_PER_WINDOW), _MOST_UNACKNOWLEDGED)

    def abandon(self) -> None:
        """Drop all batches that have not been announced. Their slots are discarded: tasks may still write to them."""
        for batch in self._batches:
            self._slots.discard(batch.slot)
        self._pace.outstanding -= len(self._batches)
        self._batches.clear()
        self.close()

    def close(self) -> None:
        """Stop fetching for this epoch. Idempotent."""
        self._ahead.close()

    def _next_run(self) -> RowTask | None:
        """A task of consecutive batches of one block; None where nothing can be scheduled now."""
        run, most_outstanding = self._size()
        if self._pace.outstanding + run > most_outstanding:
            return None
        batches: list[_Batch] = []
        while len(batches) < run and (not batches or self._ahead.in_block):
            source = self._ahead.take()
            if source is None:
                break
            batches.append(_Batch(source, self._slots.take()))
            if len(batches) == 1:
                run = _even(run, source)
        if not batches:
            return None
        self._batches += batches
        self._pace.outstanding += len(batches)
        number = next(self._scans.numbers)
        self._tasks[number] = batches
        planned = batches[0].source[0]
        edges = [planned.edges(batch.source[1]) for batch in batches]
        start, end = edges[0][0], edges[-1][1]
        return RowTask(
            number=number,
            epoch=self.start.epoch,
            table=planned.table.rows(start, end),
            keys=None if planned.keys is None else planned.keys[start:end],
            batches=tuple(
                [BatchSlot(batch.slot, last - first) for batch, (first, last) in zip(batches, edges, strict=True)]
            ),
            pass_number=self.start.number,
        )

    def _size(self) -> tuple[int, int]:
        """How many batches make a task, and how many may be in flight or wait for the loop.

        No worker may be idle: each has a current task and one waiting, however many batches that is. So more than
        `prefetch_batches` are in flight where batches are small, or workers many.
        """
        tasks, most = self._pool.capacity + 2, self._slots.most_in_flight
        run = min(self._pace.run(self._batch_rows, tasks), max(1, self._most_run_rows // self._batch_rows))
        room_bytes = self._settings.expansion_room_bytes
        if room_bytes is not None:  # of the last row there is a copy while it is made
            rows = room_bytes // -(-self._pace.slot_bytes // self._batch_rows) - 1
            run = min(run, max(1, rows // self._batch_rows))
        # A run waits until all of it fits, and the loop has not acknowledged up to a fifth of what is outstanding.
        return min(run, max(1, most // 2)), min(max(self._settings.prefetch_batches, run * tasks), most)

    def _ready(self, batch: _Batch, done: BatchDone) -> ReadyBatch:
        planned, number = batch.source
        return ReadyBatch(
            slot=batch.slot,
            size_bytes=done.size_bytes,
            layout=done.layout,
            rows=done.rows,
            values=done.values,
            failed=tuple([self._located(failure) for failure in done.failures]),
            end=int(planned.block.ends[number]),
        )

    def _located(self, failure: RowFailure) -> FailedRow:
        table = self._tables.find_joined(failure.shard)
        assert table is not None
        failure = with_fields(failure, table, frozenset(self._tables.listing.sidecar_fields))
        return FailedRow(failure, self._tables.url(failure.stored_in), table.key(failure.sample))


def _even(run: int, source: Source) -> int:
    """The length of runs, at most `run`, that cuts the rest of a block evenly: a short one costs as much."""
    planned, number = source
    left = planned.batches - number
    return -(-left // -(-left // run))


def _plan(order: OrderOptions, tables: Dataset, start: EpochStart) -> EpochPlan:
    where = start.epoch, start.rank, start.world_size
    if isinstance(order.sampling, Mixed):
        return MixturePlan(order, tables.counts, *where, start=start.position, share=start.share)
    return RankPlan(order, tables.counts, *where, start=start.position, numbers=start.numbers, share=start.share)


Begin = Callable[[EpochStart], Epoch]
SendReady = Callable[[EpochStart, list[ReadyBatch], bool, int], None]


class Epochs:
    """At most two epochs: the one that the trainer requested, and the one that it will probably request next.

    The first batches of the next epoch are made while the last ones of the current one are used, so that there is no
    gap between them. They are announced as soon as the current epoch has ended, requested or not. A trainer that
    starts elsewhere discards them; then nothing is made ahead until one epoch follows another again. A failure in the
    next epoch is met again when that epoch is requested.

    A trainer may leave its epoch, or just request another one: the old one is abandoned. The trainer still takes what
    was announced of it, the rest is not made, and no epoch is begun ahead of time.

    Args:
        begin: makes an epoch.
        send_ready: announces batches: their epoch, the batches, whether they end the requested epoch, and how many the
            trainer may take before it acknowledges.
        works_ahead: False never begins an epoch before it is requested.
    """

    def __init__(self, begin: Begin, send_ready: SendReady, *, works_ahead: bool) -> None:
        self._begin = begin
        self._send_ready = send_ready
        self._works_ahead = works_ahead
        self._in_step = True
        self._last: Epoch | None = None
        self._requested: Epoch | None = None
        self._next: Epoch | None = None
        self._next_failed = False
        self._abandoned: list[Epoch] = []  # those with tasks in flight
        self._untaken = 0
        self._acknowledge_after = 1

    @property
    def trainer_is_busy(self) -> bool:
        """Whether it has batches left, and will acknowledge some of them."""
        return self._untaken > self._acknowledge_after

    @property
    def blocked(self) -> bool:
        """Whether nothing can be done of the requested epoch before more bytes are resident; see `Epoch.blocked`."""
        return self._requested is not None and self._requested.blocked

    @property
    def awaited(self) -> bool:
        """Whether the trainer waits, as far as that is known here: it acknowledges some batches late."""
        return self._requested is not None and not self.trainer_is_busy

    @property
    def full(self) -> bool:
        """Whether the requested epoch is `Epoch.full`, or has no task left."""
        epoch = self._requested
        return epoch is not None and (epoch.exhausted or epoch.full)

    @property
    def busy(self) -> bool:
        """Whether any batch is being made; when it is done, its parts can be freed."""
        return any(epoch is not None and epoch.busy for epoch in (self._requested, self._next))

    @property
    def has_orphans(self) -> bool:
        """Whether tasks of an abandoned epoch are in flight. They hold the bytes that they read until they are done."""
        return bool(self._abandoned)

    @property
    def newest(self) -> tuple[int, int, int] | None:
        """The identity of the newest epoch in progress: nothing of an older one is announced any more."""
        newest = self._next if self._requested is None and self._next is not None else self._last
        return None if newest is None else newest.start.identity

    def request(self, start: EpochStart) -> None:
        """Start the epoch that the trainer requests, or go on with it if it was begun ahead."""
        if self._requested is not None:
            self.abandon(self._requested.start.number)
        self._in_step = self._last is None or start == _after(self._last.start)
        following, self._next, self._next_failed = self._next, None, False
        if following is not None and following.start != start:
            self._drop(following)
            following = None
        self._requested = self._last = following or self._begin(start)

    def abandon(self, number: int) -> None:
        """Abandon the epoch that was requested as this pass, if it has not ended."""
        if self._requested is not None and self._requested.start.number == number:
            self._drop(self._requested)
            self._requested = None
            self._in_step = False

    def _drop(self, epoch: Epoch) -> None:
        epoch.abandon()
        if epoch.busy:
            self._abandoned.append(epoch)

    def stop(self) -> None:
        """Forget all epochs."""
        self._requested = self._next = None

    def note_taken(self, batches: int) -> None:
        """Note that the trainer has taken so many of the announced batches."""
        self._untaken -= batches

    def waits_for(self, task: int) -> bool:
        """Whether a task in flight makes batches that are still wanted."""
        return any(epoch is not None and epoch.has_task(task) for epoch in (self._requested, self._next))

    def drop(self, task: int) -> None:
        """Forget an unwanted task that will have no result."""
        self._end_task(task, None)

    def on_done(self, done: RowsDone) -> None:
        """Take the result of a task; that of an abandoned epoch is dropped."""
        self._end_task(done.number, done)

    def _end_task(self, number: int, done: RowsDone | None) -> None:
        for epoch in (self._requested, self._next, *self._abandoned):
            if epoch is not None and epoch.has_task(number):
                epoch.end_task(number, done)
        self._abandoned = [epoch for epoch in self._abandoned if epoch.busy]

    def pump(self) -> None:
        """Announce what is ready, and schedule what can be scheduled.

        Raises:
            StreamloadError: the requested epoch cannot go on.
        """
        if self._requested is not None:
            self._announce(self._requested)
        if self._requested is not None:
            self._requested.pump()
            if self._requested.ended:  # it had no batch left
                self._announce(self._requested)
        if not self._next_failed:
            with Attempt() as attempt:
                self._pump_next()
            self._next_failed = attempt.error is not None

    def _pump_next(self) -> None:
        last = self._last
        if self._next is None and self._works_ahead and self._in_step and last is not None and last.exhausted:
            self._next = self._begin(_after(last.start))
        if self._next is not None:
            self._next.pump()
            if self._requested is None:
                self._announce(self._next)

    def _announce(self, epoch: Epoch) -> None:
        ready, acknowledge_after = epoch.take_ready()
        last = epoch is self._requested and epoch.ended
        if ready:
            self._untaken += len(ready)
            self._acknowledge_after = acknowledge_after
        if ready or last:
            self._send_ready(epoch.start, ready, last, acknowledge_after)
        if last:
            epoch.close()
            self._requested = None


def _after(start: EpochStart) -> EpochStart:
    return replace(start, epoch=start.epoch + 1, position=0, number=start.number + 1)
