"""Do tasks in the caller's process, for `num_workers=0`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from streamload.decode.batch_maker import TaskRunner
from streamload.decode.tasks import Job, RowsDone, RowTask, ScanDone, ScanTask, TaskCosts
from streamload.limits import MOST_FREE_SLOTS


class CallerWorker:
    """Queue the messages of a `Pool` until `step` handles them.

    Args:
        job: the user's functions themselves, not copies, so that they share state with the caller's code.

    Attributes:
        waiting: the queued messages, each with its descriptors.
    """

    def __init__(self, job: Job) -> None:
        self._runner = TaskRunner(job, in_callers_process=True)
        self.waiting: deque[tuple[Any, Sequence[int]]] = deque()
        self._pass_number: int | None = None
        self._failed: deque[RowsDone] = deque(maxlen=MOST_FREE_SLOTS)  # more than wait for the loop

    def begin(self, pass_number: int) -> None:
        """Make rows only for this pass from now on."""
        self._pass_number = pass_number
        self._failed.clear()

    def leave(self, pass_number: int) -> None:
        """Stop making rows for a pass, if it is the current one."""
        if self._pass_number == pass_number:
            self._pass_number = None

    def step(self) -> RowsDone | ScanDone | None:
        """Do the next task, and return its answer; None if no task waits.

        A `RowTask` of another pass is answered without being done. An interrupted task is done again by the next call.
        """
        while self.waiting:
            message, descriptors = self.waiting[0]
            if not isinstance(message, RowTask | ScanTask):
                self.waiting.popleft()  # first, since `handle` owns the descriptors even if it is interrupted
                self._runner.handle(message, descriptors, [-1, -1])
                continue
            if isinstance(message, RowTask) and message.pass_number != self._pass_number:
                done: RowsDone | ScanDone | None = RowsDone(message.number, (), 0, 0, TaskCosts())
            else:
                done = self._runner.handle(message, (), [-1, -1])
                if isinstance(done, RowsDone) and any(batch.failures for batch in done.batches):
                    self._failed.append(done)  # keeps its errors until the trainer has unpickled them, see `Original`
            self.waiting.popleft()
            return done
        return None

    def close(self) -> None:
        """Close all shards, slots and waiting descriptors. Idempotent."""
        while self.waiting:
            for descriptor in self.waiting.popleft()[1]:
                os.close(descriptor)
        self._runner.close()
