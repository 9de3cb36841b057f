"""Send tasks to workers, each task after the shards and slots that it needs."""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, NamedTuple

from streamload.decode.tasks import Forget, RowsDone, ScanDone, ScanTask, ShardsOpened, SlotOpened, Task
from streamload.fetch.resident import OpenShard, ResidentShards
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.memory.slots import SlotPool


class WorkerActivity(NamedTuple):
    """The current work of a busy or starting worker.

    Attributes:
        name: the worker's number and process id.
        task: the current task; None while the worker starts.
        row: the current row; -1 before and after the rows.
        stack: the stacks of the worker's Python threads, if known.
    """

    name: str
    task: Task | None
    row: int
    stack: str


class PoolEvents(NamedTuple):
    """Callbacks of a pool, called in one thread. `abandon_unwanted` calls only the first two.

    Attributes:
        is_wanted: returns True if an unfinished task must still be done.
        dropped: called for an unwanted task, which gets no answer.
        done: called with the answer to a task.
        has_room: called when a worker has started.
        broken: called with the error if the pool cannot continue.
    """

    is_wanted: Callable[[Task], bool]
    dropped: Callable[[Task], None]
    done: Callable[[RowsDone | ScanDone], None]
    has_room: Callable[[], None]
    broken: Callable[[Exception], None]


class WorkerLink:
    """The tasks of one worker, and the shards and slots that it has open.

    Args:
        send: sends the worker a message with descriptors, and closes them.
        shards: opens shards.
        slots: the memory of batches.
        most_open: maximum number of shards that the worker has open.

    Attributes:
        started: True once the worker is ready for tasks.
        tasks: the worker's tasks by number, oldest first.
    """

    def __init__(
        self, send: Callable[[Any, Sequence[int]], None], shards: ResidentShards, slots: SlotPool, most_open: int
    ) -> None:
        self.started = True
        self.tasks: OrderedDict[int, Task] = OrderedDict()
        self._send = send
        self._shards = shards
        self._slots = slots
        self._most_open = max(1, most_open)
        self._open: OrderedDict[int, tuple[int, int]] = OrderedDict()  # versions by shard, least recently used first
        self._mapped: set[int] = set()

    def submit(self, task: Task) -> None:
        """Send a task with the shards and slots that it needs. Raises what `ResidentShards.open` raises."""
        shards = list(task.shards) if isinstance(task, ScanTask) else task.table.read_shards()
        self._spare_descriptors(shards)
        versions = self._shards.need(shards)
        outdated = [shard for shard, version in versions.items() if self._open.get(shard) != version]
        for start in range(0, len(outdated), MAX_DESCRIPTORS):
            self._open_shards(outdated[start : start + MAX_DESCRIPTORS])
        for shard in shards:
            self._open.move_to_end(shard)
        if not isinstance(task, ScanTask):
            for slot, _ in task.batches:
                if slot not in self._mapped:
                    self._mapped.add(slot)
                    self._send(SlotOpened(slot), [os.dup(self._slots.descriptors[slot])])
        self.tasks[task.number] = task
        self._send(task, ())

    def _open_shards(self, shards: Sequence[int]) -> None:
        """Send the descriptors of shards in one message, up to the first that cannot be opened."""
        opened: list[OpenShard] = []
        try:
            for shard in shards:
                opened.append(self._shards.open(shard))
        finally:
            sent = shards[: len(opened)]
            message = ShardsOpened(
                tuple(sent), tuple(each.url for each in opened), tuple(each.size_bytes for each in opened)
            )
            self._send(message, [each.descriptor for each in opened])
            self._open.update(self._shards.versions(sent))

    def drop(self, shards: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Make the worker close shards and unmap slots, after its current tasks."""
        shards = tuple(shard for shard in shards if self._open.pop(shard, None) is not None)
        slots = tuple(self._mapped.intersection(slots))
        self._mapped.difference_update(slots)
        if shards or slots:
            self._send(Forget(shards, slots), ())

    def _spare_descriptors(self, shards: Collection[int]) -> None:
        """Make the worker close its least recently used shards if a task's shards would exceed the worker's limit."""
        wanted = set(shards)
        n_open = len(self._open) + sum(shard not in self._open for shard in wanted)
        if n_open > self._most_open:  # `islice` stops early, since thousands may be open
            others = (shard for shard in self._open if shard not in wanted)
            self.drop([*islice(others, n_open - self._most_open)])


class Pool:
    """Send tasks to a single worker, the trainer itself. `ProcessPool` adds processes and handles their deaths.

    Attributes:
        capacity: the maximum number of tasks in the pool.
        restarts: the number of workers that were replaced.
    """

    def __init__(
        self, workers: Sequence[WorkerLink], shards: ResidentShards, events: PoolEvents, tasks_ahead: int = 1
    ) -> None:
        self.workers = workers
        self.capacity = len(workers) * tasks_ahead
        self.restarts = 0
        self.shards = shards
        self._events = events
        self._tasks_ahead = tasks_ahead
        self._returned: deque[Task] = deque()  # tasks for the next free worker, in order

    def has_room(self) -> bool:
        """Return True if a worker accepts a task."""
        return not self._returned and self._least_busy() is not None

    def _least_busy(self) -> WorkerLink | None:
        free = [worker for worker in self.workers if worker.started and len(worker.tasks) < self._tasks_ahead]
        return min(free, key=lambda worker: len(worker.tasks), default=None)

    def n_with_tasks(self) -> int:
        """Return the number of busy and starting workers."""
        return sum(not worker.started or bool(worker.tasks) for worker in self.workers)

    def submit(self, task: Task) -> None:
        """Send a task to the least busy worker, or queue it; `events.done` gets the answer."""
        worker = self._least_busy()
        if worker is None:
            self._returned.append(task)
        else:
            worker.submit(task)

    def end_task(self, done: RowsDone | ScanDone) -> None:
        """Record the trainer's answer to a task."""
        del self.workers[0].tasks[done.number]
        self._events.done(done)

    def abandon_unwanted(self) -> None:
        """Do nothing: the trainer answers unwanted tasks without doing them."""

    def drop(self, shards: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Make the workers close shards and unmap slots, after their current tasks."""
        for worker in self.workers:
            worker.drop(shards, slots)

    async def inspect(self) -> WorkerActivity | None:
        """Return None; a `ProcessPool` returns the activity of a worker."""
        return None  # the trainer cannot ask while it does a task

    def close(self) -> None:
        """Do nothing: the trainer is the only worker."""
