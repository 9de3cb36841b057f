"""Does a worker's tasks: makes the rows of whole batches, collates them, writes them to slots; and scans shards."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.batch_layout import (
    ArrayLeaf,
    Layout,
    MappingNode,
    Node,
    SequenceNode,
    describe_batch,
    describe_rows,
    is_tensor,
    slot_views,
)
from streamload.decode.collate import (
    LayoutMismatchError,
    ValueBlock,
    choose_rows,
    dump_values,
    torch_collate,
    write_rows,
)
from streamload.decode.columns import Rows, UnreadableError
from streamload.decode.failure import Attempt, failure_here, failure_of, in_words
from streamload.decode.field_reader import OpenShards, Progress, ShardReader
from streamload.decode.rows import MadeRows, RowMaker
from streamload.decode.seeding import UnseededError
from streamload.decode.tasks import (
    BatchDone,
    BatchSlot,
    Failure,
    ForgetShards,
    ForgetSlots,
    Job,
    RowFailure,
    RowsDone,
    RowTask,
    ScanDone,
    ScannedShard,
    ScanTask,
    ShardsOpened,
    SlotOpened,
    StoredColumn,
    TaskCosts,
)
from streamload.memory.slots import HeapSlots, MappedSlots, SlotMemory
from streamload.order.randomness import SampleRandomness
from streamload.tar.scan import scan_file, scan_piece
from streamload.tar.table import MISSING

_WHOSE: int = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # there are no figures of threads but on Linux


class DelayCounter:
    """For how long this process's main thread was ready to run, while others had the processors. Elsewhere than on
    Linux, and where the kernel does not count it, 0.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def delayed_s(self) -> float:
        """Seconds since the process began."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def close(self) -> None:
        """Close what is open. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class TaskClock:
    """Runs from its creation on.

    Args:
        waited_s: how long the task was waited for.
        delays: the counter of this process; None where delays are not wanted.
    """

    def __init__(self, waited_s: float = 0.0, delays: DelayCounter | None = None) -> None:
        self._waited_s = waited_s
        self._delays = delays
        self._delayed_s = 0.0 if delays is None else delays.delayed_s()
        self._usage = resource.getrusage(_WHOSE)
        self._started_s = perf_counter()

    def costs(self, **stages: Any) -> TaskCosts:
        """What the task has taken until now; the stages are given."""
        whole_s = perf_counter() - self._started_s
        begun, usage = self._usage, resource.getrusage(_WHOSE)
        return TaskCosts(
            started=self._started_s,
            process=os.getpid(),
            waited=self._waited_s,
            whole=whole_s,
            processor=usage.ru_utime + usage.ru_stime - begun.ru_utime - begun.ru_stime,
            delayed=0.0 if self._delays is None else self._delays.delayed_s() - self._delayed_s,
            **stages,
        )


_IMAGES = re.compile(r"uint8\[\d+, \d+, 3] uint8\[\d+, \d+, 3]$")
_RESIZE = " (images with streamload.images.Resize((224, 224)), say)"

# How deep samples are compared; the limit also ends with samples that contain themselves.
_LEVELS = 6


def difference_between(rows: Rows) -> str:
    """Why some samples cannot be a batch, for the message of an error.

    Places in a sample are written as in Python: `['boxes'][0]`. Empty if the samples are alike and hold only what can
    be collated.
    """
    first = rows.row_alike(0)
    for number in range(1, rows.count):
        found = _first_difference(first, rows.row_alike(number), "", _LEVELS)
        if found is not None:
            place, one, other = found
            images = _RESIZE if _IMAGES.match(f"{one} {other}") else ""
            return (
                f"its samples are not alike{_in(place)}: the first is {one}, number {number} is {other}; "
                f"make them alike in transform={images}, name the fields in fields=, or give a collate_fn="
            )
    strange = _strange_leaf(first, "", _LEVELS)
    if strange is None:
        return ""
    place, outline = strange
    return (
        f"its samples hold {outline}{_in(place)}, of which no tensor is made; "
        "convert it in decode= or transform=, leave it out of fields=, or give a collate_fn="
    )


class MissingKey(NamedTuple):
    """A sample lacks what another one of its batch has.

    Attributes:
        row: the row that lacks it.
        field: the key, if it is a field.
        message: for an error of that sample.
    """

    row: int
    field: str | None
    message: str


