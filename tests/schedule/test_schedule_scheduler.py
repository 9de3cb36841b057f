"""Scheduling: every row once and in its place, whatever order the work comes back in, and never too much at once.

The pool of these tests does nothing by itself. It notes for each slot which sample was written to which row, and
answers when a test says so, after a time that the test makes up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_shards import write_numbers

from streamload.decode.tasks import PieceDone, RowsDone, RowTask, ScanDone, ScannedShard, ScanTask, TaskCosts
from streamload.index.listing import list_shards
from streamload.index.tables import Tables
from streamload.limits import MOST_KEPT_SLOTS
from streamload.memory.mapped import map_memory
from streamload.memory.slots import SlotPool
from streamload.order.epoch_start import EpochStart
from streamload.order.plan import OrderOptions, RankPlan, ShardCounts
from streamload.schedule import lookahead as lookahead
from streamload.schedule.epoch import Epoch, OrphanedTasks, ReadyBatch
from streamload.schedule.scans import Scans
from streamload.schedule.scheduler import Learned, PipelineSettings, Resources
from streamload.tar.scan import scan_shard
from streamload.totals import Totals

COUNTS = (40, 3, 57, 20)

Place = tuple[int, int]


class Pool:
    """Takes tasks and keeps them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tasks: list[RowTask | ScanTask] = []
        self.layouts: list[bytes] = []
        self.forgotten: list[int] = []

    def has_room(self) -> bool:
        return len(self.tasks) < self.capacity

    def submit(self, task: RowTask | ScanTask) -> None:
        assert self.has_room()
        self.tasks.append(task)

    def fix_layout(self, layout: bytes) -> None:
        self.layouts.append(layout)

    def forget_shards(self, shards: Sequence[int]) -> None:
        self.forgotten += shards

    def forget_slots(self, slots: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class Run:
    """One epoch, driven by hand.

    Attributes:
        batches: the samples of each batch as it was delivered.
        ends: the position behind each batch.
        numbers: the number of rows of each task that was answered.
    """

    def __init__(
        self,
        folder: Path,
        *,
        batch_size: int = 8,
        capacity: int = 4,
        prefetch: int = 4,
        whole: bool = False,
        in_order: bool = True,
        shuffle: bool = True,
        row_s: float | None = None,
        learned: Learned | None = None,
        start: EpochStart | None = None,
        mismatched: Callable[[Place], bool] = lambda place: False,
        expansion_room_bytes: int | None = None,
    ) -> None:
        listing = list_shards(folder)
        self.order = OrderOptions(0, shuffle, 30, 1, batch_size, drop_last=False, pad=True)
        self.start = start or EpochStart(0, 0, 0, 1)
        self.pool, self.slots, self.learned = Pool(capacity), SlotPool(), learned or Learned()
        self.tables = Tables(listing)
        self.listing = listing
        self._row_s = row_s
        self._mismatched = mismatched
        self._written: dict[int, dict[int, Place]] = {}
        self.batches: list[list[Place]] = []
        self.ends: list[int] = []
        self.tasks: list[RowTask] = []
        self._scans = Scans(self.tables)
        self.epoch = Epoch(
            PipelineSettings(
                self.order,
                ("cls",),
                False,
                whole,
                prefetch,
                in_order,
                expansion_room_bytes=expansion_room_bytes,
            ),
            self.start,
            Resources(self.tables, self._scans, self.pool, self.slots, self.learned),
            totals=Totals(),
            orphaned=OrphanedTasks(None),
        )

    def _note_ready(self, ready: list[ReadyBatch], acknowledge_after: int) -> None:
        assert acknowledge_after >= 1, "one that is never acknowledged stops everything"
        assert acknowledge_after <= MOST_KEPT_SLOTS // 2, "a late acknowledgement discards slots"
        for batch in ready:
            rows = sum(part.rows for part in batch.parts)
            written = self._written.pop(batch.slot)
            assert sorted(written) == list(range(rows)), "every row of a batch is written"
            self.batches.append([written[row] for row in range(rows)])
            self.ends.append(batch.end)
            self.slots.announce(batch.slot, batch.size_bytes)
            self.slots.note_taken(1)
            self.slots.note_released([batch.slot])

    def answer(self, number: int = 0) -> RowTask | ScanTask:
        """Have one of the tasks come back."""
        task = self.pool.tasks.pop(number)
        if isinstance(task, ScanTask):
            self._scans.on_done(self._scan(task))
        else:
            assert self.epoch.take_result(self._rows(task))
        self._note_ready(*self.epoch.take_ready())
        return task

    def _scan(self, task: ScanTask) -> ScanDone:
        found = []
        for number in task.shards:
            shard = self.listing.shards[number]
            with open(shard.url, "rb") as file:
                table = scan_shard(map_memory(file.fileno(), shard.bytes, writable=False), shard.url)
            found.append(ScannedShard(number, table))
        return ScanDone(task.number, tuple(found), TaskCosts())

    def _rows(self, task: RowTask) -> RowsDone:
        self.tasks.append(task)
        places = list(zip(task.table.shards.tolist(), task.table.samples.tolist(), strict=True))
        done, row = [], 0
        for piece in task.pieces:
            of_piece = places[row : row + piece.rows]
            row += piece.rows
            if not task.whole and any(map(self._mismatched, of_piece)):
                done.append(PieceDone(piece, layout_mismatch=True))
                continue
            slot = self._written.setdefault(piece.slot, {})
            for number, place in enumerate(of_piece, piece.first_row):
                assert number not in slot, "no row is written twice"
                slot[number] = place
            first = not self.pool.layouts and not task.whole
            done.append(
                PieceDone(piece, whole=task.whole, layout=b"layout" if first or task.whole else None, size_bytes=100)
            )
        assert row == len(places)
        row_s = self._row_s if self._row_s is not None else 1e-4
        return RowsDone(task.number, tuple(done), len(places), 0, TaskCosts(decode=row_s * len(places)))

    def finish(self, choose: Callable[[int], int] = lambda count: 0, taken_at_once: int = 1) -> None:
        """Go on to the end; the loop takes batches as they come."""
        try:
            self._go_on(choose, taken_at_once)
        finally:
            self.slots.close()

    def _go_on(self, choose: Callable[[int], int], taken_at_once: int) -> None:
        self.epoch.pump()
        taken = 0
        while not self.epoch.ended:
            assert self.pool.tasks, "nothing is in flight, and the epoch has not ended"
            self.answer(choose(len(self.pool.tasks)))
            if len(self.batches) - taken >= taken_at_once or not self.pool.tasks:
                self.epoch.batcher.note_taken(len(self.batches) - taken)
                taken = len(self.batches)
            self.epoch.pump()

    def expected(self) -> list[list[Place]]:
        plan = RankPlan(
            self.order,
            ShardCounts.of(COUNTS),
            self.start.epoch,
            self.start.rank,
            self.start.world_size,
            start=self.start.position,
        )
        batches = []
        while (block := plan.take(50)) is not None:
            rows = list(zip(block.shard.tolist(), block.sample.tolist(), strict=True))
            edges = block.batch_edges.tolist()
            batches += [rows[a:b] for a, b in pairwise(edges)]
        return batches


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_numbers(tmp_path_factory.mktemp("dealing") / "shards", COUNTS))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return Path(write_numbers(tmp_path / "shards", COUNTS, index=False))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_batch_is_delivered_whole_and_in_order(folder: Path, data: st.DataObject) -> None:
    options: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, 40), "batch_size"),
        "capacity": data.draw(st.integers(1, 6), "capacity"),
        "prefetch": data.draw(st.integers(1, 6), "prefetch"),
        "whole": data.draw(st.booleans(), "whole"),
        "row_s": data.draw(st.sampled_from([0.0, 1e-6, 1e-4, 2e-3, 0.1, None]), "row_s"),
    }
    bad = data.draw(st.sets(st.sampled_from([(0, 0), (0, 30), (2, 5), (2, 50), (3, 1)])), "mismatched")
    run = Run(folder, **options, mismatched=bad.__contains__)
    run.finish(lambda count: data.draw(st.integers(0, count - 1)), data.draw(st.integers(1, 4), "taken at once"))
    assert run.batches == run.expected()
    assert run.ends == sorted(run.ends)
    assert run.ends[-1] == sum(COUNTS)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_out_of_order_every_batch_is_delivered_once(folder: Path, data: st.DataObject) -> None:
    run = Run(folder, batch_size=9, in_order=False, row_s=data.draw(st.sampled_from([1e-4, 0.01])))
    run.finish(lambda count: data.draw(st.integers(0, count - 1)))
    assert sorted(run.batches) == sorted(run.expected())


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("lanes_start", [EpochStart(3, 0, 0, 1), EpochStart(0, 37, 0, 1), EpochStart(1, 16, 1, 2)])
def test_an_epoch_begins_at_its_start_position(folder: Path, shuffle: bool, lanes_start: EpochStart) -> None:
    run = Run(folder, shuffle=shuffle, start=lanes_start)
    run.finish()
    assert run.batches == run.expected()
    assert {task.epoch for task in run.tasks} == {lanes_start.epoch}


