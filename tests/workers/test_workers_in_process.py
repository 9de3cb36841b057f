"""Doing tasks without processes: one at a time in the caller's thread."""

from __future__ import annotations

import os
import random
import traceback
from pathlib import Path
from typing import Any

import pytest
from tasks_by_hand import Shelf, batch_of, job, numbered

from streamload.decode.tasks import BytesMoved, Job, RowsDone, ScanDone, ScanTask, Task
from streamload.errors import ShardNotFoundError
from streamload.fetch.resident import ResidentShards
from streamload.memory.slots import HeapSlots
from streamload.workers.in_process import CallerPool

FIELDS = ("cls", "npy")


class Notes:
    """What a pool has told."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        self.broken: list[Exception] = []

    def on_done(self, done: RowsDone | ScanDone) -> None:
        assert done.number not in self.done
        self.done[done.number] = done

    def on_moved(self, moved: BytesMoved) -> None:
        raise AssertionError("nothing was to be moved")

    def is_wanted(self, task: Task) -> bool:
        return True

    def on_dropped(self, task: Task) -> None:
        raise AssertionError("no task is done twice")

    def may_redo(self, task: Task) -> bool:
        return True

    def on_room(self) -> None:
        raise AssertionError("nobody waits for room")

    def on_restarted(self) -> None:
        raise AssertionError("there is nobody to restart")

    def on_broken(self, error: Exception) -> None:
        self.broken.append(error)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(numbered(20), per_shard=7)


def caller_pool(work: Job, shelf: Shelf, folder: Path) -> tuple[CallerPool, Notes, HeapSlots]:
    notes, slots = Notes(), HeapSlots()
    shards = ResidentShards(shelf.write(folder), kept_bytes=0)
    return CallerPool(job=work, shards=shards, slots=slots, events=notes), notes, slots


def test_the_caller_does_one_task_at_each_step(shelf: Shelf, tmp_path: Path) -> None:
    pool, notes, slots = caller_pool(job(fields=FIELDS), shelf, tmp_path)
    assert not pool.step(), "there is nothing to do"
    tasks = [shelf.task(FIELDS, rows, number=rows[0], first_slot=slots.take(1)) for rows in ([0, 9], [19, 3, 4])]
    for task in tasks:
        assert pool.has_room()
        pool.submit(task)
        assert not pool.has_room()
        assert notes.done.keys() == {first.number for first in tasks[: tasks.index(task)]}, "nothing is done before"
        assert pool.step()
    for task in tasks:
        numbers, arrays = batch_of(notes.done[task.number].pieces[0], slots)
        assert numbers.tolist() == arrays[:, 0].tolist()
    pool.close()
    assert not pool.step()


STACKS: list[str] = []


def note_stack(value: int) -> int:
    STACKS.append("".join(traceback.format_stack()))
    return value


def test_functions_are_called_from_the_callers_own_frames(shelf: Shelf, tmp_path: Path) -> None:
    """That is what doing it here is for: breakpoints and tracebacks work as ever."""
    pool, _, slots = caller_pool(job(fields=FIELDS, transform={"cls": note_stack}), shelf, tmp_path)
    pool.submit(shelf.task(FIELDS, [0], first_slot=slots.take(1)))
    pool.step()
    assert "in test_functions_are_called_from_the_callers_own_frames" in STACKS[-1]


def test_the_callers_generators_are_not_touched(shelf: Shelf, tmp_path: Path) -> None:
    pool, notes, slots = caller_pool(
        job(fields=FIELDS, transform={"cls": lambda value: random.getrandbits(30)}), shelf, tmp_path
    )
    state = random.getstate()
    for number in range(2):
        pool.submit(shelf.task(FIELDS, [0, 1], number=number, first_slot=slots.take(1)))
        pool.step()
    assert random.getstate() == state
    first, second = (batch_of(notes.done[number].pieces[0], slots)[0].tolist() for number in range(2))
    assert first == second


def test_a_shard_that_is_gone_breaks_the_callers_pool(shelf: Shelf, tmp_path: Path) -> None:
    pool, notes, slots = caller_pool(job(fields=FIELDS), shelf, tmp_path)
    os.remove(tmp_path / "1.tar")
    pool.submit(shelf.task(FIELDS, [0, 8], first_slot=slots.take(1)))
    assert pool.step()
    assert [type(error) for error in notes.broken] == [ShardNotFoundError]
    pool.close()


def test_interrupts_reach_the_caller(shelf: Shelf, tmp_path: Path) -> None:
    def interrupt(value: int) -> int:
        raise KeyboardInterrupt

    pool, _, slots = caller_pool(job(fields=FIELDS, transform={"cls": interrupt}), shelf, tmp_path)
    pool.submit(shelf.task(FIELDS, [0], first_slot=slots.take(1)))
    with pytest.raises(KeyboardInterrupt):
        pool.step()
    pool.close()


def test_shards_that_were_forgotten_are_opened_again(shelf: Shelf, tmp_path: Path) -> None:
    pool, notes, slots = caller_pool(job(fields=FIELDS), shelf, tmp_path)
    for number in range(2):
        pool.submit(shelf.task(FIELDS, [0, 8], number=number, first_slot=slots.take(1)))
        pool.step()
        pool.forget_shards([0, 1])
        pool.forget_slots([0])
    assert notes.broken == []
    assert len(notes.done) == 2


def test_the_caller_scans_too(shelf: Shelf, tmp_path: Path) -> None:
    pool, notes, _ = caller_pool(job(), shelf, tmp_path)
    pool.submit(ScanTask(5, 0, True))
    pool.step()
    assert notes.done[5].failure is not None, "these shards are no tar files"
