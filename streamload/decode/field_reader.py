"""Read one field of many samples from open shards into a column of values.

Truncating a mapped shard kills the processes that read it. So only workers, which can be replaced, map shards, and only
to read many rows at once: reading a mapped field adds surrounding pages to the process's memory.
"""

from __future__ import annotations

import os
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from struct import iter_unpack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.collate import ABSENT, PlacedRows, Rows, are_apart, by_first_row, copy_together, owned
from streamload.decode.decoders import Decoder, Encoded, decoder_for, npy_layout
from streamload.decode.failure import Attempt
from streamload.decode.tasks import Column, Job, RowFailure, RowTable, by_shard
from streamload.memory.mapped import Bytes, gather, map_memory, read_fully
from streamload.order.randomness import SampleRandomness
from streamload.tar.extensions import KIND_OF, Kind, decodes_as_built_in, is_array, is_image, last_extension
from streamload.tar.scan import MISSING

_INT64_DIGITS = 18  # every number with this many digits fits an int64
# With fewer rows per shard, reading row by row is faster than shard by shard.
_ROWS_PER_SHARD = 8

# Rows of at least this size are copied one by one, smaller ones by one indexing operation per shard.
_ROW_BY_ROW_BYTES = 1024

# A column with a field above this size, except of npy arrays of equal size, is read row by row: a read call costs
# little next to the copy, and maps no surrounding pages.
_VIEWED_BYTES = 32 << 10

# Decoded arrays below this size are copied to their batch together, which is faster.
_COPIED_TOGETHER_BYTES = 4 << 10


