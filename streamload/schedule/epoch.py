"""One epoch of one rank, end to end: plan, locate, schedule, put in order, deliver.

The pipeline does no waiting and no input or output of its own. Its user calls `pump` after every event (a task done, a
batch taken, a worker ready), and `pump` schedules whatever can be scheduled now. So the same code runs in the feeder's
event loop and in the caller's own thread.

What happens when something fails:

- A sample that fails is part of its batch's delivery; the loop raises it, or leaves the sample out, when the batch's
  turn comes. So every batch before it is delivered, and what is raised does not depend on timing.
- A shard that cannot be read or scanned ends the epoch at once: `pump` and `on_done` raise, and the owner closes pool
  and slots. Nothing is retried here; retries belong to the storage and to the pool.
- A worker's death is the pool's business and is not seen here, unless the pool gives up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from streamload.decode.missing_field import with_fields
from streamload.decode.tasks import InSlot, PieceDone, RowFailure, RowsDone, RowTask
from streamload.fetch.prerequisites import Prerequisites
from streamload.index.tables import Tables
from streamload.memory.slots import Slots
from streamload.order.epoch_start import EpochStart
from streamload.schedule.orphaned_tasks import OrphanedTasks
from streamload.schedule.scans import Scans
from streamload.schedule.scheduler import Learned, PipelineSettings, RowBatch, RowBatcher, Scheduler
from streamload.statistics import FeederTotals
from streamload.workers.protocol import Pool

__all__ = ["Epoch", "FailedRow", "Part", "ReadyBatch"]

_MESSAGES_PER_WINDOW = 5
"""How often the trainer tells what it has taken, while it takes as many batches as may be outstanding."""

_MOST_INLINE_BYTES = 1 << 20
"""Of a batch's values beside its arrays in messages: more is written to its slot, which one worker then fills alone."""

_MOST_UNACKNOWLEDGED = 64
"""Half of the slots that the pool keeps for a trainer that has not given them back yet."""


@dataclass(frozen=True)
class FailedRow:
    """A row that failed, and where it is from."""

    failure: RowFailure
    url: str
    key: str


class Part(NamedTuple):
    """Rows of a batch as one task made them: their values that are no arrays, see `PieceDone`."""

    rows: int
    out_of_band: bytes | InSlot | None


class ReadyBatch(NamedTuple):
    """A batch for the trainer.

    Attributes:
        slot: where it lies.
        size_bytes: how much of the slot it takes.
        layout: a cloudpickle of its layout.
        rows: how many rows it has; None where a `collate_fn` made it and its layout has none.
        parts: in the order of their rows.
        failed: the rows that failed, in order. In a batch of rows their places hold other rows' bytes.
        dropped_already: the failed rows are not in the batch any more.
        end: the position of the epoch's order behind it.
        extra: it comes only in the place of those before it of which nothing is left; its samples have their own turn.
    """

    slot: int
    size_bytes: int
    layout: bytes | None
    rows: int | None
    parts: tuple[Part, ...]
    failed: tuple[FailedRow, ...]
    dropped_already: bool
    end: int
    extra: bool = False

    @property
    def nothing_left(self) -> bool:
        """Whether every sample of it has failed."""
        return len(self.failed) >= sum(part.rows for part in self.parts)


