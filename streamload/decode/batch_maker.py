"""Run a worker's tasks: make rows, collate them and write batches to slots; and scan shards."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    UnreadableError,
    choose_rows,
    describe_batch,
    describe_rows,
    dump_values,
    is_tensor_class,
    slot_views,
    store_values,
    torch_collate,
    write_rows,
)
from streamload.decode.failure import Attempt, failure_here, failure_of, in_words
from streamload.decode.field_reader import OpenShards, Progress, Work
from streamload.decode.rows import RowMaker
from streamload.decode.seeding import UnseededError
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
from streamload.tar.table import MISSING

_IMAGES = re.compile(r"uint8\[\d+, \d+, 3] uint8\[\d+, \d+, 3]$")
_RESIZE = " (images with streamload.images.Resize((224, 224)), say)"

# Maximum depth to compare samples to; also stops at samples that contain themselves.
_LEVELS = 6

# Raised for rows that differ, that hold classes only torch knows, or that are nested too deeply.
_RAGGED = (LayoutMismatchError, TypeError, RecursionError)

# Separates the draws of a `collate_fn` from those of the batch's first sample.
_COLLATE_STREAM = 1 << 40


def _missing_key(
    rows: Rows, names: Sequence[str] | None = None, fields: Collection[str] = ()
) -> tuple[int, str | None, str] | None:
    """Find a mapping's key that not all samples have.

    torch's `default_collate` takes the first sample's keys and would silently drop keys that only others have.

    Args:
        rows: the samples.
        names: the samples' keys, if known.
        fields: the stored fields, if the samples are dicts of them.

    Returns:
        The row that lacks the key, the key if it is a field, and a message.
    """
    for number, place, one, other, _ in _pairs(rows, range(1, rows.count)):
        if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() != other.keys():
            key = next(key for key in (*one, *other) if key not in one or key not in other)
            lacks, has = (number, 0) if key in one else (0, number)
            which = f"number {has}" if names is None else f"sample {names[has]!r}"
            is_field = key in fields and not place
            message = (
                f"it has no {'field' if is_field else 'key'} {key!r}{place}, which {which} of its batch has; "
                f"{'name the fields that all samples have in fields=, ' if is_field else ''}make the samples alike in "
                "transform=, or give a collate_fn="
            )
            return lacks, str(key) if is_field else None, message
    return None


def _difference_between(rows: Rows, fields: Sequence[str]) -> tuple[int, str]:
    """Return a row that cannot be in the batch, and the reason; an empty reason if all rows fit."""
    for number, place, one, other, levels in _pairs(rows, range(1, rows.count), fields):
        mine = _items(one)
        if levels and mine and type(one) is type(other) and mine.keys() == _items(other).keys():
            continue  # their items are compared next
        outlines = _outline(one, levels), _outline(other, levels)
        if outlines[0] != outlines[1]:
            images = _RESIZE if _IMAGES.match(" ".join(outlines)) else ""
            return number, (
                f"it is not like the first of its batch{place}: that is {outlines[0]}, this is {outlines[1]}; "
                f"make samples alike in transform={images}, name the fields in fields=, or give a collate_fn="
            )
    for _, place, value, _, levels in _pairs(rows, [0], fields):
        if isinstance(value, Mapping | tuple | list):
            continue
        try:
            describe_rows(value)
        except TypeError:
            return 0, (
                f"it holds {_outline(value, levels)}{place}, of which no tensor is made; "
                "convert it in decode= or transform=, leave it out of fields=, or give a collate_fn="
            )
    return 0, ""


def _pairs(rows: Rows, numbers: Iterable[int], fields: Sequence[str] = ()) -> Iterator[tuple[int, str, Any, Any, int]]:
    """Yield each place that some rows share with the first, such as " in ['boxes'][0]", with both values.

    Tuples of fields are compared by field name.
    """

    def named(number: int) -> Any:
        row = rows.row(number, alike=True)
        return row if rows.columns is None or rows.keys is not None else dict(zip(fields, row, strict=False)) or row

    for number in numbers:
        for place, *values in _common_places(named(0), named(number)):
            yield number, f" in {place}" if place else "", *values


def _common_places(one: Any, other: Any, place: str = "", levels: int = _LEVELS) -> Iterator[tuple[str, Any, Any, int]]:
    """Yield each place that two samples share, outer ones first, with the levels left."""
    yield place, one, other, levels
    if levels:
        theirs = _items(other)
        for key, value in _items(one).items():
            if key in theirs:
                yield from _common_places(value, theirs[key], f"{place}[{key!r}]", levels - 1)


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, tuple | list) else {}


def _outline(value: Any, levels: int) -> str:
    if isinstance(value, np.ndarray | np.generic) or is_tensor_class(type(value)):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping | tuple | list) and levels == 0:
        return "..."
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_outline(item, levels - 1)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_outline(item, levels - 1) for item in value) + ")"
    if isinstance(value, int) and value.bit_length() > 63:
        return "an integer of more than 64 bits"
    return "None" if value is None else type(value).__name__


def _delayed_s() -> float:
    """Return how long, in seconds, the main thread has waited for a CPU while ready to run; 0 if unknown."""
    with suppress(OSError, IndexError), open("/proc/self/schedstat", "rb", buffering=0) as file:
        return int(file.read(64).split()[1]) / 1e9
    return 0.0


class TaskRunner:
    """Run the tasks of one worker, one at a time, with the shards and slots that the pool has opened for it.

    Most batches of a job share a layout, so rows are written in place as they are made, by the layout of the previous
    batch. A batch that does not fit gets its own layout.

    Args:
        job: the user's functions and options.
        in_callers_process: as for `RowMaker`; also, shards are not mapped as a whole, see `OpenShards`.

    Attributes:
        rows: the `RowMaker`.
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
        """Handle a message of the pool; return the answer if it is a task.

        Raises only interrupts, and in the caller's process exits.

        Args:
            message: from the pool.
            descriptors: sent with the message; owned by this object from now on.
            progress: receives the current row and task.
            waited_s: how long the worker waited for the message.
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
                    found = tuple(_scanned(message, shard, self._shards) for shard in message.shards)
                    done = ScanDone(message.number, found, TaskCosts(scan=perf_counter() - started_s))
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
        """Close all shards and slots."""
        self._shards.close()
        self._slots.close()

    def _make_batches(self, task: RowTask, progress: Progress, *, may_stay_stored: bool = True) -> RowsDone:
        placed = self._last_layout
        try:
            with self.rows.seeds.whole_task():
                made = self.rows.make(
                    task.table,
                    self._shards,
                    self._random(task.epoch),
                    keys=task.keys,
                    untried=task.untried,
                    progress=progress,
                    blocks={} if placed is None else self._blocks(task, placed),
                    may_stay_stored=may_stay_stored,
                )
                started = perf_counter()
                done, start = [], 0
                for batch in task.batches:
                    done.append(self._batch(task, batch, start, made, placed))
                    start += batch.rows
        except UnreadableError:  # read again row by row, so that only the bad row fails
            return self._make_batches(task, progress, may_stay_stored=False)
        except UnseededError:  # torch is loaded now, so the second run seeds it
            return self._make_batches(task, progress, may_stay_stored=may_stay_stored)
        collate_s, named = perf_counter() - started, made.named_s
        decode_s, transform_s = (
            sum(seconds for name, seconds in named.items() if name.startswith(stage))
            for stage in ("decode_s/", "transform_s/")
        )
        costs = TaskCosts(decode=decode_s, transform=transform_s, collate=collate_s, named=named)
        payload_bytes = sum(int(column.sizes.clip(0).sum()) for column in made.columns)
        return RowsDone(task.number, tuple(done), len(task.table), payload_bytes, costs)

    def _random(self, epoch: int) -> SampleRandomness:
        if self._randomness is None or self._randomness[0] != epoch:
            self._randomness = epoch, SampleRandomness(self._job.seed, epoch)
        return self._randomness[1]

    def _blocks(self, task: RowTask, placed: Layout) -> dict[int, list[NDArray[Any]]]:
        """Return the slots' memory for array values of rows."""
        if not isinstance(placed.tree, MappingNode | SequenceNode):
            return {}
        views = []
        for batch in task.batches:
            layout, _ = _with_capacity(placed, batch.rows)
            views.append(slot_views(layout, self._slots.at_least(batch.slot, layout.size_bytes), batch.rows))
        return {
            number: [of_batch[leaf.number] for of_batch in views]
            for number, leaf in enumerate(placed.tree.children)
            if isinstance(leaf, ArrayLeaf) and leaf.torch_dtype is None
        }

    def _batch(self, task: RowTask, batch: BatchSlot, start: int, made: Work, placed: Layout | None) -> BatchDone:
        end, failed = start + batch.rows, made.failures
        failures = tuple([failed[row] for row in range(start, end) if row in failed]) if failed else ()
        rows = made.rows.slice(start, end)
        chosen: Sequence[int] = range(rows.count)
        if failures:
            chosen = choose_rows(rows.count, {row - start for row in failed}, self._job.on_error)
            if not chosen or self._job.on_error == "raise" or any(failure.fatal for failure in failures):
                return BatchDone(failures=failures)
            rows = rows.take(chosen)
        collate_fn, returned = self._job.collate_fn, False
        with Attempt(exits=not self._in_callers_process) as attempt:
            if collate_fn is None:
                return self._collate(batch, rows, placed)._replace(failures=failures)
            first = task.table.values[start, :3].tolist()
            self.rows.seeds.seed(self._random(task.epoch), first[0] + _COLLATE_STREAM, *first[1:])
            collated = collate_fn(rows.as_list())
            returned = True
            return self._write(batch, collated, rows.count)._replace(failures=failures)
        assert attempt.error is not None
        if isinstance(attempt.error, UnreadableError):
            raise attempt.error
        if collate_fn is None:
            failure = self._not_collated(task, [start + row for row in chosen], rows, attempt.error)
        else:
            happened = "returned what cannot be sent to the training process:" if returned else "raised"
            message = f"collate_fn {happened} {in_words(attempt.error)} (for the batch that begins with this sample)"
            failure = _batch_failure(task, start, message, cause=self._failure_of(attempt.error))
        return BatchDone(failures=(*failures, failure))

    def _not_collated(self, task: RowTask, task_rows: Sequence[int], rows: Rows, error: Exception) -> RowFailure:
        """Return the failure of the row that prevents collation, else of the first; `error` is torch's."""
        names = None if task.keys is None else [task.keys[row] for row in task_rows]
        fields = () if self._job.fields is not None else [column.name for column in task.table.columns()]
        missing = _missing_key(rows, names, fields)
        if missing is not None:
            row, field, message = missing
            return _batch_failure(task, task_rows[row], message, field=field)
        named = self._job.fields or ()
        row, difference = 0, _optional_numbers(rows, named)
        if difference is None:
            row, difference = _difference_between(rows, named)
        if difference:  # torch's message says less, in a page of frames
            return _batch_failure(task, task_rows[row], f"this sample cannot be collated: {difference}")
        message = f"the batch that begins with this sample cannot be collated: {in_words(error)}"
        return _batch_failure(task, task_rows[0], message, cause=self._failure_of(error))

    def _collate(self, batch: BatchSlot, rows: Rows, placed: Layout | None) -> BatchDone:
        """Write rows by a common layout; leave others to torch, which collates them or raises."""
        if placed is not None and placed is self._last_layout:
            with suppress(LayoutMismatchError):
                layout, pickled = _with_capacity(placed, batch.rows)
                columns = write_rows(layout, rows, self._slots.at_least(batch.slot, layout.size_bytes))
                return self._finish(batch, layout, pickled, columns, rows.count)
        try:
            layout = replace(describe_rows(rows.row(0, alike=True)), capacity=batch.rows)
            memory = np.empty(layout.size_bytes, np.uint8)  # values may lie in the slot, in another layout
            columns = write_rows(layout, rows, memory)
        except _RAGGED:
            if _missing_key(rows) is not None:
                raise
            return self._write(batch, torch_collate(rows), rows.count)
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


