"""The batches of a rank in order, over its epochs: planned, made by tasks, and announced at their turn.

Nothing here waits or does I/O. The owner calls `pump` after every event (a task done, a batch taken, a worker ready),
which schedules all that can be scheduled now. So the same code runs in an event loop and in the caller's thread.

- A failed sample travels with its batch; the loop raises the error, or leaves the sample out, at the batch's turn.
- A shard that cannot be read ends the epoch when the next batch needs it and those before have been made: `pump`
  raises. Retries belong to the storage and to the pool.
- The pool handles the death of a worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from streamload.decode.failure import Attempt, with_fields
from streamload.decode.tasks import BatchDone, BatchSlot, RowFailure, RowsDone, RowTable, RowTask
from streamload.errors import StreamloadError
from streamload.feeder.lookahead import MAX_RUN_ROWS, Lookahead, Source
from streamload.feeder.messages import FailedRow, PipelineSettings, ReadyBatch
from streamload.feeder.scans import Scans
from streamload.fetch.fetcher import Fetcher
from streamload.index.dataset import Dataset
from streamload.limits import SCHEDULED_SHARDS_SHARE
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import descriptor_limit
from streamload.order.share import EpochStart
from streamload.totals import Totals
from streamload.workers.pool import Pool

# How often the trainer acknowledges, while it takes as many batches as may be outstanding.
_MESSAGES_PER_WINDOW = 5

# Half of the slots kept for a trainer that has not released them yet.
_MOST_UNACKNOWLEDGED = 64

# A shorter task costs more than it saves: a message wakes a worker and the feeder, with cold caches.
_RUN_S = 0.030
_RUN_BYTES = 20 << 20
_BATCHES_IN_FLIGHT = 512

SendReady = Callable[[EpochStart, list[ReadyBatch], bool, int], None]


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch from its task until it is announced; `done` is the worker's answer."""

    start: EpochStart
    source: Source
    slot: int
    done: BatchDone | None = None


@dataclass(slots=True)
class _Pace:
    """How fast batches are made, and how large they are.

    Attributes:
        row_s: seconds that a worker takes for a row; 0 if unknown.
        slot_bytes: the size of the largest batch until now.
    """

    row_s: float = 0.0
    slot_bytes: int = 1

    def measure(self, done: RowsDone) -> None:
        row_s = (done.costs.decode + done.costs.transform + done.costs.collate) / max(1, done.rows)
        self.row_s = 0.7 * self.row_s + 0.3 * row_s if self.row_s else row_s
        self.slot_bytes = max(self.slot_bytes, *(made.size_bytes for made in done.batches))


