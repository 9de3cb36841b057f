"""Read one field of many samples, from bytes in open shards to a column of values.

A shard that is truncated while in use kills a process that reads it through a mapping. So only workers, which can be
replaced, map shards, and only to read many rows at once: for a single field, a mapping would count all pages around it
as the process's memory.
"""

from __future__ import annotations

import ctypes
import enum
import os
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.array_files import NpyLayout, npy_layout
from streamload.decode.columns import PlacedBlocks, PlacedRows, Rows, StoredBytes, StoredRows, windows
from streamload.decode.decoders import Decoder, Encoded, decoder_for, decodes_as_built_in, is_array, is_image
from streamload.decode.failure import Attempt
from streamload.decode.seeding import RowRandomness
from streamload.decode.tasks import Column, Job, RowFailure, RowTable, ShardOpened, by_shard
from streamload.memory.mapped import Bytes, gather, map_memory, read_fully
from streamload.tar.extensions import KIND_OF, Kind
from streamload.tar.table import MISSING

_INT64_DIGITS = 18  # every number of so many digits fits an int64
_ARRAYS_PER_SHARD = 8
_INTEGERS_PER_SHARD = 32
# With fewer rows in each shard, reading them one by one is faster than shard by shard.
_VIEWS_PER_SHARD = 2

# Larger fields are not copied to one place before they are read: for each the copy costs more than a read saves.
_GATHERED_BYTES = 1024

# Larger fields are read one by one, which costs little beside copying them and counts no pages around them.
_VIEWED_BYTES = 32 << 10

ABSENT: Any = type("Absent", (), {})()
"""The value in a column of a field that a sample lacks."""


