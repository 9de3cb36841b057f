"""The way to one worker: before a task it is sent the shards and the slots of it that it has not open yet."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from streamload.decode.row_table import shards_of
from streamload.decode.tasks import ForgetShards, ForgetSlots, ScanTask, ShardOpened, SlotOpened, Task
from streamload.fetch.resident import ResidentShards
from streamload.memory.slots import SlotPool

__all__ = ["WorkerLink"]


class WorkerLink:
    """What one worker holds: its tasks, and what it has open for them.

    Args:
        send: sends it a message with descriptors, which it closes.
        shards: opens shards.
        slots: whose descriptors the worker gets; None for a worker that has their memory already.
        most_open: how many shards the worker keeps open; it has more only where one task needs them.

    Attributes:
        tasks: those that it holds, by number, the oldest first.
    """

    def __init__(
        self,
        send: Callable[[Any, Sequence[int]], None],
        *,
        shards: ResidentShards,
        slots: SlotPool | None,
        most_open: int,
    ) -> None:
        self.tasks: OrderedDict[int, Task] = OrderedDict()
        self._send = send
        self._shards = shards
        self._slots = slots
        self._most_open = most_open
        self._open: dict[int, tuple[int, int]] = {}  # by shard its version; the most recently used last
        self._mapped: set[int] = set()

    def give(self, task: Task) -> None:
        """Send a task, and before it what it needs.

        Raises:
            ShardNotFoundError, ShardChangedError, StorageError: as `ResidentShards.open`.
        """
        shards = [task.shard] if isinstance(task, ScanTask) else shards_of(task.table.shards)
        self._spare_descriptors(shards)
        for shard in shards:
            self._shards.need(shard)
            version = self._shards.version(shard)
            if self._open.get(shard) != version:
                opened = self._shards.open(shard)
                self._send(ShardOpened(shard, opened.url, opened.size_bytes), [opened.descriptor])
                self._open[shard] = version  # only now: one that cannot be opened is tried again
            self._open[shard] = self._open.pop(shard)  # the most recently used
        if self._slots is not None and not isinstance(task, ScanTask):
            for piece in task.pieces:
                if piece.slot not in self._mapped:
                    self._mapped.add(piece.slot)
                    self._send(SlotOpened(piece.slot), [os.dup(self._slots.descriptor(piece.slot))])
        self.tasks[task.number] = task
        self._send(task, ())

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Have the worker close shards, after the tasks that it holds."""
        known = tuple(shard for shard in shards if self._open.pop(shard, None) is not None)
        if known:
            self._send(ForgetShards(known), ())

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Have the worker unmap slots, after the tasks that it holds."""
        known = tuple(slot for slot in slots if slot in self._mapped)
        if known:
            self._mapped.difference_update(known)
            self._send(ForgetSlots(known), ())

    def _spare_descriptors(self, shards: Collection[int]) -> None:
        """Have the worker close its least recently used shards, so that it can open those of a task."""
        wanted = set(shards)
        others = [shard for shard in self._open if shard not in wanted]
        self.drop_shards(others[: max(0, len(others) + len(shards) - self._most_open)])
