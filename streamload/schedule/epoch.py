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

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from streamload.decode.failure import Attempt
from streamload.decode.missing_field import with_fields
from streamload.decode.tasks import InSlot, PieceDone, RowFailure, RowsDone, RowTask
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import parts_of_rows, shard_and_number
from streamload.fetch.prerequisites import Prerequisites
from streamload.index.tables import Tables
from streamload.memory.slots import Slots
from streamload.order.epoch_start import EpochStart
from streamload.schedule.scans import Scans
from streamload.schedule.scheduler import Learned, PipelineSettings, RowBatch, RowBatcher, Scheduler
from streamload.statistics import FeederTotals
from streamload.workers.protocol import Pool

__all__ = ["Epoch", "Epochs", "FailedRow", "OrphanedTasks", "Part", "ReadyBatch"]

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


class OrphanedTasks:
    """Those whose batch is made again by another task, or whose epoch was given up.

    A worker that has such a task does it all the same. Were its bytes freed meanwhile, it would find zeros, and
    the user's code would be run on these.

    Args:
        fetcher: has the bytes; None where nothing is fetched.
    """

    def __init__(self, fetcher: Fetcher | None) -> None:
        self._fetcher = fetcher
        self._parts: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, task: RowTask) -> None:
        """Nobody waits for this one any more; its batch still holds what it reads. Idempotent."""
        if self._fetcher is None or task.number in self._parts:
            return
        keys = parts_of_rows(task.table.shards, task.table.places())
        held = [key for key in keys if shard_and_number(key)[0] in self._fetcher.fetched]
        self._fetcher.ledger.hold(held)
        self._parts[task.number] = held

    def over(self, number: int) -> None:
        """A task is not in flight any more. It need not be one of these."""
        held = self._parts.pop(number, None)
        if held is not None and self._fetcher is not None:
            self._fetcher.ledger.release(held)
            self._fetcher.freed()


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


Begin = Callable[[EpochStart, RowBatcher | None], Epoch]
Deliver = Callable[[EpochStart, list[ReadyBatch], bool, int], None]