def decode_integers(
    field: str, data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Decode an integer field of n samples exactly as the built-in decoder would one by one, or return None.

    None for other kinds of field, numbers with spaces or more than 18 digits, and anything out of bounds or damaged;
    the caller then decodes sample by sample, which raises the proper errors.

    Args:
        field: the field's full name; its last extension decides.
        data: uint8[m], contiguous bytes that contain the payloads, such as a mapped shard.
        offsets: int64[n], first byte of each sample's payload.
        sizes: int64[n], payload bytes of each sample.
    """
    if _kind(field) is not Kind.INTEGER or not _inside(data, offsets, sizes):
        return None
    width = int(sizes.max())
    starts = offsets + sizes - width  # aligned at the right, so a shorter number has foreign bytes before it
    if width > _INT64_DIGITS or starts.min() < 0:
        return None
    characters = windows(data.data, np.dtype(f"V{width}"))[starts].view(np.uint8).reshape(len(offsets), width)
    first = width - sizes
    if first.any():
        characters[np.arange(width) < first[:, None]] = ord("0")
    negative = np.flatnonzero(data[offsets] == ord("-"))
    if len(negative):
        if sizes[negative].min() < 2:
            return None
        characters[negative, first[negative]] = ord("0")
    digits = characters - np.uint8(ord("0"))  # wraps around to more than 9 for what is no digit
    if digits.max() > 9:
        return None
    values: NDArray[np.int64] = digits[:, 0].astype(np.int64)
    for position in range(1, width):
        values *= 10
        values += digits[:, position]
    values[negative] *= -1
    return values


def _shared_npy_layout(data: NDArray[np.uint8], offsets: NDArray[np.int64], size: int) -> NpyLayout | None:
    """Return the layout of npy payloads of one size if their headers are equal and row-major; else None."""
    if not _inside(data, offsets, np.array([size])):
        return None
    first = int(offsets[0])
    try:
        layout = npy_layout(data[first : first + size].data)
    except ValueError:
        return None
    if layout.end > size or layout.order == "F":
        return None
    headers = windows(data.data, np.dtype(f"V{layout.start}"))[offsets].tobytes()
    return layout if headers == headers[: layout.start] * len(offsets) else None


def _inside(data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    if len(offsets) == 0 or not data.flags.c_contiguous:
        return False
    return bool(offsets.min() >= 0 and sizes.min() > 0 and (offsets + sizes).max() <= data.size)


def _kind(field: str) -> Kind | None:
    return KIND_OF.get(field.rpartition(".")[2])


class ShardReader(ABC):
    """Reads bytes of shards, by the numbers that a `RowTable` gives them."""

    @abstractmethod
    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """Return the bytes from `start` on; fewer if the shard ends before.

        Raises:
            OSError: the storage cannot read them.
        """

    @abstractmethod
    def url(self, shard: int) -> str:
        """Return the shard's url."""

    @abstractmethod
    def size_bytes(self, shard: int) -> int:
        """Return the shard's size."""

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target` with the bytes from `start` on; return how many, fewer if the shard ends before."""
        data = self.read(shard, start, len(target))
        target[: len(data)] = data
        return len(data)

    def read_own(self, shard: int, start: int, size_bytes: int) -> bytearray:
        """Like `read`, into memory that the caller may change."""
        own = bytearray(size_bytes)
        count = self.read_into(memoryview(own), shard, start)
        return own if count == size_bytes else own[:count]

    def mapped(self, shard: int) -> memoryview | None:
        """Return a shard's bytes if this process may die of reading one that was cut; else None."""
        del shard
        return None

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """Return bytes that hold many fields, and where each begins; None to read them one by one."""
        del shard, offsets, sizes
        return None


Values = list[Any] | PlacedRows | PlacedBlocks

Progress = memoryview | list[int]
"""Its first item is the number of the current row; a memoryview is shared memory that survives a crash."""


class RowError(Exception):
    """An error of a row that our own code found; `kind` names a class of `streamload.errors`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(slots=True)
class Work:
    """Rows while they are being made, and as the user's functions have left them.

    Attributes:
        keys: the rows' keys, if samples hold them.
        progress: is set to each row's number before the row is touched.
        failures: by row.
        named_s: seconds by stage and name, as in "decode_s/jpg".
        rows: the values at the end; those of a row that failed are undefined.
        row_shards: the number of each row's shard.
        rows_per_shard: on average.
    """

    table: RowTable
    shards: ShardReader
    random: RowRandomness
    keys: Sequence[str] | None = None
    progress: Progress = field(default_factory=lambda: [-1])
    failures: dict[int, RowFailure] = field(default_factory=dict)
    named_s: dict[str, float] = field(default_factory=dict)
    rows: Rows = field(init=False)
    columns: tuple[Column, ...] = field(init=False)
    row_shards: list[int] = field(init=False)
    rows_per_shard: float = field(init=False)

    def __post_init__(self) -> None:
        self.columns = self.table.columns()
        self.row_shards = self.table.shards.tolist()
        self.rows_per_shard = self.count / max(1, len(set(self.row_shards)))

    def record(self, name: str, seconds: float) -> None:
        """Add to the seconds of a stage and name."""
        self.named_s[name] = self.named_s.get(name, 0.0) + seconds

    def shards_of(self, column: Column) -> list[int]:
        """Return the number of the shard of each row's field."""
        return self.row_shards if column.shards is None else column.shards.tolist()

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.row_shards)

    def each_row(self, action: Callable[[Iterator[int]], None], failed: Callable[[int, Exception], RowFailure]) -> None:
        """Run an action over the rows that have not failed; if it raises, that row fails, and it goes on after it."""
        rows = self._rows_left()
        while True:
            with Attempt(exits=True) as attempt:
                action(rows)
            if attempt.error is None:
                return
            row = self.progress[0]
            self.failures[row] = failed(row, attempt.error)

    def _rows_left(self) -> Iterator[int]:
        progress, failures = self.progress, self.failures
        for row in range(self.count):
            if row not in failures:
                progress[0] = row
                yield row


class _Target(enum.Enum):
    """The memory that a field is read into."""

    REUSED = enum.auto()
    BYTEARRAY = enum.auto()
    BYTES = enum.auto()


class FieldReader:
    """Decodes fields.

    A sample that lacks an optional field has None in its place, or `ABSENT` if all fields are read.

    Args:
        job: what the user wants of a sample.
        single: user code sees the values one by one, so they must be exactly what the decoder returns.
    """

    def __init__(self, job: Job, *, single: bool) -> None:
        self._job = job
        self.absent = ABSENT if job.fields is None else None
        self._single = single
        self._decoders: dict[str, Decoder] = {}
        self._reused = memoryview(b"")
        self._targets: dict[str, _Target] = {}

    def decoder(self, name: str) -> Decoder:
        """Return the decoder of a field."""
        decoder = self._decoders.get(name)
        if decoder is None:
            decoder = self._decoders[name] = decoder_for(name, self._job.decode, self._job.expansion_limit_bytes)
        return decoder

    def is_built_in(self, column: Column) -> bool:
        """Return True if the library's own decoders apply."""
        return all(decodes_as_built_in(name, self._job.decode) for name in column.alternatives)

    def keeps_nothing(self, name: str) -> bool:
        """Return True if a field's decoder keeps no reference to the bytes."""
        return self._target(name) is _Target.REUSED

    def is_absent(self, column: Column, row: int) -> bool:
        """Return True if the sample lacks a field that is optional."""
        is_optional = self._job.fields is None or column.name in self._job.optional_fields
        return is_optional and int(column.offsets[row]) == MISSING

    def encoded(self, work: Work, column: Column, row: int, name: str) -> Encoded:
        """Return a field's bytes, checked, in the kind of memory that its decoder takes without a copy.

        `name` is the alternative that the row has. If it `keeps_nothing`, the next call may reuse the memory.

        Raises:
            RowError: the field is missing, cannot be read, or is not what the index says.
        """
        start, size = int(column.offsets[row]), int(column.sizes[row])
        if start == MISSING:
            raise RowError("SampleError", f"the sample has no field {column.name!r}")
        shards = work.shards
        shard = work.row_shards[row] if column.shards is None else int(column.shards[row])
        if size > shards.size_bytes(shard) - start:
            raise RowError("DecodeError", "the index points beyond the end of the shard; run `streamload index`")
        data: Encoded
        try:
            match self._target(name):
                case _Target.REUSED:
                    if len(self._reused) < size:  # allocating memory for each image would cost more than reading it
                        self._reused = memoryview(bytearray(2 * size))
                    view = self._reused[:size]
                    data = view[: shards.read_into(view, shard, start)]
                case _Target.BYTEARRAY:
                    data = shards.read_own(shard, start, size)
                case _:
                    data = shards.read(shard, start, size)
        except (OSError, OverflowError) as error:
            raise RowError("SampleError", f"the field {column.name!r} cannot be read: {error}") from error
        if len(data) != size:
            raise RowError(
                "ShardChangedError",
                f"the shard became shorter while it was in use: it ends in the field {column.name!r}; make a new "
                "loader, and give every version of a dataset a folder of its own",
            )
        if column.crc32 is not None and zlib.crc32(data) != int(column.crc32[row]):
            raise RowError(
                "DecodeError",
                f"the bytes of field {column.name!r} are damaged: their crc32 differs; fetch the shard again, "
                "or run `streamload index` if it was rewritten",
            )
        return data

    def _target(self, name: str) -> _Target:
        target = self._targets.get(name)
        if target is None:
            target = _Target.BYTES
            if decodes_as_built_in(name, self._job.decode):
                target = _Target.REUSED if is_image(name) else _Target.BYTEARRAY if is_array(name) else target
            self._targets[name] = target
        return target

    def stored_bytes(self, work: Work, column: Column) -> StoredBytes | None:
        """Return a field's bytes, left in their shards; None if they are decoded, checked or missing."""
        if self._single or column.crc32 is not None or work.failures:
            return None
        if any(self.decoder(name) is not bytes for name in column.alternatives):
            return None
        starts, sizes, size_of = column.offsets.tolist(), column.sizes.tolist(), work.shards.size_bytes
        shards = work.shards_of(column)
        places = zip(shards, starts, sizes, strict=True)
        if any(start == MISSING or start + size > size_of(shard) for shard, start, size in places):
            return None
        return StoredBytes(shards, starts, sizes, work.shards)

    def read(
        self,
        work: Work,
        column: Column,
        failed: Callable[[int, Exception], RowFailure],
        target: Callable[[], Values],
    ) -> Any:
        """Return a field's values for all rows, in a column of any kind that `Rows` may have.

        Args:
            work: the rows.
            column: the field.
            failed: makes the failure of a row.
            target: makes the container to which values are added one by one.
        """
        missing = bool((column.offsets == MISSING).any())
        first_only = column.which is None or not column.which.any()
        plain = first_only and column.crc32 is None and not missing
        if plain and not self._single and not work.failures and self.is_built_in(column):
            if (arrays := _stored_arrays(column, work)) is not None:
                return arrays
            if (integers := _integers(column, work)) is not None:
                return integers
        values = target()
        read = self._read_plain(work, column, values) if plain else self._read_checked(work, column, values)
        work.each_row(read, failed)
        return values

    def _read_plain(self, work: Work, column: Column, values: Values) -> Callable[[Iterator[int]], None]:
        name = column.alternatives[0]
        decoder = self.decoder(name)
        if self._target(name) is _Target.BYTES and (alike := _alike(column, work)) is not None:
            return _read_alike(work, decoder, *alike, values)
        mapped = _mapped(work, column)
        convert = bytearray if self._target(name) is _Target.BYTEARRAY else bytes

        def read(rows: Iterator[int]) -> None:
            if mapped is None:
                for row in rows:
                    values[row] = decoder(self.encoded(work, column, row, name))
            else:
                for row, memory, start, end in zip(rows, *mapped, strict=False):
                    values[row] = decoder(convert(memory[start:end]))

        return read

    def _read_checked(self, work: Work, column: Column, values: Values) -> Callable[[Iterator[int]], None]:
        def read(rows: Iterator[int]) -> None:
            for row in rows:
                if self.is_absent(column, row):
                    values[row] = self.absent
                else:
                    name = field_of(column, row)
                    values[row] = self.decoder(name)(self.encoded(work, column, row, name))

        return read


def field_of(column: Column, row: int) -> str:
    """Return the alternative that a row has."""
    return column.alternatives[0 if column.which is None else int(column.which[row])]


def _read_alike(
    work: Work, decoder: Decoder, data: NDArray[np.uint8], size: int, values: Values
) -> Callable[[Iterator[int]], None]:
    """Decode fields of one size that lie one after another."""
    memory = (ctypes.c_char * len(data)).from_buffer(data.data)  # unlike a memoryview's, its slices are bytes
    # Counted here, which for a small field takes noticeably less time than a generator of rows.
    places = zip(range(work.count), range(0, len(data), size), range(size, len(data) + 1, size), strict=True)
    progress = work.progress

    def read(_: Iterator[int]) -> None:
        for row, start, end in places:
            progress[0] = row
            values[row] = decoder(memory[start:end])

    return read


def _mapped(work: Work, column: Column) -> tuple[Iterator[memoryview], Iterator[int], Iterator[int]] | None:
    """Return for each row of a small field the mapped shard, and where the field begins and ends in it.

    None if rows have failed, or fields have to be read one by one, with their errors.
    """
    if work.failures or int(column.sizes.max(initial=0)) > _VIEWED_BYTES or work.rows_per_shard < _VIEWS_PER_SHARD:
        return None
    memory: dict[int, memoryview] = {}
    shards = work.shards_of(column)
    for shard in set(shards):
        mapped = work.shards.mapped(shard)
        if mapped is None:
            return None
        memory[shard] = mapped
    ends = (column.offsets + column.sizes).tolist()
    if any(map(gt, ends, map(len, map(memory.__getitem__, shards)))):
        return None
    # Iterators, which go on where they were after a row that has failed.
    return map(memory.__getitem__, shards), iter(column.offsets.tolist()), iter(ends)


def _gathered(
    column: Column, work: Work
) -> list[tuple[int, NDArray[np.intp], NDArray[np.uint8], NDArray[np.int64]]] | None:
    """Return for each shard its number, its rows, bytes that hold their fields, and where each begins in them.

    None if fields have to be read one by one, with their errors.
    """
    gathered = []
    for shard, rows in by_shard(work.table.shards if column.shards is None else column.shards):
        found = work.shards.gather(shard, column.offsets[rows], column.sizes[rows])
        if found is None:
            return None
        gathered.append((shard, rows, *found))
    return gathered


def _stored_arrays(column: Column, work: Work) -> StoredRows | None:
    """Leave arrays of one dtype and shape in their shards until they are copied; None if they differ."""
    if work.rows_per_shard < _ARRAYS_PER_SHARD or _kind(column.alternatives[0]) is not Kind.ARRAY:
        return None
    size = int(column.sizes[0])
    if (column.sizes != size).any() or (gathered := _gathered(column, work)) is None:
        return None
    layout: NpyLayout | None = None
    memory: dict[int, memoryview] = {}
    starts = np.empty(work.count, np.int64)
    for shard, rows, data, places in gathered:
        layout_here = _shared_npy_layout(data, places, size)
        if layout_here is None or layout not in (None, layout_here):
            return None
        layout = layout_here
        memory[shard] = memoryview(data.data)
        starts[rows] = places + layout.start
    assert layout is not None
    shards = work.table.shards if column.shards is None else column.shards
    return StoredRows(layout.dtype, layout.shape, shards, starts, memory)


def _integers(column: Column, work: Work) -> NDArray[np.int64] | None:
    """Decode a column of integers shard by shard; None if the field is no such column."""
    name = column.alternatives[0]
    if work.rows_per_shard < _INTEGERS_PER_SHARD or _kind(name) is not Kind.INTEGER:
        return None
    if int(column.sizes.max()) > _INT64_DIGITS or (gathered := _gathered(column, work)) is None:
        return None
    out = np.empty(work.count, np.int64)
    for _, rows, data, places in gathered:
        part = decode_integers(name, data, places, column.sizes[rows])
        if part is None:
            return None
        out[rows] = part
    return out


def _alike(column: Column, work: Work) -> tuple[NDArray[np.uint8], int] | None:
    """Copy small fields of one size one after another, and return them and their size; None if they differ.

    Copying all at once, the processor waits for many fields together to come from memory; read one by one, for each.
    """
    if work.failures or work.rows_per_shard < _ARRAYS_PER_SHARD:
        return None
    size = int(column.sizes[0])
    if not 0 < size <= _GATHERED_BYTES or (column.sizes != size).any():
        return None
    if (gathered := _gathered(column, work)) is None:
        return None
    out = np.empty(work.count * size, np.uint8)
    fields = out.view(f"V{size}")
    for _, rows, data, places in gathered:
        fields[rows] = windows(memoryview(data.data), fields.dtype)[places]
    return out, size


class OpenShards(ShardReader):
    """Open shards, by number. The descriptors are closed with this object at the latest.

    Args:
        maps: False in a process that must survive whatever happens to the files: then nothing is mapped.
    """

    def __init__(self, *, maps: bool = True) -> None:
        self._maps = maps
        self._descriptors: dict[int, int] = {}
        self._opened: dict[int, ShardOpened] = {}
        self._mapped: dict[int, Bytes] = {}
        weakref.finalize(self, _close_all, self._descriptors).atexit = False

    def add(self, opened: ShardOpened, descriptor: int) -> None:
        """Take over a shard's descriptor, replacing an earlier one."""
        self.drop((opened.shard,))
        self._descriptors[opened.shard] = descriptor
        self._opened[opened.shard] = opened

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target` as `ShardReader.read_into` does."""
        return read_fully(self._descriptors[shard], target, start)

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """Return the bytes from `start` on; fewer if the shard ends before."""
        data = os.pread(self._descriptors[shard], size_bytes, start)
        if len(data) == size_bytes:
            return data
        del data  # the kernel returns no more than 2 GiB at once
        return bytes(self.read_own(shard, start, size_bytes))

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """Return bytes that hold many fields, and where each begins; None if one lies beyond the shard."""
        if not len(offsets) or offsets.min() < 0 or (sizes > self.size_bytes(shard) - offsets).any():
            return None
        try:
            if self._maps:
                return self._memory(shard), offsets
            return gather(self._descriptors[shard], offsets, sizes)
        except OSError:
            return None

    def mapped(self, shard: int) -> memoryview | None:
        """Return a shard's bytes, or None if it cannot be mapped."""
        if not self._maps:
            return None
        try:
            return memoryview(self._memory(shard).data)
        except OSError:
            return None

    def descriptor(self, shard: int) -> int:
        """Return a shard's descriptor, still owned by this object."""
        return self._descriptors[shard]

    def _memory(self, shard: int) -> Bytes:
        if shard not in self._mapped:
            self._mapped[shard] = map_memory(self._descriptors[shard], self.size_bytes(shard), writable=False)
        return self._mapped[shard]

    def url(self, shard: int) -> str:
        """Return the shard's url."""
        return self._opened[shard].url

    def size_bytes(self, shard: int) -> int:
        """Return the shard's size."""
        return self._opened[shard].size_bytes

    def drop(self, shards: tuple[int, ...]) -> None:
        """Close shards; they are unmapped when the last view of them is gone."""
        for shard in shards:
            self._mapped.pop(shard, None)
            if self._opened.pop(shard, None) is not None:
                os.close(self._descriptors.pop(shard))

    def close(self) -> None:
        """Close all shards."""
        self.drop(tuple(self._opened))


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
