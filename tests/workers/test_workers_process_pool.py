"""Worker processes: every task is answered, whoever dies on the way; and none of them outlives its pool."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import os
import signal
import sys
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import exhaustive
from processes import children
from tasks_by_hand import Shelf, job, mapped_batch, numbered

from streamload.decode.failure import error_from
from streamload.decode.job_pickle import pickle_job
from streamload.decode.tasks import Job, RowsDone, RowTask, ScanDone, ScanTask, Task
from streamload.errors import ShardFormatError, ShardNotFoundError, WorkerError
from streamload.fetch.resident import ResidentShards
from streamload.index.listing import Shard
from streamload.memory.slots import SlotPool
from streamload.workers.launch import child_environment
from streamload.workers.process_pool import ProcessPool


class Office:
    """A pool with its events, and the slots that its workers fill."""

    def __init__(self, work: Job, shards: tuple[Shard, ...], workers: int = 2) -> None:
        self.done: dict[int, RowsDone | ScanDone] = {}
        self.broken: list[Exception] = []
        self.restarted = 0
        self.rooms = 0
        self.unwanted: set[int] = set()
        self.dropped: list[int] = []
        self._changed = asyncio.Event()
        self.slots = SlotPool()
        self.pool = ProcessPool(
            workers,
            job=pickle_job(work)[0],
            import_path=tuple(sys.path),
            shards=ResidentShards(shards, kept_bytes=0),
            slots=self.slots,
            events=self,
            ends_at_failure=work.on_error == "raise",
        )

    def on_done(self, done: RowsDone | ScanDone) -> None:
        assert done.number not in self.done, "a task is answered once"
        self.done[done.number] = done
        self._changed.set()

    def is_wanted(self, task: Task) -> bool:
        return task.number not in self.unwanted

    def on_dropped(self, task: Task) -> None:
        self.dropped.append(task.number)

    def on_room(self) -> None:
        self.rooms += 1
        self._changed.set()

    def on_restarted(self) -> None:
        self.restarted += 1
        self._changed.set()

    def on_broken(self, error: Exception) -> None:
        self.broken.append(error)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.broken:
            self._changed.clear()
            await self._changed.wait()

    async def do(self, tasks: list[Any]) -> list[Any]:
        """Have tasks done, giving them out as there is room."""
        waiting = list(tasks)
        while waiting and not self.broken:
            await self.until(self.pool.has_room)
            if not self.broken:
                self.pool.submit(waiting.pop(0))
        await self.until(lambda: all(task.number in self.done for task in tasks))
        return [self.done.get(task.number) for task in tasks]

    def tasks(self, shelf: Shelf, rows: int, **changes: Any) -> list[RowTask]:
        """One task for every so many samples, each with a slot of its own."""
        count = len(shelf.samples)
        return [
            shelf.task(
                ("cls", "npy"),
                range(first, min(first + rows, count)),
                number=number,
                first_slot=self.slots.take(100),
                **changes,
            )
            for number, first in enumerate(range(0, count, rows))
        ]

    def batch(self, done: RowsDone) -> Any:
        """The only batch of a task."""
        return mapped_batch(done.pieces[0], self.slots)

    def processes(self) -> list[int]:
        return [process.pid for process in children("streamload.workers")]


@contextlib.asynccontextmanager
async def in_office(work: Job, shards: tuple[Shard, ...], workers: int = 2) -> AsyncIterator[Office]:
    """A pool to give tasks to; that it leaves nothing behind is proved after each test."""
    office = Office(work, shards, workers)
    try:
        yield office
    finally:
        pids = office.processes()
        office.pool.close()
        office.pool.close()
        office.slots.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf(numbered(40), per_shard=15)


FIELDS = ("cls", "npy")


def check(office: Office, done: list[RowsDone], failed: dict[int, str] | None = None) -> None:
    """All rows are right, but for those that had to fail."""
    seen = 0
    for answer in done:
        piece = answer.pieces[0]
        failures = {seen + failure.row: failure for failure in piece.failures}
        assert {row: failure.kind for row, failure in failures.items()} == {
            row: kind for row, kind in (failed or {}).items() if seen <= row < seen + piece.piece.rows
        }
        numbers, arrays = office.batch(answer)
        for row in range(piece.piece.rows):
            if seen + row not in failures:
                assert int(numbers[row]) == seen + row
                assert arrays[row].tolist() == [seen + row] * 3
        seen += piece.piece.rows
    assert seen == 40


async def test_every_task_is_answered_with_the_right_rows(shelf: Shelf, tmp_path: Path) -> None:
    async with in_office(job(fields=FIELDS), shelf.write(tmp_path), workers=3) as office:
        check(office, await office.do(office.tasks(shelf, 3)))
        assert office.restarted == 0


async def test_each_worker_has_a_task_in_hand_and_one_waiting(shelf: Shelf, tmp_path: Path) -> None:
    def noted(value: int) -> int:
        (tmp_path / f"{value} {os.getpid()}.done").touch()
        return value

    async with in_office(job(fields=FIELDS, transform={"cls": noted}), shelf.write(tmp_path)) as office:
        assert office.pool.capacity == 4
        assert not office.pool.has_room(), "nobody has started yet"
        await office.until(lambda: office.rooms == 2)
        tasks = office.tasks(shelf, 1)
        given = 0
        while office.pool.has_room():
            office.pool.submit(tasks[given])
            given += 1
        assert given == 4
        await office.until(lambda: len(office.done) == 4)
        assert sorted(Counter(path.stem.split()[1] for path in tmp_path.glob("*.done")).values()) == [2, 2]
        assert office.pool.has_room()


async def test_a_task_beyond_the_room_there_is_waits(shelf: Shelf, tmp_path: Path) -> None:
    async with in_office(job(fields=FIELDS), shelf.write(tmp_path)) as office:
        tasks = office.tasks(shelf, 4)
        for task in tasks:
            office.pool.submit(task)  # before any worker has started
        assert not office.pool.has_room()
        await office.until(lambda: len(office.done) == len(tasks))
        check(office, [office.done[task.number] for task in tasks])  # type: ignore[misc]


# -- deaths --------------------------------------------------------------------------------------------------------


async def test_a_worker_that_is_killed_is_replaced_and_its_tasks_are_done_again(shelf: Shelf, tmp_path: Path) -> None:
    marker = str(tmp_path / "killed once")

    def killed_once(value: int) -> int:
        if value == 17 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    async with in_office(job(fields=FIELDS, transform={"cls": killed_once}), shelf.write(tmp_path)) as office:
        before = office.processes()
        check(office, await office.do(office.tasks(shelf, 5)))
        assert office.restarted == 1
        assert len(set(office.processes()) & set(before)) == 1


async def test_what_a_dead_worker_had_for_nobody_is_not_done_again_and_nobody_else_is_blamed(
    shelf: Shelf, tmp_path: Path
) -> None:
    """Not even where the worker dies of it: the task behind it has done nothing."""
    folder = tmp_path / "done"
    folder.mkdir()

    def deadly(samples: list[Any]) -> Any:
        numbers = [int(number) for number, _ in samples]
        (folder / f"{numbers[0]} {os.getpid()}").touch()
        if numbers[0] == 0 or len(list(folder.glob("10 *"))) < 3:
            os._exit(9)
        return numbers

    async with in_office(job(fields=FIELDS, collate_fn=deadly), shelf.write(tmp_path), workers=1) as office:
        await office.until(lambda: office.rooms == 1)
        late, *others = office.tasks(shelf, 10, whole=True)[:2]
        office.unwanted = {late.number}
        for task in (late, *others):
            office.pool.submit(task)
        await office.until(lambda: len(office.done) == 1)
        assert list(office.done) == [task.number for task in others]
        assert sorted(int(path.name.split()[0]) for path in folder.iterdir()) == [0, 10, 10, 10]
        assert not office.broken, "of its own deaths the task has died twice, and a third would be too many"


async def test_what_waits_for_a_worker_is_dropped_where_nobody_waits_for_it(shelf: Shelf, tmp_path: Path) -> None:
    async with in_office(job(fields=FIELDS), shelf.write(tmp_path), workers=1) as office:
        wanted, late = office.tasks(shelf, 5)[:2]
        for task in (late, wanted):
            office.pool.submit(task)  # before the worker has started
        office.unwanted = {late.number}
        office.pool.drop_unwanted()
        assert office.dropped == [late.number]
        await office.until(lambda: len(office.done) == 1)
        assert list(office.done) == [wanted.number]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        exhaustive((lambda: os.kill(os.getpid(), signal.SIGKILL), "the second one was killed by SIGKILL")),
        (lambda: ctypes.string_at(0), "the second one was killed by SIGSEGV\nFatal Python error: Segmentation fault"),
        (lambda: os._exit(7), "the second one ended with status 7"),
    ],
    ids=["SIGKILL", "SIGSEGV", "_exit"],
)
async def test_a_row_that_kills_two_workers_is_an_error_of_its_own(
    shelf: Shelf, tmp_path: Path, how: Callable[[], Any], words: str
) -> None:
    def deadly(value: int) -> int:
        if value == 17:
            how()
        return value

    async with in_office(
        job(fields=FIELDS, transform={"cls": deadly}, on_error="skip"), shelf.write(tmp_path)
    ) as office:
        done = await office.do(office.tasks(shelf, 5))
        check(office, done, {17: "SampleError"})
        (failure,) = done[3].pieces[0].failures
        assert failure.message.startswith(f"two workers died while they made this sample; {words}")
        assert (failure.shard, failure.sample) == (1, 2)
        assert office.restarted == 2


async def test_two_rows_of_one_task_may_each_kill_two_workers(shelf: Shelf, tmp_path: Path) -> None:
    def deadly(value: int) -> int:
        if value in (16, 18):
            os._exit(1)
        return value

    async with in_office(
        job(fields=FIELDS, transform={"cls": deadly}, on_error="skip"), shelf.write(tmp_path)
    ) as office:
        check(office, await office.do(office.tasks(shelf, 5)), {16: "SampleError", 18: "SampleError"})
        assert office.restarted == 4


async def test_where_a_deadly_row_is_raised_the_rows_behind_it_are_not_tried(shelf: Shelf, tmp_path: Path) -> None:
    def deadly(value: int) -> int:
        if value >= 2:
            os._exit(1)
        return value

    async with in_office(job(fields=FIELDS, transform={"cls": deadly}), shelf.write(tmp_path), workers=1) as office:
        (done,) = await office.do(office.tasks(shelf, 5)[:1])
        failures = [failure for piece in done.pieces for failure in piece.failures]
        assert [failure.row for failure in failures] == [2, 3, 4]
        assert office.restarted == 2


async def test_a_collate_fn_that_kills_every_worker_breaks_the_pool(shelf: Shelf, tmp_path: Path) -> None:
    def deadly(samples: list[Any]) -> Any:
        os._exit(9)

    async with in_office(job(fields=FIELDS, collate_fn=deadly), shelf.write(tmp_path), workers=1) as office:
        await office.do(office.tasks(shelf, 20, whole=True)[:1])
        (error,) = office.broken
        assert isinstance(error, WorkerError)
        assert "three workers died while they prepared or collated a batch; the last one ended with status 9" in str(
            error
        )


async def test_workers_that_are_killed_while_they_have_nothing_to_do_are_replaced(shelf: Shelf, tmp_path: Path) -> None:
    async with in_office(job(fields=FIELDS), shelf.write(tmp_path)) as office:
        await office.until(lambda: office.rooms == 2)
        for pid in office.processes():
            os.kill(pid, signal.SIGKILL)
        await office.until(lambda: office.restarted == 2)
        check(office, await office.do(office.tasks(shelf, 10)))


async def test_a_replaced_worker_knows_the_layout(shelf: Shelf, tmp_path: Path) -> None:
    async with in_office(job(fields=FIELDS), shelf.write(tmp_path), workers=1) as office:
        first, *others = office.tasks(shelf, 10, capacity=10)
        (done,) = await office.do([first])
        layout = done.pieces[0].layout
        assert layout is not None
        office.pool.fix_layout(layout)
        os.kill(office.processes()[0], signal.SIGKILL)
        await office.until(lambda: office.restarted == 1)
        for answer in await office.do(others):
            assert answer.pieces[0].layout is None
            assert not answer.pieces[0].layout_mismatch


async def test_a_shard_that_could_not_be_opened_is_opened_for_the_next_task(shelf: Shelf, tmp_path: Path) -> None:
    """The worker was believed to have it."""
    shards = shelf.write(tmp_path)

    async with in_office(job(fields=FIELDS), shards, workers=1) as office:
        tasks = office.tasks(shelf, 15)
        await office.until(office.pool.has_room)
        path = Path(shards[0].url)
        path.rename(tmp_path / "away")
        with pytest.raises(ShardNotFoundError):
            office.pool.submit(tasks[0])
        (tmp_path / "away").rename(path)
        check(office, await office.do(tasks))
        assert office.restarted == 0


async def test_after_forgetting_shards_and_slots_they_can_be_used_again(shelf: Shelf, tmp_path: Path) -> None:
    async with in_office(job(fields=FIELDS), shelf.write(tmp_path), workers=1) as office:
        first, second, *_ = office.tasks(shelf, 10)
        await office.do([first])
        office.pool.forget_shards([0, 1, 2])
        office.pool.forget_slots([first.pieces[0].slot])
        office.pool.forget_shards([0, 1])
        (done,) = await office.do([second])
        assert office.batch(done)[0].tolist() == list(range(10, 20))


# -- the start -----------------------------------------------------------------------------------------------------


def explode() -> None:
    raise LookupError("not in this process")


class CannotBeLoaded:
    def __reduce__(self) -> Any:
        return (explode, ())

    def __call__(self, sample: Any) -> Any:
        return sample


def refuse(worker: int) -> None:
    raise OSError(f"worker {worker} finds no device")


@pytest.mark.parametrize(
    ("work", "cause", "words"),
    [
        (job(transform=CannotBeLoaded()), LookupError, "LookupError: not in this process"),
        (job(worker_init_fn=refuse), OSError, "OSError: worker 0 finds no device"),
    ],
    ids=["cannot be loaded", "worker_init_fn raises"],
)
async def test_a_job_that_cannot_begin_breaks_the_pool_with_the_cause(
    tmp_path: Path, work: Job, cause: type[Exception], words: str
) -> None:
    async with in_office(work, (), workers=1) as office:
        await office.until(lambda: False)
        error = office.broken[0]
        assert isinstance(error, WorkerError)
        assert f"a worker could not be set up: {words}" in str(error)
        assert isinstance(error.__cause__, cause)
        assert "Traceback in the worker" in error.__cause__.__notes__[0]
        assert not office.pool.has_room()


async def test_workers_that_die_at_every_start_break_the_pool(tmp_path: Path) -> None:
    async with in_office(job(worker_init_fn=lambda worker: os._exit(3)), (), workers=1) as office:
        await office.until(lambda: False)
        assert str(office.broken[0]) == "a worker process ended with status 3 before it was ready, 3 times running"


async def test_each_worker_is_set_up_with_its_number_and_so_is_who_takes_its_place(
    shelf: Shelf, tmp_path: Path
) -> None:
    folder = tmp_path / "numbers"
    folder.mkdir()

    def note(worker: int) -> None:
        (folder / f"{worker} {os.getpid()}").touch()

    async with in_office(job(worker_init_fn=note), shelf.write(tmp_path)) as office:
        await office.until(lambda: office.rooms == 2)
        (noted,) = folder.glob("1 *")
        os.kill(int(noted.name.split()[1]), signal.SIGKILL)
        await office.until(lambda: office.rooms == 3)
    assert sorted(int(path.name.split()[0]) for path in folder.iterdir()) == [0, 1, 1]


async def test_modules_of_the_users_are_found_where_the_trainer_finds_them(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_own_module.py").write_text("def twice(value):\n    return value * 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import users_own_module

    async with in_office(
        job(fields=FIELDS, transform={"cls": users_own_module.twice}), shelf.write(tmp_path), workers=1
    ) as office:
        (done,) = await office.do(office.tasks(shelf, 40))
        assert office.batch(done)[0].tolist() == [2 * number for number in range(40)]
    monkeypatch.delitem(sys.modules, "users_own_module")


def test_workers_do_not_start_threads_for_linear_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert child_environment()["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert child_environment()["OMP_NUM_THREADS"] == "4", "what the user has set is left alone"


async def test_interrupts_from_the_keyboard_are_left_to_the_trainer(shelf: Shelf, tmp_path: Path) -> None:
    async with in_office(job(fields=FIELDS), shelf.write(tmp_path)) as office:
        await office.until(lambda: office.rooms == 2)
        for pid in office.processes():
            os.kill(pid, signal.SIGINT)
        check(office, await office.do(office.tasks(shelf, 10)))
        assert office.restarted == 0


# -- the end -------------------------------------------------------------------------------------------------------


async def test_workers_end_with_their_pool_even_in_the_middle_of_a_long_sleep(shelf: Shelf, tmp_path: Path) -> None:
    folder = tmp_path / "asleep"
    folder.mkdir()

    def sleep(value: int) -> int:
        (folder / str(os.getpid())).touch()
        time.sleep(1000)
        return value

    async with in_office(job(fields=FIELDS, transform={"cls": sleep}), shelf.write(tmp_path)) as office:
        await office.until(lambda: office.rooms == 2)
        for task in office.tasks(shelf, 10):
            office.pool.submit(task)
        while len(os.listdir(folder)) < 2:
            await asyncio.sleep(0.01)


async def test_a_pool_can_be_closed_before_its_workers_have_started(tmp_path: Path) -> None:
    async with in_office(job(), ()):
        pass


# -- scans ---------------------------------------------------------------------------------------------------------


async def test_shards_are_scanned_and_damage_is_the_answer_and_not_the_end(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"%d" % number))
    whole = buffer.getvalue()
    shards = []
    for number, content in enumerate((whole, whole[:700])):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(content)
        shards.append(Shard(str(path), path.name, len(content), path.stat().st_mtime_ns, str(tmp_path)))

    async with in_office(job(), tuple(shards)) as office:
        (done,) = await office.do([ScanTask(0, (0, 1))])
        good, bad = done.found
        assert good.table.keys() == ["0", "1", "2"]
        assert bad.table is None
        error = error_from(bad.failure)
        assert isinstance(error, ShardFormatError)
        assert error.url == shards[1].url
        assert np.asarray(good.table.member_size).tolist() == [1, 1, 1]
        assert good.piece is None


async def test_a_part_of_a_shard_is_scanned_and_the_answer_is_a_piece(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(3):
            tar.addfile(tarfile.TarInfo(f"{number}.cls"))
    content = buffer.getvalue()
    path = tmp_path / "0.tar"
    path.write_bytes(content[:1024] + b"garbage" * 1000)
    shards = (Shard(str(path), path.name, path.stat().st_size, path.stat().st_mtime_ns, str(tmp_path)),)

    async with in_office(job(), shards) as office:
        answers = await office.do(
            [ScanTask(0, (0,), 0, 1024, len(content)), ScanTask(1, (0,), 512, 2048, len(content))]
        )
        first, bad = (done.found[0] for done in answers)
        assert first.failure is None
        assert first.table is None
        assert first.piece.table.keys() == ["0"]
        assert (first.piece.start, first.piece.resume, first.piece.needs) == (0, 512, 1536)
        assert bad.piece is None
        assert error_from(bad.failure).offset == 1024
