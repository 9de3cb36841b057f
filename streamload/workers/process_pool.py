"""Start worker processes, keep them busy, and replace those that die.

Another worker does the tasks of a dead worker again, with the same rows and randomness. Workers write their current row
to memory shared with the pool: a row that has killed two workers is not tried again. If workers die one after the other
without finishing a task, the pool gives up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from math import inf

from streamload.decode.failure import error_from
from streamload.decode.tasks import RowsDone, RowTask, ScanDone, ScanTask, Task, WorkerSetup, WorkerStarted
from streamload.errors import WorkerError
from streamload.fetch.resident import ResidentShards
from streamload.limits import WORKER_SHARDS_SHARE
from streamload.log_records import Logged
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import descriptor_limit
from streamload.workers.launch import PROGRESS_BYTES, STACK_S, WORKER, Child, end_all, launch
from streamload.workers.pool import Pool, PoolEvents, WorkerActivity, WorkerLink

_log = logging.getLogger("streamload")

_TASKS_AHEAD = 2
_MAX_FAILED_STARTS = 3
_DEATHS_OF_A_ROW = 2
_DEATHS_OF_A_TASK = 3
# The limit is four per worker if that is more, since all workers may die at once if memory runs out.
_MOST_DEATHS_IN_A_ROW = 16
_GRACE_S = 0.3
# A worker that has closed its socket is exiting; killing it at once would hide the reason.
_GRACE_OF_THE_LOST_S = 2.0
# Time to finish an unwanted task before its worker is replaced: a task takes about 30 ms, a new worker a second
# to start, or longer if the user's code imports much.
_GRACE_OF_THE_UNWANTED_S = 1.0


class _Worker(WorkerLink):
    """Link to a worker's process, owned by this object."""

    def __init__(self, pool: ProcessPool, number: int, child: Child) -> None:
        self.number = number
        self.child = child
        on_message, on_lost = partial(pool.handle, self), partial(pool.replace_lost, self)
        self.channel = AsyncChannel(child.socket, lambda message, _: on_message(message), on_lost)
        send = partial(self.channel.send, close=True)
        super().__init__(send, pool.shards, pool.slots, descriptor_limit() // WORKER_SHARDS_SHARE)
        self.started = False

    def row_of(self, task: Task) -> int:
        """Return the current row of a task; -1 before and after the rows."""
        row, number = struct.unpack("<qq", os.pread(self.child.progress, PROGRESS_BYTES, 0))
        return row if number == task.number else -1


class ProcessPool(Pool):
    """Do tasks in worker processes, each with a current task and a waiting one."""

    workers: list[_Worker]

    def __init__(
        self,
        workers: int,
        setup: WorkerSetup,
        shards: ResidentShards,
        slots: SlotPool,
        events: PoolEvents,
        *,
        ends_at_failure: bool,
        launched: Sequence[Child],
    ) -> None:
        self._setup = setup
        self.slots = slots
        self._deaths: Counter[tuple[int, int]] = Counter()  # by task and row
        self._ends_at_failure = ends_at_failure
        self._deaths_in_a_row = 0
        self._most_deaths_in_a_row = _MAX_FAILED_STARTS
        self.shards = shards
        started = [self._start(number, child) for number, child in zip_longest(range(workers), launched)]
        super().__init__(started, shards, events, _TASKS_AHEAD)

    def abandon_unwanted(self) -> None:
        """Drop unwanted tasks not yet sent; after a second, replace workers still busy with unwanted ones."""
        self._returned = deque(self._wanted(self._returned))
        held = [task for worker in self.workers for task in worker.tasks.values()]
        unwanted = {task.number for task in held if not self._events.is_wanted(task)}
        if unwanted:
            asyncio.get_running_loop().call_later(_GRACE_OF_THE_UNWANTED_S, self._replace_busy, unwanted)

    def _replace_busy(self, unwanted: Collection[int]) -> None:
        for worker in list(self.workers):
            if next(iter(worker.tasks), None) in unwanted:
                worker.channel.close()
                worker.child.end(0.0)
                self._replace(worker, self._wanted(worker.tasks.values()))

    async def inspect(self) -> WorkerActivity | None:
        """Return the activity of the worker with the oldest task, or of a starting worker; None if all are idle."""
        busy = [worker for worker in self.workers if worker.tasks or not worker.started]
        if not busy:
            return None
        worker = min(busy, key=lambda each: next(iter(each.tasks), inf))
        name = f"worker {worker.number} (process {worker.child.pid})"
        if not worker.tasks:
            return WorkerActivity(name, None, -1, "")
        start = worker.child.request_stack()
        await asyncio.sleep(STACK_S)
        task = next(iter(worker.tasks.values()), None) if worker in self.workers else None
        return task and WorkerActivity(name, task, worker.row_of(task), worker.child.last_words(start))

    def close(self) -> None:
        """End all workers; kill those that have not ended after a short grace period."""
        workers, self.workers = self.workers, []
        for worker in workers:
            worker.channel.close()
        end_all([worker.child for worker in workers], _GRACE_S)

    # -- workers ---------------------------------------------------------------------------------------------------

    def _start(self, number: int, launched: Child | None = None) -> _Worker:
        if launched is not None and launched.wait(0.0) is not None:  # the worker died before the pool was created
            launched.close()
            launched = None
        worker = _Worker(self, number, launched or launch(WORKER))
        worker.channel.send(self._setup._replace(worker=number))
        return worker

    def _wanted(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the wanted tasks, and report the others as dropped."""
        wanted = []
        for task in tasks:
            if self._events.is_wanted(task):
                wanted.append(task)
            else:
                self._events.dropped(task)
        return wanted

    def _submit_returned(self) -> None:
        """Drop unwanted tasks in `_returned`, and submit the others to free workers."""
        self._returned = deque(self._wanted(self._returned))
        while self._returned and (worker := self._least_busy()) is not None:
            worker.submit(self._returned.popleft())

    def handle(self, worker: _Worker, message: Logged | RowsDone | ScanDone | WorkerStarted) -> None:
        """Handle a worker's message."""
        if isinstance(message, Logged):
            message.handle()  # this process forwards its log to the trainer
            return
        if isinstance(message, WorkerStarted):
            self._on_started(worker, message)
            return
        task = worker.tasks.pop(message.number)
        if not isinstance(task, RowTask) or len(task.untried) < len(task.table):
            self._deaths_in_a_row = 0
        self._submit_returned()
        self._events.done(message)

    def _on_started(self, worker: _Worker, message: WorkerStarted) -> None:
        if message.failure is not None:
            error = cause = error_from(message.failure)
            if not isinstance(cause, WorkerError):  # a WorkerError says what to do
                error = WorkerError(
                    f"a worker could not be set up: {message.failure.summary}. The transform, the decoders, collate_fn "
                    "and worker_init_fn must be importable (or defined in the script) and load in a fresh process"
                )
                error.__cause__ = cause
            self._events.broken(error)
            return
        worker.started = True
        # A worker can start, so more deaths in a row are tolerated from now on.
        self._most_deaths_in_a_row = max(_MOST_DEATHS_IN_A_ROW, 4 * len(self.workers))
        self._submit_returned()
        self._events.has_room()

    # -- deaths ----------------------------------------------------------------------------------------------------

    def replace_lost(self, worker: _Worker) -> None:
        """Replace a worker whose process has ended."""
        if worker not in self.workers:
            return
        worker.channel.close()
        how = worker.child.end(_GRACE_OF_THE_LOST_S)
        if not worker.started:
            self._deaths_in_a_row += 1
            if self._deaths_in_a_row >= self._most_deaths_in_a_row:
                died = f"{self._deaths_in_a_row} workers died in a row"
                self._events.broken(WorkerError(f"{died}; the last one, not yet ready, {how}"))
                return
        held = list(worker.tasks.values())
        tasks = self._wanted(held)
        if tasks and tasks[0] is held[0]:
            blamed = self._blame(worker, tasks[0], how)
            if blamed is None:
                return
            tasks[0] = blamed
        _log.warning("a worker process has died and is replaced; it %s", how)
        self.restarts += 1
        self._replace(worker, tasks)

    def _replace(self, worker: _Worker, tasks: Sequence[Task]) -> None:
        """Start a worker in place of `worker`, which has ended, and do `tasks` again."""
        worker.child.close()
        self._returned.extendleft(reversed(tasks))
        self.workers[self.workers.index(worker)] = self._start(worker.number)
        self._submit_returned()

    def _blame(self, worker: _Worker, task: Task, how: str) -> Task | None:
        """Return the task to retry, without a row that killed two workers; None if the pool gives up."""
        row = worker.row_of(task)
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= self._most_deaths_in_a_row:
            self._events.broken(
                WorkerError(
                    f"{self._deaths_in_a_row} workers died in a row without finishing a task: check the transform, "
                    f"the decoders, the libraries that they load, and the memory of workers. The last one {how}"
                )
            )
            return None
        self._deaths[task.number, row] += 1
        deaths = self._deaths[task.number, row]
        if row >= 0 and deaths >= _DEATHS_OF_A_ROW and isinstance(task, RowTask):
            reason = f"two workers died while they made this sample; the second one {how}"
            # If the row ends the pass, later rows are not tried: each might kill two more workers.
            last = len(task.table) - 1 if self._ends_at_failure else row
            return task._replace(untried={**dict.fromkeys(range(row, last + 1), reason), **task.untried})
        if row < 0 and deaths >= _DEATHS_OF_A_TASK:
            doing = "scanned shards" if isinstance(task, ScanTask) else "prepared or collated a batch"
            self._events.broken(WorkerError(f"three workers died while they {doing}; the last one {how}"))
            return None
        return task
