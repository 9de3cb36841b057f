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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.decode.array_files import DECOMPRESSED_LIMIT_BYTES, NpyLayout, npy_layout
from streamload.decode.columns import PlacedBlocks, PlacedRows, StoredBytes, StoredRows, windows
from streamload.decode.decoders import Decoder, Encoded, decoder_for, decodes_as_built_in, is_array, is_image
from streamload.decode.failure import Attempt
from streamload.decode.seeding import RowRandomness
from streamload.decode.tasks import Column, RowFailure, RowTable, ShardOpened, by_shard
from streamload.memory.mapped import Bytes, gather, map_memory, read_fully
from streamload.tar.extensions import KIND_OF, Kind
from streamload.tar.table import MISSING

_INT64_DIGITS = 18  # every number of so many digits fits an int64


def may_be_integers(field: str, sizes: NDArray[np.int64]) -> bool:
    """Whether a field of these sizes is worth reading for `decode_integers`."""
    return _kind(field) is Kind.INTEGER and int(sizes.max(initial=0)) <= _INT64_DIGITS


def may_share_layout(field: str, sizes: NDArray[np.int64]) -> bool:
    """Whether a field of these sizes is worth reading for `shared_npy_layout`."""
    return _kind(field) is Kind.ARRAY and bool((sizes == sizes[:1]).all())


