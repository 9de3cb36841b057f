"""The pool of one worker for `num_workers=0`: the caller makes rows while it waits for a batch."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from streamload.decode.batch_maker import TaskRunner
from streamload.decode.tasks import Job, RowsDone, RowTask, ScanDone, ScanTask, Task, TaskCosts
from streamload.fetch.resident import ResidentShards
from streamload.limits import CALLER_SHARDS_SHARE
from streamload.memory.slots import HeapSlots, SlotPool
from streamload.workers.protocol import PoolEvents, WorkerActivity
from streamload.workers.worker_link import WorkerLink


class CallerWorker:
    """Keeps what a `CallerPool` sends until `step` does it.

    Args:
        job: the user's functions themselves: state shared with the caller's code stays shared.
        heap: where batches are written, if the pool is in this process too.
    """

    def __init__(self, job: Job, heap: HeapSlots | None = None) -> None:
        self._runner = TaskRunner(job, heap, in_callers_process=True)
        self._waiting: deque[tuple[Any, Sequence[int]]] = deque()
        self._pass_number: int | None = None
        self._failed: list[RowsDone] = []

    def begin(self, pass_number: int) -> None:
        """Make rows for this pass only, from now on."""
        self._pass_number = pass_number
        self._failed.clear()

    def leave(self, pass_number: int) -> None:
        """Make no more rows for a pass; another one that has begun meanwhile goes on."""
        if self._pass_number == pass_number:
            self._pass_number = None

    def put(self, message: Any, descriptors: Sequence[int]) -> None:
        """Queue a message of the pool, and take over its descriptors."""
        self._waiting.append((message, descriptors))

    def step(self) -> RowsDone | ScanDone | None:
        """Do one task, and the messages before it; return its answer, or None if no task waits.

        A task of another pass is answered without doing it. One that is interrupted is done by the next call.
        """
        while self._waiting:
            message, descriptors = self._waiting[0]
            if isinstance(message, RowTask | ScanTask):
                done = self._do(message)
                self._waiting.popleft()
                return done
            self._waiting.popleft()  # first: descriptors are taken over once
            self._runner.handle(message, descriptors, [-1, -1])
        return None

    def _do(self, task: RowTask | ScanTask) -> RowsDone | ScanDone | None:
        if isinstance(task, RowTask) and task.pass_number != self._pass_number:
            return RowsDone(task.number, (), 0, 0, TaskCosts())
        done = self._runner.handle(task, (), [-1, -1])
        if isinstance(done, RowsDone) and any(batch.failures for batch in done.batches):
            self._failed.append(done)  # exceptions that stay here are found again only while they are referred to
        return done

    def close(self) -> None:
        """Close all that is open. Idempotent."""
        while self._waiting:
            for descriptor in self._waiting.popleft()[1]:
                os.close(descriptor)
        self._runner.close()


class CallerPool:
    """Has one task at a time done by a `CallerWorker`, which may be in another process."""

    capacity = 1

    def __init__(
        self,
        send: Callable[[Any, Sequence[int]], None],
        *,
        shards: ResidentShards,
        slots: SlotPool | None,
        events: PoolEvents,
        descriptors: int,
    ) -> None:
        self._shards = shards
        self._events = events
        self._link = WorkerLink(send, shards=shards, slots=slots, most_open=max(1, descriptors // CALLER_SHARDS_SHARE))

    def has_room(self) -> bool:
        """Return True if the caller holds no task."""
        return not self._link.tasks

    def workers_with_tasks(self) -> tuple[int, int]:
        """See `Pool.workers_with_tasks`."""
        return 1, len(self._link.tasks)

    def submit(self, task: Task) -> None:
        """Send a task; it is done when the caller waits for a batch."""
        self._link.give(task)

    def on_done(self, done: RowsDone | ScanDone) -> None:
        """Take the caller's answer to a task."""
        del self._link.tasks[done.number]
        self._events.on_done(done)

    def drop_unwanted(self) -> None:
        """Do nothing: no task is done twice."""

    def abandon_unwanted(self) -> None:
        """Do nothing: the caller answers abandoned tasks without doing them."""

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Close shards, except those worth keeping."""
        self.drop_shards(self._shards.finish(shards))

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Close shards."""
        self._link.drop_shards(shards)

    async def inspect(self) -> list[WorkerActivity]:
        """Return nothing: the caller knows what it is doing."""
        return []

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Unmap slots."""
        self._link.forget_slots(slots)

    def close(self) -> None:
        """Do nothing: the caller closes what it has open."""