def find_missing_key(rows: Rows, names: Sequence[str] | None = None, fields: Collection[str] = ()) -> MissingKey | None:
    """Find a key of some mapping in the samples that not all of them have.

    torch's `default_collate` takes the first sample's keys and would silently drop what only others have.

    Args:
        rows: the samples.
        names: the samples' keys, where they are known.
        fields: the stored fields, where the samples are dicts of them.
    """
    first = rows.row_alike(0)
    for number in range(1, rows.count):
        found = _first_missing(first, rows.row_alike(number), "", _LEVELS)
        if found is not None:
            place, key, first_has_it = found
            lacks, has = (number, 0) if first_has_it else (0, number)
            which = f"number {has}" if names is None else f"sample {names[has]!r}"
            is_field = key in fields and not place
            return MissingKey(
                lacks,
                str(key) if is_field else None,
                f"it has no {'field' if is_field else 'key'} {key!r}{_in(place)}, which {which} of its batch has; "
                f"{_wanted_fields(rows) if is_field else 'make them alike in transform='}, or give a collate_fn=",
            )
    return None


def _first_missing(one: Any, other: Any, place: str, levels: int) -> tuple[str, Any, bool] | None:
    """The first place where only one of two samples has a key, the key, and whether the first sample has it."""
    mine, theirs = _items(one), _items(other)
    if isinstance(one, Mapping) and isinstance(other, Mapping) and mine.keys() != theirs.keys():
        key = next(key for key in (*mine, *theirs) if key not in mine or key not in theirs)
        return place, key, key in mine
    if not levels or not mine or not theirs:
        return None
    found = (_first_missing(mine[key], theirs[key], f"{place}[{key!r}]", levels - 1) for key in mine if key in theirs)
    return next((missing for missing in found if missing is not None), None)


def _wanted_fields(rows: Rows) -> str:
    common = [key for key in rows.row_alike(0) if all(key in rows.row_alike(number) for number in range(rows.count))]
    fields = ", ".join(repr(key) for key in common if key not in ("__key__", "__url__"))
    said = f" (those of this batch have {fields})" if fields else ""
    return f"name the fields that all samples have in fields={said}, make the samples alike in transform="


def _in(place: str) -> str:
    return f" in {place}" if place else ""


def _first_difference(one: Any, other: Any, place: str, levels: int) -> tuple[str, str, str] | None:
    """The first place where two samples differ, and the outlines of both values."""
    mine, theirs = _items(one), _items(other)
    if levels and mine and type(one) is type(other) and mine.keys() == theirs.keys():
        found = (_first_difference(mine[key], theirs[key], f"{place}[{key!r}]", levels - 1) for key in mine)
        return next((difference for difference in found if difference is not None), None)
    outlines = _outline(one, levels), _outline(other, levels)
    return None if outlines[0] == outlines[1] else (place, *outlines)


def _strange_leaf(value: Any, place: str, levels: int) -> tuple[str, str] | None:
    """The place and the outline of a value that cannot be collated."""
    if isinstance(value, Mapping | tuple | list):
        items = _items(value) if levels else {}
        found = (_strange_leaf(item, f"{place}[{key!r}]", levels - 1) for key, item in items.items())
        return next((leaf for leaf in found if leaf is not None), None)
    try:
        describe_rows(value)
    except TypeError:
        return place, _outline(value, levels)
    return None


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, tuple | list) else {}


def _outline(value: Any, levels: int) -> str:
    if isinstance(value, np.ndarray | np.generic) or is_tensor(value):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping | tuple | list) and levels == 0:
        return "..."
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_outline(item, levels - 1)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_outline(item, levels - 1) for item in value) + ")"
    return "None" if value is None else type(value).__name__


# Raised for rows that differ, that hold classes only torch knows, or that are nested too deeply.
_RAGGED = (LayoutMismatchError, TypeError, RecursionError)

# Separates the random numbers of a `collate_fn` from those of the batch's first sample.
_COLLATE_STREAM = 1 << 40


