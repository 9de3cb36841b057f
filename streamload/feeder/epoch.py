"""The epochs of one rank, from scheduling to batches in order: the current epoch, and the next one ahead of time.

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
from collections.abc import Callable, Iterable
from dataclasses import replace

from streamload.decode.failure import Attempt
from streamload.decode.missing_field import with_fields
from streamload.decode.tasks import PieceDone, RowFailure, RowsDone, RowTask
from streamload.feeder.messages import FailedRow, Part, PipelineSettings, ReadyBatch
from streamload.feeder.scheduler import Resources, RowBatch, RowBatcher, Scheduler
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import parts_of_rows, shard_and_number
from streamload.order.share import EpochStart
from streamload.totals import Totals

# How often the trainer acknowledges, while it takes as many batches as may be outstanding.
_MESSAGES_PER_WINDOW = 5

# Half of the slots kept for a trainer that has not released them yet.
_MOST_UNACKNOWLEDGED = 64


class OrphanedTasks:
    """Tasks in flight whose result is unwanted: another task makes their batch again, or their epoch was abandoned.

    A worker that holds such a task still does it. If its bytes were freed meanwhile, it would read zeros and run the
    user's code on them; so they are held until the task is done.

    Args:
        fetcher: holds the bytes; None where nothing is fetched.
    """

    def __init__(self, fetcher: Fetcher | None) -> None:
        self._fetcher = fetcher
        self._parts: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, task: RowTask) -> None:
        """Take over from its batch the parts that a task reads. Idempotent."""
        if self._fetcher is None or task.number in self._parts:
            return
        keys = parts_of_rows(task.table.places())
        held = [key for key in keys if shard_and_number(key)[0] in self._fetcher.fetched]
        self._fetcher.window.hold(held)
        self._parts[task.number] = held

    def release(self, number: int) -> None:
        """Release the parts of a task that is no longer in flight; other tasks are ignored."""
        held = self._parts.pop(number, None)
        if held is not None and self._fetcher is not None:
            self._fetcher.window.release(held)
            self._fetcher.notify()


class Epoch:
    """A running epoch.

    Args:
        settings: the loader's.
        start: which epoch, which position in it, which rank.
        resources: of the feeder.
        totals: statistics to add to.
        orphaned: gets its tasks in flight whose result is no longer wanted.
        before: the previous epoch's batcher, whose batches count as outstanding too.

    Attributes:
        start: which epoch this is.
        batcher: its batches from their first task until the trainer takes them.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        start: EpochStart,
        resources: Resources,
        *,
        totals: Totals,
        orphaned: OrphanedTasks,
        before: RowBatcher | None = None,
    ) -> None:
        self.start = start
        self.batcher = RowBatcher(before=before, numbers=resources.batch_numbers)
        self._fields = settings.fields
        self._tables = resources.tables
        self._scans = resources.scans
        self._pool = resources.pool
        self._slots = resources.slots
        self._learned = resources.learned
        self._totals = totals
        self._orphaned = orphaned
        self._tasks: dict[int, RowTask] = {}
        self._scheduler = Scheduler(settings, start, resources, self.batcher, self._note_orphaned)

    @property
    def exhausted(self) -> bool:
        """Whether every batch has been scheduled; see `Scheduler.exhausted`."""
        return self._scheduler.exhausted

    @property
    def ended(self) -> bool:
        """Whether every batch has been released."""
        return self.exhausted and self.batcher.empty

    @property
    def blocked(self) -> bool:
        """Whether nothing can be done of it before more bytes are resident.

        Raises:
            StreamloadError: they cannot be fetched.
        """
        return not self.busy and self._scheduler.blocked

    @property
    def full(self) -> bool:
        """Whether as many batches are in flight, or wait for the loop, as may."""
        return self._scheduler.full

    @property
    def busy(self) -> bool:
        """Whether any task is in flight."""
        return bool(self._tasks)

    def pump(self) -> None:
        """Schedule all that can be scheduled now.

        Raises:
            StreamloadError: a shard cannot be read, and every batch that does not need it has been made.
        """
        while self._pool.has_room():
            task = self._scheduler.next_task()
            if task is None:
                break
            if isinstance(task, RowTask):
                self._tasks[task.number] = task
                self._pool.submit(task)
            else:
                self._scans.submit(task, self._pool)
        self._totals["plan_s"] += self._scheduler.take_plan_s()
        if self._scheduler.error is not None and not self.busy:
            raise self._scheduler.error

    def waits_for(self, number: int) -> bool:
        """Whether a task in flight makes batches of this epoch, none of which another task makes again."""
        task = self._tasks.get(number)
        return task is not None and all(self.batcher.find(each.batch, each.slot) for each in task.pieces)

    def take_result(self, done: RowsDone) -> bool:
        """Take the result of a task; False if the task belongs to another epoch."""
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
                if part.values is not None:
                    self._scheduler.note_values(batch, part.piece, part.values.copied_bytes)
                    if not part.values.columns:
                        self._scheduler.make_again(batch)
                        continue
                batch.parts.append(part)
                batch.rows_done += part.piece.rows
        return True

    def take_ready(self) -> tuple[list[ReadyBatch], int]:
        """The batches that are ready, in order, and how many the trainer may take before it acknowledges."""
        complete = self.batcher.take_complete()
        for batch in complete:
            self._scheduler.release(batch)
        ready = [self._ready(batch) for batch in complete]
        return ready, min(
            max(1, self._scheduler.outstanding // _MESSAGES_PER_WINDOW), _MOST_UNACKNOWLEDGED
        ) if ready else 1

    def drop(self, number: int) -> None:
        """Forget a task that will have no result; tasks of other epochs are ignored."""
        self._tasks.pop(number, None)

    def abandon(self) -> None:
        """Drop all batches that have not been released. Their slots are discarded: tasks may still write to them."""
        for task in self._tasks.values():
            self._orphaned.add(task)
        for batch in self.batcher.take_all():
            self._scheduler.release(batch)
            self._slots.discard(batch.slot)
        self.close()

    def close(self) -> None:
        """Stop fetching for this epoch. Idempotent."""
        self._scheduler.close()

    def _note_orphaned(self) -> None:
        """A batch was restarted: its tasks in flight are orphaned."""
        for task in self._tasks.values():
            if not self.waits_for(task.number):
                self._orphaned.add(task)

    def _note_layout(self, part: PieceDone) -> None:
        learned = self._learned
        learned.size_bytes = max(learned.size_bytes, part.size_bytes)
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
            parts=tuple([Part(part.piece.rows, part.values) for part in parts]),
            failed=tuple([self._located(failure) for failure in failures]),
            dropped_already=whole,
            end=batch.end,
        )

    def _located(self, failure: RowFailure) -> FailedRow:
        table = self._tables.find_joined(failure.shard)
        assert table is not None
        failure = with_fields(failure, table, self._fields, frozenset(self._tables.listing.sidecar_fields))
        return FailedRow(failure, self._tables.url(failure.stored_in), table.key(failure.sample))


