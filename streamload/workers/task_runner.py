"""Does what a pool sends: in a worker's process, or in the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamload.decode.batch_maker import BatchMaker, DelayCounter, TaskClock
from streamload.decode.failure import Attempt, failure_of
from streamload.decode.field_reader import OpenShards, Progress
from streamload.decode.tasks import (
    ForgetShards,
    ForgetSlots,
    Job,
    RowsDone,
    RowTask,
    ScanDone,
    ScannedShard,
    ScanTask,
    ShardsOpened,
    SlotOpened,
)
from streamload.memory.slots import HeapSlots, MappedSlots
from streamload.tar.scan import scan_file, scan_piece


def scan(task: ScanTask, shards: OpenShards, clock: TaskClock | None = None) -> ScanDone:
    """Read the headers of shards, or of the part of one that has arrived."""
    clock = clock or TaskClock()
    found = tuple(_scanned(task, shard, shards) for shard in task.shards)
    costs = clock.costs()
    return ScanDone(task.number, found, costs._replace(scan=costs.whole))


def _scanned(task: ScanTask, shard: int, shards: OpenShards) -> ScannedShard:
    with Attempt() as attempt:
        url = shards.url(shard)
        if task.available is None:
            table = scan_file(shards.descriptor(shard), shards.size_bytes(shard), url)
            return ScannedShard(shard, table)
        data = shards.first_bytes(shard, task.available)[task.start : max(task.start, task.available)]
        piece = scan_piece(data, url, start=task.start, total=task.total)
        return ScannedShard(shard, piece=piece)
    assert attempt.error is not None
    return ScannedShard(shard, failure=failure_of(attempt.error))


class TaskRunner:
    """Keeps what a pool has opened for one worker, and does that worker's tasks, one at a time.

    Args:
        job: what the user wants of a sample and of a batch.
        heap: where batches are written, if the worker shares its memory with the pool; else slots are opened for it.
        in_callers_process: as for `RowMaker`; and no shard is mapped as a whole, see `OpenShards`.

    Attributes:
        maker: of rows and batches.
    """

    def __init__(
        self,
        job: Job,
        heap: HeapSlots | None = None,
        *,
        in_callers_process: bool = False,
    ) -> None:
        self._delays = None if in_callers_process else DelayCounter()
        self._slots = MappedSlots()
        self._shards = OpenShards(maps=not in_callers_process)
        self.maker = BatchMaker(job, self._slots if heap is None else heap, in_callers_process=in_callers_process)

    def handle(
        self, message: Any, descriptors: Sequence[int], progress: Progress, waited_s: float = 0.0
    ) -> RowsDone | ScanDone | None:
        """Do what one message says; the answer, if it is a task.

        Only interrupts are raised, and in the caller's process exits.

        Args:
            message: from the pool.
            descriptors: that came with it; they are closed here.
            progress: where the current task and row are noted.
            waited_s: how long the message was waited for.
        """
        match message:
            case RowTask():
                progress[1] = message.number
                return self.maker.run(message, self._shards, progress, TaskClock(waited_s, self._delays))
            case ScanTask():
                progress[0], progress[1] = -1, message.number
                return scan(message, self._shards, TaskClock(waited_s, self._delays))
            case ShardsOpened():
                for opened, descriptor in zip(message.shards, descriptors, strict=True):
                    self._shards.add(opened, descriptor)
            case SlotOpened():
                self._slots.add(message.slot, descriptors[0])
            case ForgetShards():
                self._shards.drop(message.shards)
            case ForgetSlots():
                for slot in message.slots:
                    self._slots.drop(slot)
        return None

    def close(self) -> None:
        """Close all shards and slots. Idempotent."""
        self._shards.close()
        self._slots.close()
        if self._delays is not None:
            self._delays.close()
