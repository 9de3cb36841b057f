"""The scheduler: cuts an epoch's rows into tasks of the right size."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, Self, TypeVar

from streamload.decode.tasks import Piece, PieceDone, RowsDone, RowTask, ScanTask
from streamload.errors import StreamloadError
from streamload.feeder.lookahead import MAX_RUN_ROWS, Lookahead
from streamload.feeder.messages import PipelineSettings
from streamload.feeder.planned import PlannedRows
from streamload.feeder.scans import Scans
from streamload.fetch.prerequisites import Prerequisites
from streamload.fetch.window import Turns
from streamload.index.dataset import Dataset
from streamload.limits import SCHEDULED_SHARDS_SHARE
from streamload.memory.slots import ALIGNMENT_BYTES, Slots, round_up
from streamload.memory.unnamed import descriptor_limit
from streamload.order.mixture_plan import MixturePlan
from streamload.order.options import OrderOptions, samples_of_epoch
from streamload.order.plan import EpochPlan, RankPlan
from streamload.order.sampling import Mixed, Sampled
from streamload.order.share import EpochStart
from streamload.workers.protocol import Pool

PartT = TypeVar("PartT")
SourceT = TypeVar("SourceT")


@dataclass(slots=True, eq=False)
class OpenBatch(Generic[SourceT, PartT]):
    """A batch that is being made.

    Attributes:
        number: unique over all epochs.
        rows: how many it will have.
        source: where its rows come from, in case they have to be made again.
        slot: where they are written.
        end: the position in the epoch's order after its last sample.
        parts: its finished parts.
        rows_done: the rows in these parts.
        values_end: of the room given to values of unlike sizes, in bytes behind the arrays of its slot.
    """

    number: int
    rows: int
    source: SourceT
    slot: int
    end: int
    parts: list[PartT] = field(default_factory=list)
    rows_done: int = 0
    values_end: int = 0

    @property
    def complete(self) -> bool:
        """Whether all rows are done."""
        return self.rows_done == self.rows

    def restart(self, slot: int) -> None:
        """Drop the finished parts and use another slot: late parts may still be written to the old one."""
        self.parts.clear()
        self.rows_done = self.values_end = 0
        self.slot = slot


class Batcher(Generic[SourceT, PartT]):
    """Batches from their first task until the trainer takes them.

    Args:
        before: the previous epoch's batcher. Its batches count as outstanding here too, and its numbers continue.
        numbers: of batches, where other batchers take some of them too.

    Attributes:
        numbers: of the next batches.
    """

    def __init__(self, *, before: Self | None = None, numbers: Iterator[int] | None = None) -> None:
        self._before = before
        self._open: OrderedDict[int, OpenBatch[SourceT, PartT]] = OrderedDict()
        self.numbers: Iterator[int] = (numbers or count()) if before is None else before.numbers
        self._opened = 0
        self._taken = 0

    @property
    def outstanding(self) -> int:
        """Batches opened and not yet taken by the trainer, those of the previous epoch included."""
        outstanding = self._opened - self._taken
        if self._before is not None:
            outstanding += self._before.outstanding
            if not self._before.outstanding:
                self._before = None
        return outstanding

    @property
    def kept(self) -> int:
        """How many batches have not been released: their own rows, or those of an earlier batch, are incomplete."""
        return len(self._open)

    @property
    def empty(self) -> bool:
        """Whether no batch is open."""
        return not self._open

    def open(self, rows: int, source: SourceT, slot: int, end: int) -> OpenBatch[SourceT, PartT]:
        """Open a batch."""
        batch: OpenBatch[SourceT, PartT] = OpenBatch(next(self.numbers), rows, source, slot, end)
        self._open[batch.number] = batch
        self._opened += 1
        return batch

    def find(self, number: int, slot: int) -> OpenBatch[SourceT, PartT] | None:
        """The batch that a part belongs to; None if it has been restarted in another slot since."""
        batch = self._open.get(number)
        return batch if batch is not None and batch.slot == slot else None

    def note_taken(self, batches: int) -> None:
        """Note that the trainer has taken so many batches."""
        self._taken += batches

    def take_complete(self) -> list[OpenBatch[SourceT, PartT]]:
        """Remove and return the batches that can be released now."""
        ready = []
        for batch in self._open.values():
            if not batch.complete:
                break
            ready.append(batch)
        for batch in ready:
            del self._open[batch.number]
        return ready

    def take_all(self) -> list[OpenBatch[SourceT, PartT]]:
        """Remove and return all open batches, complete or not."""
        left = list(self._open.values())
        self._open.clear()
        self._taken += len(left)
        return left


Source = tuple[PlannedRows, int]
"""A batch's rows: their block, and the number of the batch in it."""

