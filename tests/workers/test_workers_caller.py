"""Doing tasks without processes: one at a time in the caller's thread."""

from __future__ import annotations

import gc
import os
import pickle
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tasks_by_hand import Shelf, batch_of, job, numbered

from streamload.decode.failure import error_from
from streamload.decode.tasks import Job, RowsDone, ScanDone, ScanTask, Task
from streamload.errors import ShardNotFoundError
from streamload.fetch.resident import ResidentShards
from streamload.memory.slots import HeapSlots
from streamload.workers.caller_pool import CallerPool
from streamload.workers.caller_worker import CallerWorker

FIELDS = ("cls", "npy")


class Notes:
    """What a pool has told."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}

    def on_done(self, done: RowsDone | ScanDone) -> None:
        assert done.number not in self.done
        self.done[done.number] = done

    def is_wanted(self, task: Task) -> bool:
        raise AssertionError("nobody has died")

    def on_dropped(self, task: Task) -> None:
        raise AssertionError("every task is answered")

    def on_room(self) -> None:
        raise AssertionError("nobody waits for room")

    def on_restarted(self) -> None:
        raise AssertionError("there is nobody to restart")

    def on_broken(self, error: Exception) -> None:
        raise AssertionError("it does not break")


class Caller:
    """A pool and its worker in one process.

    Attributes:
        pool: the pool.
        done: by number, what it has told.
        slots: what batches are written to.
    """

    def __init__(self, work: Job, shelf: Shelf, folder: Path) -> None:
        notes, self.slots = Notes(), HeapSlots()
        self.worker = CallerWorker(work, self.slots)
        self.worker.begin(0)
        self.done = notes.done
        shards = ResidentShards(shelf.write(folder), kept_bytes=0)
        self.pool = CallerPool(self.worker.put, shards=shards, slots=None, events=notes, descriptors=100)

    def step(self) -> bool:
        done = self.worker.step()
        if done is not None:
            self.pool.on_done(done)
        return done is not None

    def close(self) -> None:
        self.pool.close()
        self.worker.close()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(numbered(20), per_shard=7)


@pytest.fixture
def caller(shelf: Shelf, tmp_path: Path) -> Iterator[Callable[[Job], Caller]]:
    made: list[Caller] = []

    def make(work: Job) -> Caller:
        made.append(Caller(work, shelf, tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[[Job], Caller]


def test_the_caller_does_one_task_at_each_step(shelf: Shelf, caller: Make) -> None:
    here = caller(job(fields=FIELDS))
    assert not here.step(), "there is nothing to do"
    tasks = [shelf.task(FIELDS, rows, number=rows[0], first_slot=here.slots.take(1)) for rows in ([0, 9], [19, 3, 4])]
    for task in tasks:
        assert here.pool.has_room()
        here.pool.submit(task)
        assert not here.pool.has_room()
        assert here.done.keys() == {first.number for first in tasks[: tasks.index(task)]}, "nothing is done before"
        assert here.step()
    for task in tasks:
        numbers, arrays = batch_of(here.done[task.number].pieces[0], here.slots)
        assert numbers.tolist() == arrays[:, 0].tolist()
    assert not here.step()


STACKS: list[str] = []


def note_stack(value: int) -> int:
    STACKS.append("".join(traceback.format_stack()))
    return value


def test_functions_are_called_from_the_callers_own_frames(shelf: Shelf, caller: Make) -> None:
    """That is what doing it here is for: breakpoints and tracebacks work as ever."""
    here = caller(job(fields=FIELDS, transform={"cls": note_stack}))
    here.pool.submit(shelf.task(FIELDS, [0], first_slot=here.slots.take(1)))
    here.step()
    assert "in test_functions_are_called_from_the_callers_own_frames" in STACKS[-1]


def test_the_callers_generators_are_not_touched(shelf: Shelf, caller: Make) -> None:
    here = caller(job(fields=FIELDS, transform={"cls": lambda value: random.getrandbits(30)}))
    state = random.getstate()
    for number in range(2):
        here.pool.submit(shelf.task(FIELDS, [0, 1], number=number, first_slot=here.slots.take(1)))
        here.step()
    assert random.getstate() == state
    first, second = (batch_of(here.done[number].pieces[0], here.slots)[0].tolist() for number in range(2))
    assert first == second


def test_a_shard_that_is_gone_is_an_error_where_the_task_is_submitted(
    shelf: Shelf, caller: Make, tmp_path: Path
) -> None:
    here = caller(job(fields=FIELDS))
    os.remove(tmp_path / "1.tar")
    with pytest.raises(ShardNotFoundError):
        here.pool.submit(shelf.task(FIELDS, [0, 8], first_slot=here.slots.take(1)))
    assert here.pool.has_room()


def test_a_task_of_another_pass_is_answered_without_doing_it(shelf: Shelf, caller: Make) -> None:
    """A pass was left while a task for it waited: its memory may be gone, and the user wants nothing of it."""
    called: list[int] = []
    here = caller(job(fields=FIELDS, transform={"cls": called.append}))
    here.pool.submit(shelf.task(FIELDS, [0, 1], number=4, first_slot=here.slots.take(1)))
    here.worker.leave(0)
    assert here.step()
    assert here.done[4].pieces == ()
    assert called == []
    assert here.pool.has_room()
    here.worker.begin(0)
    here.worker.leave(7)  # which another thread has just dropped
    here.pool.submit(shelf.task(FIELDS, [0, 1], number=5, first_slot=here.slots.take(1)))
    assert here.step()
    assert called == [0, 1]


def test_an_interrupt_reaches_the_caller_and_the_task_is_not_lost(shelf: Shelf, caller: Make) -> None:
    interrupts = [KeyboardInterrupt]

    def interrupt(value: int) -> int:
        if interrupts:
            raise interrupts.pop()
        return value

    here = caller(job(fields=FIELDS, transform={"cls": interrupt}))
    here.pool.submit(shelf.task(FIELDS, [0], number=3, first_slot=here.slots.take(1)))
    with pytest.raises(KeyboardInterrupt):
        here.step()
    assert not here.done
    assert here.step()
    assert batch_of(here.done[3].pieces[0], here.slots)[0].tolist() == [0]


def test_shards_that_were_forgotten_are_opened_again(shelf: Shelf, caller: Make) -> None:
    here = caller(job(fields=FIELDS))
    for number in range(2):
        here.pool.submit(shelf.task(FIELDS, [0, 8], number=number, first_slot=here.slots.take(1)))
        here.step()
        here.pool.forget_shards([0, 1])
        here.pool.forget_slots([0])
    assert len(here.done) == 2


def test_the_caller_scans_too(caller: Make) -> None:
    here = caller(job())
    here.pool.submit(ScanTask(5, (0,)))
    here.step()
    assert here.done[5].found[0].failure is not None, "these shards are no tar files"


def test_what_was_raised_is_found_again_when_its_answer_comes_back_from_another_process(
    shelf: Shelf, caller: Make
) -> None:
    def fail(value: int) -> int:
        raise OSError(value)

    here = caller(job(fields=FIELDS, transform={"cls": fail}))
    here.pool.submit(shelf.task(FIELDS, [0], number=3, first_slot=here.slots.take(1)))
    sent = pickle.dumps(here.worker.step())
    gc.collect()
    (failure,) = pickle.loads(sent).pieces[0].failures
    error = error_from(failure.cause)
    assert error.__traceback__ is not None, "it is the same object"
    here.worker.begin(1)
    del failure, error
    gc.collect()
    (failure,) = pickle.loads(sent).pieces[0].failures
    assert error_from(failure.cause).__traceback__ is None, "nothing is kept for a pass that is over"