def test_the_layout_is_learned_from_a_single_row_before_anything_else(folder: Path) -> None:
    run = Run(folder)
    run.epoch.pump()
    (task,) = run.pool.tasks
    assert isinstance(task, RowTask)
    assert [(piece.first_row, piece.rows) for piece in task.pieces] == [(0, 1)]
    run.epoch.pump()
    assert len(run.pool.tasks) == 1, "nothing else is scheduled meanwhile"
    run.answer()
    assert run.pool.layouts == [b"layout"]
    run.epoch.pump()
    assert len(run.pool.tasks) > 1
    run.finish()


def test_a_layout_that_is_known_from_an_earlier_epoch_is_not_requested_again(folder: Path) -> None:
    learned = Learned(layout=b"known", size_bytes=100, row_s=1e-3)
    run = Run(folder, learned=learned)
    run.epoch.pump()
    assert len(run.pool.tasks) > 1
    run.slots.close()


def rows_and_pieces(tasks: Sequence[RowTask]) -> set[tuple[int, int]]:
    return {(len(task.table), len(task.pieces)) for task in tasks}


def test_slow_batches_are_cut_among_the_workers(folder: Path) -> None:
    """50 ms a row: a task is two rows, and all workers are at the same batch."""
    run = Run(folder, row_s=0.05, learned=Learned(layout=b"known", size_bytes=100, row_s=0.05))
    run.epoch.pump()
    assert [task.pieces[0].batch for task in run.pool.tasks if isinstance(task, RowTask)] == [0] * 4
    run.finish()
    assert rows_and_pieces(run.tasks) == {(2, 1)}