def decode_integers(
    field: str, data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Decode an integer field of n samples exactly as the built-in decoder would one by one, or decline.

    Only for fields that are decoded by the library's own decoder (`decodes_as_built_in`).

    Args:
        field: the field's full name; its last extension decides.
        data: uint8[m], contiguous bytes that contain the payloads, such as a mapped shard. Only read.
        offsets: int64[n], first byte of each sample's payload.
        sizes: int64[n], payload bytes of each sample.

    Returns:
        int64[n] in memory of its own, or None where this does not apply: other kinds of field, numbers with spaces or
        more than 18 digits, anything out of bounds or damaged. The caller then decodes sample by sample, which raises
        the proper errors.
    """
    if _kind(field) is not Kind.INTEGER or not _inside(data, offsets, sizes):
        return None
    return _integer_column(data, offsets, sizes)


def shared_npy_layout(
    field: str, data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NpyLayout | None:
    """The layout of an npy field whose payloads all have the same header, so that they need no decoding.

    The arguments are those of `decode_integers`.

    Returns:
        None where headers differ, or are column-major, damaged or out of bounds, or the field is of another kind.
    """
    if _kind(field) is not Kind.ARRAY:
        return None
    return _shared_layout(data, offsets, sizes)


def _inside(data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    if len(offsets) == 0 or not data.flags.c_contiguous:
        return False
    return bool(offsets.min() >= 0 and sizes.min() > 0 and (offsets + sizes).max() <= data.size)


def _windows(data: NDArray[np.uint8], window_bytes: int) -> NDArray[np.void]:
    """All windows of one size over `data`, as opaque items; indexing them copies."""
    return np.ndarray((data.size - window_bytes + 1,), f"V{window_bytes}", data, 0, (1,))


def _shared_layout(data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NpyLayout | None:
    """The layout of all samples, if their headers are equal byte for byte; else None."""
    if not _inside(data, offsets, sizes) or sizes.min() != sizes.max():
        return None
    first, size = int(offsets[0]), int(sizes[0])
    try:
        layout = npy_layout(data[first : first + size].data)
    except ValueError:
        return None
    if layout.end > size or layout.order == "F":
        return None
    headers = _windows(data, layout.start)[offsets].tobytes()
    return layout if headers == headers[: layout.start] * len(offsets) else None


def _integer_column(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    width = int(sizes.max())
    starts = offsets + sizes - width  # aligned at the right, so a shorter number has foreign bytes before it
    if width > _INT64_DIGITS or starts.min() < 0:
        return None
    characters = _windows(data, width)[starts].view(np.uint8).reshape(len(offsets), width)
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


def _kind(field: str) -> Kind | None:
    return KIND_OF.get(field.rpartition(".")[2])


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


class _Target(enum.Enum):
    """The memory that a field is read into."""

    REUSED = enum.auto()
    BYTEARRAY = enum.auto()
    BYTES = enum.auto()


class ShardReader(ABC):
    """Reads bytes of shards, by the numbers that a `RowTable` gives them."""

    @abstractmethod
    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """The bytes from `start` on; fewer where the shard ends before.

        Raises:
            OSError: the storage cannot read them.
        """

    @abstractmethod
    def url(self, shard: int) -> str:
        """The shard's url."""

    @abstractmethod
    def size_bytes(self, shard: int) -> int:
        """The shard's size."""

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target` with the bytes from `start` on; returns how many, fewer where the shard ends before."""
        data = self.read(shard, start, len(target))
        target[: len(data)] = data
        return len(data)

    def read_own(self, shard: int, start: int, size_bytes: int) -> bytearray:
        """Like `read`, into memory that the caller may change."""
        own = bytearray(size_bytes)
        found = self.read_into(memoryview(own), shard, start)
        return own if found == size_bytes else own[:found]

    def mapped(self, shard: int) -> memoryview | None:
        """All bytes of a shard, where reading one that was cut meanwhile may kill the process; else None."""
        del shard
        return None

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """The bytes of many fields at once, and where each begins in them; None to have them read one by one."""
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
    """Rows while they are being made.

    Attributes:
        table: the rows, and where their fields lie.
        shards: reads the bytes.
        random: gives each row its randomness.
        keys: the rows' keys, where the samples are to hold them.
        progress: is set to each row's number before the row is touched.
        failures: of the rows that have failed so far, by row.
        decode_s: seconds spent on decoding.
        transform_s: seconds spent in the user's functions.
        named_s: seconds of both, by what took them.
        columns: of the table.
        row_shards: the number of each row's shard.
        rows_per_shard: how many rows a shard has on average.
    """

    table: RowTable
    shards: ShardReader
    random: RowRandomness
    keys: Sequence[str] | None = None
    progress: Progress = field(default_factory=lambda: [-1])
    failures: dict[int, RowFailure] = field(default_factory=dict)
    decode_s: float = 0.0
    transform_s: float = 0.0
    named_s: dict[str, float] = field(default_factory=dict)
    columns: tuple[Column, ...] = field(init=False)
    row_shards: list[int] = field(init=False)
    rows_per_shard: float = field(init=False)

    def __post_init__(self) -> None:
        self.columns = self.table.columns()
        self.row_shards = self.table.shards.tolist()
        self.rows_per_shard = self.count / max(1, len(set(self.row_shards)))

    def decoded(self, name: str, seconds: float) -> None:
        """Note what it took to decode a field."""
        self.decode_s += seconds
        self._note(f"decode_s/{name}", seconds)

    def transformed(self, name: str, seconds: float) -> None:
        """Note what a function of the user's took."""
        self.transform_s += seconds
        self._note(f"transform_s/{name}", seconds)

    def _note(self, name: str, seconds: float) -> None:
        self.named_s[name] = self.named_s.get(name, 0.0) + seconds

    def shards_of(self, column: Column) -> list[int]:
        """The number of the shard in which a field of each row lies."""
        return self.row_shards if column.shards is None else column.shards.tolist()

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.row_shards)

    def each_row(self, action: Callable[[Iterator[int]], None], failed: Callable[[int, Exception], RowFailure]) -> None:
        """Run an action over the rows that have not failed; one at which it raises fails, and it goes on behind it."""
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


class FieldReader:
    """Decodes fields.

    Args:
        decode: as for `decoder_for`.
        optional: the fields that a sample may lack, which then gets None; None for any, and then it gets `ABSENT`.
        limit_bytes: as for `decoder_for`.
        single: user code sees the values one by one, so they must be exactly what the decoder returns.
    """

    def __init__(
        self,
        decode: bool | Mapping[str, Callable[[bytes], Any]],
        *,
        optional: Collection[str] | None,
        limit_bytes: int = DECOMPRESSED_LIMIT_BYTES,
        single: bool = False,
    ) -> None:
        self._decode = decode
        self._limit_bytes = limit_bytes
        self._optional = optional
        self.absent = ABSENT if optional is None else None
        self._single = single
        self._decoders: dict[str, Decoder] = {}
        self._reused = memoryview(b"")
        self._targets: dict[str, _Target] = {}

    def decoder(self, name: str) -> Decoder:
        """The decoder of a field."""
        decoder = self._decoders.get(name)
        if decoder is None:
            decoder = self._decoders[name] = decoder_for(name, self._decode, self._limit_bytes)
        return decoder

    def is_built_in(self, column: Column) -> bool:
        """Whether our own decoders, not the user's, decode this field."""
        return all(decodes_as_built_in(name, self._decode) for name in column.alternatives)

    def keeps_nothing(self, name: str) -> bool:
        """Whether a field's decoder keeps no reference to the bytes, as that of images."""
        return self._target(name) is _Target.REUSED

    def is_absent(self, column: Column, row: int) -> bool:
        """Whether the sample lacks a field that is optional."""
        is_optional = self._optional is None or column.name in self._optional
        return is_optional and int(column.offsets[row]) == MISSING

    def encoded(self, work: Work, column: Column, row: int, name: str) -> Encoded:
        """A field's bytes, checked, in the kind of memory that its decoder takes without a copy.

        Args:
            work: the rows.
            column: the field.
            row: the row.
            name: of the field that the row has. If it `keeps_nothing`, the next call may reuse the memory.

        Raises:
            RowError: the sample has no such field, or its bytes cannot be read or are not what the index says.
        """
        start, size = int(column.offsets[row]), int(column.sizes[row])
        if start == MISSING:
            raise RowError("SampleError", f"the sample has no field {column.name!r}")
        shard = work.row_shards[row] if column.shards is None else int(column.shards[row])
        if size > work.shards.size_bytes(shard) - start:
            raise RowError("DecodeError", "the index points beyond the end of the shard; run `streamload index`")
        try:
            data = self._read_bytes(work.shards, shard, start, size, name)
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

    def _read_bytes(self, shards: ShardReader, shard: int, start: int, size: int, name: str) -> Encoded:
        """Read bytes to the memory that suits the field; fewer where the shard ends before."""
        match self._target(name):
            case _Target.REUSED:
                view = self._reused_memory(size)
                return view[: shards.read_into(view, shard, start)]
            case _Target.BYTEARRAY:
                return shards.read_own(shard, start, size)
            case _:
                return shards.read(shard, start, size)

    def _target(self, name: str) -> _Target:
        """Cached by name, as it is needed twice for every value."""
        target = self._targets.get(name)
        if target is None:
            target = _Target.BYTES
            if decodes_as_built_in(name, self._decode):
                target = _Target.REUSED if is_image(name) else _Target.BYTEARRAY if is_array(name) else target
            self._targets[name] = target
        return target

    def _reused_memory(self, size_bytes: int) -> memoryview:
        """Memory reused for every image: allocating it would cost more than reading into it."""
        if len(self._reused) < size_bytes:
            self._reused = memoryview(bytearray(2 * size_bytes))
        return self._reused[:size_bytes]

    def stored_bytes(self, work: Work, column: Column) -> StoredBytes | None:
        """A field's bytes, left in their shards; None where they are decoded or checked, or not there."""
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
        target: Callable[[], Values] | None = None,
    ) -> Any:
        """A field's values for all rows, in a column of any kind that `Rows` may have.

        Args:
            work: the rows.
            column: the field.
            failed: makes the failure of a row.
            target: makes what the values are put into one by one; by default a list.
        """
        missing = bool((column.offsets == MISSING).any())
        first_only = column.which is None or not column.which.any()
        plain = first_only and column.crc32 is None and not missing
        if plain and not self._single and not work.failures and self.is_built_in(column):
            whole = self._read_at_once(work, column)
            if whole is not None:
                return whole
        values = [None] * work.count if target is None else target()
        read = self._read_plain(work, column, values) if plain else self._read_checked(work, column, values)
        work.each_row(read, failed)
        return values

    def _read_at_once(self, work: Work, column: Column) -> StoredRows | NDArray[np.int64] | None:
        if work.rows_per_shard >= _ARRAYS_PER_SHARD and (arrays := _stored_arrays(column, work)) is not None:
            return arrays
        return _integers(column, work) if work.rows_per_shard >= _INTEGERS_PER_SHARD else None

    def _read_plain(self, work: Work, column: Column, values: Values) -> Callable[[Iterator[int]], None]:
        name = column.alternatives[0]
        decoder = self.decoder(name)
        if self._target(name) is _Target.BYTES and (alike := _alike(column, work)) is not None:
            return _read_alike(work, decoder, *alike, values)
        mapped = _mapped(work, column)
        if mapped is None:

            def read(rows: Iterator[int]) -> None:
                for row in rows:
                    values[row] = decoder(self.encoded(work, column, row, name))

        elif self._target(name) is _Target.BYTEARRAY:

            def read(rows: Iterator[int]) -> None:
                for row, memory, start, end in zip(rows, *mapped, strict=False):
                    values[row] = decoder(bytearray(memory[start:end]))

        else:

            def read(rows: Iterator[int]) -> None:
                for row, memory, start, end in zip(rows, *mapped, strict=False):
                    values[row] = decoder(memory[start:end].tobytes())

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
    """The field that a row has, where the user named alternatives."""
    return column.alternatives[0 if column.which is None else int(column.which[row])]


def _shards(column: Column, work: Work) -> NDArray[np.int64]:
    return work.table.shards if column.shards is None else column.shards


def _read_alike(
    work: Work, decoder: Decoder, data: NDArray[np.uint8], size: int, values: Values
) -> Callable[[Iterator[int]], None]:
    """Decodes fields of one size that lie one after another."""
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
    """For each row of a small field the mapped shard, and where the field begins and ends in it.

    None where they are to be read one by one, with their errors, or where rows have failed and are left out.
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
    # Iterators, which go on where they were behind a row that has failed.
    return map(memory.__getitem__, shards), iter(column.offsets.tolist()), iter(ends)


def _gathered(column: Column, work: Work) -> Iterator[tuple[int, NDArray[np.intp], Bytes, NDArray[np.int64]] | None]:
    """For each shard its number, its rows, bytes that hold their fields, and where each begins in them.

    None where they are to be read one by one, with their errors.
    """
    for shard, rows in by_shard(_shards(column, work)):
        found = work.shards.gather(shard, column.offsets[rows], column.sizes[rows])
        yield None if found is None else (shard, rows, *found)


def _stored_arrays(column: Column, work: Work) -> StoredRows | None:
    """Arrays of one dtype and shape, left in their shards until they are copied; None where they differ."""
    name = column.alternatives[0]
    if not may_share_layout(name, column.sizes):
        return None
    layout: NpyLayout | None = None
    memory: dict[int, memoryview] = {}
    starts = np.empty(work.count, np.int64)
    for gathered in _gathered(column, work):
        if gathered is None:
            return None
        shard, rows, data, places = gathered
        layout_here = shared_npy_layout(name, data, places, column.sizes[rows])
        if layout_here is None or (layout is not None and layout_here != layout):
            return None
        layout = layout_here
        memory[shard] = memoryview(data.data)
        starts[rows] = places + layout.start
    return None if layout is None else StoredRows(layout.dtype, layout.shape, _shards(column, work), starts, memory)


def _integers(column: Column, work: Work) -> NDArray[np.int64] | None:
    """A column of integers, decoded shard by shard; None where the field is no such column."""
    name = column.alternatives[0]
    if not may_be_integers(name, column.sizes):
        return None
    out = np.empty(work.count, np.int64)
    for gathered in _gathered(column, work):
        if gathered is None:
            return None
        _, rows, data, places = gathered
        part = decode_integers(name, data, places, column.sizes[rows])
        if part is None:
            return None
        out[rows] = part
    return out


def _alike(column: Column, work: Work) -> tuple[NDArray[np.uint8], int] | None:
    """Small fields of one size, copied one after another, and their size; None where they differ.

    Copying all at once, the processor waits for many fields together to come from memory; read one by one, for each.
    """
    if work.failures or work.rows_per_shard < _ARRAYS_PER_SHARD:
        return None
    size = int(column.sizes[0])
    if not 0 < size <= _GATHERED_BYTES or (column.sizes != size).any():
        return None
    out = np.empty(work.count * size, np.uint8)
    fields = out.view(f"V{size}")
    for gathered in _gathered(column, work):
        if gathered is None:
            return None
        _, rows, data, places = gathered
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
        before = self._descriptors.get(opened.shard)
        self._descriptors[opened.shard] = descriptor
        self._opened[opened.shard] = opened
        self._mapped.pop(opened.shard, None)
        if before is not None:
            os.close(before)

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target` with the bytes from `start` on; returns how many, fewer where the shard ends before.

        Raises:
            OSError: the storage cannot read them.
        """
        return read_fully(self._descriptors[shard], target, start)

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """The bytes from `start` on, fewer where the shard ends before; held once, unless they exceed 2 GiB.

        Raises:
            OSError: the storage cannot read them.
        """
        descriptor = self._descriptors[shard]
        data = os.pread(descriptor, size_bytes, start)
        if len(data) == size_bytes:
            return data
        pieces, done = [data], len(data)
        while data and done < size_bytes:
            data = os.pread(descriptor, size_bytes - done, start + done)
            pieces.append(data)
            done += len(data)
        return b"".join(pieces)

    def read_own(self, shard: int, start: int, size_bytes: int) -> bytearray:
        """Like `read`, into memory that the caller may change.

        Raises:
            OSError: the storage cannot read them.
        """
        own = bytearray(size_bytes)
        found = self.read_into(memoryview(own), shard, start)
        return own if found == size_bytes else own[:found]

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """The bytes of many fields at once, and where each begins in them.

        None where one lies beyond the shard or cannot be read; reading them one by one then raises the proper error.
        """
        if not len(offsets) or offsets.min() < 0 or (sizes > self.size_bytes(shard) - offsets).any():
            return None
        try:
            if self._maps:
                return self._memory(shard), offsets
            return gather(self._descriptors[shard], offsets, sizes)
        except OSError:
            return None

    def mapped(self, shard: int) -> memoryview | None:
        """See `ShardReader.mapped`."""
        if not self._maps:
            return None
        try:
            return memoryview(self._memory(shard).data)
        except OSError:
            return None

    def descriptor(self, shard: int) -> int:
        """A shard's descriptor, still owned by this object."""
        return self._descriptors[shard]

    def _memory(self, shard: int) -> Bytes:
        """The whole shard, mapped read-only on the first call."""
        if shard not in self._mapped:
            self._mapped[shard] = map_memory(self._descriptors[shard], self._opened[shard].size_bytes, writable=False)
        return self._mapped[shard]

    def first_bytes(self, shard: int, size_bytes: int) -> Bytes:
        """The first bytes of a shard that may still be arriving, mapped read-only for this caller alone.

        Such a shard lies in memory or in a file of our own, which is never truncated.
        """
        return map_memory(self._descriptors[shard], size_bytes, writable=False)

    def url(self, shard: int) -> str:
        """Its url."""
        return self._opened[shard].url

    def size_bytes(self, shard: int) -> int:
        """Its size."""
        return self._opened[shard].size_bytes

    def drop(self, shards: tuple[int, ...]) -> None:
        """Close shards; they are unmapped when the last view of them is gone."""
        for shard in shards:
            self._mapped.pop(shard, None)
            if self._opened.pop(shard, None) is not None:
                os.close(self._descriptors.pop(shard))

    def close(self) -> None:
        """Close all of them."""
        self.drop(tuple(self._opened))


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
