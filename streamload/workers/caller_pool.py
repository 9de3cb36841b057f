"""The caller as a pool of one worker, which works only while it waits for a batch, and is never replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamload.decode.tasks import LayoutFixed, RowsDone, ScanDone, Task
from streamload.fetch.resident import ResidentShards
from streamload.limits import CALLER_SHARDS_SHARE
from streamload.memory.slots import SlotPool
from streamload.workers.protocol import PoolEvents, WorkerActivity
from streamload.workers.worker_link import WorkerLink


class CallerPool:
    """Has one task at a time done by a `CallerWorker`, which may be in another process.

    Args:
        send: sends that messages with descriptors, which it closes.
        shards: opens shards.
        slots: whose descriptors it gets; None where it shares the pool's memory.
        events: notified of what happens.
        descriptors: how many the worker's process may have open.
    """

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
        self._send = send
        self._shards = shards
        self._events = events
        self._link = WorkerLink(send, shards=shards, slots=slots, most_open=max(1, descriptors // CALLER_SHARDS_SHARE))

    def has_room(self) -> bool:
        """Whether the caller holds no task."""
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
        """Do nothing: the caller answers a task of an abandoned epoch without doing it."""

    def fix_layout(self, layout: bytes) -> None:
        """Set the layout of all later tasks."""
        self._send(LayoutFixed(layout), ())

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Close shards, except those worth keeping."""
        self.drop_shards(self._shards.finish(shards))

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Close shards."""
        self._link.drop_shards(shards)

    async def inspect(self) -> list[WorkerActivity]:
        """Nothing: the caller knows what it is doing."""
        return []

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Unmap slots."""
        self._link.forget_slots(slots)

    def close(self) -> None:
        """Do nothing: the caller closes what it has open."""
