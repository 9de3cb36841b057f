"""Plan a rank's batches, epoch after epoch, submit the tasks that make them, and announce them in order.

Nothing here waits for tasks or for the bytes of shards. After every event (a task done, a batch taken, a worker ready),
the owner calls `pump`, which schedules all that can be scheduled now. So the same code runs in an event loop and in the
caller's thread.

- A failed sample travels with its batch; the loop raises or records the error at the batch's turn.
- A shard that cannot be read ends the epoch: `pump` raises once all batches before it have been made. Retries belong to
  the storage and to the pool.
- The pool handles the death of a worker.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from streamload.decode.failure import Attempt, error_from, with_fields
from streamload.decode.tasks import BatchDone, BatchSlot, RowsDone, RowTable, RowTask, ScanDone, ScanTask
from streamload.errors import StreamloadError
from streamload.feeder.messages import FailedRow, PipelineSettings, ReadyBatch
from streamload.feeder.planned import PlannedRows, locate
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.window import PART_BYTES, part_edges, part_key, raise_first, shard_and_number
from streamload.index.dataset import Dataset
from streamload.limits import (
    BLOCK_ROWS,
    FIRST_BLOCK_ROWS,
    SCANNED_PARTS,
    SCANNED_PARTS_SHARE,
    SCANNED_SHARDS,
    SCHEDULED_SHARDS_SHARE,
)
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import descriptor_limit
from streamload.order.plan import EpochPlan, MixturePlan, RowBlock
from streamload.order.sampling import Mixed
from streamload.order.share import EpochStart
from streamload.tar.scan import ShardTable
from streamload.totals import Totals
from streamload.workers.pool import Pool

# Maximum number and bytes of local shards in one scan task: few, so that all workers get scans.
_SCANNED_TOGETHER, _SCANNED_TOGETHER_BYTES = 16, 4 << 20
# Minimum bytes of an arriving shard that a task scans before the shard's turn, since each task has a cost.
_ARRIVING_BYTES = 4 * PART_BYTES
# The number of parts that a scan is assumed to need if its shard is compressed or of unknown size.
_GUESSED_PARTS = 4
# Number of local shards scanned ahead of the plan.
_LOCAL_SCANS_AHEAD = 4
# Maximum rows of a task, and of a block of the plan, unless one batch has more.
_MAX_RUN_ROWS = 16_384
# Maximum rows planned ahead of the next batch.
_MOST_LOOKAHEAD_ROWS = 1 << 17
# Target time of a task, and its maximum bytes. Shorter tasks cost more: each wakes a worker and the feeder.
_RUN_S, _RUN_BYTES = 0.030, 20 << 20
# Maximum batches of all tasks in flight, if tasks have several batches.
_BATCHES_IN_FLIGHT = 512
# Acknowledgements per full window of outstanding batches: the trainer acknowledges a fifth of it at once.
_MESSAGES_PER_WINDOW = 5
# Maximum batches per acknowledgement: half of `MOST_KEPT_SLOTS`, the slots that the trainer may hold.
_MOST_UNACKNOWLEDGED = 64
_ENDLESS = 1 << 62
_NO_SLOT = -1
SendReady = Callable[[list[ReadyBatch], bool], None]


class Engine(NamedTuple):
    """The components of a feeder; `fetcher` is None if nothing must be fetched."""

    settings: PipelineSettings
    tables: Dataset
    scans: Scans
    pool: Pool
    slots: SlotPool
    totals: Totals
    fetcher: Fetcher | None


class BatchStream:
    """Make the epoch that the trainer has requested, and begin the next one before it is requested.

    The first batches of the next epoch are made while the trainer uses the last ones of the current epoch, and
    announced when the next epoch is requested. A failure while working ahead is dropped; it recurs in that epoch. If
    the trainer leaves its epoch or requests any epoch but the next, all unannounced batches are dropped.

    Args:
        send_ready: announces batches of the requested epoch; its second argument is True with the last ones.
        works_ahead: begin the next epoch before it is requested.

    Attributes:
        requested: the epoch that was requested last.
        untaken: the number of announced batches that the trainer has not taken.
        tasks: the batches that are being made, by task. Tasks of abandoned epochs hold their parts until they end.
    """

    def __init__(self, engine: Engine, send_ready: SendReady, *, works_ahead: bool) -> None:
        self._engine = engine
        self._send_ready = send_ready
        self._works_ahead = works_ahead
        self._task_size = TaskSize(engine)
        self.requested: EpochStart | None = None
        self._error: Exception | None = None  # of the next batches, raised once the tasks before them have ended
        self._in_progress = False  # True until all of the requested epoch is announced
        self._ahead: Lookahead | None = None  # plans the requested epoch, then the next one
        self._batches: deque[Batch] = deque()  # submitted and not yet announced, in order
        self.untaken = 0
        self.tasks: dict[int, list[Batch]] = {}

    @property
    def awaited(self) -> bool:
        """Return True if the trainer probably waits, judging by its last acknowledgement."""
        return self._in_progress and self.untaken <= self.acknowledge_after

    @property
    def full(self) -> bool:
        """Return True if the requested epoch has all its tasks, or the prefetch limit is reached."""
        return self._in_progress and (
            self._planning() is None or len(self._batches) + self.untaken >= self._task_size.batches()[1]
        )

    @property
    def blocked(self) -> bool:
        """Return True if the requested epoch waits for bytes, and neither a task nor the loop can free memory.

        Raises the error of a failed fetch.
        """
        planning = self._planning()
        return planning is not None and not self.tasks and not self.full and planning.blocked

    @property
    def acknowledge_after(self) -> int:
        """Return the number of batches that the trainer may take before it acknowledges them."""
        return min(max(1, self._task_size.batches()[1] // _MESSAGES_PER_WINDOW), _MOST_UNACKNOWLEDGED)

    def request(self, start: EpochStart) -> None:
        """Start an epoch, or continue it if it was begun ahead."""
        if self._in_progress or self._ahead is None or self._ahead.start != start:
            self.stop()
            self._ahead = Lookahead(self._engine, start)
        self.requested, self._in_progress = self._ahead.start, True

    def abandon(self, number: int) -> None:
        """Abandon the pass of this number, if it has not ended."""
        if self._in_progress and self.requested is not None and self.requested.number == number:
            self.stop()

    def stop(self) -> None:
        """Drop all batches that have not been announced. Their slots are discarded: tasks may still write to them."""
        for batch in self._batches:
            self._engine.slots.discard(batch.slot)
            batch.slot = _NO_SLOT
        self._batches.clear()
        self._stop_planning()
        self._in_progress = False

    def _stop_planning(self) -> None:
        self._error = None
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def is_wanted(self, number: int) -> bool:
        """Return True unless the batches of a task were dropped."""
        return self.tasks[number][0].slot != _NO_SLOT

    def end_task(self, number: int, done: RowsDone | None) -> None:
        """Record a task's result, if any, and release the parts of its batches."""
        batches, fetcher = self.tasks.pop(number), self._engine.fetcher
        if fetcher is not None:
            for batch in batches:
                fetcher.window.release(batch.parts)
            fetcher.notify()
        if done is not None and done.batches:
            self._task_size.learn(done)
            for batch, batch_done in zip(batches, done.batches, strict=True):
                batch.done = batch_done

    def pump(self) -> None:
        """Announce all batches that are ready, and schedule all that can be scheduled.

        Raises:
            StreamloadError: a shard of the requested epoch cannot be read, and every batch before it has been made.
        """
        scans, pool = self._engine.scans, self._engine.pool
        self._announce()
        with Attempt() as attempt:
            while pool.has_room() and (scans.submit_next(pool) or self._submit_run() or scans.submit_next(pool)):
                pass
        if self._error is not None and not self.tasks:
            attempt.error = self._error
        if attempt.error is not None:
            if self._in_progress and self._ahead is not None and self._ahead.start is self.requested:
                raise attempt.error
            self._stop_planning()  # the error recurs once the next epoch is requested
        self._announce()

    def _planning(self) -> Lookahead | None:
        """Return the lookahead of the requested epoch; None once all batches have a task."""
        ahead = self._ahead
        if not self._in_progress or ahead is None or ahead.start is not self.requested or ahead.exhausted:
            return None
        return ahead

    def _announce(self) -> None:
        """Announce the requested epoch's next batches that are done, and its end."""
        while self._in_progress:
            start, ready = self.requested, list[ReadyBatch]()
            assert start is not None
            queue = self._batches
            while queue and queue[0].start is start and queue[0].done is not None and len(ready) < MAX_DESCRIPTORS:
                ready.append(self._ready(queue.popleft()))
            last = self._planning() is None and not (queue and queue[0].start is start)
            if not ready and not last:
                return
            self.untaken += len(ready)
            self._in_progress = not last
            self._send_ready(ready, last)

    def _submit_run(self) -> bool:
        """Submit a task of batches of one block, or begin the next epoch; return False if neither is possible."""
        run, most_outstanding = self._task_size.batches()
        ahead, batches = self._ahead, list[Batch]()
        if ahead is None or self._error is not None or len(self._batches) + self.untaken + run > most_outstanding:
            return False
        try:
            while len(batches) < run and (batch := ahead.take()) is not None:
                batches.append(batch)
                if batch.finished is not None:
                    break
        except StreamloadError:
            if not batches and not self.tasks:
                raise  # else `take` raises it again once the earlier batches have been made
        if not batches:
            begins_next = self._works_ahead and ahead.exhausted and ahead.start is self.requested
            if begins_next:
                start = replace(ahead.start, epoch=ahead.start.epoch + 1, position=0, number=ahead.start.number + 1)
                self._ahead = Lookahead(self._engine, start)
            return begins_next
        number, start, planned = next(self._engine.scans.numbers), batches[0].start, batches[0].planned
        for batch in batches:
            batch.slot = self._engine.slots.take()
        self._batches += batches
        self.tasks[number] = batches
        first, end = batches[0].rows[0], batches[-1].rows[1]
        task = RowTask(
            number=number,
            epoch=start.epoch,
            table=RowTable(planned.table.values[first:end], planned.table.kinds),
            keys=None if planned.keys is None else planned.keys[first:end],
            batches=tuple([BatchSlot(batch.slot, batch.rows[1] - batch.rows[0]) for batch in batches]),
            pass_number=start.number,
        )
        with Attempt() as attempt:
            self._engine.pool.submit(task)
        if attempt.error is not None:
            self.end_task(number, None)
            self._error = attempt.error
            return False
        ahead.release_finished()
        return True

    def _ready(self, batch: Batch) -> ReadyBatch:
        done, tables, failed = batch.done, self._engine.tables, []
        assert done is not None
        for failure in done.failures:
            table = tables.find_joined(failure.shard)
            assert table is not None
            failure = with_fields(failure, table, frozenset(tables.listing.sidecar_fields))  # noqa: PLW2901
            failed.append(FailedRow(failure, tables.url(failure.stored_in), table.key(failure.sample)))
        return ReadyBatch(batch.slot, done._replace(failures=()), tuple(failed), batch.end)