RowBatch = OpenBatch[Source, PieceDone]
RowBatcher = Batcher[Source, PieceDone]

# A shorter task costs more than it saves: a message wakes a worker and the feeder, with cold caches.
_RUN_S = 0.030
_SHORTEST_PART_S = 0.010
_LONGEST_PART_S = 0.100
_RUN_BYTES = 20 << 20
_BATCHES_IN_FLIGHT = 512
# For a batch's values of unlike sizes while only the first row is known: all of a page-locked slot takes memory.
_MOST_GUESSED_BYTES = 64 << 20

_ROOM_FACTOR = 1.5
# The room for the values of unlike sizes of one part of a batch: so much more than the largest until now took. Where
# they take more nevertheless, the batch is made again as a whole. Room that is not used takes no memory.
_LEAST_ROOM_BYTES = 4096


@dataclass(slots=True)
class Learned:
    """What one epoch learns for the next.

    Attributes:
        layout: of batches of rows.
        size_bytes: of a slot.
        values_bytes: of a batch's values of unlike sizes, which are copied to the trainer's heap.
        ragged: some row did not fit the layout, so batches are collated one by one.
        row_s: seconds that a worker takes for a row.
        first_row_is_made: a first row is being made, which sets the layout of all.
    """

    layout: bytes | None = None
    size_bytes: int = 1
    values_bytes: int = 0
    ragged: bool = False
    row_s: float | None = None
    first_row_is_made: bool = False

    def expect_values(self, size_bytes: int) -> None:
        """Note that a batch's values of unlike sizes take so many bytes in its slot, and as many again outside."""
        self.values_bytes = max(self.values_bytes, size_bytes)
        self.size_bytes = max(self.size_bytes, size_bytes)

    def measure(self, done: RowsDone) -> None:
        """Learn from the time that a task took."""
        costs = done.costs
        row_s = (costs.decode + costs.transform + costs.collate) / max(1, done.rows)
        self.row_s = row_s if self.row_s is None else 0.7 * self.row_s + 0.3 * row_s


class TaskSize(NamedTuple):
    """The size of the next tasks; at least one of `parts` and `run` is 1.

    Attributes:
        parts: into how many tasks a batch is cut.
        run: how many batches make a task.
        outstanding: how many batches may be in flight or waiting for the loop.
    """

    parts: int
    run: int
    outstanding: int


