"""Define the messages between a pool and its workers, and the table of rows that they carry.

Messages are named tuples: each dataclass would add half a millisecond to every process's start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from streamload.order.shard_counts import distinct
from streamload.tar.extensions import Decode
from streamload.tar.scan import MISSING, ScannedPiece, ShardTable

SAMPLE_NAMES = ("__key__", "__url__")
"""Names that can be requested like fields: the sample's key and its shard's url."""

Transform = Callable[..., Any] | Mapping[str, Callable[..., Any]]
OwnTransforms = tuple[tuple[int, Transform | None], ...]
"""The first shard and the transform (or None) of each dataset of a mixture; empty for a single dataset."""

OnError = Literal["raise", "skip", "replace"]

# Tables of at least this many rows are packed for sending: the bytes of a message beyond the
# socket's buffer are sent only when the worker reads.
_PACKED_ROWS = 256

# NumPy sorts 16-bit integers by radix, in a fraction of the time.
_SORTED_BY_RADIX = np.iinfo(np.uint16).max


class Job(NamedTuple):
    """The user's functions and options.

    Attributes:
        optional_fields: fields that samples may lack, with None in their place. (If all fields are read, a missing one
            has no entry.)
    """

    fields: tuple[str, ...] | None
    decode: Decode
    transform: Transform | None
    collate_fn: Callable[[list[Any]], Any] | None
    worker_init_fn: Callable[[int], Any] | None
    on_error: OnError
    seed: int
    own_transforms: OwnTransforms = ()
    optional_fields: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class RowTable:
    """Rows and the locations of their fields, in one array, since each array of a message costs microseconds.

    Attributes:
        values: int64[rows, width]: shard, sample and repeat (see `RowBlock`); then, for each column, its offset and
            size, plus alternative, crc32 and shard if present.
    """

    values: NDArray[np.int64]
    kinds: tuple[ColumnKind, ...]

    @classmethod
    def empty(cls, rows: int, kinds: tuple[ColumnKind, ...]) -> RowTable:
        """Create a table of zeros."""
        width = 3 + sum(2 + kind.has_which + kind.has_crc32 + kind.has_shard for kind in kinds)
        return cls(np.zeros((rows, width), np.int64), kinds)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shards(self) -> NDArray[np.int64]:
        """Return the shard of each row, int64[rows]."""
        return self.values[:, 0]

    def columns(self) -> tuple[Column, ...]:
        """Return the columns, as views."""
        views = iter(self.values.T[3:])
        return tuple(
            Column(
                kind.name,
                kind.alternatives,
                offsets=next(views),
                sizes=next(views),
                which=next(views) if kind.has_which else None,
                crc32=next(views) if kind.has_crc32 else None,
                shards=next(views) if kind.has_shard else self.shards,
            )
            for kind in self.kinds
        )

    def read_shards(self) -> list[int]:
        """Return the shards that hold the rows or their fields, each once."""
        columns = zip(self.columns(), self.kinds, strict=True)
        others = [column.shards for column, kind in columns if kind.has_shard]
        shards: list[int] = distinct(np.concatenate((self.shards, *others)) if others else self.shards).tolist()
        return shards

    def __reduce__(self) -> tuple[Any, ...]:
        if len(self) < _PACKED_ROWS:
            return RowTable, (self.values, self.kinds)
        columns = np.array(self.values.T, order="C")  # always a copy
        least = columns.min(axis=1, keepdims=True)
        columns -= least
        return _unpacked, (self.kinds, least, [each.astype(np.min_scalar_type(int(each.max()))) for each in columns])


def _unpacked(kinds: tuple[ColumnKind, ...], least: NDArray[np.int64], columns: list[NDArray[Any]]) -> RowTable:
    values = np.stack(columns, dtype=np.int64, casting="unsafe")
    values += least
    return RowTable(values.T, kinds)


class ColumnKind(NamedTuple):
    """A column's field, and which optional arrays of a `Column` the `RowTable` holds."""

    name: str
    alternatives: tuple[str, ...]
    has_which: bool = False
    has_crc32: bool = False
    has_shard: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """The location of one field for every row.

    Attributes:
        name: the user's request, such as "jpg;png".
        alternatives: the requested fields, such as ("jpg", "png").
        offsets: int64[rows], first byte within the shard; `MISSING` if the sample has none of the alternatives.
        sizes: int64[rows], bytes.
        which: int64[rows], the number of each row's alternative; None if every row has the first.
        crc32: int64[rows], checksums to verify the bytes against; None to skip the check.
        shards: int64[rows], the shard or sidecar that holds the field.
    """

    name: str
    alternatives: tuple[str, ...]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    which: NDArray[np.int64] | None
    crc32: NDArray[np.int64] | None
    shards: NDArray[np.int64]