@dataclass(slots=True, eq=False)
class Batch:
    """A planned batch.

    Attributes:
        start: the epoch.
        planned: the block of rows that contains the batch.
        rows: the first row of the batch in the block, and the end of its rows.
        end: the position in the epoch's order after the last sample.
        parts: the keys of the parts to read.
        finished: for the last batch of a block, the shards that no later block needs.
        slot: set when the batch has a task, and removed if the batch is dropped.
    """

    start: EpochStart
    planned: PlannedRows
    rows: tuple[int, int]
    end: int
    parts: list[int]
    finished: list[int] | None = None
    slot: int = _NO_SLOT
    done: BatchDone | None = None


class TaskSize:
    """Choose how many batches make a task, from the costs of earlier tasks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._batch_rows = engine.settings.order.batch_size
        # Each row may lie in a different shard, and a worker must be able to open all shards of its tasks.
        shards_at_once = max(1, descriptor_limit() // SCHEDULED_SHARDS_SHARE)
        has_more = len(engine.tables.counts) > shards_at_once
        self._most_run_rows = min(shards_at_once, _MAX_RUN_ROWS) if has_more else _MAX_RUN_ROWS
        self._row_s = 0.0  # a worker's time for a row; 0 if unknown
        self._slot_bytes = 1  # the size of the largest batch so far

    def learn(self, done: RowsDone) -> None:
        """Record the costs of a finished task."""
        row_s = (done.costs.decode + done.costs.transform + done.costs.collate) / max(1, done.rows)
        self._row_s = 0.7 * self._row_s + 0.3 * row_s if self._row_s else row_s
        self._slot_bytes = max(self._slot_bytes, *[batch.size_bytes for batch in done.batches])

    def batches(self) -> tuple[int, int]:
        """Return how many batches make a task, and how many may be in flight or wait for the loop.

        A task takes about thirty milliseconds and at most 20 MiB, but has at least one batch. Each worker has a current
        task and a waiting one, so more than `prefetch_batches` are in flight if batches are small or workers are many.
        """
        settings, batch_rows = self._engine.settings, self._batch_rows
        tasks, most, run = self._engine.pool.capacity + 2, self._engine.slots.most_in_flight, 1
        if self._row_s:
            by_time = int(min(_RUN_S / (self._row_s * batch_rows), _BATCHES_IN_FLIGHT // tasks))
            run = max(1, min(by_time, _RUN_BYTES // self._slot_bytes, self._most_run_rows // batch_rows))
        # At most half of `most`, since a task waits until all its batches fit, and one message acknowledges several.
        return min(run, max(1, most // 2)), min(max(settings.prefetch_batches, run * tasks), most)


class Lookahead:
    """Plan the batches of an epoch, and return each as soon as its bytes are resident.

    One block of rows at a time is planned for a local dataset. If bytes must be fetched, further blocks are planned
    while fewer parts are missing than may be requested at once. The parts that a batch has used are held until the plan
    has passed their samples.
    """

    def __init__(self, engine: Engine, start: EpochStart) -> None:
        self.start = start
        self._engine = engine
        self._fetcher = engine.fetcher
        self._tables = engine.tables
        order = engine.settings.order
        kind = MixturePlan if isinstance(order.sampling, Mixed) else EpochPlan
        self._plan: EpochPlan = kind(
            order,
            engine.tables.counts,
            start.epoch,
            start.rank,
            start.world_size,
            start=start.position,
            numbers=start.numbers,
            share=start.share,
        )
        self._scan_order = iter(self._plan.shards_ahead())
        self._blocks: deque[tuple[RowBlock, list[int]]] = deque()  # not located; each with its finished shards
        self._planned: deque[Batch] = deque()  # located and not yet taken
        self._held: set[int] = set()  # the parts that are held for the epoch
        self._block_rows = FIRST_BLOCK_ROWS  # few at first, so that the first batch comes soon
        self._finished: list[int] = []  # the shards to close once the taken batches have tasks
        self._planned_all = False
        if self._fetcher is not None:  # scans may have kept parts for the order of the previous pass
            self._fetcher.window.unkeep_all()

    @property
    def exhausted(self) -> bool:
        """Return True if every batch has been taken."""
        return self._planned_all and not self._blocks and not self._planned

    @property
    def blocked(self) -> bool:
        """Return True if the next batch waits for bytes or a shard's count. Raises the error of a failed fetch."""
        if self._fetcher is None or not self._planned:
            return not self._planned_all and not self._blocks and bool(self._missing())
        return not self._fetcher.window.are_present(self._planned[0].parts)

    def take(self) -> Batch | None:
        """Remove and return the next batch; None at the end, or while counts, tables or bytes are missing.

        Raises:
            StreamloadError: the batch cannot be made; later calls raise it again, until the cause is gone.
        """
        if not self._planned or self._fetcher is not None:
            with Attempt() as attempt:
                self._look_ahead()
            if attempt.error is not None and not self._planned:
                raise attempt.error  # else planned batches come first, and the error recurs in a later call
        if not self._planned or (self._fetcher is not None and self.blocked):
            return None
        batch = self._planned.popleft()
        self._hold(batch.parts)
        self._finished += batch.finished or ()
        if self.exhausted:
            self.close()  # makes room for the next epoch
        return batch

    def release_finished(self) -> None:
        """Close the shards that no later batch needs. Taken batches must have tasks."""
        finished, self._finished = self._finished, []
        if finished:
            finished = self._tables.with_sidecars(finished)
            self._engine.pool.drop(self._engine.pool.shards.finish(finished))
            if self._fetcher is not None:
                self._fetcher.finish(finished)

    def close(self) -> None:
        """Cancel everything but the batches that were taken. Idempotent."""
        self._planned_all = True
        if self._fetcher is not None:
            for batch in self._planned:
                self._fetcher.window.unplan(batch.parts, -1)
            self._fetcher.window.release(self._held)
            self._fetcher.window.unkeep_all()
            self._fetcher.notify()
        self._held.clear()
        self._planned.clear()
        self._blocks.clear()

    # -- planning --------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        started = perf_counter()
        while (self._blocks or (self._wants_more() and self._plan_block())) and self._locate_block():
            pass
        self._engine.totals["plan_s"] += perf_counter() - started

    def _wants_more(self) -> bool:
        if self._planned_all or not self._planned:
            return not self._planned_all
        return (
            self._fetcher is not None
            and len(self._planned) * self._engine.settings.order.batch_size < _MOST_LOOKAHEAD_ROWS
            and len(self._fetcher.window.missing.ranks) < self._fetcher.most_requests
        )

    def _plan_block(self) -> bool:
        """Plan the next block of rows; return False while counts are missing, and at the end."""
        scans = self._engine.scans
        while missing := self._missing():
            scans.request(missing)
            if not self._planned:
                raise_first(scans.errors, missing[:1])  # only the first shard is certainly needed
            if missing[0] in scans.requested:  # else `request` has found its count in an index
                scans.put_first(missing[0])
                self._scan_ahead()
                return False
        block = self._plan.take(self._block_rows)
        self._block_rows = min(4 * self._block_rows, _MAX_RUN_ROWS if self._fetcher is None else BLOCK_ROWS)
        finished = self._plan.finished()
        if block is None:
            self._planned_all = True
            self._finished += finished
            if self.exhausted:
                self.release_finished()
                self.close()
            self._release_passed()
            return False
        self._blocks.append((block, finished))
        self._scan_ahead()
        return True

    def _missing(self) -> list[int]:
        return self._plan.missing(_SCANNED_TOGETHER * self._engine.pool.capacity)

    def _scan_ahead(self) -> None:
        """Request scans of some shards before the plan needs them."""
        scans = self._engine.scans
        if not self._tables.counts.complete:
            most = _LOCAL_SCANS_AHEAD if self._fetcher is None else SCANNED_SHARDS
            scans.request(itertools.islice(self._scan_order, max(0, most - len(scans.requested))))

    def _locate_block(self) -> bool:
        """Locate the rows of the first block; return False while tables are missing.

        If a table cannot be read, the block is halved, so that the batches before its first use still come.
        """
        (block, finished), fetcher, settings = self._blocks[0], self._fetcher, self._engine.settings
        with Attempt() as attempt:
            if fetcher is not None and not fetcher.index_tables.has(dict.fromkeys(block.shard.tolist())):
                return False
            planned = locate(block, self._tables, settings.fields, verify=settings.verify, fetcher=fetcher)
        if attempt.error is None:
            self._blocks.popleft()  # only now, so that a failed block fails again on the next call
            rows = itertools.pairwise(block.batch_edges.tolist())
            batches = zip(rows, block.ends.tolist(), planned.parts, strict=True)
            self._planned += [Batch(self.start, planned, *batch) for batch in batches]
            self._planned[-1].finished = finished
            if fetcher is not None:
                for keys in planned.parts:
                    fetcher.window.plan(keys)
                self._release_passed()
                fetcher.notify()
            return True
        if not isinstance(attempt.error, StreamloadError) or len(block.ends) == 1:
            raise attempt.error
        middle, end = len(block.ends) // 2, len(block.ends)
        self._blocks.popleft()
        self._blocks.extendleft([(block.batches(middle, end), finished), (block.batches(0, middle), [])])
        return True

    # -- parts that the epoch holds --------------------------------------------------------------------------------

    def _hold(self, keys: list[int]) -> None:
        """Hold parts for a batch until it is made, and for the epoch until the plan has passed their samples."""
        if self._fetcher is not None:
            window = self._fetcher.window
            window.hold(keys)
            window.unplan(keys)
            new = set(keys).difference(self._held)
            new.difference_update(self._passed(new))
            window.hold(new)
            self._held.update(new)

    def _release_passed(self) -> None:
        if self._fetcher is not None:
            window = self._fetcher.window
            passed, unkept = self._passed(self._held), self._passed(window.kept)
            self._held.difference_update(passed)
            window.release(passed)
            for key in unkept:
                window.unkeep(key)
            if passed or unkept:
                self._fetcher.notify()

    def _passed(self, keys: Iterable[int]) -> list[int]:
        """Return the parts that are not needed by rows yet to be planned, as far as is known."""
        passed = []
        for shard, of_shard in itertools.groupby(sorted(keys), key=lambda key: shard_and_number(key)[0]):
            needed = list(self._needed(shard))
            for key in of_shard:
                start, end = part_edges(shard_and_number(key)[1], None)
                if not any(first < end and start < after for first, after in needed):
                    passed.append(key)
        return passed

    def _needed(self, shard: int) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges `[start, end)` of a shard's rows yet to be planned."""
        tables, fetcher = self._tables, self._fetcher
        samples = tables.stretches(shard, self._plan.unpassed(tables.listing.owner(shard)))
        table = tables.at_hand(shard)
        if samples and (table is None or fetcher is None or shard in fetcher.compressed):
            yield 0, _ENDLESS
        if not samples or table is None:
            return
        for first, end in samples:
            if first < min(end, len(table)):
                yield _extent(table, first, min(end, len(table)))
        if tables.is_growing(shard):
            yield _extent(table, 0, len(table))[1] if len(table) else 0, _ENDLESS