class Epoch:
    """An epoch in flight.

    Args:
        settings: the loader's.
        start: which epoch, from where, for whom.
        tables: where samples lie.
        scans: finds out what the tables don't know.
        pool: who does the work.
        slots: where batches are written.
        learned: from earlier epochs, for later ones.
        totals: what is added up.
        orphaned: gets those of its tasks in flight that nobody waits for any more.
        before: the batcher of the epoch before, whose batches count as in flight too.
        prerequisites: brings what has to be fetched; None where everything is here.

    Attributes:
        start: which epoch this is.
        batcher: its batches from the moment work on them begins until the trainer takes them.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        start: EpochStart,
        *,
        tables: Tables,
        scans: Scans,
        pool: Pool,
        slots: Slots,
        learned: Learned,
        totals: FeederTotals,
        orphaned: OrphanedTasks,
        before: RowBatcher | None = None,
        prerequisites: Prerequisites | None = None,
    ) -> None:
        self.start = start
        self.batcher = RowBatcher(in_order=settings.in_order, before=before)
        self._fields = settings.fields
        self._fills_up = settings.fills_up
        self._something_left = start.position > 0  # as far as is known
        self._owes = False
        self._wrapped = False
        self._tables = tables
        self._pool = pool
        self._slots = slots
        self._learned = learned
        self._totals = totals
        self._orphaned = orphaned
        self._tasks: dict[int, RowTask] = {}
        self._scheduler = Scheduler(
            settings,
            start,
            tables=tables,
            scans=scans,
            pool=pool,
            slots=slots,
            batcher=self.batcher,
            learned=learned,
            begun_again=self._note_orphaned,
            prerequisites=prerequisites,
        )

    @property
    def exhausted(self) -> bool:
        """Whether every batch has been scheduled; see `Scheduler.exhausted`."""
        return self._scheduler.exhausted

    @property
    def ended(self) -> bool:
        """Whether every batch has been given out, and one more where nothing was left of the last ones."""
        return self.exhausted and self.batcher.empty and not self.must_wrap

    @property
    def must_wrap(self) -> bool:
        """Whether nothing was left of the last batches, so that one from the start of the order comes for them."""
        return self._owes and not self._wrapped and self.exhausted and self.batcher.empty

    @property
    def idle(self) -> bool:
        """Whether nothing is being done, and the trainer has taken all that was given out."""
        return not self.busy and self.batcher.outstanding == self.batcher.kept

    @property
    def busy(self) -> bool:
        """Whether anything is being done.

        What is to be done again, and waits for bytes that have moved to a worker, is not being done.
        """
        return bool(self._tasks) and not self._pool.held_up

    def pump(self) -> None:
        """Schedule all that can be scheduled now.

        Raises:
            StreamloadError: a shard cannot be read.
        """
        while self._pool.has_room():
            task = self._scheduler.next_task()
            if task is None and self.must_wrap:
                self._wrapped = True
                self._scheduler.wrap_round()
                continue
            if task is None:
                break
            if isinstance(task, RowTask):
                self._tasks[task.number] = task
            self._pool.submit(task)
        self._totals.plan_s += self._scheduler.take_plan_s()

    def waits_for(self, number: int) -> bool:
        """Whether a task is being done for batches of this epoch, none of which is made again by another task."""
        task = self._tasks.get(number)
        return task is not None and all(self.batcher.find(each.batch, each.slot) for each in task.pieces)

    def takes(self, done: RowsDone) -> bool:
        """Take in an answer, if it is to a task of this epoch."""
        if done.number not in self._tasks:
            return False
        del self._tasks[done.number]
        self._scheduler.measure(done)
        for part in done.pieces:
            batch = self.batcher.find(part.piece.batch, part.piece.slot)
            if part.layout_mismatch:
                self._learned.ragged = True
                if batch is not None:
                    self._scheduler.make_again(batch)
            elif batch is not None:
                self._note_layout(part)
                if _needs_slot(part, batch):
                    self._learned.uncut = True
                    self._learned.expect_objects(_bytes_inline(part) * batch.rows // part.piece.rows)
                    self._scheduler.make_again(batch)
                    continue
                batch.parts.append(part)
                batch.rows_done += part.piece.rows
        self._learned.outstanding = self._scheduler.outstanding
        return True

    def take_ready(self) -> tuple[list[ReadyBatch], int]:
        """The batches that are ready, in order, and how many the trainer may take before it tells of it."""
        complete = self.batcher.take_complete()
        for batch in complete:
            self._scheduler.done(batch)
        ready = [self._ready(batch) for batch in complete]
        if self._fills_up:
            for each in ready:
                self._note_left(each)
        return ready, min(
            max(1, self._scheduler.outstanding // _MESSAGES_PER_WINDOW), _MOST_UNACKNOWLEDGED
        ) if ready else 1

    def drop(self, number: int) -> None:
        """A task is not in flight any more, and has no answer; it need not be one of this epoch."""
        self._tasks.pop(number, None)

    def abandon(self) -> None:
        """Nobody wants what has not been given out. Its slots are not used again: tasks may still write there."""
        for task in self._tasks.values():
            self._orphaned.add(task)
        for batch in self.batcher.take_all():
            self._scheduler.done(batch)
            self._slots.discard(batch.slot)
        self.close()

    def close(self) -> None:
        """Nothing is fetched for this epoch any more. Idempotent."""
        self._scheduler.close()

    def _note_left(self, batch: ReadyBatch) -> None:
        """A batch is given out, for which the next one comes where nothing is left of it."""
        if batch.nothing_left:
            self._owes = self._something_left
        else:
            self._something_left, self._owes = True, False
            if self._wrapped:
                self._scheduler.close()

    def _note_orphaned(self) -> None:
        """A batch was begun again, so nobody waits for those of its tasks that are in flight."""
        for task in self._tasks.values():
            if not self.waits_for(task.number):
                self._orphaned.add(task)

    def _note_layout(self, part: PieceDone) -> None:
        learned = self._learned
        learned.size_bytes = max(learned.size_bytes, part.size_bytes)
        if isinstance(part.out_of_band, InSlot):
            learned.expect_objects(part.out_of_band.size_bytes)
        if part.layout is not None and not part.whole:
            learned.layout = part.layout
            self._pool.fix_layout(part.layout)

    def _ready(self, batch: RowBatch) -> ReadyBatch:
        parts = batch.parts
        if len(parts) > 1:
            parts = sorted(parts, key=lambda part: part.piece.first_row)
        whole = parts[0].whole
        failures = [failure for part in parts for failure in part.failures]
        return ReadyBatch(
            slot=batch.slot,
            size_bytes=max([part.size_bytes for part in parts]),
            layout=parts[0].layout if whole else self._learned.layout,
            rows=parts[0].rows if whole else batch.rows,
            parts=tuple([Part(part.piece.rows, part.out_of_band) for part in parts]),
            failed=tuple([self._located(failure) for failure in failures]),
            dropped_already=whole,
            end=batch.end,
            extra=self._wrapped,
        )

    def _located(self, failure: RowFailure) -> FailedRow:
        table = self._tables.find(failure.shard)
        assert table is not None
        failure = with_fields(failure, table, self._fields)
        return FailedRow(failure, self._tables.url(failure.shard), table.key(failure.sample))


def _needs_slot(part: PieceDone, batch: RowBatch) -> bool:
    """Whether the values that are no arrays are too large for messages: one worker makes such a batch."""
    if part.whole or part.piece.complete:
        return False
    return _bytes_inline(part) * batch.rows > _MOST_INLINE_BYTES * part.piece.rows


def _bytes_inline(part: PieceDone) -> int:
    return len(part.out_of_band) if isinstance(part.out_of_band, bytes) else 0