def task_size(
    row_s: float | None,
    batch_rows: int,
    slot_bytes: int,
    *,
    capacity: int,
    prefetch_batches: int,
    whole: bool,
) -> TaskSize:
    """Tasks of about thirty milliseconds; parts of a batch take ten to a hundred.

    A slow batch is cut, so that all workers share it: it is ready early, and a slow sample delays only its own batch.
    Every task has a cost of its own, mostly cold caches, so parts may grow to 100 ms while each worker still gets one
    part of every batch. Fast batches are joined to a run, so that a message costs little compared with its work.

    No worker may be idle: each has a current task and one waiting, however many batches that is. So more than
    `prefetch_batches` are in flight where batches are small or made whole. A run is limited to 20 MiB, so everything
    in flight is limited to 20 MiB for each task and two more.

    Args:
        row_s: seconds that a worker takes for a row; None while that is unknown: then a batch is cut for all workers.
        batch_rows: rows of a batch.
        slot_bytes: of the slot of a batch.
        capacity: tasks that the workers hold together, two for each.
        prefetch_batches: at least so many batches are made ahead.
        whole: a batch must not be cut.
    """
    tasks = capacity + 2
    batch_s = (row_s or 0.0) * batch_rows
    run = parts = 1
    if row_s is None:
        parts = 1 if whole else min(batch_rows, capacity)
    elif batch_s > _RUN_S and not whole:
        one_for_each = min(max(1, capacity // 2), math.ceil(batch_s / _SHORTEST_PART_S))
        parts = min(batch_rows, max(one_for_each, math.ceil(batch_s / _LONGEST_PART_S)))
    elif batch_s > 0:
        by_number = _BATCHES_IN_FLIGHT // tasks
        by_time = int(min(_RUN_S / batch_s, by_number))
        run = max(1, min(by_time, by_number, _RUN_BYTES // slot_bytes, MAX_RUN_ROWS // batch_rows))
    return TaskSize(parts, run, max(prefetch_batches, -(-run * tasks // parts)))


class Resources(NamedTuple):
    """What all epochs of a feeder share.

    Attributes:
        tables: where samples lie.
        scans: scans the shards that have no table, before they can be planned.
        pool: does the tasks, and is notified of finished shards.
        slots: where batches are written.
        learned: by earlier epochs and tasks, for later ones.
        prerequisites: fetches remote parts and tables; None where everything is local.
        batch_numbers: unique within a pool.
        turns: of the rank's batches in the order of need.
    """

    tables: Dataset
    scans: Scans
    pool: Pool
    slots: Slots
    learned: Learned
    prerequisites: Prerequisites | None = None
    batch_numbers: Iterator[int] | None = None
    turns: Turns | None = None


class Scheduler:
    """Schedules one epoch of one rank.

    Args:
        settings: the loader's.
        start: which epoch, which position in it, which rank.
        resources: of the feeder.
        batcher: bounds how many batches are in flight.
        begun_again: called when a batch is restarted, which orphans its tasks in flight.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        start: EpochStart,
        resources: Resources,
        batcher: RowBatcher,
        begun_again: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._number = start.epoch
        self._scans = resources.scans
        self._pool = resources.pool
        self._slots = resources.slots
        self._batcher = batcher
        self._learned = resources.learned
        self._begun_again = begun_again
        self._start = start
        self._batch_rows = settings.order.batch_size
        self._ahead = _plan_rows(settings, resources, start)
        self._tables = tables = resources.tables
        # Each row may lie in another shard, and a worker must be able to open all shards of its tasks.
        shards_at_once = max(1, descriptor_limit() // SCHEDULED_SHARDS_SHARE)
        self._most_run_rows = shards_at_once if len(tables.counts) > shards_at_once else MAX_RUN_ROWS
        self._scheduling: tuple[RowBatch, int] | None = None
        self._again: deque[RowBatch] = deque()
        self._waits_for_first_row = False

    @property
    def exhausted(self) -> bool:
        """Whether every batch has been scheduled, and the layout is known if a first row is to set it.

        The next epoch must not begin earlier: it would learn a layout from a first row of its own, and rows of one
        batch would be written by two layouts.
        """
        return self._ahead.exhausted and self._scheduling is None and not self._waits_for_first_row

    @property
    def full(self) -> bool:
        """Whether as many batches are in flight, or wait for the loop, as may."""
        return self._batcher.outstanding >= self.outstanding

    @property
    def blocked(self) -> bool:
        """Whether the next task waits for bytes.

        Raises:
            StreamloadError: they cannot be fetched.
        """
        return not self._again and self._scheduling is None and self._ahead.blocked

    @property
    def error(self) -> StreamloadError | None:
        """Why the next batch does not come, where `next_task` has found that."""
        return self._ahead.error

    def next_task(self) -> RowTask | ScanTask | None:
        """The next task; None where nothing can be scheduled now."""
        return self._scans.next_task() or self._rows_task() or self._scans.next_task()

    def _rows_task(self) -> RowTask | None:
        if self._again:
            return self._made_again()
        if self._whole:
            return self._whole_batches()
        if self._learned.layout is None:
            return self._first_rows()
        return self._rows()

    def _made_again(self) -> RowTask:
        batch = self._again.popleft()
        return self._task([(batch, 0, batch.rows)], whole=True)

    @property
    def _whole(self) -> bool:
        return self._settings.whole_batches or self._learned.ragged or self._sampled_few

    def _first_rows(self) -> RowTask | None:
        """A single row, which sets the layout of all; nothing else is scheduled until it is done."""
        if self._learned.first_row_is_made:
            return None
        task = self._part_of_batch(rows=1)
        self._waits_for_first_row = self._learned.first_row_is_made = task is not None
        return task

    def _rows(self) -> RowTask | None:
        """A part of a slow batch, or a run of fast ones."""
        size = self._size()
        if size.parts > 1 or self._scheduling is not None:
            return self._part_of_batch(-(-self._batch_rows // size.parts))
        return self._run(whole=False)

    def _whole_batches(self) -> RowTask | None:
        if self._scheduling is not None:  # partly scheduled when another batch turned out not to fit the layout
            self.make_again(self._scheduling[0])
            return self._made_again()
        return self._run(whole=True)

    def _run(self, *, whole: bool) -> RowTask | None:
        """Several consecutive batches."""
        size = self._size()
        if self._batcher.outstanding + size.run > size.outstanding:
            return None
        batches: list[RowBatch] = []
        run = size.run
        while len(batches) < run and (not batches or self._ahead.in_block):
            batch = self._open_batch()
            if batch is None:
                break
            batches.append(batch)
            if len(batches) == 1:
                run = _even(run, batch.source)
        if not batches:
            return None
        return self._task([(batch, 0, batch.rows) for batch in batches], whole=whole)

    def _part_of_batch(self, rows: int) -> RowTask | None:
        if self._scheduling is None:
            batch = self._open_batch() if self._batcher.outstanding < self._size().outstanding else None
            if batch is None:
                return None
            self._scheduling = batch, 0
        batch, start = self._scheduling
        end = min(start + rows, batch.rows)
        self._scheduling = (batch, end) if end < batch.rows else None
        return self._task([(batch, start, end)], whole=False)

    @property
    def outstanding(self) -> int:
        """How many batches may be in flight or waiting for the loop."""
        return self._size().outstanding

    def _size(self) -> TaskSize:
        size = task_size(
            self._learned.row_s,
            self._batch_rows,
            self._learned.size_bytes,
            capacity=self._pool.capacity,
            prefetch_batches=self._settings.prefetch_batches,
            whole=self._whole,
        )
        most_run = max(1, self._most_run_rows // self._batch_rows)
        size = self._within_room(size._replace(run=min(size.run, most_run)))
        most = self._slots.most_in_flight
        # A run waits until all of it fits, and the loop has not acknowledged up to a fifth of what is outstanding.
        return TaskSize(size.parts, min(size.run, max(1, most // 2)), min(size.outstanding, most))

    def _within_room(self, size: TaskSize) -> TaskSize:
        """Tasks of no more rows than a worker has room for, where rows may have expanded."""
        room_bytes = self._settings.expansion_room_bytes
        if room_bytes is None:
            return size
        batch_rows = self._batch_rows
        row_bytes = -(-self._learned.size_bytes // batch_rows)
        rows = max(1, room_bytes // row_bytes - 1)  # of the last one there is a copy while it is made
        parts, run = -(-batch_rows // rows), max(1, rows // batch_rows)
        return size._replace(parts=max(size.parts, parts), run=min(size.run, run))

    def _open_batch(self) -> RowBatch | None:
        source = self._ahead.take()
        if source is None:
            return None
        planned, number = source
        start, end = planned.edges(number)
        slot = self._slots.take(self._learned.size_bytes)
        return self._batcher.open(end - start, source, slot, int(planned.block.ends[number]))

    def _task(self, batches: list[tuple[RowBatch, int, int]], *, whole: bool) -> RowTask:
        """A task for rows of consecutive batches of one block."""
        first, first_row, _ = batches[0]
        last, _, last_row = batches[-1]
        planned = first.source[0]
        start = planned.edges(first.source[1])[0] + first_row
        end = planned.edges(last.source[1])[0] + last_row
        return RowTask(
            number=next(self._scans.numbers),
            epoch=self._number,
            table=planned.table.rows(start, end),
            keys=None if planned.keys is None else planned.keys[start:end],
            pieces=tuple(self._piece(*each) for each in batches),
            capacity=self._capacity,
            whole=whole,
            pass_number=self._start.number,
        )

    def _piece(self, batch: RowBatch, start: int, end: int) -> Piece:
        """Rows of a batch, with room of their own for values of unlike sizes if other tasks write to its slot too."""
        rows, values_start = end - start, batch.values_end
        if rows == batch.rows or self._learned.layout is None:
            return Piece(batch.number, batch.slot, start, rows)
        row_bytes = self._learned.values_bytes / self._batch_rows
        room_bytes = round_up(int(rows * row_bytes * _ROOM_FACTOR) + _LEAST_ROOM_BYTES, ALIGNMENT_BYTES)
        batch.values_end += room_bytes
        return Piece(batch.number, batch.slot, start, rows, values_start, room_bytes)

    def note_values(self, batch: RowBatch, piece: Piece, size_bytes: int) -> None:
        """Note what the values of unlike sizes of a piece take, whether or not there was room for them."""
        expected_bytes = -(-size_bytes * batch.rows // piece.rows)
        if not self._learned.values_bytes and piece.rows < batch.rows:  # a single large row says little of the others
            expected_bytes = min(expected_bytes, max(size_bytes, _MOST_GUESSED_BYTES))
        self._learned.expect_values(expected_bytes)
        batch.values_end = max(batch.values_end, piece.values_start + size_bytes)

    @property
    def _capacity(self) -> int:
        """The rows of the largest batch of any epoch: `batch_size` may be far more than there are samples."""
        order, counts = self._settings.order, self._tables.counts
        if not counts.complete or isinstance(order.sampling, Sampled):
            return self._batch_rows
        return min(self._batch_rows, self._rows_of_rank(samples_of_epoch(order, counts.total)))

    @property
    def _sampled_few(self) -> bool:
        """Whether a sampler returned too few samples for one batch; it may return more in other epochs."""
        numbers = self._start.numbers
        return numbers is not None and self._rows_of_rank(len(numbers)) < self._settings.order.batch_size

    def _rows_of_rank(self, samples: int) -> int:
        return max(1, -(-samples // self._start.world_size))

    def take_plan_s(self) -> float:
        """Seconds spent on planning and locating since the last call."""
        plan_s, self._ahead.plan_s = self._ahead.plan_s, 0.0
        return plan_s

    def release(self, batch: RowBatch) -> None:
        """Release what a batch needs: it is complete, or no longer wanted."""
        self._ahead.release(batch.source)

    def close(self) -> None:
        """Stop scheduling and fetching."""
        self._note_first_row()
        self._ahead.close()

    def measure(self, done: RowsDone) -> None:
        """Learn from how long a task took."""
        if self._waits_for_first_row:
            self._note_first_row()  # its time says little: it paid for imports
        else:
            self._learned.measure(done)

    def _note_first_row(self) -> None:
        """The first row is made, or no longer wanted, if it was waited for."""
        if self._waits_for_first_row:
            self._waits_for_first_row = self._learned.first_row_is_made = False

    def make_again(self, batch: RowBatch) -> None:
        """Make a batch again as a whole, since some of its rows do not fit the layout."""
        if self._scheduling is not None and self._scheduling[0] is batch:
            self._scheduling = None
        # The old slot is not used again: parts in flight may still be written to it. That happens a few times only:
        # afterwards all batches are made whole, or their values have more room.
        batch.restart(self._slots.take(self._learned.size_bytes))
        self._again.append(batch)
        self._begun_again()


def _even(run: int, source: Source) -> int:
    """The length of runs, at most `run`, that cuts the rest of a block evenly: a short one costs as much."""
    planned, number = source
    left = planned.batches - number
    return -(-left // -(-left // run))


def _plan_rows(settings: PipelineSettings, resources: Resources, start: EpochStart) -> Lookahead:
    plan = _plan(settings.order, resources.tables, start)
    return Lookahead(
        plan,
        plan.shards_ahead(),
        settings.fields,
        verify=settings.verify,
        tables=resources.tables,
        scans=resources.scans,
        pool=resources.pool,
        prerequisites=resources.prerequisites,
        turns=resources.turns,
    )


def _plan(order: OrderOptions, tables: Dataset, start: EpochStart) -> EpochPlan:
    where = start.epoch, start.rank, start.world_size
    if isinstance(order.sampling, Mixed):
        return MixturePlan(order, tables.counts, *where, start=start.position, share=start.share)
    return RankPlan(order, tables.counts, *where, start=start.position, numbers=start.numbers, share=start.share)