@pytest.mark.parametrize(("room_bytes", "rows"), [(None, 16), (170, 16), (90, 8), (50, 4), (20, 1), (1, 1)])
def test_a_task_has_no_more_rows_than_a_worker_has_room_for(folder: Path, room_bytes: int | None, rows: int) -> None:
    """A row takes 10 bytes, and the last one twice as much while it is made."""
    learned = Learned(layout=b"known", size_bytes=80, row_s=1.8e-3)
    run = Run(folder, learned=learned, expansion_room_bytes=room_bytes)
    run.epoch.pump()
    (first, *_) = run.pool.tasks
    assert isinstance(first, RowTask)
    assert len(first.table) == rows
    run.slots.close()


def test_fast_batches_are_scheduled_in_runs_of_about_thirty_milliseconds(folder: Path) -> None:
    run = Run(folder, batch_size=2, row_s=3e-3, learned=Learned(layout=b"known", size_bytes=100, row_s=3e-3))
    run.epoch.pump()
    assert rows_and_pieces([task for task in run.pool.tasks if isinstance(task, RowTask)]) == {(10, 5)}
    run.finish()
    assert run.batches == run.expected()


def test_runs_of_large_batches_are_held_to_what_memory_allows(folder: Path) -> None:
    run = Run(folder, batch_size=2, learned=Learned(layout=b"known", size_bytes=1 << 30, row_s=1e-6))
    run.epoch.pump()
    assert {len(task.pieces) for task in run.pool.tasks if isinstance(task, RowTask)} == {1}
    run.slots.close()


