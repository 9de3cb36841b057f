"""What a pool of workers can be asked, and what it tells its user, whatever the workers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamload.decode.tasks import BytesMoved, RowsDone, ScanDone, Task

__all__ = ["Pool", "PoolEvents"]


class PoolEvents(Protocol):
    """What a pool tells its user, in one thread; from within a call to the pool only the first three."""

    def is_wanted(self, task: Task) -> bool:
        """Whether anyone waits for a task that was in the hands of a worker that died; then it is done again."""

    def on_dropped(self, task: Task) -> None:
        """Such a task is not done again, and has no answer."""

    def may_redo(self, task: Task) -> bool:
        """Whether all is there that such a task needs; see `Pool.resume`."""

    def on_done(self, done: RowsDone | ScanDone) -> None:
        """A task is done."""

    def on_moved(self, moved: BytesMoved) -> None:
        """A worker has its own copy of these bytes."""

    def on_room(self) -> None:
        """There is room for tasks again."""

    def on_restarted(self) -> None:
        """A worker has died and was replaced."""

    def on_broken(self, error: Exception) -> None:
        """The pool cannot go on."""


class Pool(Protocol):
    """Whoever does tasks: processes, or the caller itself."""

    capacity: int
    """How many tasks it takes before it is full."""

    def has_room(self) -> bool:
        """Whether it takes a task now."""

    def submit(self, task: Task) -> None:
        """Take a task; its answer comes as an event."""

    @property
    def held_up(self) -> bool:
        """Whether there are tasks, and `PoolEvents.may_redo` holds up all of them."""

    def drop_unwanted(self) -> None:
        """Drop what is to be done again and is not wanted any more."""

    def abandon_unwanted(self) -> None:
        """An epoch was abandoned: see to it that its tasks don't keep those of the next one waiting for long."""

    def resume(self) -> None:
        """Something has come, or is not wanted any more: do again what `PoolEvents.may_redo` has held up."""

    def fix_layout(self, layout: bytes) -> None:
        """Hold for all later tasks."""

    def forget_shards(self, shards: Sequence[int]) -> None:
        """No later task of this epoch reads these."""

    def drop_shards(self, shards: Sequence[int]) -> None:
        """The memory of these is gone."""

    def forget_slots(self, slots: Sequence[int]) -> None:
        """No later task writes to these."""

    def close(self) -> None:
        """Leave nothing behind."""