@lru_cache(64)
def _with_capacity(layout: Layout, capacity: int) -> tuple[Layout, bytes]:
    layout = replace(layout, capacity=capacity)
    return layout, dump_values(layout)


def _scanned(task: ScanTask, shard: int, shards: OpenShards) -> ScannedShard:
    with Attempt() as attempt:
        (url, size_bytes), descriptor = shards.listed(shard), shards.descriptors[shard]
        if task.available is None:
            return ScannedShard(shard, scan_file(descriptor, size_bytes, url))
        # Safe to map in any process: a shard that is still arriving lies in memory or our own file, never truncated.
        data = map_memory(descriptor, task.available, writable=False)[task.start : max(task.start, task.available)]
        return ScannedShard(shard, piece=scan_piece(data, url, start=task.start, total=task.total))
    assert attempt.error is not None
    return ScannedShard(shard, failure=failure_of(attempt.error))


def _optional_numbers(rows: Rows, fields: Sequence[str]) -> str | None:
    """Explain that an optional field of numbers or arrays is missing in a batch; None otherwise."""
    for place in sorted(rows.optional):
        assert rows.columns is not None
        if any(value is None for value in rows.columns[place]):
            return (
                f"a sample lacks the optional field {fields[place]!r}, and None goes with strings and bytes alone; "
                "have a transform of whole samples put a value in its place, or leave such samples out, as in "
                f"where='\"{fields[place]}\"'"
            )
    return None


def _batch_failure(
    task: RowTask, task_row: int, message: str, *, field: str | None = None, cause: Failure | None = None
) -> RowFailure:
    shard, sample = task.table.values[task_row, :2].tolist()
    return RowFailure(
        kind="CollateError",
        message=message,
        field=field,
        fatal=True,
        cause=cause,
        shard=shard,
        sample=sample,
        offset=MISSING,
        stored_in=shard,
    )