Begin = Callable[[EpochStart, RowBatcher | None], Epoch]
SendReady = Callable[[EpochStart, list[ReadyBatch], bool, int], None]


class Epochs:
    """At most two epochs: the one that the trainer requested, and the one that it will probably request next.

    The first batches of the next epoch are made while the last ones of the current one are used, so that there is no
    gap between them. They are announced as soon as the current epoch has ended, requested or not. A trainer that
    starts elsewhere discards them; then nothing is made ahead until one epoch follows another again. A failure in the
    next epoch takes effect when that epoch is requested, unless it is forgiven before.

    A trainer may leave its epoch, or just request another one: the old one is abandoned. The trainer still takes what
    was announced of it, the rest is not made, and no epoch is begun ahead of time.

    Args:
        begin: makes an epoch, given the batcher of the previous one.
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
        self._next_error: Exception | None = None
        self._untaken: deque[tuple[RowBatcher, int]] = deque()
        self._acknowledge_after = 1

    @property
    def trainer_is_busy(self) -> bool:
        """Whether it has batches left, and will acknowledge some of them."""
        untaken = sum(announced for _, announced in self._untaken)
        return untaken > self._acknowledge_after

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
    def newest(self) -> tuple[int, int, int] | None:
        """The identity of the newest epoch in progress: nothing of an older one is announced any more."""
        newest = self._next if self._requested is None and self._next is not None else self._last
        return None if newest is None else newest.start.identity

    def request(self, start: EpochStart) -> None:
        """Start the epoch that the trainer requests, or go on with it if it was begun ahead.

        Raises:
            StreamloadError: it was begun ahead and has failed.
        """
        if self._requested is not None:
            self.abandon(self._requested.start.number)
        self._in_step = self._last is None or start == _after(self._last.start)
        following, error = self._next, self._next_error
        self._next = self._next_error = None
        if following is not None and following.start != start:
            following.abandon()
            following = None
        before = None if self._last is None else self._last.batcher
        self._requested = self._last = following or self._begin(start, before)
        if following is not None and error is not None:
            raise error

    def abandon(self, number: int) -> None:
        """Abandon the epoch that was requested as this pass, if it has not ended."""
        if self._requested is not None and self._requested.start.number == number:
            self._requested.abandon()
            self._requested = None
            self._in_step = False

    def stop(self) -> None:
        """Forget all epochs."""
        self._requested = self._next = self._next_error = None

    def forgive(self, errors: Iterable[Exception]) -> None:
        """Let the next epoch go on if it failed with one of these errors, whose cause is being retried."""
        if any(error is self._next_error for error in errors):
            self._next_error = None

    def note_taken(self, batches: int) -> None:
        """Note that the trainer has taken so many of the announced batches."""
        while batches:
            batcher, announced = self._untaken.popleft()
            count = min(batches, announced)
            batcher.note_taken(count)
            batches -= count
            if count < announced:
                self._untaken.appendleft((batcher, announced - count))

    def waits_for(self, task: int) -> bool:
        """Whether a task in flight makes batches that are still wanted."""
        return any(epoch is not None and epoch.waits_for(task) for epoch in (self._requested, self._next))

    def drop(self, task: int) -> None:
        """Forget an unwanted task that will have no result."""
        for epoch in (self._requested, self._next):
            if epoch is not None:
                epoch.drop(task)

    def on_done(self, done: RowsDone) -> None:
        """Take the result of a task; that of an abandoned epoch is dropped."""
        for epoch in (self._requested, self._next):
            if epoch is not None and epoch.take_result(done):
                return

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
            if self._requested is None:
                self._announce(self._next)

    def _announce(self, epoch: Epoch) -> None:
        ready, acknowledge_after = epoch.take_ready()
        last = epoch is self._requested and epoch.ended
        if ready:
            self._untaken.append((epoch.batcher, len(ready)))
            self._acknowledge_after = acknowledge_after
        if ready or last:
            self._send_ready(epoch.start, ready, last, acknowledge_after)
        if last:
            epoch.close()
            self._requested = None


def _after(start: EpochStart) -> EpochStart:
    return replace(start, epoch=start.epoch + 1, position=0, number=start.number + 1)