@pytest.mark.parametrize("row_s", [1e-6, 1e-3, 0.05])
@pytest.mark.parametrize("prefetch", [1, 4, 9])
@pytest.mark.parametrize("whole", [True, False])
def test_what_the_loop_does_not_take_is_not_made_for_ever(
    folder: Path, row_s: float, prefetch: int, whole: bool
) -> None:
    """A loop that stands still: everything comes to rest with a bounded number of batches, at least those wished."""
    learned = Learned(layout=b"known", size_bytes=2 << 20, row_s=row_s)  # ten of them are 20 MiB
    run = Run(folder, batch_size=1, capacity=4, prefetch=prefetch, whole=whole, row_s=row_s, learned=learned)
    run.epoch.pump()
    while run.pool.tasks:
        run.answer()
        run.epoch.pump()
    waiting = len(run.batches)
    assert prefetch <= waiting <= max(prefetch, 60) < sum(COUNTS)
    run.epoch.batcher.note_taken(waiting)
    run.finish()
    assert run.batches == run.expected()


def test_batches_that_are_made_whole_are_never_cut(folder: Path) -> None:
    run = Run(folder, whole=True, row_s=0.05)
    run.finish()
    assert all(task.whole and task.pieces[0].first_row == 0 for task in run.tasks)
    assert [len(batch) for batch in run.batches] == [8] * 15


def test_after_a_layout_mismatch_all_batches_are_made_whole(folder: Path) -> None:
    place = (2, 20)
    run = Run(folder, shuffle=False, row_s=1e-3, mismatched=lambda found: found == place)
    run.finish()
    assert run.batches == run.expected()
    first_whole = next(number for number, task in enumerate(run.tasks) if task.whole)
    assert first_whole > 0
    orphaned = [task for task in run.tasks[first_whole + 4 :] if not task.whole]
    assert orphaned == [], "those that were in flight come back, and that is all"
    assert run.learned.ragged


def test_the_old_slot_of_a_batch_that_is_made_again_is_not_used_for_another(folder: Path) -> None:
    """Parts of it that are in flight may still be written there, by a worker that is told of it only now."""
    learned = Learned(layout=b"known", size_bytes=100, row_s=0.02)
    run = Run(folder, shuffle=False, learned=learned, mismatched=lambda place: place == (0, 0))
    run.epoch.pump()
    old = run.pool.tasks[0]
    assert isinstance(old, RowTask)
    slot = old.pieces[0].slot
    run.answer()
    assert run.learned.ragged
    assert run.slots.descriptor(slot) >= 0, "a part that was scheduled can still find it"
    for _ in range(60):
        run.epoch.pump()
        if not run.pool.tasks:
            break
        task = run.answer()
        assert isinstance(task, RowTask)
        if task.whole:
            assert slot not in {piece.slot for piece in task.pieces}
    run.epoch.batcher.note_taken(len(run.batches))
    run.finish()
    assert run.batches == run.expected()