class BatchStream:
    """Makes the epoch that the trainer has requested, and begins the next one before it is requested.

    The first batches of the next epoch are made while the last ones of the current one are used, and announced when it
    is requested. A trainer that starts elsewhere has them dropped; then nothing is made ahead until one epoch follows
    another again. A failure in the next epoch is met again when that epoch is requested.

    A trainer may leave its epoch, or request another one: all batches that were not announced are abandoned.

    `send_ready` announces batches: their epoch, the batches, whether they end the requested epoch, and how many the
    trainer may take before it acknowledges. `works_ahead=False` never begins an epoch before it is requested.

    Attributes:
        requested: the epoch that was requested last.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        *,
        tables: Dataset,
        scans: Scans,
        pool: Pool,
        slots: SlotPool,
        totals: Totals,
        fetcher: Fetcher | None,
        send_ready: SendReady,
        works_ahead: bool,
    ) -> None:
        self._settings = settings
        self._tables = tables
        self._scans = scans
        self._pool = pool
        self._slots = slots
        self._totals = totals
        self._fetcher = fetcher
        self._send_ready = send_ready
        self._works_ahead = works_ahead
        self._batch_rows = settings.order.batch_size
        # Each row may lie in another shard, and a worker must be able to open all shards of its tasks.
        shards_at_once = max(1, descriptor_limit() // SCHEDULED_SHARDS_SHARE)
        self._most_run_rows = min(shards_at_once, MAX_RUN_ROWS) if len(tables.counts) > shards_at_once else MAX_RUN_ROWS
        self._pace = _Pace()
        self.requested: EpochStart | None = None
        self._in_progress = False  # not all of the requested epoch has been announced
        self._may_begin_next = works_ahead  # one epoch has followed another
        self._ahead: Lookahead | None = None  # of the requested epoch, then of the next
        self._batches: deque[_Batch] = deque()  # that have a task and have not been announced, in order
        self._untaken = 0  # announced
        self._tasks: dict[int, list[_Batch]] = {}
        self._abandoned: dict[int, list[_Batch]] = {}  # tasks that hold what they read until they are done

    @property
    def awaited(self) -> bool:
        """Whether the trainer waits, as far as that is known here: it acknowledges some batches late."""
        return self._in_progress and self._untaken <= self._acknowledge_after

    @property
    def full(self) -> bool:
        """Whether the requested epoch has all its tasks, or no further batch may be in flight or wait for the loop."""
        return self._in_progress and (self._planning() is None or self._outstanding >= self._size()[1])

    @property
    def blocked(self) -> bool:
        """Whether the requested epoch can only go on with more resident bytes. Raises why they cannot be fetched."""
        planning = self._planning()
        return planning is not None and not self._tasks and planning.blocked

    @property
    def busy(self) -> bool:
        """Whether a wanted batch is being made, after which its parts can be freed."""
        return bool(self._tasks)

    @property
    def has_abandoned(self) -> bool:
        """Whether abandoned tasks are in flight, which hold the bytes that they read."""
        return bool(self._abandoned)

    def request(self, start: EpochStart) -> None:
        """Start an epoch, or go on with it if it was begun ahead."""
        follows = self.requested is None or start == _after(self.requested)
        self._may_begin_next = self._works_ahead and follows
        if self._in_progress or self._ahead is None or self._ahead.start != start:
            self.stop()
            self.requested = start
            self._ahead = self._begin(start)
        self.requested, self._in_progress = self._ahead.start, True

    def abandon(self, number: int) -> None:
        """Abandon the epoch that was requested as this pass, if it has not ended."""
        if self._in_progress and self.requested is not None and self.requested.number == number:
            self.stop()

    def stop(self) -> None:
        """Drop all batches that have not been announced."""
        self._drop_all_but(None)
        self._in_progress = False

    def _drop_all_but(self, kept: EpochStart | None) -> None:
        """Plan nothing more, and drop batches. Their slots are discarded: tasks may still write to them."""
        for batch in self._batches:
            if batch.start is not kept:
                self._slots.discard(batch.slot)
        self._batches = deque(batch for batch in self._batches if batch.start is kept)
        for number in [number for number, (batch, *_) in self._tasks.items() if batch.start is not kept]:
            self._abandoned[number] = self._tasks.pop(number)
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def take_acknowledged(self, batches: int) -> None:
        """Count batches that the trainer has taken."""
        self._untaken -= batches

    def waits_for(self, task: int) -> bool:
        """Whether a task in flight makes batches that are still wanted."""
        return task in self._tasks

    def end_task(self, number: int, done: RowsDone | None) -> None:
        """Take the result of a task, if it has one, and release what its batches needed."""
        batches = self._tasks.pop(number, None) or self._abandoned.pop(number)
        if self._fetcher is not None:
            for planned, batch in [each.source for each in batches]:
                self._fetcher.window.release(planned.parts[batch])
            self._fetcher.notify()
        if done is not None and done.batches:
            self._pace.measure(done)
            for each, made in zip(batches, done.batches, strict=True):
                each.done = made

    def pump(self) -> None:
        """Announce what is ready, and schedule what can be scheduled.

        Raises:
            StreamloadError: a shard of the requested epoch cannot be read, and every batch before it has been made.
        """
        self._announce()
        self._schedule()
        self._announce()

    def _planning(self) -> Lookahead | None:
        """Return what plans the requested epoch; None once all of its batches have a task."""
        ahead = self._ahead
        if not self._in_progress or ahead is None or ahead.start is not self.requested or ahead.exhausted:
            return None
        return ahead

    def _announce(self) -> None:
        """Announce the batches at the head of the requested epoch that are done, and its end."""
        while self._in_progress:
            start, ready = self.requested, []
            assert start is not None
            while self._batches and self._batches[0].start is start and (done := self._batches[0].done) is not None:
                ready.append(self._ready(self._batches.popleft(), done))
            last = self._planning() is None and not (self._batches and self._batches[0].start is start)
            if not ready and not last:
                return
            self._untaken += len(ready)
            self._in_progress = not last
            self._send_ready(start, ready, last, self._acknowledge_after)

    def _schedule(self) -> None:
        while self._pool.has_room():
            if (scan := self._scans.next_task()) is not None:
                self._scans.submit(scan, self._pool)
                continue
            with Attempt() as attempt:
                if self._submit_run():
                    continue
            if attempt.error is not None:
                if self._in_progress and self._ahead is not None and self._ahead.start is self.requested:
                    raise attempt.error
                self._drop_all_but(self.requested)  # it is met again when the next epoch is requested
            if (scan := self._scans.next_task()) is None:
                return
            self._scans.submit(scan, self._pool)

    def _submit_run(self) -> bool:
        """Submit a task of consecutive batches; False if none can be scheduled now."""
        task = self._next_run()
        if task is None:
            return False
        with Attempt() as attempt:
            self._pool.submit(task)
        if attempt.error is not None:
            self.end_task(task.number, None)
            raise attempt.error
        return True

    def _next_run(self) -> RowTask | None:
        """Make a task of consecutive batches of one block; None if nothing can be scheduled now."""
        run, most_outstanding = self._size()
        if self._ahead is None or self._outstanding + run > most_outstanding:
            return None
        sources: list[Source] = []
        while len(sources) < run and (not sources or self._ahead.in_block):
            try:
                source = self._take()
            except StreamloadError:
                if not sources and not self._tasks:
                    raise
                break  # it is met again when the batches before have been made
            if source is None:
                break
            sources.append(source)
        if not sources:
            return None
        batches = [_Batch(self._ahead.start, source, self._slots.take()) for source in sources]
        self._batches += batches
        number = next(self._scans.numbers)
        self._tasks[number] = batches
        planned = sources[0][0]
        edges = [planned.edges(batch) for _, batch in sources]
        start, end = edges[0][0], edges[-1][1]
        return RowTask(
            number=number,
            epoch=self._ahead.start.epoch,
            table=RowTable(planned.table.values[start:end], planned.table.kinds),
            keys=None if planned.keys is None else planned.keys[start:end],
            batches=tuple(
                [BatchSlot(batch.slot, last - first) for batch, (first, last) in zip(batches, edges, strict=True)]
            ),
            pass_number=self._ahead.start.number,
        )

    def _take(self) -> Source | None:
        """Take the next batch: of the requested epoch, then of the one after it."""
        assert self._ahead is not None
        source, start = self._ahead.take(), self._ahead.start
        if source is None and self._ahead.exhausted and start is self.requested and self._may_begin_next:
            self._ahead = self._begin(_after(start))
            source = self._ahead.take()
        return source

    def _begin(self, start: EpochStart) -> Lookahead:
        return Lookahead(
            self._settings,
            start,
            tables=self._tables,
            scans=self._scans,
            pool=self._pool,
            totals=self._totals,
            fetcher=self._fetcher,
        )

    @property
    def _outstanding(self) -> int:
        """How many batches are in flight, or wait for the loop."""
        return len(self._batches) + self._untaken

    @property
    def _acknowledge_after(self) -> int:
        """How many batches the trainer may take before it acknowledges."""
        return min(max(1, self._size()[1] // _MESSAGES_PER_WINDOW), _MOST_UNACKNOWLEDGED)

    def _size(self) -> tuple[int, int]:
        """Return how many batches make a task, and how many may be in flight or wait for the loop.

        A task takes about thirty milliseconds, or one batch if that takes longer, and at most 20 MiB. Each worker has a
        current task and one waiting, so more than `prefetch_batches` are in flight if batches are small, or workers
        many.
        """
        tasks, most, batch_rows = self._pool.capacity + 2, self._slots.most_in_flight, self._batch_rows
        pace, run = self._pace, 1
        if pace.row_s:
            by_time = int(min(_RUN_S / (pace.row_s * batch_rows), _BATCHES_IN_FLIGHT // tasks))
            run = max(1, min(by_time, _RUN_BYTES // pace.slot_bytes, self._most_run_rows // batch_rows))
        room_bytes = self._settings.expansion_room_bytes
        if room_bytes is not None:  # of the last row there is a copy while it is made
            rows = room_bytes // -(-pace.slot_bytes // batch_rows) - 1
            run = min(run, max(1, rows // batch_rows))
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


def _after(start: EpochStart) -> EpochStart:
    return replace(start, epoch=start.epoch + 1, position=0, number=start.number + 1)