def by_shard(shards: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Group rows by shard: yield each shard, ascending, with the numbers of its rows."""
    small = len(shards) > 0 and int(shards.max()) <= _SORTED_BY_RADIX
    order = np.argsort(shards.astype(np.uint16) if small else shards, kind="stable")
    edges = np.flatnonzero(np.diff(shards[order])) + 1
    for rows in np.split(order, edges):
        if len(rows):
            yield int(shards[rows[0]]), rows


class WorkerSetup(NamedTuple):
    """The first message to a worker; `job` is from `pickle_job`."""

    worker: int
    job: bytes
    import_path: tuple[str, ...]
    log_levels: tuple[tuple[str, int], ...] = ()


class WorkerStarted(NamedTuple):
    """Sent when a worker is ready for tasks, or cannot start."""

    failure: Failure | None = None


class ShardsOpened(NamedTuple):
    """Sent to a worker with the shards' descriptors."""

    shards: tuple[int, ...]
    urls: tuple[str, ...]
    sizes_bytes: tuple[int, ...]


class SlotOpened(NamedTuple):
    """Sent to a worker with the slot's descriptor."""

    slot: int


class Forget(NamedTuple):
    """Close these shards and unmap these slots; any needed later are sent again."""

    shards: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


class BatchSlot(NamedTuple):
    """The slot of one batch of a task, and the number of its rows, which follow the previous batch's in the table."""

    slot: int
    rows: int


class RowTask(NamedTuple):
    """Make batches and write them to their slots.

    Attributes:
        number: unique within a pool.
        keys: the rows' keys, if the user's samples hold them.
        batches: in the order of their rows.
        untried: rows to fail without trying, with the reason: they killed workers, or follow a row that ends the pass.
        pass_number: `EpochStart.number` of the pass.
    """

    number: int
    epoch: int
    table: RowTable
    keys: tuple[str, ...] | None
    batches: tuple[BatchSlot, ...]
    untried: Mapping[int, str] = {}
    pass_number: int = 0


class ScanTask(NamedTuple):
    """Scan the headers of whole shards, or of the piece of a single shard that has arrived.

    Attributes:
        start: where the piece begins.
        available: where the piece ends; None to scan whole shards.
        total: the shard's size if known; used for pieces only.
    """

    number: int
    shards: tuple[int, ...]
    start: int = 0
    available: int | None = None
    total: int | None = None


Task = RowTask | ScanTask


class Failure(NamedTuple):
    """An exception in transit to the training loop.

    Attributes:
        error: a cloudpickle of the exception; None if it does not pickle or load.
        summary: class and message.
        traceback: the worker's traceback as text; may be empty.
        original: the exception itself, if it stays in the caller's process.
    """

    error: bytes | None
    summary: str
    traceback: str
    cause: Failure | None = None
    original: Original | None = None


class Original:
    """An exception that stays in its process, with its frames for a debugger.

    It pickles as a number. The creating process loads the same object while a reference exists; other processes load a
    substitute without the error.
    """

    _kept: ClassVar[WeakValueDictionary[int, Original]] = WeakValueDictionary()
    _numbers: ClassVar[Iterator[int]] = count()

    def __init__(self, error: Exception | None, number: int | None = None) -> None:
        self.error = error
        self.number = next(self._numbers) if number is None else number
        if error is not None:
            self._kept[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return Original.find, (self.number,)

    @classmethod
    def find(cls, number: int) -> Original:
        """Return the object with this number, or a substitute if there is none."""
        return cls._kept.get(number) or cls(None, number)


class RowFailure(NamedTuple):
    """The error of one row.

    Attributes:
        kind: the name of the error's class in `streamload.errors`.
        fatal: a bug in the program, a failed collation, or a shard changed while in use; never skipped.
        offset: the first byte of the field (of the first field if `field` is None), or MISSING.
        missing_field: the sample lacks the field.
        stored_in: the number of the shard or sidecar that holds the field.
    """

    kind: str
    message: str
    fatal: bool
    shard: int
    sample: int
    stored_in: int
    field: str | None = None
    cause: Failure | None = None
    offset: int = MISSING
    missing_field: bool = False


class StoredColumn(NamedTuple):
    """The place of a column of values in a slot.

    Attributes:
        start: its first byte in the slot.
        length: the number of values.
        is_pickle: the column was pickled into one value.
    """

    start: int
    length: int
    is_pickle: bool


class BatchDone(NamedTuple):
    """The result of one batch.

    Attributes:
        layout: pickled; None if nothing was written because samples or collating failed.
        size_bytes: the used bytes of the slot.
        rows: the number of rows, without skipped ones.
        values: the places of values other than arrays.
    """

    layout: bytes | None = None
    size_bytes: int = 0
    rows: int = 0
    values: tuple[StoredColumn, ...] = ()
    failures: tuple[RowFailure, ...] = ()


class TaskCosts(NamedTuple):
    """The costs of a task in seconds.

    Attributes:
        waited: how long the worker waited for the task.
        busy: from the task's start to its end.
        processor: CPU time within `busy`.
        delayed: time within `busy` spent ready to run, but waiting for a CPU.
        named: seconds by stage and name, such as "decode_s/jpg".
        started: the start by `perf_counter`.
    """

    decode: float = 0.0
    transform: float = 0.0
    collate: float = 0.0
    scan: float = 0.0
    waited: float = 0.0
    busy: float = 0.0
    processor: float = 0.0
    delayed: float = 0.0
    named: Mapping[str, float] = {}
    started: float = 0.0
    process: int = 0


class RowsDone(NamedTuple):
    """The answer to a `RowTask`."""

    number: int
    batches: tuple[BatchDone, ...]
    rows: int
    payload_bytes: int
    costs: TaskCosts


class ScannedShard(NamedTuple):
    """The scan of one shard: its table, a piece of it, or a failure."""

    shard: int
    table: ShardTable | None = None
    failure: Failure | None = None
    piece: ScannedPiece | None = None


class ScanDone(NamedTuple):
    """The answer to a `ScanTask`, in the order of its shards."""

    number: int
    shards: tuple[ScannedShard, ...]
    costs: TaskCosts
