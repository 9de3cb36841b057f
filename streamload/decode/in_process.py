"""Doing tasks in the caller's own thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streamload.decode.failure import Attempt
from streamload.decode.open_shards import OpenShards
from streamload.decode.pool_protocol import PoolEvents
from streamload.decode.rows import RowMaker
from streamload.decode.tasks import Job, RowsDone, ScanDone, ScanTask, ShardOpened, Task
from streamload.decode.worker import scan
from streamload.fetch.resident import ResidentShards
from streamload.memory.slots import HeapSlots
from streamload.memory.unnamed import descriptor_limit

__all__ = ["CallerPool"]

_SHARE_OF_DESCRIPTORS = 6


class _LocalShards:
    """Shards that are opened when they are first needed."""

    def __init__(self, shards: ResidentShards) -> None:
        self._resident = shards
        self._known: dict[int, tuple[int, int]] = {}
        self._most_open = max(1, descriptor_limit() // _SHARE_OF_DESCRIPTORS)
        self.open = OpenShards(maps=False)

    def need(self, task: Task) -> set[int]:
        needed = _shards_of(task)
        for shard in needed:
            self._resident.need(shard)
            version = self._resident.version(shard)
            if self._known.get(shard) != version:
                opened = self._resident.open(shard)
                self.open.add(ShardOpened(shard, opened.url, opened.size_bytes), opened.descriptor)
                self._known[shard] = version
            self._known[shard] = self._known.pop(shard)  # the last one to be closed
        return needed

    def spare_descriptors(self, task: Task) -> None:
        """Close the shards that were not needed for longest, so that a task's can be opened; no other one may run."""
        needed = _shards_of(task)
        others = [shard for shard in self._known if shard not in needed]
        self.drop(others[: max(0, len(others) + len(needed) - self._most_open)])

    def finish(self, shards: Sequence[int]) -> None:
        self.drop(self._resident.finish(shards))

    def drop(self, shards: Sequence[int]) -> None:
        dropped = tuple(shard for shard in shards if self._known.pop(shard, None) is not None)
        self.open.drop(dropped)


class CallerPool:
    """Does one task at a time in the caller's thread, when told to `step`: breakpoints and tracebacks work as ever.

    Args:
        job: the user's functions, as they are: what they share with the caller's code stays shared.
        shards: opens shards.
        slots: where batches are written.
        events: told what happens.
    """

    capacity = 1

    def __init__(self, *, job: Job, shards: ResidentShards, slots: HeapSlots, events: PoolEvents) -> None:
        self._maker = RowMaker(job, slots, restore_random_state=True)
        self._shards = _LocalShards(shards)
        self._events = events
        self._tasks: deque[Task] = deque()
        self._progress = [-1]

    def has_room(self) -> bool:
        """Whether it has nothing to do."""
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
            self._shards.spare_descriptors(task)
            self._shards.need(task)
            done = _do(task, self._maker, self._shards.open, self._progress)
        if done is not None:
            self._events.on_done(done)
        elif attempt.error is not None:
            self._events.on_broken(attempt.error)
        return True

    @property
    def held_up(self) -> bool:
        """Never: no task is done twice."""
        return False

    def drop_unwanted(self) -> None:
        """Nothing to do: no task is done twice."""

    def abandon_unwanted(self) -> None:
        """Drop what was not begun: there is no memory for it any more."""
        tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            if self._events.is_wanted(task):
                self._tasks.append(task)
            else:
                self._events.on_dropped(task)

    def resume(self) -> None:
        """Nothing to do here either."""

    def fix_layout(self, layout: bytes) -> None:
        """Hold for all later tasks."""
        self._maker.fix_layout(layout)

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Unmap shards, but for those worth keeping."""
        self._shards.finish(shards)

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Unmap shards."""
        self._shards.drop(shards)

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Nothing to do: slots are used once."""

    def close(self) -> None:
        """Forget what was to be done, and close the shards."""
        self._tasks.clear()
        self._shards.open.close()


def _shards_of(task: Task) -> set[int]:
    return {task.shard} if isinstance(task, ScanTask) else set(task.table.shards.tolist())


def _do(task: Task, maker: RowMaker, shards: OpenShards, progress: list[int]) -> RowsDone | ScanDone:
    return scan(task, shards) if isinstance(task, ScanTask) else maker.run(task, shards, progress)