class Epochs:
    """At most two epochs: the one that the trainer has asked for, and the one that it will probably ask for next.

    The first batches of the next one are made while the last ones of the other are used, so there is no gap between
    them. They are announced as soon as the other has ended, asked for or not; a trainer that begins somewhere else lets
    them go, and then nothing is made ahead until it goes on from one epoch to the next again. What fails in the next
    epoch takes effect when that is asked for, unless it is forgiven before.

    A trainer may leave the epoch that it has asked for, or just ask for another one: then that is abandoned. What was
    announced of it the trainer still takes; the rest is made by nobody, and no other one is begun unasked.

    Args:
        begin: makes an epoch, given the batcher of the one before.
        deliver: announces batches: which epoch's, the batches, whether that was all of the epoch that was asked for,
            and how many may be taken before that is told.
        works_ahead: False never begins an epoch that was not asked for.
    """

    def __init__(self, begin: Begin, deliver: Deliver, *, works_ahead: bool) -> None:
        self._begin = begin
        self._deliver = deliver
        self._works_ahead = works_ahead
        self._in_step = True
        self._last: Epoch | None = None
        self._asked: Epoch | None = None
        self._next: Epoch | None = None
        self._next_error: Exception | None = None
        self._untaken: deque[tuple[RowBatcher, int]] = deque()

    @property
    def only_next_works(self) -> bool:
        """Whether whatever is done now is done for an epoch that was not asked for."""
        return self._next is not None and (self._asked is None or self._asked.exhausted)

    @property
    def waits(self) -> bool:
        """Whether the epoch that was asked for can only go on when something more has come near."""
        return self._asked is not None and self._asked.idle and not self._asked.ended

    @property
    def busy(self) -> bool:
        """Whether any batch is being made; when it is, what it was made of may make room."""
        return any(epoch is not None and epoch.busy for epoch in (self._asked, self._next))

    @property
    def newest(self) -> tuple[int, int, int] | None:
        """The identity of the newest epoch that anything is done for: nothing is announced of an older one."""
        newest = self._next if self._asked is None and self._next is not None else self._last
        return None if newest is None else newest.start.identity

    def ask(self, start: EpochStart) -> None:
        """The trainer wants this one.

        Raises:
            StreamloadError: what was done of it already has failed.
        """
        if self._asked is not None:
            self.abandon(self._asked.start.number)
        self._in_step = self._last is None or start == _after(self._last.start)
        following, error = self._next, self._next_error
        self._next = self._next_error = None
        if following is not None and following.start != start:
            following.abandon()
            following = None
        before = None if self._last is None else self._last.batcher
        self._asked = self._last = following or self._begin(start, before)
        if following is not None and error is not None:
            raise error

    def abandon(self, number: int) -> None:
        """The trainer does not want the rest of the epoch that it asked for as this pass, if that has not ended."""
        if self._asked is not None and self._asked.start.number == number:
            self._asked.abandon()
            self._asked = None
            self._in_step = False

    def stop(self) -> None:
        """Forget all of them."""
        self._asked = self._next = self._next_error = None

    def fail_next(self, error: Exception) -> None:
        """Something has failed that was done for the next epoch."""
        self._next_error = error

    def forgive(self, errors: Iterable[Exception]) -> None:
        """What these were met for is tried again; if the next epoch has failed with one of them, it goes on."""
        if any(error is self._next_error for error in errors):
            self._next_error = None

    def taken(self, batches: int) -> None:
        """The trainer has taken so many of the batches that were announced."""
        while batches:
            batcher, announced = self._untaken.popleft()
            count = min(batches, announced)
            batcher.taken(count)
            batches -= count
            if count < announced:
                self._untaken.appendleft((batcher, announced - count))

    def waits_for(self, task: int) -> bool:
        """Whether a task is being done for batches that are wanted."""
        return any(epoch is not None and epoch.waits_for(task) for epoch in (self._asked, self._next))

    def drop(self, task: int) -> None:
        """A task is not in flight any more, and has no answer: nobody waits for it."""
        for epoch in (self._asked, self._next):
            if epoch is not None:
                epoch.drop(task)

    def on_done(self, done: RowsDone) -> None:
        """A task has come back. That of an epoch that was abandoned is dropped."""
        for epoch in (self._asked, self._next):
            if epoch is not None and epoch.takes(done):
                return

    def pump(self) -> None:
        """Announce what is ready, and schedule what can be scheduled.

        Raises:
            StreamloadError: the epoch that was asked for cannot go on.
        """
        if self._asked is not None:
            self._announce(self._asked)
        if self._asked is not None:
            if self._asked.must_wrap and self._next is not None:  # or the next one might leave it no room
                self._next.abandon()
                self._next = self._next_error = None
            self._asked.pump()
            if self._asked.ended:  # it had no batch that was still to come
                self._announce(self._asked)
        if self._next_error is None:
            with Attempt() as attempt:
                self._pump_next()
            self._next_error = attempt.error

    def _pump_next(self) -> None:
        last = self._last
        if self._next is None and self._works_ahead and self._in_step and last is not None and last.exhausted:
            self._next = self._begin(_after(last.start), last.batcher)
        if self._next is not None:
            self._next.pump()
            if self._asked is None:
                self._announce(self._next)

    def _announce(self, epoch: Epoch) -> None:
        ready, acknowledge_after = epoch.take_ready()
        last = epoch is self._asked and epoch.ended
        if ready:
            self._untaken.append((epoch.batcher, len(ready)))
        if ready or last:
            self._deliver(epoch.start, ready, last, acknowledge_after)
        if last:
            epoch.close()
            self._asked = None


def _after(start: EpochStart) -> EpochStart:
    return replace(start, epoch=start.epoch + 1, position=0, number=start.number + 1)
