"""One worker process as its pool sees it: what it has been given, and how to end it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from streamload.decode.tasks import Task
from streamload.launch import PROGRESS_BYTES, WorkerChild
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.mapped import map_memory

__all__ = ["PoolWorker"]


class PoolWorker:
    """A worker that has been launched.

    Args:
        number: in the pool.
        launched: its process, which is this object's from now on.
        on_message: told of each of its messages.
        on_lost: told when it is gone.

    Attributes:
        number: as given.
        started: it has said that it is ready.
        tasks: those that it holds, by number, the oldest first.
        shards: those that it has been given, with the version of each; the one used last comes last.
        slots: those that it has been given.
        channel: to it.
    """

    def __init__(
        self,
        number: int,
        launched: WorkerChild,
        on_message: Callable[[PoolWorker, Any], None],
        on_lost: Callable[[PoolWorker], None],
    ) -> None:
        self.number = number
        self.started = False
        self.tasks: OrderedDict[int, Task] = OrderedDict()
        self.shards: dict[int, tuple[int, int]] = {}
        self.slots: set[int] = set()
        self._ended: str | None = None
        self._child = launched.child
        self._progress = map_memory(launched.progress, PROGRESS_BYTES, writable=True).view("<i8")
        self._progress[:] = -1
        os.close(launched.progress)
        self.channel = AsyncChannel(
            launched.child.socket, lambda message, _: on_message(self, message), lambda: on_lost(self)
        )

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._child.process.pid

    def row_in_hand(self) -> tuple[int, int]:
        """The task and the row (or -1) that the worker was last at."""
        return int(self._progress[1]), int(self._progress[0])

    def end(self, grace_s: float) -> str:
        """Wait for the process, at most so long, kill it then, and say how it ended."""
        if self._ended is not None:
            return self._ended
        self.channel.close()
        self._ended = self._child.how_it_ended(self._child.end(grace_s))
        os.close(self._child.words)
        return self._ended
