"""Run a worker's tasks: scan shards, or make rows, collate them and write batches to slots."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.collate import (
    ArrayLeaf,
    Layout,
    LayoutMismatchError,
    MappingNode,
    Rows,
    SequenceNode,
    choose_rows,
    describe_batch,
    describe_rows,
    dump_values,
    outline,
    slot_views,
    store_values,
    torch_collate,
    write_rows,
)
from streamload.decode.failure import Attempt, failure_here, failure_of, in_words
from streamload.decode.field_reader import OpenShards, Progress, Work
from streamload.decode.rows import RowMaker, UnseededError
from streamload.decode.tasks import (
    BatchDone,
    BatchSlot,
    Failure,
    Forget,
    Job,
    RowFailure,
    RowsDone,
    RowTask,
    ScanDone,
    ScannedShard,
    ScanTask,
    ShardsOpened,
    SlotOpened,
    TaskCosts,
)
from streamload.memory.mapped import map_memory
from streamload.memory.slots import MappedSlots
from streamload.order.randomness import SampleRandomness
from streamload.tar.scan import scan_file, scan_piece

_IMAGES = re.compile(r"uint8\[\d+, \d+, 3] uint8\[\d+, \d+, 3]$")
_RESIZING = " (images with streamload.images.Resize((224, 224)), say)"
_MIXED = " (None mixes only with strings and bytes)"
_WITHOUT_TENSOR = {"None", "str", "bytes"}
_MISSING = type("missing", (), {})()  # stands for a key or an item that only the other sample has

# Maximum depth of a comparison, since a container in a sample may contain itself.
_LEVELS = 6

# Errors after which torch collates the rows: they differ, hold values that only torch may know, or are nested deeply.
_LEFT_TO_TORCH = (LayoutMismatchError, TypeError, RecursionError)

# Separates the draws of a `collate_fn` from those of the batch's first sample.
_COLLATE_STREAM = 1 << 40


class TaskRunner:
    """Run the tasks of one worker, one at a time, on the shards and slots of the pool.

    Most batches of a job share a layout, so rows are written in place, in the layout of the previous batch. A batch
    that does not fit gets a layout of its own.

    `in_callers_process` is as for `RowMaker`; shards are then not mapped, see `OpenShards`.
    """

    def __init__(self, job: Job, *, in_callers_process: bool = False) -> None:
        self.rows = RowMaker(job, in_callers_process=in_callers_process)
        self._job = job
        self._in_callers_process = in_callers_process
        self._failure_of = failure_here if in_callers_process else failure_of
        self._slots = MappedSlots()
        self._shards = OpenShards(maps=not in_callers_process)
        self._last_layout: Layout | None = None
        self._randomness: tuple[int, SampleRandomness] | None = None

    def handle(
        self, message: Any, descriptors: Sequence[int], progress: Progress, waited_s: float = 0.0
    ) -> RowsDone | ScanDone | None:
        """Handle a message of the pool; return the answer to a task.

        Raises only KeyboardInterrupt and, in the caller's process, SystemExit. The message's `descriptors` belong to
        this object from now on. `progress` is set to the current row and task.
        """
        match message:
            case RowTask() | ScanTask():
                progress[0], progress[1] = -1, message.number
                delayed_s = 0.0 if self._in_callers_process else _delayed_s()
                processor_s, started_s = thread_time(), perf_counter()
                done: RowsDone | ScanDone
                if isinstance(message, RowTask):
                    done = self._make_batches(message, progress)
                else:
                    scans = tuple(_scanned(message, shard, self._shards) for shard in message.shards)
                    done = ScanDone(message.number, scans, TaskCosts(scan=perf_counter() - started_s))
                costs = done.costs._replace(
                    started=started_s,
                    process=os.getpid(),
                    waited=waited_s,
                    busy=perf_counter() - started_s,
                    processor=thread_time() - processor_s,
                    delayed=0.0 if self._in_callers_process else _delayed_s() - delayed_s,
                )
                return done._replace(costs=costs)
            case ShardsOpened():
                for opened in zip(*message, descriptors, strict=True):
                    self._shards.add(*opened)
            case SlotOpened():
                self._slots.add(message.slot, descriptors[0])
            case Forget():
                self._shards.drop(message.shards)
                for slot in message.slots:
                    self._slots.drop(slot)
        return None

    def close(self) -> None:
        """Close all shards and slots, and the event loop of user functions."""
        self.rows.close()
        self._shards.close()
        self._slots.close()

    def _make_batches(self, task: RowTask, progress: Progress) -> RowsDone:
        expected = self._last_layout
        try:
            with self.rows.seeds.whole_task():
                work = self.rows.make(
                    task.table,
                    self._shards,
                    self._random(task.epoch),
                    keys=task.keys,
                    untried=task.untried,
                    progress=progress,
                    blocks={} if expected is None else self._blocks(task, expected),
                )
                started = perf_counter()
                done, start = [], 0
                for batch in task.batches:
                    done.append(self._batch(task, batch, start, work, expected))
                    start += batch.rows
        except UnseededError:  # torch is loaded now, so the second run seeds it
            return self._make_batches(task, progress)
        collate_s, named_s = perf_counter() - started, work.named_s
        decode_s, transform_s = (
            sum(seconds for name, seconds in named_s.items() if name.startswith(stage))
            for stage in ("decode_s/", "transform_s/")
        )
        costs = TaskCosts(decode=decode_s, transform=transform_s, collate=collate_s, named=named_s)
        payload_bytes = sum(int(column.sizes.clip(0).sum()) for column in work.columns)
        return RowsDone(task.number, tuple(done), len(task.table), payload_bytes, costs)

    def _random(self, epoch: int) -> SampleRandomness:
        if self._randomness is None or self._randomness[0] != epoch:
            self._randomness = epoch, SampleRandomness(self._job.seed, epoch)
        return self._randomness[1]

    def _blocks(self, task: RowTask, expected: Layout) -> dict[int, list[NDArray[Any]]]:
        """Return each batch's block of its slot for the arrays at the top of a row, by their position in the row.

        Arrays of a dtype that NumPy lacks are left out.
        """
        if not isinstance(expected.tree, MappingNode | SequenceNode):
            return {}
        views = []
        for batch in task.batches:
            layout, _ = _with_capacity(expected, batch.rows)
            views.append(slot_views(layout, self._slots.at_least(batch.slot, layout.size_bytes), batch.rows))
        return {
            number: [arrays[leaf.number] for arrays in views]
            for number, leaf in enumerate(expected.tree.children)
            if isinstance(leaf, ArrayLeaf) and leaf.torch_dtype is None
        }

    def _batch(self, task: RowTask, batch: BatchSlot, start: int, work: Work, expected: Layout | None) -> BatchDone:
        end, failed = start + batch.rows, work.failures
        failures = tuple([failed[row] for row in range(start, end) if row in failed]) if failed else ()
        rows = work.rows.slice(start, end)
        chosen: Sequence[int] = range(rows.count)
        if failures:
            chosen = choose_rows(rows.count, {row - start for row in failed}, self._job.on_error)
            if not chosen or self._job.on_error == "raise" or any(failure.fatal for failure in failures):
                return BatchDone(failures=failures)
            rows = rows.take(chosen)
        collate_fn, returned = self._job.collate_fn, False
        with Attempt(exits=not self._in_callers_process) as attempt:
            if collate_fn is None:
                return self._collate(batch, rows, expected)._replace(failures=failures)
            first = task.table.values[start, :3].tolist()
            self.rows.seeds.seed(self._random(task.epoch), first[0] + _COLLATE_STREAM, *first[1:])
            collated = collate_fn(rows.as_list())
            returned = True
            return self._write(batch, collated, rows.count)._replace(failures=failures)
        assert attempt.error is not None
        if collate_fn is None:
            failure = self._not_collated(task, [start + row for row in chosen], rows, attempt.error)
        else:
            problem = "returned a value that cannot be sent to the training process:" if returned else "raised"
            message = f"collate_fn {problem} {in_words(attempt.error)} (for the batch that begins with this sample)"
            failure = _batch_failure(task, start, message, cause=self._failure_of(attempt.error))
        return BatchDone(failures=(*failures, failure))

    def _not_collated(self, task: RowTask, task_rows: Sequence[int], rows: Rows, error: Exception) -> RowFailure:
        """Return the failure of the first row that differs from row 0, or of row 0 if none does.

        `rows` is the batch, `task_rows` the number of each row in the task, and `error` the exception.
        """
        fields = self._job.fields
        first, *others = samples = rows.as_list()
        if fields is not None and rows.columns is not None:
            first, *others = [dict(zip(fields, sample, strict=True)) for sample in samples]
        for task_row, other in zip(task_rows[1:], others, strict=True):
            # Torch leaves strings and bytes in a list, even if their types are mixed.
            differences = [each for each in _differences(first, other) if not _WITHOUT_TENSOR.issuperset(each[1])]
            if differences:
                place, pair = min(differences, key=lambda each: "missing" not in each[1])
                which = "the first" if task.keys is None else f"sample {task.keys[task_rows[0]]!r}, the first"
                advice = _RESIZING if _IMAGES.match(" ".join(pair)) else _MIXED if "None" in pair else ""
                message = (
                    f"this sample cannot be collated: it is not like {which} of its batch{place and f' in {place}'}: "
                    f"the first is {pair[0]}, this one is {pair[1]}; make samples alike in transform={advice}, limit "
                    "fields= to those that all samples have, or give a collate_fn="
                )
                return _batch_failure(task, task_row, message)
        try:
            describe_rows(first)
        except TypeError as refusal:  # its message says more than torch's
            return _batch_failure(task, task_rows[0], f"this sample cannot be collated: {refusal}")
        except RecursionError:
            pass
        message = f"the batch that begins with this sample cannot be collated: {in_words(error)}"
        return _batch_failure(task, task_rows[0], message, cause=self._failure_of(error))

    def _collate(self, batch: BatchSlot, rows: Rows, expected: Layout | None) -> BatchDone:
        """Write rows that share a layout; let torch collate others, which may raise."""
        if expected is not None and expected is self._last_layout:
            with suppress(LayoutMismatchError):
                layout, pickled = _with_capacity(expected, batch.rows)
                columns = write_rows(layout, rows, self._slots.at_least(batch.slot, layout.size_bytes))
                return self._finish(batch, layout, pickled, columns, rows.count)
        try:
            layout = replace(describe_rows(rows.row(0, alike=True)), capacity=batch.rows)
            memory = np.empty(layout.size_bytes, np.uint8)  # not the slot: arrays of the rows may lie there
            columns = write_rows(layout, rows, memory)
        except _LEFT_TO_TORCH:
            first, *others = rows.as_list()
            if any("missing" in pair for other in others for _, pair in _differences(first, other)):
                raise  # torch takes the keys of the first sample, and would silently drop those of others
            return self._write(batch, torch_collate(rows.as_list()), rows.count)
        self._last_layout = layout
        self._slots.at_least(batch.slot, len(memory))[: len(memory)] = memory
        return self._finish(batch, layout, dump_values(layout), columns, rows.count)

    def _write(self, batch: BatchSlot, collated: Any, rows: int) -> BatchDone:
        layout, arrays, columns = describe_batch(collated)
        if arrays:
            memory = self._slots.at_least(batch.slot, layout.size_bytes)
            for view, array in zip(slot_views(layout, memory, None), arrays, strict=True):
                view[...] = array
        return self._finish(batch, layout, dump_values(layout), columns, rows)

    def _finish(
        self, batch: BatchSlot, layout: Layout, pickled: bytes, columns: Sequence[Sequence[Any]], rows: int
    ) -> BatchDone:
        values, size_bytes = store_values(columns, partial(self._slots.at_least, batch.slot), layout.size_bytes)
        return BatchDone(pickled, size_bytes, rows, values)


def _delayed_s() -> float:
    """Return how long, in seconds, the main thread has waited for a CPU while ready to run; 0 if unknown."""
    with suppress(OSError, IndexError), open("/proc/self/schedstat", "rb", buffering=0) as file:
        return int(file.read(64).split()[1]) / 1e9
    return 0.0


@lru_cache(64)
def _with_capacity(layout: Layout, capacity: int) -> tuple[Layout, bytes]:
    layout = replace(layout, capacity=capacity)
    return layout, dump_values(layout)


def _differences(
    first: Any, other: Any, place: str = "", levels: int = _LEVELS
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the places where two samples differ, such as "['boxes'][0]", with outlines of both values."""
    items, others = _items(first), _items(other)
    if items is not None and others is not None:
        for key in {**items, **others} if levels else ():
            pair = items.get(key, _MISSING), others.get(key, _MISSING)
            yield from _differences(*pair, f"{place}[{key!r}]", levels - 1)
    elif (outlines := (outline(first), outline(other)))[0] != outlines[1]:
        yield place, outlines


def _items(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, tuple | list) else None


def _scanned(task: ScanTask, shard: int, shards: OpenShards) -> ScannedShard:
    with Attempt() as attempt:
        (url, size_bytes), descriptor = shards.listed(shard), shards.descriptors[shard]
        if task.available is None:
            return ScannedShard(shard, scan_file(descriptor, size_bytes, url))
        # Safe to map in any process: an arriving shard lies in memory or in our own file, which is never truncated.
        data = map_memory(descriptor, task.available, writable=False)[task.start : max(task.start, task.available)]
        return ScannedShard(shard, piece=scan_piece(data, url, start=task.start, total=task.total))
    assert attempt.error is not None
    return ScannedShard(shard, failure=failure_of(attempt.error))


def _batch_failure(task: RowTask, task_row: int, message: str, *, cause: Failure | None = None) -> RowFailure:
    shard, sample = task.table.values[task_row, :2].tolist()
    return RowFailure("CollateError", message, fatal=True, shard=shard, sample=sample, stored_in=shard, cause=cause)