class ShardReader(ABC):
    """Read bytes of shards, by their numbers in a `RowTable`."""

    @abstractmethod
    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `start` on; fewer if the shard ends earlier.

        Raises:
            OSError: the shard cannot be read.
        """

    @abstractmethod
    def listed(self, shard: int) -> tuple[str, int]:
        """Return the shard's url and size in bytes."""

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target` with the bytes from `start` on; return their number, smaller if the shard ends earlier."""
        data = self.read(shard, start, len(target))
        target[: len(data)] = data
        return len(data)

    @abstractmethod
    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """Return memory with the fields, and each field's offset in it; None to read the fields one by one."""


Progress = memoryview | list[int]
"""Holds the current row as its first item. A memoryview of shared memory stays readable if the process crashes."""


class RowError(Exception):
    """Raised if a field is missing or cannot be read; `kind` names a class of `streamload.errors`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Work:
    """The rows of a task: their inputs, failures, costs and, in the end, values.

    Attributes:
        keys: the rows' keys, if samples hold them.
        progress: set to each row's number before the row is processed.
        named_s: seconds by stage and name, such as "decode_s/jpg".
        rows: the resulting values; undefined for failed rows.
        any_missing: at least one row lacks a field.
    """

    rows: Rows

    def __init__(
        self,
        table: RowTable,
        shards: ShardReader,
        random: SampleRandomness,
        keys: Sequence[str] | None,
        progress: Progress,
    ) -> None:
        self.table, self.shards, self.random, self.keys, self.progress = table, shards, random, keys, progress
        self.failures: dict[int, RowFailure] = {}
        self.named_s: dict[str, float] = {}
        self.columns = table.columns()
        self.any_missing = any((column.offsets == MISSING).any() for column in self.columns)
        self.row_shards: list[int] = table.shards.tolist()
        self.count = len(table)
        self.rows_per_shard = self.count / max(1, len(set(self.row_shards)))

    def record(self, name: str, seconds: float) -> None:
        """Add seconds to an entry of `named_s`."""
        self.named_s[name] = self.named_s.get(name, 0.0) + seconds

    def each_row(
        self,
        action: Callable[[Iterator[int]], None],
        failed: Callable[[int, Exception], RowFailure],
        numbers: range | None = None,
    ) -> None:
        """Pass unfailed rows to an action; if it raises, fail the current row and call it again for the rest."""
        progress, failures = self.progress, self.failures

        def left() -> Iterator[int]:
            for row in range(self.count) if numbers is None else numbers:
                if row not in failures:
                    progress[0] = row
                    yield row

        rows = left()
        while True:
            with Attempt(exits=True) as attempt:
                action(rows)
            if attempt.error is None:
                return
            row = progress[0]
            failures[row] = failed(row, attempt.error)


class FieldReader:
    """Read and decode fields.

    A missing optional field is None, or `ABSENT` if all fields are read.

    Args:
        job: the user's functions and options.
        single: user code sees each value, so columns hold the decoders' results, never one array of them.
    """

    def __init__(self, job: Job, *, single: bool) -> None:
        self._job = job
        self.absent = ABSENT if job.fields is None else None
        self._single = single
        self._decodings: dict[str, tuple[Decoder, type[Encoded]]] = {}
        self._reused = memoryview(b"")
        self._reusing: set[str] = set()  # fields whose decoders may reuse the memory of arrays they returned

    def decoding(self, name: str) -> tuple[Decoder, type[Encoded]]:
        """Return a field's decoder, and the class of its input: memoryview only if the decoder keeps no reference."""
        decoding = self._decodings.get(name)
        if decoding is None:
            kind: type[Encoded] = bytes
            if decodes_as_built_in(name, self._job.decode):
                kind = memoryview if is_image(name) else bytearray if is_array(name) else kind
            decoding = decoder_for(name, self._job.decode), kind
            self._decodings[name] = decoding
        return decoding

    def is_built_in(self, column: Column) -> bool:
        """Return True if only built-in decoders apply."""
        return all(decodes_as_built_in(name, self._job.decode) for name in column.alternatives)

    def is_absent(self, column: Column, row: int) -> bool:
        """Return True if a row lacks the field, and the field is optional."""
        is_optional = self._job.fields is None or column.name in self._job.optional_fields
        return is_optional and column.offsets.item(row) == MISSING

    def encoded(self, work: Work, column: Column, row: int, kind: type[Encoded]) -> Encoded:
        """Return a field's verified bytes as an object of class `kind`; the next call reuses a memoryview's memory.

        Raises:
            RowError: the field is missing or unreadable, or differs from the index.
        """
        start, size = column.offsets.item(row), column.sizes.item(row)  # twice as fast as indexing
        if start == MISSING:
            raise RowError("SampleError", f"the sample has no field {column.name!r}")
        shards, shard = work.shards, column.shards.item(row)
        if size > shards.listed(shard)[1] - start:
            raise RowError("DecodeError", "the index points beyond the end of the shard; run `streamload index`")
        data: Encoded
        try:
            if kind is bytes:
                data = shards.read(shard, start, size)
            elif kind is bytearray:
                data = bytearray(size)
                del data[shards.read_into(memoryview(data), shard, start) :]
            else:
                if len(self._reused) < size:  # allocating memory for each image would cost more than reading it
                    self._reused = memoryview(bytearray(2 * size))
                data = self._reused[: shards.read_into(self._reused[:size], shard, start)]
        except (OSError, OverflowError) as error:
            raise RowError("SampleError", f"the field {column.name!r} cannot be read: {error}") from error
        if len(data) != size:
            raise RowError(
                "ShardChangedError",
                f"the shard was truncated while it was in use: it ends within the field {column.name!r}; create a new "
                "loader, and keep each version of a dataset in its own folder",
            )
        if column.crc32 is not None and zlib.crc32(data) != column.crc32.item(row):
            raise RowError(
                "DecodeError",
                f"the bytes of field {column.name!r} are damaged: their crc32 is not that of the index; fetch the "
                "shard again, or run `streamload index` if it was rewritten",
            )
        return data

    def read(
        self,
        work: Work,
        column: Column,
        failed: Callable[[int, Exception], RowFailure],
        blocks: list[NDArray[Any]] | None,
    ) -> Any:
        """Return a field's values for all rows, as a column of `Rows`.

        Args:
            work: the rows.
            column: the field.
            failed: creates the failure of a row.
            blocks: each batch's memory for the values, if known.
        """
        name, largest = column.alternatives[0], int(column.sizes.max())
        is_whole = not self._single and self.is_built_in(column)
        is_integer = KIND_OF.get(last_extension(name)) is Kind.INTEGER
        is_block = is_whole and is_array(name) and (column.sizes == largest).all()
        gathered = None
        if (
            work.rows_per_shard >= _ROWS_PER_SHARD
            and (0 < largest <= _VIEWED_BYTES or is_block)
            and column.crc32 is None
            and not work.failures
            and (column.which is None or not column.which.any())
        ):
            gathered = _gathered(column, work)
        decoded = None
        if gathered is not None and is_block:
            decoded = _arrays(column, gathered, blocks)
        elif gathered is not None and is_whole and is_integer and largest <= _INT64_DIGITS:
            decoded = _integers(column, gathered)
        if decoded is not None:
            return decoded
        return self._read_by_row(work, column, failed, blocks, gathered if largest <= _VIEWED_BYTES else None)

    def _read_by_row(
        self,
        work: Work,
        column: Column,
        failed: Callable[[int, Exception], RowFailure],
        blocks: list[NDArray[Any]] | None,
        gathered: _Gathered | None,
    ) -> Any:
        read_rows = self._row_reader(work, column, failed, gathered)
        is_built_in = self.is_built_in(column)
        is_placed = blocks is not None and blocks[0].nbytes >= _COPIED_TOGETHER_BYTES * len(blocks[0])
        values: list[Any] = [None] * work.count
        if is_placed or column.name in self._reusing or (blocks is None and not is_built_in):
            values = PlacedRows(work.count, blocks)
        if blocks is None or isinstance(values, PlacedRows):
            read_rows(values, range(work.count))
            return values
        batches: dict[int, Any] = {}
        for start, block in by_first_row(blocks).items():
            end = start + len(block)
            read_rows(values, range(start, end))
            batch: Any = values[start:end]
            kinds = set(map(type, batch))
            if np.ndarray in kinds:
                if not is_built_in and not are_apart([value for value in batch if type(value) is np.ndarray]):
                    self._reusing.add(column.name)
                    return self._read_by_row(work, column, failed, blocks, None if work.failures else gathered)
                if len(kinds) == 1 and copy_together(batch, block):
                    batch = block
                elif not is_built_in:
                    batch = list(map(owned, batch))
            batches[start] = batch
            values[start:end] = [None] * len(block)  # frees memory for the next values, while it is in the CPU's caches
        return batches

    def _row_reader(
        self, work: Work, column: Column, failed: Callable[[int, Exception], RowFailure], gathered: _Gathered | None
    ) -> Callable[[list[Any], range], None]:
        """Return a function that sets the values of a range of rows; call it for consecutive ranges, from row 0."""
        decode, of_bytes = self.decoding(column.alternatives[0])
        progress, small = work.progress, None if gathered is None else _fields(column, gathered, of_bytes)

        def read(values: list[Any], numbers: range) -> None:
            # For small fields, counting rows here is noticeably faster than `each_row`'s generator.
            numbered = zip(numbers, small or (), strict=False)

            def read_small(_: Iterator[int]) -> None:
                for row, data in numbered:
                    progress[0] = row
                    values[row] = decode(data)

            def read_each(rows: Iterator[int]) -> None:
                for row in rows:
                    if self.is_absent(column, row):
                        values[row] = self.absent
                    else:
                        decoder, kind = self.decoding(field_of(column, row))
                        values[row] = decoder(self.encoded(work, column, row, kind))

            work.each_row(read_each if small is None else read_small, failed, numbers)

        return read


def field_of(column: Column, row: int) -> str:
    """Return the name of the alternative that a row has."""
    return column.alternatives[0 if column.which is None else column.which.item(row)]


class _Gathered(NamedTuple):
    """The bytes of a field of many rows, in one mapping or copy for each shard.

    Attributes:
        shards: int64[rows], the shard of each row.
        groups: each shard with its rows.
        memory: the mapping or copy by shard.
        starts: int64[rows], the offset of each row's field in `memory`.
    """

    shards: NDArray[np.int64]
    groups: Iterable[tuple[int, NDArray[np.intp]]]
    memory: dict[int, memoryview]
    starts: NDArray[np.int64]


def _gathered(column: Column, work: Work) -> _Gathered | None:
    """Gather a field of all rows; None if the rows must be read one by one, for example to find the failing one."""
    memory, starts, groups = {}, np.empty(work.count, np.int64), list(by_shard(column.shards))
    for shard, rows in groups:
        gathered = work.shards.gather(shard, column.offsets[rows], column.sizes[rows])
        if gathered is None:
            return None
        memory[shard], starts[rows] = gathered[0].data, gathered[1]
    return _Gathered(column.shards, groups, memory, starts)


def _copy(gathered: _Gathered, out: NDArray[Any]) -> None:
    """Copy the first bytes of each row's field to its entry of `out`, which is C-contiguous."""
    row_bytes = out.nbytes // len(out)
    if row_bytes == 0:
        return
    target, (shards, groups, memory, starts) = out.reshape(-1).view(np.uint8), gathered
    if row_bytes < _ROW_BY_ROW_BYTES:
        items = target.view(f"V{row_bytes}")
        for shard, rows in groups:
            data = memory[shard]
            at_every_byte = np.ndarray((len(data) - row_bytes + 1,), items.dtype, data, 0, (1,))
            items[rows] = at_every_byte[starts[rows]]
        return
    # Slices of memoryviews cost half as much as slices of arrays.
    written, end = target.data, 0
    for shard, start in zip(shards.tolist(), starts.tolist(), strict=True):
        begin, end = end, end + row_bytes
        written[begin:end] = memory[shard][start : start + row_bytes]


def _arrays(
    column: Column, gathered: _Gathered, blocks: list[NDArray[Any]] | None
) -> NDArray[Any] | dict[int, NDArray[Any]] | None:
    """Copy C-order npy arrays of equal headers to `blocks` if these fit, else to new memory; None for others."""
    (shards, _, memory, starts), size = gathered, int(column.sizes[0])
    first = memory[int(shards[0])][int(starts[0]) :][:size]
    try:
        layout = npy_layout(first)
    except ValueError:
        return None
    if layout.end > size or layout.order == "F":
        return None
    headers = np.empty((len(starts), layout.start), np.uint8)
    _copy(gathered, headers)
    if headers.tobytes() != bytes(first[: layout.start]) * len(starts):
        return None
    starts = starts + layout.start
    if (
        blocks is None
        or not layout.shape
        or (blocks[0].dtype, blocks[0].shape[1:]) != (layout.dtype, layout.shape)
        or not blocks[0].flags.c_contiguous
    ):
        values = np.empty((len(starts), *layout.shape), layout.dtype)
        _copy(gathered._replace(starts=starts), values)
        return values
    batches = by_first_row(blocks)
    for start, block in batches.items():
        batch = slice(start, start + len(block))
        _copy(_Gathered(shards[batch], by_shard(shards[batch]), memory, starts[batch]), block)
    return batches


def _integers(column: Column, gathered: _Gathered) -> NDArray[np.int64] | None:
    """Decode plain digits exactly as `decode_integer` does; None if a row needs `decode_integer` itself."""
    width = int(column.sizes.max())
    starts = gathered.starts + column.sizes - width  # aligned right; the bytes before shorter numbers become "0" below
    if starts.min() < 0 or column.sizes.min() == 0:
        return None
    characters = np.empty((len(starts), width), np.uint8)
    _copy(gathered._replace(starts=starts), characters)
    characters[np.arange(width) < (width - column.sizes)[:, None]] = ord("0")
    digits = characters - np.uint8(ord("0"))  # anything but a digit wraps around to more than 9
    if digits.max() > 9:
        return None
    values = np.zeros(len(starts), np.int64)
    for position in range(width):
        values *= 10
        values += digits[:, position]
    return values


def _fields(column: Column, gathered: _Gathered, kind: type[Encoded]) -> Iterator[Encoded]:
    """Return an iterator over the fields' bytes; after a failed row it continues with the next."""
    convert, size = bytearray if kind is bytearray else bytes, int(column.sizes[0])
    if size <= _ROW_BY_ROW_BYTES and (column.sizes == size).all():
        # One bulk copy overlaps the cache misses of many fields.
        copies = np.empty(len(column.sizes), f"V{size}")
        _copy(gathered, copies)
        fields = chain.from_iterable(iter_unpack(f"{size}s", copies.data))  # unlike `tolist`, one at a time
        return fields if kind is bytes else map(convert, fields)
    shards, _, memory, starts = gathered
    bounds = zip(shards.tolist(), starts.tolist(), (starts + column.sizes).tolist(), strict=True)
    return (convert(memory[shard][start:end]) for shard, start, end in bounds)


class OpenShards(ShardReader):
    """Read shards by open descriptors; deleting this object closes them.

    Args:
        maps: map shards; False in a process that must survive their truncation.

    Attributes:
        descriptors: the descriptors by shard, owned by this object.
    """

    def __init__(self, *, maps: bool = True) -> None:
        self._maps = maps
        self.descriptors: dict[int, int] = {}
        self._opened: dict[int, tuple[str, int]] = {}  # url and size in bytes
        self._mapped: dict[int, Bytes] = {}
        descriptors = self.descriptors.values()
        weakref.finalize(self, lambda: [*map(os.close, descriptors)]).atexit = False

    def add(self, shard: int, url: str, size_bytes: int, descriptor: int) -> None:
        """Take ownership of a shard's descriptor, replacing an earlier one."""
        self.drop((shard,))
        self.descriptors[shard] = descriptor
        self._opened[shard] = url, size_bytes

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target`; return the number of bytes read."""
        return read_fully(self.descriptors[shard], target, start)

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """Return bytes of a shard."""
        data = os.pread(self.descriptors[shard], size_bytes, start)
        if len(data) == size_bytes:
            return data
        own = bytearray(size_bytes)  # a single call returns at most 2 GiB
        del data, own[self.read_into(memoryview(own), shard, start) :]
        return bytes(own)

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """Map the shard, or copy the fields; return None if a field cannot be read."""
        size_bytes = self._opened[shard][1]
        if not len(offsets) or offsets.min() < 0 or (sizes > size_bytes - offsets).any():
            return None
        try:
            if not self._maps:
                return gather(self.descriptors[shard], offsets, sizes)
            if shard not in self._mapped:
                self._mapped[shard] = map_memory(self.descriptors[shard], size_bytes, writable=False)
            return self._mapped[shard], offsets
        except OSError:
            return None

    def listed(self, shard: int) -> tuple[str, int]:
        """Return the url and size."""
        return self._opened[shard]

    def drop(self, shards: tuple[int, ...]) -> None:
        """Close shards; memory is unmapped with its last view."""
        for shard in shards:
            self._mapped.pop(shard, None)
            if self._opened.pop(shard, None) is not None:
                os.close(self.descriptors.pop(shard))

    def close(self) -> None:
        """Close all shards."""
        self.drop(tuple(self._opened))
