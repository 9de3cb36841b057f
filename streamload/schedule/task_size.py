"""How much work makes a task: a part of one slow batch, or a run of several fast ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MAX_RUN_ROWS", "TaskSize", "task_size"]

_TASK_S = 0.010
_LONGEST_PART_S = 0.100
_RUN_BYTES = 20 << 20
_BATCHES_IN_FLIGHT = 512

MAX_RUN_ROWS = 16_384
"""The most rows of a run of batches; a block of the plan has so many."""


@dataclass(frozen=True, slots=True)
class TaskSize:
    """What the next tasks look like; at least one of `parts` and `run` is 1.

    Attributes:
        parts: into how many tasks a batch is cut.
        run: how many batches make a task.
        outstanding: how many batches may be in flight or waiting for the loop.
    """

    parts: int
    run: int
    outstanding: int


def task_size(
    row_s: float | None, batch_rows: int, slot_bytes: int, *, capacity: int, prefetch_batches: int, whole: bool
) -> TaskSize:
    """Tasks of about ten milliseconds, or more where a batch takes long.

    A slow batch is cut, so that all workers are at the same one: it comes early, and a slow sample delays only its own
    batch. Every task costs time by itself, most of it in caches that have grown cold, so parts may grow to 100 ms as
    long as each worker gets one of every batch. Fast batches make a run: a message costs little beside its work.

    No worker may stand idle: each has a task in hand and one waiting, whatever that is in batches. So more than
    `prefetch_batches` are in flight where batches are small or made whole. A run is held to 20 MiB, so all that is
    in flight to 20 MiB for each task and two more.

    Args:
        row_s: seconds of a worker for one row; None where nothing is known yet: then a batch is cut for everyone.
        batch_rows: rows of a batch.
        slot_bytes: of the slot of a batch.
        capacity: tasks that the workers hold together, two for each.
        prefetch_batches: how many batches are to be made ahead, at least.
        whole: a batch must not be cut.
    """
    tasks = capacity + 2
    batch_s = (row_s or 0.0) * batch_rows
    run = parts = 1
    if row_s is None:
        parts = 1 if whole else min(batch_rows, capacity)
    elif batch_s > _TASK_S and not whole:
        one_for_each = min(max(1, capacity // 2), math.ceil(batch_s / _TASK_S))
        parts = min(batch_rows, max(one_for_each, math.ceil(batch_s / _LONGEST_PART_S)))
    elif batch_s > 0:
        by_number = _BATCHES_IN_FLIGHT // tasks
        by_time = int(min(_TASK_S / batch_s, by_number))
        run = max(1, min(by_time, by_number, _RUN_BYTES // slot_bytes, MAX_RUN_ROWS // batch_rows))
    return TaskSize(parts, run, max(prefetch_batches, -(-run * tasks // parts)))
