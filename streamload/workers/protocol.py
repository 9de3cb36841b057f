"""The pool protocol: does tasks and reports events, whatever the workers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from streamload.decode.tasks import RowsDone, ScanDone, Task


class WorkerActivity(NamedTuple):
    """What a worker that has a task, or is starting, is doing.

    Attributes:
        name: of the worker, with its process.
        task: the current one; None while it starts.
        row: the current row; -1 before and after the rows.
        stopped: its process is stopped, by a signal or a debugger.
        stack: of its Python code, if known.
    """

    name: str
    task: Task | None
    row: int
    stopped: bool
    stack: str


class PoolEvents(Protocol):
    """Callbacks of a pool, in one thread; only the first two are called from within a call to the pool."""

    def is_wanted(self, task: Task) -> bool:
        """Return True if the task of a worker that died is still wanted; then it is done again."""

    def on_dropped(self, task: Task) -> None:
        """An unwanted task will have no result."""

    def on_done(self, done: RowsDone | ScanDone) -> None:
        """A task is done."""

    def on_room(self) -> None:
        """The pool takes tasks again."""

    def on_restarted(self) -> None:
        """A worker died and was replaced."""

    def on_broken(self, error: Exception) -> None:
        """The pool cannot go on."""


class Pool(Protocol):
    """Does tasks: worker processes, or the caller itself."""

    @property
    def capacity(self) -> int:
        """How many tasks it holds at most."""

    def has_room(self) -> bool:
        """Return True if it takes a task now."""

    def workers_with_tasks(self) -> tuple[int, int]:
        """Return how many workers there are, and how many of them have a task or are starting."""

    def submit(self, task: Task) -> None:
        """Take a task; its result comes as an event."""

    def drop_unwanted(self) -> None:
        """Drop the unwanted among the tasks that wait to be done again."""

    def abandon_unwanted(self) -> None:
        """Drop the tasks of an abandoned epoch, or bound the time for which they delay the next one's."""

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Close shards that no later task of this epoch reads."""

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Close shards whose memory is gone."""

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Unmap slots that no later task writes to."""

    async def inspect(self) -> list[WorkerActivity]:
        """Say what the workers are doing that have tasks, or are starting: those with the oldest task first."""

    def close(self) -> None:
        """End the workers and close what is open."""
