"""The caller as a pool: tasks are done in its own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streamload.decode.batch_maker import BatchMaker
from streamload.decode.failure import Attempt
from streamload.decode.open_shards import OpenShards
from streamload.decode.tasks import Job, RowsDone, ScanDone, ScanTask, ShardOpened, Task
from streamload.fetch.resident import ResidentShards
from streamload.limits import CALLER_SHARDS_SHARE
from streamload.memory.slots import HeapSlots
from streamload.memory.unnamed import descriptor_limit
from streamload.workers.protocol import PoolEvents
from streamload.workers.worker import scan

__all__ = ["CallerPool"]


class CallerPool:
    """Does one task at a time in the caller's thread, on `step`; breakpoints and tracebacks work as usual.

    Args:
        job: the user's functions themselves: state shared with the caller's code stays shared.
        shards: opens shards.
        slots: where batches are written.
        events: notified of what happens.
    """

    capacity = 1

    def __init__(self, *, job: Job, shards: ResidentShards, slots: HeapSlots, events: PoolEvents) -> None:
        self._maker = BatchMaker(job, slots, in_callers_process=True)
        self._shards = shards
        self._versions: dict[int, tuple[int, int]] = {}
        self._open = OpenShards(maps=False)
        self._most_open = max(1, descriptor_limit() // CALLER_SHARDS_SHARE)
        self._events = events
        self._tasks: deque[Task] = deque()

    def has_room(self) -> bool:
        """Whether no task is waiting."""
        return not self._tasks

    def submit(self, task: Task) -> None:
        """Keep a task for the next `step`."""
        self._tasks.append(task)

    def step(self) -> bool:
        """Do one task; False where there is none."""
        if not self._tasks:
            return False
        task = self._tasks.popleft()
        done: RowsDone | ScanDone | None = None
        with Attempt() as attempt:
            if isinstance(task, ScanTask):
                self._open_shards({task.shard})
                done = scan(task, self._open)
            else:
                self._open_shards(set(task.table.shards.tolist()))
                done = self._maker.run(task, self._open, [-1])
        if done is not None:
            self._events.on_done(done)
        elif attempt.error is not None:
            self._events.on_broken(attempt.error)
        return True

    @property
    def held_up(self) -> bool:
        """False: no task is done twice."""
        return False

    def drop_unwanted(self) -> None:
        """Nothing to do: no task is done twice."""

    def abandon_unwanted(self) -> None:
        """Drop the waiting tasks that are unwanted: their memory may be gone."""
        tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            if self._events.is_wanted(task):
                self._tasks.append(task)
            else:
                self._events.on_dropped(task)

    def resume(self) -> None:
        """Nothing to do: no task is done twice."""

    def fix_layout(self, layout: bytes) -> None:
        """Set the layout of all later tasks."""
        self._maker.fix_layout(layout)

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Close shards, except those worth keeping."""
        self.drop_shards(self._shards.finish(shards))

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Close shards."""
        self._open.drop(tuple(shard for shard in shards if self._versions.pop(shard, None) is not None))

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Nothing to do: slots are used once."""

    def close(self) -> None:
        """Drop all tasks, and close the shards."""
        self._tasks.clear()
        self._open.close()

    def _open_shards(self, needed: set[int]) -> None:
        """Open the shards of a task; where there are too many, the least recently used are closed."""
        others = [shard for shard in self._versions if shard not in needed]
        self.drop_shards(others[: max(0, len(others) + len(needed) - self._most_open)])
        for shard in needed:
            self._shards.need(shard)
            version = self._shards.version(shard)
            if self._versions.get(shard) != version:
                opened = self._shards.open(shard)
                self._open.add(ShardOpened(shard, opened.url, opened.size_bytes), opened.descriptor)
                self._versions[shard] = version
            self._versions[shard] = self._versions.pop(shard)  # the most recently used