class BatchMaker:
    """Does the tasks of one process, one at a time: makes batches and writes them to their slots.

    Most batches of a job have one layout. So the rows of a batch are written in place as they are made, by the layout
    of the batch before; where they turn out not to fit it, the batch gets a layout of its own.

    Args:
        job: what the user wants of a sample and of a batch.
        slots: where to write.
        in_callers_process: as for `RowMaker`.
    """

    def __init__(self, job: Job, slots: SlotMemory, *, in_callers_process: bool = False) -> None:
        self.rows = RowMaker(job, in_callers_process=in_callers_process)
        self._in_callers_process = in_callers_process
        self._failure_of = failure_here if in_callers_process else failure_of
        self._job = job
        self._slots = slots
        self._last_layout: Layout | None = None
        self._layouts: dict[int, tuple[Layout, bytes]] = {}  # the last one by capacity, also pickled
        self._randomness: tuple[int, SampleRandomness] | None = None

    def run(self, task: RowTask, shards: ShardReader, progress: Progress, clock: TaskClock | None = None) -> RowsDone:
        """Do one task. What fails is in the answer; only interrupts are raised, and in the caller's process exits."""
        clock = clock or TaskClock()
        may_stay_stored = True
        while True:
            try:
                return self._run(task, shards, progress, clock, may_stay_stored=may_stay_stored)
            except UnreadableError:
                may_stay_stored = False  # read one by one, it is the failure of a row
            except UnseededError:
                continue  # torch is loaded from now on, and seeded too

    def _run(
        self, task: RowTask, shards: ShardReader, progress: Progress, clock: TaskClock, *, may_stay_stored: bool
    ) -> RowsDone:
        placed = self._last_layout
        with self.rows.seeds.whole_task():
            made = self.rows.make(
                task.table,
                shards,
                self._random(task.epoch),
                keys=task.keys,
                untried=task.untried,
                progress=progress,
                places=None if placed is None else partial(self._places, task, placed.tree),
                may_stay_stored=may_stay_stored,
            )
            started = perf_counter()
            done, start = [], 0
            for batch in task.batches:
                done.append(self._batch(task, batch, start, made, placed))
                start += batch.rows
        collate_s = perf_counter() - started
        costs = clock.costs(decode=made.decode_s, transform=made.transform_s, collate=collate_s, named=made.named_s)
        return RowsDone(task.number, tuple(done), len(task.table), made.payload_bytes, costs)

    def _random(self, epoch: int) -> SampleRandomness:
        if self._randomness is None or self._randomness[0] != epoch:
            self._randomness = epoch, SampleRandomness(self._job.seed, epoch)
        return self._randomness[1]

    def _places(self, task: RowTask, tree: Node, child: int | str) -> list[NDArray[Any]] | None:
        """Where one value of each row will lie in the slots; see `Places`."""
        leaf = _child(tree, child)
        if not isinstance(leaf, ArrayLeaf) or leaf.torch_dtype is not None or not leaf.shape:
            return None
        blocks: list[NDArray[Any]] = []
        for batch in task.batches:
            layout, _ = self._layout(batch.rows)
            memory = self._slots.at_least(batch.slot, layout.offsets()[1])
            blocks.append(slot_views(layout, memory, batch.rows)[leaf.number])
        return blocks

    def _layout(self, capacity: int) -> tuple[Layout, bytes]:
        """The last layout with this capacity, and the same pickled."""
        found = self._layouts.get(capacity)
        if found is None:
            assert self._last_layout is not None
            layout = self._last_layout.with_capacity(capacity)
            found = self._layouts[capacity] = layout, dump_values(layout)
        return found

    def _batch(
        self,
        task: RowTask,
        batch: BatchSlot,
        start: int,
        made: MadeRows,
        placed: Layout | None,
    ) -> BatchDone:
        """Collate a batch, whose rows begin at row `start` of the task, where some values may lie in place already."""
        end, failed = start + batch.rows, made.failures
        failures = tuple([failed[row] for row in range(start, end) if row in failed]) if failed else ()
        rows = made.rows.slice(start, end)
        chosen: Sequence[int] = range(rows.count)
        if failures:
            chosen = choose_rows(rows.count, {row - start for row in failed}, self._job.on_error)
            if not chosen or self._job.on_error == "raise" or any(failure.fatal for failure in failures):
                return BatchDone(failures=failures)
            rows = rows.take(chosen)
        returned = False
        with Attempt(exits=not self._in_callers_process) as attempt:
            if self._job.collate_fn is None:
                return self._collate(batch, rows, failures, placed)
            table = task.table
            first = int(table.samples[start]), int(table.repeats[start])
            self.rows.seeds.seed(self._random(task.epoch), int(table.shards[start]) + _COLLATE_STREAM, *first)
            collated = self._job.collate_fn(rows.as_list())
            returned = True
            return self._write(batch, collated, rows.count, failures)
        assert attempt.error is not None
        if isinstance(attempt.error, UnreadableError):
            raise attempt.error
        if self._job.collate_fn is None:
            failure = self._why_not_collated(task, [start + row for row in chosen], rows, attempt.error)
        else:
            happened = "returned what cannot be sent to the training process:" if returned else "raised"
            said = f"collate_fn {happened} {in_words(attempt.error)} (for the batch that begins with this sample)"
            failure = _batch_failure(task, start, said, cause=self._failure_of(attempt.error))
        return BatchDone(failures=(*failures, failure))

    def _why_not_collated(self, task: RowTask, task_rows: Sequence[int], rows: Rows, error: Exception) -> RowFailure:
        """The failure of rows that cannot be a batch: of the row that lacks a key, or the first; `error` is torch's."""
        names = None if task.keys is None else [task.keys[row] for row in task_rows]
        fields = () if self._job.fields is not None else [column.name for column in task.table.columns()]
        missing = find_missing_key(rows, names, fields)
        if missing is not None:
            return _batch_failure(task, task_rows[missing.row], missing.message, field=missing.field)
        difference = _optional_numbers(rows, self._job.fields or ()) or difference_between(rows)
        said = f"the batch that begins with this sample cannot be collated: {difference or in_words(error)}"
        # torch's message says less, in a page of frames
        return _batch_failure(task, task_rows[0], said, cause=None if difference else self._failure_of(error))

    def _collate(
        self, batch: BatchSlot, rows: Rows, failures: tuple[RowFailure, ...], placed: Layout | None
    ) -> BatchDone:
        """Write rows that are alike by their layout; others are collated, or refused, by torch."""
        if placed is not None and placed is self._last_layout:
            layout, _ = self._layout(batch.rows)
            with suppress(LayoutMismatchError):
                columns = write_rows(layout, rows, self._slots.at_least(batch.slot, layout.offsets()[1]))
                return self._stored(batch, rows, columns, failures)
        try:
            layout = describe_rows(rows.row_alike(0)).with_capacity(batch.rows)
            size_bytes = layout.offsets()[1]
            memory = np.empty(size_bytes, np.uint8)  # values may lie in the slot, where another layout has them
            columns = write_rows(layout, rows, memory)
        except _RAGGED:
            if find_missing_key(rows) is not None:  # torch would drop the keys that the first row lacks
                raise
            return self._write(batch, torch_collate(rows), rows.count, failures)
        self._last_layout, self._layouts = layout, {}
        self._slots.at_least(batch.slot, size_bytes)[:size_bytes] = memory
        return self._stored(batch, rows, columns, failures)

    def _stored(
        self, batch: BatchSlot, rows: Rows, columns: Sequence[Sequence[Any]], failures: tuple[RowFailure, ...]
    ) -> BatchDone:
        """Write values of unlike sizes behind the arrays of the last layout."""
        layout, pickled = self._layout(batch.rows)
        values, size_bytes = self._store(batch.slot, columns, layout.offsets()[1])
        return BatchDone(pickled, size_bytes, rows.count, values, failures)

    def _write(self, batch: BatchSlot, collated: Any, rows: int, failures: tuple[RowFailure, ...]) -> BatchDone:
        """Write whatever a `collate_fn` has returned of so many rows."""
        layout, arrays, columns = describe_batch(collated)
        size_bytes = layout.offsets()[1]
        if arrays:
            memory = self._slots.at_least(batch.slot, size_bytes)
            for view, array in zip(slot_views(layout, memory, None), arrays, strict=True):
                view[...] = array
        values, size_bytes = self._store(batch.slot, columns, size_bytes)
        return BatchDone(dump_values(layout), size_bytes, rows, values, failures)

    def _store(
        self, slot: int, columns: Sequence[Sequence[Any]], arrays_end: int
    ) -> tuple[tuple[StoredColumn, ...], int]:
        """Write values of unlike sizes behind the arrays; returns where they lie, and the slot's used bytes."""
        if not columns:
            return (), arrays_end
        block = ValueBlock(columns)
        end = arrays_end + block.size_bytes
        return block.write(self._slots.at_least(slot, end), arrays_end), end


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


def _child(tree: Node, child: int | str) -> Node | None:
    if isinstance(tree, MappingNode) and child in tree.keys:
        return tree.children[tree.keys.index(child)]
    if isinstance(tree, SequenceNode) and isinstance(child, int) and child < len(tree.children):
        return tree.children[child]
    return None


def _optional_numbers(rows: Rows, fields: Sequence[str]) -> str | None:
    """Why a batch has no values for an optional field of numbers or arrays; None where it is not for that."""
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
    """A failure of a whole batch, for one of its rows."""
    return RowFailure(
        kind="CollateError",
        message=message,
        field=field,
        fatal=True,
        cause=cause,
        shard=int(task.table.shards[task_row]),
        sample=int(task.table.samples[task_row]),
        offset=MISSING,
    )