def test_shards_are_scanned_as_the_plan_reaches_them(bare: Path) -> None:
    run = Run(bare, shuffle=False, batch_size=4)
    run.epoch.pump()
    assert [type(task) for task in run.pool.tasks] == [ScanTask]
    assert isinstance(run.pool.tasks[0], ScanTask)
    assert run.pool.tasks[0].shards == (0,)
    run.finish()
    assert run.batches == run.expected()
    assert run.tables.counts.values.tolist() == list(COUNTS)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_order_is_the_same_without_an_index(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    bare = Path(write_numbers(tmp_path_factory.mktemp("bare") / "shards", COUNTS, index=False))
    run = Run(bare, batch_size=data.draw(st.integers(1, 30)), capacity=data.draw(st.integers(1, 6)))
    run.finish(lambda count: data.draw(st.integers(0, count - 1)))
    assert run.batches == run.expected()


def test_finished_shards_are_forgotten_each_once(tmp_path: Path) -> None:
    folder = Path(write_numbers(tmp_path / "many", [700] * 12))
    run = Run(folder, batch_size=100, shuffle=False, row_s=1e-5)
    run.finish()
    assert sum(map(len, run.batches)) == 8400
    assert run.pool.forgotten == sorted(set(run.pool.forgotten))
    assert set(range(10)) <= set(run.pool.forgotten)


def test_tasks_carry_the_places_of_their_own_rows(folder: Path) -> None:
    run = Run(folder, batch_size=7, row_s=1e-3)
    run.finish()
    contents = [Path(shard.url).read_bytes() for shard in run.listing.shards]
    starts = np.cumsum([0, *COUNTS])
    for task in run.tasks:
        (column,) = task.table.columns()
        for row, (shard, sample) in enumerate(
            zip(task.table.shards.tolist(), task.table.samples.tolist(), strict=True)
        ):
            start, size = int(column.offsets[row]), int(column.sizes[row])
            assert contents[shard][start : start + size] == b"%d" % (starts[shard] + sample)
        assert task.capacity == 7
    assert len({task.number for task in run.tasks}) == len(run.tasks)


def test_what_was_measured_is_a_moving_mean() -> None:
    learned = Learned()
    done = RowsDone(0, (), 10, 0, TaskCosts(decode=0.5, transform=0.3, collate=0.2, waited=9.0))
    learned.measure(done)
    assert learned.row_s == pytest.approx(0.1)
    learned.measure(RowsDone(0, (), 10, 0, TaskCosts(decode=2.0)))
    assert learned.row_s == pytest.approx(0.13)


def test_a_long_queue_is_reported_in_time(folder: Path) -> None:
    run = Run(folder, batch_size=1, prefetch=1000)
    run.finish()
    assert run.batches == run.expected()


def test_a_run_waits_for_no_batches_that_are_not_acknowledged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slots may take little, a run was as long as the queue: it waited for the last batch to be told of."""
    monkeypatch.setattr(lookahead, "FIRST_BLOCK_ROWS", 9)
    run = Run(folder, batch_size=1, capacity=2, learned=Learned(layout=b"known", size_bytes=1 << 20, row_s=1e-6))
    run.slots.most_in_flight = 14
    told = 0
    run.epoch.pump()
    while not run.epoch.ended:
        assert run.pool.tasks, "the loop has taken all there is, and nothing is made"
        run.answer()
        acknowledge_after = run.epoch.take_ready()[1]
        unacknowledged = len(run.batches) - told
        if unacknowledged >= acknowledge_after:
            run.epoch.batcher.note_taken(unacknowledged - unacknowledged % acknowledge_after)
            told += unacknowledged - unacknowledged % acknowledge_after
        run.epoch.pump()
    run.slots.close()
    assert run.batches == run.expected()


def test_the_slots_of_an_abandoned_epoch_are_discarded(folder: Path) -> None:
    """Tasks that are in flight may still write there, so they are not used again; and nobody keeps them."""
    run = Run(folder)
    run.epoch.pump()
    run.answer()
    run.epoch.pump()
    in_flight = {piece.slot for task in run.pool.tasks if isinstance(task, RowTask) for piece in task.pieces}
    assert in_flight
    run.epoch.abandon()
    assert in_flight <= set(run.slots.take_retired())
    run.slots.close()
