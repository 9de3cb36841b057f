"""Doing tasks without processes: one at a time in the caller's thread, or on threads beside each other."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tasks_by_hand import Shelf, batch_of, job, mapped_batch, numbered

from streamload.decode.in_process import CallerPool, ThreadPool
from streamload.decode.job_pickle import pickle_job
from streamload.decode.tasks import BytesMoved, Job, RowsDone, RowTask, ScanDone, ScanTask, Task
from streamload.errors import ShardNotFoundError, WorkerError
from streamload.fetch.resident import ResidentShards
from streamload.memory.slots import HeapSlots, SlotPool

FIELDS = ("cls", "npy")


class Notes:
    """What a pool has told."""

    def __init__(self) -> None:
        self.done: dict[int, Any] = {}
        self.broken: list[Exception] = []
        self.threads: set[int | None] = set()
        self.changed = asyncio.Event()

    def on_done(self, done: RowsDone | ScanDone) -> None:
        assert done.number not in self.done
        self.done[done.number] = done
        self._note()

    def on_moved(self, moved: BytesMoved) -> None:
        raise AssertionError("nothing was to be moved")

    def is_wanted(self, task: Task) -> bool:
        return True

    def on_dropped(self, task: Task) -> None:
        raise AssertionError("no task is done twice")

    def may_redo(self, task: Task) -> bool:
        return True

    def on_room(self) -> None:
        self._note()

    def on_restarted(self) -> None:
        raise AssertionError("there is nobody to restart")

    def on_broken(self, error: Exception) -> None:
        self.broken.append(error)
        self._note()

    def on_hopeless(self, task: RowTask, row: int, how: str) -> None:
        raise AssertionError("there is nobody to end")

    def _note(self) -> None:
        self.threads.add(threading.get_ident())
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.broken:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(numbered(20), per_shard=7)


# -- in the caller's thread ----------------------------------------------------------------------------------------


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
    assert notes.threads == {threading.get_ident()}
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


# -- on threads ----------------------------------------------------------------------------------------------------


class Growing(ResidentShards):
    """Shards that must be opened anew for every task, as those whose memory grows must."""

    versions = 0

    def version(self, shard: int) -> tuple[int, int]:
        self.versions += 1
        return self.versions, 0


class Threads:
    """A pool of threads with its notes and slots."""

    def __init__(self, work: Job, shelf: Shelf, folder: Path, workers: int) -> None:
        self.notes, self.slots = Notes(), SlotPool()
        shards = Growing(shelf.write(folder), kept_bytes=0)
        self.pool = ThreadPool(workers, job=pickle_job(work).data, shards=shards, slots=self.slots, events=self.notes)

    async def do(self, tasks: list[Any]) -> list[Any]:
        waiting = list(tasks)
        while waiting and not self.notes.broken:
            await self.notes.until(self.pool.has_room)
            self.pool.submit(waiting.pop(0))
        await self.notes.until(lambda: all(task.number in self.notes.done for task in tasks))
        return [self.notes.done.get(task.number) for task in tasks]

    def batch(self, done: RowsDone) -> Any:
        return mapped_batch(done.pieces[0], self.slots)


def test_threads_read_on_from_what_is_opened_anew_meanwhile(tmp_path: Path) -> None:
    shelf = Shelf(numbered(20), per_shard=20)
    read = tmp_path / "read on"

    def wait(array: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
        deadline_s = time.monotonic() + 10
        while array.flat[0] == 0 and not read.exists() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return array

    def opened() -> int:
        links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(link) and os.readlink(link).endswith("0.tar") for link in links)

    async def body(threads: Threads) -> None:
        tasks = [
            shelf.task(FIELDS, rows, number=number, first_slot=threads.slots.take(100))
            for number, rows in enumerate([[0, 1, 2], [3], [4], [5]])
        ]
        threads.pool.submit(tasks[0])
        for task in tasks[1:]:
            threads.pool.submit(task)
        await threads.notes.until(lambda: len(threads.notes.done) >= 3)
        threads.pool.drop_shards([0])
        assert opened() == len(tasks), "the first task may be reading from any of them"
        read.touch()
        await threads.notes.until(lambda: len(threads.notes.done) == 4)
        for task in tasks:
            done = threads.notes.done[task.number]
            assert done.pieces[0].failures == ()
            numbers, arrays = threads.batch(done)
            assert numbers.tolist() == arrays[:, 0].tolist()
        assert opened() == 0

    on_threads(job(fields=FIELDS, transform={"npy": wait}), shelf, tmp_path, body)


def on_threads(
    work: Job, shelf: Shelf, folder: Path, body: Callable[[Threads], Coroutine[Any, Any, None]], workers: int = 3
) -> None:
    async def run() -> None:
        threads = Threads(work, shelf, folder, workers)
        try:
            await asyncio.wait_for(body(threads), 60)
        finally:
            threads.pool.close()
            threads.slots.close()
            for thread in threads.pool._threads:
                await asyncio.to_thread(thread.join)

    asyncio.run(run())


def test_threads_answer_every_task_in_the_loops_thread(shelf: Shelf, tmp_path: Path) -> None:
    async def body(threads: Threads) -> None:
        tasks = [
            shelf.task(FIELDS, [row, 19 - row], number=row, first_slot=threads.slots.take(100)) for row in range(20)
        ]
        for row, done in enumerate(await threads.do(tasks)):
            numbers, arrays = threads.batch(done)
            assert numbers.tolist() == arrays[:, 2].tolist() == [row, 19 - row]
        assert threads.notes.threads == {threading.get_ident()}

    on_threads(job(fields=FIELDS), shelf, tmp_path, body)


def test_threads_take_only_so_many_tasks(shelf: Shelf, tmp_path: Path) -> None:
    async def body(threads: Threads) -> None:
        given = 0
        while threads.pool.has_room():
            threads.pool.submit(shelf.task(FIELDS, [0], number=given, first_slot=threads.slots.take(100)))
            given += 1
        assert given == threads.pool.capacity == 6
        await threads.notes.until(lambda: len(threads.notes.done) == given)
        assert threads.pool.has_room()

    on_threads(job(fields=FIELDS), shelf, tmp_path, body)


def draws(value: int) -> Any:
    return random.getrandbits(40), float(np.random.rand())


def test_threads_that_draw_from_the_global_generators_do_not_disturb_each_other(shelf: Shelf, tmp_path: Path) -> None:
    async def body(threads: Threads) -> None:
        tasks = [
            shelf.task(FIELDS, range(number, 20, 2), number=number, first_slot=threads.slots.take(100))
            for number in (0, 1)
        ]
        tasks += [shelf.task(FIELDS, range(20), number=2, first_slot=threads.slots.take(100))]
        even, odd, whole = [threads.batch(done)[0] for done in await threads.do(tasks)]
        for part in range(2):
            assert even[part].tolist() == whole[part][0::2].tolist()
            assert odd[part].tolist() == whole[part][1::2].tolist()

    on_threads(job(fields=FIELDS, transform={"cls": draws}), shelf, tmp_path, body)


MEETING = threading.Barrier(3, timeout=20)


def meets(value: int, rng: Any) -> int:
    MEETING.wait()
    return value


def test_transforms_with_a_generator_of_their_own_run_beside_each_other(shelf: Shelf, tmp_path: Path) -> None:
    """Each waits for two others: were they run one at a time, none would ever come back."""

    async def body(threads: Threads) -> None:
        tasks = [shelf.task(FIELDS, [row], number=row, first_slot=threads.slots.take(100)) for row in range(3)]
        for done in await threads.do(tasks):
            assert done.pieces[0].failures == ()

    on_threads(job(fields=FIELDS, transform={"cls": meets}), shelf, tmp_path, body)


def refuse(worker: int) -> None:
    raise OSError(f"worker {worker} finds no device")


def test_a_thread_that_cannot_begin_breaks_the_pool(shelf: Shelf, tmp_path: Path) -> None:
    async def body(threads: Threads) -> None:
        await threads.notes.until(lambda: False)
        assert str(threads.notes.broken[0]) == "worker 0 finds no device"

    on_threads(job(worker_init_fn=refuse), shelf, tmp_path, body, workers=1)


def leave(value: int) -> int:
    raise SystemExit("leave")


def test_a_transform_that_exits_breaks_the_pool(shelf: Shelf, tmp_path: Path) -> None:
    """It would end the thread, and the loop would wait for its answer for ever."""

    async def body(threads: Threads) -> None:
        threads.pool.submit(shelf.task(FIELDS, [0], first_slot=threads.slots.take(100)))
        await threads.notes.until(lambda: False)
        assert isinstance(threads.notes.broken[0], WorkerError)
        assert str(threads.notes.broken[0]) == "the user's code has left a worker thread: SystemExit: leave"

    on_threads(job(fields=FIELDS, transform={"cls": leave}), shelf, tmp_path, body, workers=1)


def test_threads_forget_shards_only_when_earlier_tasks_are_done(shelf: Shelf, tmp_path: Path) -> None:
    async def body(threads: Threads) -> None:
        await threads.notes.until(threads.pool.has_room)
        for number in range(6):
            threads.pool.submit(shelf.task(FIELDS, range(20), number=number, first_slot=threads.slots.take(100)))
            threads.pool.forget_shards([0, 1, 2])
        await threads.notes.until(lambda: len(threads.notes.done) == 6)
        assert threads.notes.broken == []
        last = shelf.task(FIELDS, [0, 8], number=6, first_slot=threads.slots.take(100))
        assert threads.batch((await threads.do([last]))[0])[0].tolist() == [0, 8]

    on_threads(job(fields=FIELDS), shelf, tmp_path, body)


def test_threads_forget_slots_only_when_earlier_tasks_are_done(shelf: Shelf, tmp_path: Path) -> None:
    """A batch that is made again leaves its slot while parts of it are still under way."""

    async def body(threads: Threads) -> None:
        for number in range(6):
            task = shelf.task(FIELDS, range(20), number=number, first_slot=threads.slots.take(100))
            threads.pool.submit(task)
            threads.pool.forget_slots([task.pieces[0].slot])
        await threads.notes.until(lambda: len(threads.notes.done) == 6)
        assert threads.notes.broken == []

    on_threads(job(fields=FIELDS), shelf, tmp_path, body)


def test_threads_learn_the_layout_once_for_all(shelf: Shelf, tmp_path: Path) -> None:
    async def body(threads: Threads) -> None:
        first = shelf.task(FIELDS, [0], number=0, first_slot=threads.slots.take(100), capacity=3)
        (done,) = await threads.do([first])
        threads.pool.fix_layout(done.pieces[0].layout)
        tasks = [
            shelf.task(FIELDS, [row, 3, 4], number=row, first_slot=threads.slots.take(100)) for row in range(5, 12)
        ]
        assert {answer.pieces[0].layout for answer in await threads.do(tasks)} == {None}

    on_threads(job(fields=FIELDS), shelf, tmp_path, body)
