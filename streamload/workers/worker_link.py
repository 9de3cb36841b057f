"""Tasks of one worker; before a task it is sent the shards and the slots that it has not open yet."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any

from streamload.decode.tasks import Forget, ScanTask, ShardsOpened, SlotOpened, Task
from streamload.fetch.resident import OpenShard, ResidentShards
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.memory.slots import SlotPool


class WorkerLink:
    """What one worker holds: its tasks, and what it has open for them.

    Attributes:
        tasks: by number, the oldest first.
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
        self._open: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by shard its version; the latest used last
        self._mapped: set[int] = set()

    def give(self, task: Task) -> None:
        """Send a task, and before it what it needs.

        Raises:
            ShardNotFoundError, ShardChangedError, StorageError: as `ResidentShards.open`.
        """
        shards = list(task.shards) if isinstance(task, ScanTask) else task.table.read_shards()
        self._spare_descriptors(shards)
        versions = self._shards.need(shards)
        closed = [shard for shard, version in versions.items() if self._open.get(shard) != version]
        for start in range(0, len(closed), MAX_DESCRIPTORS):
            self._open_shards(closed[start : start + MAX_DESCRIPTORS])
        for shard in shards:
            self._open.move_to_end(shard)
        if self._slots is not None and not isinstance(task, ScanTask):
            for slot, _ in task.batches:
                if slot not in self._mapped:
                    self._mapped.add(slot)
                    self._send(SlotOpened(slot), [os.dup(self._slots.descriptor(slot))])
        self.tasks[task.number] = task
        self._send(task, ())

    def _open_shards(self, shards: Sequence[int]) -> None:
        """Send the descriptors of shards by one message, also of those before one that cannot be opened."""
        opened: list[OpenShard] = []
        try:
            for shard in shards:
                opened.append(self._shards.open(shard))
        finally:
            known = shards[: len(opened)]
            message = ShardsOpened(
                tuple(known), tuple(each.url for each in opened), tuple(each.size_bytes for each in opened)
            )
            self._send(message, [each.descriptor for each in opened])
            self._open.update(self._shards.versions(known))

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Have the worker close shards, after the tasks that it holds."""
        known = tuple(shard for shard in shards if self._open.pop(shard, None) is not None)
        if known:
            self._send(Forget(shards=known), ())

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Have the worker unmap slots, after the tasks that it holds."""
        known = tuple(slot for slot in slots if slot in self._mapped)
        if known:
            self._mapped.difference_update(known)
            self._send(Forget(slots=known), ())

    def _spare_descriptors(self, shards: Collection[int]) -> None:
        """Have the worker close its least recently used shards, so that it can open those of a task."""
        wanted = set(shards)
        n_open = len(self._open) + sum(shard not in self._open for shard in wanted)
        if n_open > self._most_open:  # there may be thousands, so not all of them are looked at for every task
            others = (shard for shard in self._open if shard not in wanted)
            self.drop_shards([*islice(others, n_open - self._most_open)])
