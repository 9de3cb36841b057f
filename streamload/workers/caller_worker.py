"""The caller as a worker: tasks are done in its own thread, where breakpoints and tracebacks work as usual."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from streamload.decode.tasks import Job, RowsDone, RowTask, ScanDone, ScanTask, TaskCosts
from streamload.memory.slots import HeapSlots
from streamload.workers.task_runner import TaskRunner


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
        """Take a message of the pool, and its descriptors, which are closed here."""
        self._waiting.append((message, descriptors))

    def step(self) -> RowsDone | ScanDone | None:
        """Do one task, and before it what comes before it; its answer, or None where no task waits.

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
        if isinstance(done, RowsDone) and any(piece.failures for piece in done.pieces):
            self._failed.append(done)  # exceptions that stay here are found again only while they are referred to
        return done

    def close(self) -> None:
        """Close all that is open. Idempotent."""
        while self._waiting:
            for descriptor in self._waiting.popleft()[1]:
                os.close(descriptor)
        self._runner.close()