def _extent(table: ShardTable, first: int, end: int) -> tuple[int, int]:
    """Return the first byte of consecutive samples, and the end of the last one."""
    member, last = int(table.sample_start[first]), int(table.sample_start[end]) - 1
    return int(table.member_offset[member]), int(table.member_offset[last] + table.member_size[last])


class Scans:
    """Count the samples of shards, from an index or by a scan.

    A task scans a whole local shard, or several small ones. A shard that must be fetched is scanned piece by piece, one
    task at a time, as its parts arrive; `feed` requests the parts.

    Args:
        tables: receives the counts and tables.
        keeps: keep scanned parts while there is room, because their rows come next.

    Attributes:
        requested: the shards whose counts are requested but not known, including failed shards.
        errors: the error of each shard that cannot be scanned.
        numbers: yields the number of the pool's next task.
        in_flight: the parts that each scan in flight holds, by the task's number.
    """

    def __init__(self, tables: Dataset, fetcher: Fetcher | None, *, keeps: bool) -> None:
        self._tables = tables
        self._fetcher = fetcher
        self._keeps = keeps
        self._waiting: deque[int] = deque()  # local shards
        self.requested: set[int] = set()
        self._arriving: OrderedDict[int, _Arriving] = OrderedDict()
        self._turns = itertools.count()
        self._first_turns = itertools.count(-1, -1)  # for `put_first`
        self.errors: dict[int, Exception] = {}
        self.in_flight: dict[int, list[int]] = {}
        self.numbers: Iterator[int] = itertools.count()

    def request(self, shards: Iterable[int]) -> None:
        """Request the counts of some shards; an error is recorded in `errors`."""
        counts = self._tables.counts.values
        for shard in shards:
            if shard not in self.requested and counts[shard] < 0:
                with Attempt() as attempt:
                    self._tables.find(shard)  # finds its count if an index has it
                if attempt.error is not None:
                    self.fail(shard, attempt.error)
                if attempt.error is not None or counts[shard] >= 0:
                    continue
                self.requested.add(shard)
                if self._fetcher is not None and shard in self._fetcher.fetched:
                    self._arriving[shard] = _Arriving(next(self._turns))
                else:
                    self._waiting.append(shard)

    def put_first(self, shard: int) -> None:
        """Scan an arriving shard before other arriving ones, because a batch waits for it."""
        if (arriving := self._arriving.get(shard)) is not None and shard != next(iter(self._arriving)):
            self._request_parts(shard, arriving, range(0))  # `feed` requests them again, for the new turn
            arriving.turn = next(self._first_turns)
            self._arriving.move_to_end(shard, last=False)

    # -- needs -----------------------------------------------------------------------------------------------------

    def feed(self) -> bool:
        """Request the parts that scans need next, in the order of the shards.

        Returns:
            True if a shard has failed, because a part cannot be fetched.
        """
        fetcher, failed = self._fetcher, False
        if fetcher is None or not self._arriving:
            return False
        # The number of parts to request, bounded so that later shards do not take the room of earlier ones.
        left = max(1, min(SCANNED_PARTS, fetcher.window.budget_bytes // SCANNED_PARTS_SHARE // PART_BYTES))
        # Only the first shards: thousands may follow.
        for number, (shard, arriving) in enumerate(list(itertools.islice(self._arriving.items(), SCANNED_PARTS))):
            if left <= 0:
                break
            start, needs = self._tables.next_scan(shard)
            end, total = fetcher.arrived_from(shard, start)
            is_worth_it = number == 0 or end - start >= _ARRIVING_BYTES or total in (None, end)
            is_enough = end >= (needs if total is None else min(needs, total))
            arriving.is_ready = is_worth_it and is_enough and not arriving.in_flight
            parts, missing = range(1), _GUESSED_PARTS
            if total is not None and shard not in fetcher.compressed:
                parts = range(start // PART_BYTES, -(-min(total, max(needs, end + left * PART_BYTES)) // PART_BYTES))
                missing = parts.stop - -(-end // PART_BYTES)
            left -= missing
            self._request_parts(shard, arriving, parts)
            with Attempt() as attempt:
                fetcher.window.are_present([part_key(shard, number) for number in parts])
            if attempt.error is not None and not arriving.in_flight:  # else the error recurs after the scan
                self.fail(shard, attempt.error)
                failed = True
        return failed

    def _request_parts(self, shard: int, arriving: _Arriving, parts: range) -> None:
        """Request these parts of a shard, and withdraw earlier requests for others."""
        if self._fetcher is None or arriving.parts == parts:
            return  # without `notify`, which would wake the fetcher, and then `feed`, endlessly
        before, arriving.parts = set(arriving.parts or ()), parts
        window = self._fetcher.window
        for key in [part_key(shard, number) for number in before.difference(parts)]:
            if self._keeps and key in window.present:
                window.keep(key, arriving.turn)
            window.withdraw(key)
        for number in set(parts).difference(before):
            window.request(part_key(shard, number), arriving.turn)
        self._fetcher.notify()

    # -- tasks -----------------------------------------------------------------------------------------------------

    def submit_next(self, pool: Pool) -> bool:
        """Submit the next scan; return False if there is none, or its bytes are not resident.

        A shard that cannot be opened is marked as failed; other shards of the task are queued again.
        """
        if (task := self._next_whole() if self._waiting else self._next_piece()) is None:
            return False
        with Attempt() as attempt:
            pool.submit(task)
        if attempt.error is None:
            return True
        if not isinstance(attempt.error, StreamloadError):
            raise attempt.error
        self._end(task.number)
        url = getattr(attempt.error, "url", None)
        unopened = [shard for shard in task.shards if self._tables.url(shard) == url] or task.shards
        self._waiting.extendleft(shard for shard in reversed(task.shards) if shard not in unopened)
        for shard in unopened:
            self.fail(shard, attempt.error)
        return True

    def _next_whole(self) -> ScanTask:
        """Return a task for the next local shard, or for several small ones, since each task has a cost."""
        shards = [self._waiting.popleft()]
        left_bytes = _SCANNED_TOGETHER_BYTES - self._tables.listing.shard(shards[0]).bytes
        while self._waiting and len(shards) < _SCANNED_TOGETHER:
            left_bytes -= self._tables.listing.shard(self._waiting[0]).bytes
            if left_bytes < 0:
                break
            shards.append(self._waiting.popleft())
        task = ScanTask(next(self.numbers), tuple(shards))
        self.in_flight[task.number] = []
        return task

    def _next_piece(self) -> ScanTask | None:
        """Return a task for the first shard with enough bytes; hold the bytes' parts until the task ends."""
        for shard, arriving in itertools.islice(self._arriving.items(), SCANNED_PARTS):
            if self._fetcher is None or not arriving.is_ready:
                continue
            arriving.is_ready = False
            start, needs = self._tables.next_scan(shard)
            end, total = self._fetcher.arrived_from(shard, start)  # parts may have been evicted since `feed`
            if end >= (needs if total is None else min(needs, total)):
                arriving.in_flight = True
                task = ScanTask(next(self.numbers), (shard,), start, end, total)
                self.in_flight[task.number] = keys = self._fetcher.keys_between(shard, start, end)
                self._fetcher.window.hold(keys)
                return task
        return None

    def on_done(self, done: ScanDone) -> None:
        """Record the result of a scan."""
        self._end(done.number)
        for result in done.shards:
            shard, piece = result.shard, result.piece
            if result.failure is not None:
                self.fail(shard, error_from(result.failure))
            elif piece is None:
                self._forget(shard)
                assert result.table is not None
                self._tables.add(shard, result.table)
            else:
                if piece.needs is None or shard not in self._arriving:
                    self._forget(shard)
                else:
                    self._arriving[shard].in_flight = False
                with Attempt() as attempt:
                    self._tables.add_piece(shard, piece)
                if attempt.error is not None:
                    self.fail(shard, attempt.error)

    def _end(self, number: int) -> None:
        keys = self.in_flight.pop(number, None)
        if keys and self._fetcher is not None:
            self._fetcher.window.release(keys)
            self._fetcher.notify()

    def fail(self, shard: int, error: Exception) -> None:
        """Mark a shard as failed; it is not scanned again until `retry_failed`."""
        self._forget(shard)
        self.requested.add(shard)
        self.errors[shard] = error

    def retry_failed(self) -> None:
        """Clear errors, so that failed shards are scanned when they are requested again."""
        self.requested -= self.errors.keys()
        self.errors.clear()

    def _forget(self, shard: int) -> None:
        self.requested.discard(shard)
        if (arriving := self._arriving.pop(shard, None)) is not None:
            self._request_parts(shard, arriving, range(0))


@dataclass(slots=True)
class _Arriving:
    """A shard that is scanned while it arrives.

    Attributes:
        turn: the shard's place in the order of requests; negative if it was put first.
        in_flight: a scan of the shard is in flight.
        is_ready: `feed` has found enough bytes for its next scan.
        parts: the parts that are requested for its scans; None until `feed` reaches the shard.
    """

    turn: int
    in_flight: bool = False
    is_ready: bool = False
    parts: range | None = None
