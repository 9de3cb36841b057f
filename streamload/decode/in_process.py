"""Doing tasks in this process: on threads of the feeder, or in the caller's own thread."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamload.decode.failure import Attempt, in_words
from streamload.decode.job_pickle import load_job, warn_of_lost
from streamload.decode.open_shards import OpenShards
from streamload.decode.pool_protocol import PoolEvents
from streamload.decode.rows import RowMaker
from streamload.decode.tasks import Job, RowsDone, ScanDone, ScanTask, ShardOpened, Task
from streamload.decode.worker import scan
from streamload.errors import WorkerError
from streamload.fetch.resident import ResidentShards
from streamload.memory.mapped import Bytes
from streamload.memory.slots import HeapSlots, MappedSlots, SlotPool
from streamload.memory.unnamed import descriptor_limit

__all__ = ["CallerPool", "ThreadPool"]

_TASKS_AHEAD = 2
_SHARE_OF_DESCRIPTORS = 6


class _LocalShards:
    """Shards that are opened when they are first needed."""

    def __init__(self, shards: ResidentShards, retire: Callable[[int], None] = os.close) -> None:
        self._resident = shards
        self._known: dict[int, tuple[int, int]] = {}
        self._most_open = max(1, descriptor_limit() // _SHARE_OF_DESCRIPTORS)
        self.open = OpenShards(retire, maps=False)

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


class _LockedSlots:
    """Slots that several threads fill; their descriptors are the pool's."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._mapped = MappedSlots()
        self._known: set[int] = set()
        self._lock = threading.Lock()

    def need(self, slot: int) -> None:
        with self._lock:
            if slot not in self._known:
                self._known.add(slot)
                self._mapped.add(slot, os.dup(self._pool.descriptor(slot)))

    def at_least(self, slot: int, size_bytes: int) -> Bytes:
        with self._lock:
            return self._mapped.at_least(slot, size_bytes)

    def drop(self, slots: Sequence[int]) -> None:
        with self._lock:
            for slot in slots:
                self._known.discard(slot)
                self._mapped.drop(slot)

    def close(self) -> None:
        self.drop(list(self._known))


@dataclass(slots=True)
class _ToForget:
    """What to unmap or to close when some tasks are done.

    Attributes:
        after: the tasks.
        shards: which have been finished with.
        dropped: shards whose memory is gone.
        slots: which are not written to any more.
        descriptors: of shards that have others now.
    """

    after: set[int]
    shards: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)
    descriptors: list[int] = field(default_factory=list)


class ThreadPool:
    """Worker threads in the feeder: for decoders that release the GIL, and for Python without one.

    Transforms that may draw from the process's global random generators run one at a time, since threads share these;
    one that takes an `rng` runs beside others.

    Args:
        workers: how many threads.
        job: the pickled `Job`.
        shards: opens shards.
        slots: where batches are written.
        events: told what happens, in the event loop that this is made in.
    """

    def __init__(
        self, workers: int, *, job: bytes, shards: ResidentShards, slots: SlotPool, events: PoolEvents
    ) -> None:
        self.capacity = workers * _TASKS_AHEAD
        self._job, lost = load_job(job)
        if lost:
            warn_of_lost(lost)
        self._shards = _LocalShards(shards, self._retire)
        self._slots = _LockedSlots(slots)
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._outstanding: set[int] = set()
        guard = threading.Lock()
        self._makers = [RowMaker(self._job, self._slots, guard) for _ in range(workers)]
        self._to_forget: list[_ToForget] = []
        self._threads = [
            threading.Thread(target=self._serve, args=(number, maker), name=f"streamload-{number}", daemon=True)
            for number, maker in enumerate(self._makers)
        ]
        for thread in self._threads:
            thread.start()
        self._loop.call_soon(events.on_room)

    def has_room(self) -> bool:
        """Whether another task can wait its turn."""
        return len(self._outstanding) < self.capacity

    def submit(self, task: Task) -> None:
        """Take a task."""
        needed = self._shards.need(task)
        for forgetting in self._to_forget:
            forgetting.shards -= needed
            forgetting.dropped -= needed
        for piece in () if isinstance(task, ScanTask) else task.pieces:
            self._slots.need(piece.slot)
        self._outstanding.add(task.number)
        self._tasks.put(task)

    @property
    def held_up(self) -> bool:
        """Never: no task is done twice."""
        return False

    def drop_unwanted(self) -> None:
        """Nothing to do: no task is done twice."""

    def abandon_unwanted(self) -> None:
        """Nothing to do: a thread cannot be ended, and does what it was given."""

    def resume(self) -> None:
        """Nothing to do here either."""

    def fix_layout(self, layout: bytes) -> None:
        """Hold for all later tasks."""
        for maker in self._makers:
            maker.fix_layout(layout)

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Unmap shards when the tasks submitted so far are done."""
        self._forget(_ToForget(set(self._outstanding), shards=set(shards)))

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Unmap shards when the tasks submitted so far are done; none of these should read them."""
        self._forget(_ToForget(set(self._outstanding), dropped=set(shards)))

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Unmap slots when the tasks submitted so far are done."""
        self._forget(_ToForget(set(self._outstanding), slots=set(slots)))

    def close(self) -> None:
        """Let the threads end after the task in hand; they are daemons, and the process ends without waiting."""
        for _ in self._threads:
            self._tasks.put(None)
        self._slots.close()

    def _serve(self, number: int, maker: RowMaker) -> None:
        with Attempt() as attempt:
            try:
                self._work(number, maker)
            except (SystemExit, KeyboardInterrupt) as error:  # it would end this thread, and nobody would hear of it
                raise WorkerError(f"the user's code has left a worker thread: {in_words(error)}") from error
        if attempt.error is not None:
            self._loop.call_soon_threadsafe(self._events.on_broken, attempt.error)

    def _work(self, number: int, maker: RowMaker) -> None:
        if self._job.worker_init_fn is not None:
            self._job.worker_init_fn(number)
        while (task := self._tasks.get()) is not None:
            done = _do(task, maker, self._shards.open, [-1])
            self._loop.call_soon_threadsafe(self._done, done)

    def _done(self, done: RowsDone | ScanDone) -> None:
        self._outstanding.discard(done.number)
        waiting, self._to_forget = self._to_forget, []
        for forgetting in waiting:
            forgetting.after.discard(done.number)
            self._forget(forgetting)
        self._events.on_done(done)

    def _forget(self, forgetting: _ToForget) -> None:
        if forgetting.after:
            self._to_forget.append(forgetting)
            return
        self._shards.finish(tuple(forgetting.shards))
        self._shards.drop(tuple(forgetting.dropped))
        self._slots.drop(tuple(forgetting.slots))
        for descriptor in forgetting.descriptors:
            os.close(descriptor)

    def _retire(self, descriptor: int) -> None:
        """A thread may be reading from it; if its number stood for another file meanwhile, it would read that."""
        self._forget(_ToForget(set(self._outstanding), descriptors=[descriptor]))


def _shards_of(task: Task) -> set[int]:
    return {task.shard} if isinstance(task, ScanTask) else set(task.table.shards.tolist())


def _do(task: Task, maker: RowMaker, shards: OpenShards, progress: list[int]) -> RowsDone | ScanDone:
    return scan(task, shards) if isinstance(task, ScanTask) else maker.run(task, shards, progress)
