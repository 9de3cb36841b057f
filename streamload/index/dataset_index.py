"""Read, check and write the files of an index (docs/index-format.md).

A writer writes table files, then `index.json`, then deletes old table files. `index.json` is replaced atomically, and
table files are named by digests of their content, so a reader never mixes the old and the new index.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError, ShardNotFoundError, StreamloadError, without_secrets
from streamload.storage.protocol import Storage
from streamload.tar.decompression import compression_of
from streamload.tar.scan import ShardTable, starts_of, stretches
from streamload.text import counted

_log = logging.getLogger("streamload")

INDEX_FOLDER = ".streamload"  # beside the shards
INDEX_FILE = "index.json"  # in that folder: the list of shards
MOST_INDEX_BYTES = 4 << 30  # maximum size of an index file
# Maximum size of neighbouring tables read at once: a request costs as much as reading these bytes.
GROUP_BYTES = 128 << 10

_FORMAT = 2
_KIND = "streamload-index"
_LOOKS_LIKE_INDEX = re.compile(rb'"kind"\s*:\s*"' + _KIND.encode() + rb'"')
_TABLE_FILE = re.compile(r"tables-[0-9a-f]{16}\.bin")
_NO_NAMES = ("", ".", "..")

# Maximum bytes and samples of a shard, so the sums over all shards of a dataset fit into 63 bits.
_MAX_COUNT = 1 << 48
# The columns of numbers in `index.json`, with their maxima.
_NUMBERS = {"bytes": _MAX_COUNT, "samples": _MAX_COUNT, "table_bytes": _MAX_COUNT, "table_crc32": (1 << 32) - 1}

# Maximum tables and bytes of a table file.
_FILE_TABLES, _FILE_BYTES = 1000, 64 << 20

_MAGIC = b"slt\n"
# Magic, format, flags, the shard's bytes; numbers of members, samples, bytes of keys, bytes of JSON.
_HEADER = struct.Struct("<4sHHQQQQQ")
_HEADERS = np.dtype([("magic", "S4"), ("format", "<u2"), ("flags", "<u2"), ("counts", "<u8", 5)])
_CRC32, _LABELS = 1, 2
_ALIGNMENT = 8
_INT64, _UINT32, _UINT16, _UINT8 = (np.dtype(code) for code in ("<i8", "<u4", "<u2", "u1"))


class NotAnIndexError(DatasetIndexError):
    """Raised for an `index.json` that streamload did not write."""


def index_error(why: str, url: str, offset: int | None = None) -> DatasetIndexError:
    """Return the error for a damaged file of an index."""
    return DatasetIndexError(f"{why}; rebuild the index with `streamload index`", url=url, offset=offset)


# -- tables --------------------------------------------------------------------------------------------------------


def pack_table(table: ShardTable) -> bytes:
    """Pack a table. Equal tables give equal bytes."""
    about = json.dumps({"fields": table.fields, "skipped": dict(sorted(table.skipped.items()))}).encode("ascii")
    flags = (_CRC32 if table.member_crc32 is not None else 0) | (_LABELS if table.labels is not None else 0)
    counts = (len(table.member_offset), len(table), len(table.key_bytes), len(about))
    columns = (
        (table.member_offset, _INT64),
        (table.member_size, _INT64),
        (table.sample_start, _INT64),
        (table.key_start, _INT64),
        (table.labels, _INT64),
        (table.member_crc32, _UINT32),
        (table.member_field, _UINT16),
        (table.key_bytes, _UINT8),
    )
    arrays = [np.asarray(column, dtype).tobytes() for column, dtype in columns if column is not None]
    packed = b"".join((_HEADER.pack(_MAGIC, _FORMAT, flags, table.shard_bytes, *counts), *arrays, about))
    return packed + bytes(-len(packed) % _ALIGNMENT)


def unpack_table(content: bytes, url: str) -> ShardTable:
    """Unpack a table of `pack_table`, as views of the bytes.

    Raises:
        DatasetIndexError: the table is damaged, of another version, or inconsistent; the error names `url`.
    """
    try:
        return _unpack(content, [0, len(content)]).table
    except _TableError as exc:
        raise index_error(str(exc), url, 0) from exc


class _TableError(Exception):
    """Raised for bytes of an index that are not a valid table."""


class TableRun(NamedTuple):
    """The tables of neighbouring shards, joined.

    Attributes:
        table: the samples of all shards in order, with offsets relative to each sample's shard.
        firsts: the row of each shard's first sample, followed by the number of all samples.
        shard_bytes: the size of each shard.
        about: the JSON of each table.
    """

    table: ShardTable
    firsts: list[int]
    shard_bytes: list[int]
    about: list[bytes]

    def table_of(self, number: int) -> ShardTable:
        """Return the table of one shard of the run."""
        if len(self.about) == 1:
            return self.table
        # Slicing is five times as fast as `ShardTable.only`.
        table, start, end = self.table, self.firsts[number], self.firsts[number + 1]
        starts, keys = table.sample_start[start : end + 1], table.key_start[start : end + 1]
        members = slice(int(starts[0]), int(starts[-1]))
        return ShardTable(
            shard_bytes=self.shard_bytes[number],
            fields=table.fields,
            member_offset=table.member_offset[members],
            member_size=table.member_size[members],
            member_field=table.member_field[members],
            sample_start=starts - starts[0],
            key_bytes=table.key_bytes[int(keys[0]) : int(keys[-1])],
            key_start=keys - keys[0],
            member_crc32=None if table.member_crc32 is None else table.member_crc32[members],
            labels=None if table.labels is None else table.labels[start:end],
            skipped=_parse_about(self.about[number])[1],
        )


def _unpack(content: bytes, edges: Sequence[int]) -> TableRun:
    """Join the packed tables between `edges`. A single table is not copied.

    Raises:
        _TableError: a table is damaged, of another version, or exceeds its shard; or fields or flags differ.
    """
    start, length = np.array(edges[:-1], np.int64), np.diff(np.array(edges, np.int64))
    if length.min() < _HEADER.size or edges[-1] > len(content):
        raise _TableError(f"a table is cut off: the file ends after {len(content)} bytes of it")
    header = np.frombuffer(b"".join([content[at : at + _HEADER.size] for at in edges[:-1]]), _HEADERS)
    if (header["magic"] != _MAGIC).any():
        raise _TableError("these bytes are not a table")
    if (header["format"] != _FORMAT).any():
        raise _TableError(f"a table has format {header['format'][0]}, but this release reads format {_FORMAT}")
    counts = header["counts"]
    shard_bytes, members, samples, key_bytes, about_bytes = np.minimum(counts, 2 * _MAX_COUNT).astype(np.int64).T
    size_of_member = np.where(header["flags"] & _CRC32, 22, 18)
    size_of_sample = np.where(header["flags"] & _LABELS, 24, 16)
    about = _HEADER.size + size_of_member * members + size_of_sample * samples + 16 + key_bytes
    stated = about + about_bytes
    if (counts > _MAX_COUNT).any() or (stated + -stated % _ALIGNMENT != length).any() or (start % _ALIGNMENT).any():
        raise _TableError(f"a table has {length[0]} bytes, but its header states {stated[0]}")
    abouts = [content[at:end] for at, end in zip((start + about).tolist(), (start + stated).tolist(), strict=True)]
    flags, fields = int(header["flags"][0]), _parse_about(abouts[0])[0]
    if (header["flags"] != flags).any() or any(_parse_about(about)[0] != fields for about in {*abouts}):
        raise _TableError("the tables have different fields")
    offset_at = start + _HEADER.size
    size_at = offset_at + 8 * members
    sample_at = size_at + 8 * members
    key_at = sample_at + 8 * (samples + 1)
    label_at = key_at + 8 * (samples + 1)
    crc32_at = label_at + (8 * samples if flags & _LABELS else 0)
    field_at = crc32_at + (4 * members if flags & _CRC32 else 0)
    text_at = field_at + 2 * members

    def column(dtype: np.dtype[Any], at: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[Any]:
        if len(start) == 1:
            return np.frombuffer(content, dtype, int(counts[0]), int(at[0])) if counts[0] else np.empty(0, dtype)
        first = at // dtype.itemsize
        whole = np.frombuffer(content, dtype, len(content) // dtype.itemsize)
        return whole[stretches(first, first + counts)]

    last_edge = np.cumsum(samples + 1) - 1

    def joined_edges(name: str, at: NDArray[np.int64], ends: NDArray[np.int64], *, rising: bool) -> NDArray[np.int64]:
        """Return the start of each sample in the joined tables, then the end."""
        edges: NDArray[np.int64] = column(_INT64, at, samples + 1)
        # Edges are compared, not subtracted, since the difference of two large numbers may overflow.
        wrong = edges[1:] <= edges[:-1] if rising else edges[1:] < edges[:-1]
        wrong[last_edge[:-1]] = False  # the next table begins there
        if wrong.any() or edges[last_edge - samples].any() or (edges[last_edge] != ends).any():
            raise _TableError(f"the table's {name} does not run from 0 to {ends[0]}")
        before = np.cumsum(ends) - ends
        return np.append(np.delete(edges, last_edge) + np.repeat(before, samples), ends.sum())

    offset, size = column(_INT64, offset_at, members), column(_INT64, size_at, members)
    numbers = column(_UINT16, field_at, members)
    if ((offset | size) < 0).any() or (size > np.repeat(shard_bytes, members) - offset).any():
        raise _TableError(f"a member does not lie within the shard's {shard_bytes[0]} bytes")
    if (numbers >= len(fields)).any():
        raise _TableError("a member has a field that the table does not list")
    table = ShardTable(
        shard_bytes=int(shard_bytes.max()),
        fields=fields,
        member_offset=offset,
        member_size=size,
        member_field=numbers,
        sample_start=joined_edges("sample_start", sample_at, members, rising=True),
        key_bytes=column(_UINT8, text_at, key_bytes),
        key_start=joined_edges("key_start", key_at, key_bytes, rising=False),
        member_crc32=column(_UINT32, crc32_at, members) if flags & _CRC32 else None,
        labels=column(_INT64, label_at, samples) if flags & _LABELS else None,
        skipped=_parse_about(abouts[0])[1] if len(start) == 1 else {},
    )
    return TableRun(table, starts_of(samples).tolist(), shard_bytes.tolist(), abouts)


@lru_cache(64)
def _parse_about(content: bytes) -> tuple[tuple[str, ...], Mapping[str, int]]:
    try:
        about = json.loads(content)
        fields, skipped = about["fields"], about["skipped"]
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise _TableError(f"the table's fields cannot be read ({exc})") from exc
    if not isinstance(fields, list) or not _are(fields, {str}):
        raise _TableError("the table's fields are not a list of names")
    if not isinstance(skipped, dict) or not all(type(n) is int and 0 <= n <= _MAX_COUNT for n in skipped.values()):
        raise _TableError("the table's skipped members are not counts by reason")
    return tuple(fields), skipped


# -- the list of shards --------------------------------------------------------------------------------------------


class IndexedShard(NamedTuple):
    """The entry of one shard.

    Attributes:
        name: the file's name, without a folder.
        bytes: the file's size; the table of a compressed shard has the decompressed size instead.
        etag: the version in the storage, if recorded.
        file: the table file in the index's folder; empty for a new entry.
        start: the table's offset in that file.
    """

    name: str
    bytes: int
    samples: int
    etag: str | None = None
    file: str = ""
    start: int = 0
    table_bytes: int = 0
    table_crc32: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TableGroup:
    """Neighbouring tables, read at once: the bytes from `start` to `end` of the table file `url`."""

    url: str
    start: int
    end: int
    shards: Sequence[IndexedShard]

    def unpack(self, content: bytes) -> list[tuple[TableRun, int] | DatasetIndexError]:
        """Return, for each shard, a run of tables and the shard's number in it, or the error of its table."""
        edges = [*accumulate((entry.table_bytes for entry in self.shards), initial=0)]
        try:
            for entry, (start, end) in zip(self.shards, pairwise(edges), strict=True):
                if crc32(content[start:end]) != entry.table_crc32:
                    why = f"the table's checksum differs from the one in {INDEX_FILE}; the file was changed"
                    raise _TableError(why)
            run = _unpack(content, edges)
            for entry, (first, after), total_bytes in zip(
                self.shards, pairwise(run.firsts), run.shard_bytes, strict=True
            ):
                if after - first != entry.samples or (total_bytes != entry.bytes and not compression_of(entry.name)):
                    raise _TableError(
                        f"{INDEX_FILE} has {counted(entry.samples, 'sample')} in {entry.bytes} bytes for the shard "
                        f"{entry.name!r}, but its table has {after - first} in {total_bytes}"
                    )
            return [(run, number) for number in range(len(self.shards))]
        except _TableError as exc:
            if len(self.shards) == 1:
                return [index_error(str(exc), self.url, self.start)]
        # A table is damaged, or the tables cannot be joined: unpack each alone.
        each = zip(self.shards, pairwise(edges), strict=True)
        return [_group(self.url, (entry,)).unpack(content[start:end])[0] for entry, (start, end) in each]


def _group(url: str, shards: Sequence[IndexedShard]) -> TableGroup:
    return TableGroup(url, shards[0].start, shards[-1].start + shards[-1].table_bytes, shards)


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """The index of the shards in one folder.

    Attributes:
        folder: the index's own folder (`.../.streamload`).
        fields: the fields of all shards, sorted; fields of replaced shards may remain.
        shards: the entries, sorted by name.
    """

    folder: str
    fields: tuple[str, ...]
    shards: tuple[IndexedShard, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling columns is four times as fast as pickling each entry.
        return _from_columns, (self.folder, self.fields, tuple(zip(*self.shards, strict=True)))

    @classmethod
    def from_json(cls, content: bytes, folder: str) -> DatasetIndex:
        """Parse an `index.json`.

        Raises:
            DatasetIndexError: the content is damaged, of another version, or not an index.
        """
        path = f"{folder}/{INDEX_FILE}"
        if _LOOKS_LIKE_INDEX.search(content) is None:
            raise NotAnIndexError("not a streamload index; make one with `streamload index`", url=path)
        try:
            document = dict(json.loads(content))
        except (ValueError, TypeError, RecursionError) as exc:
            raise index_error(f"the index is not JSON ({exc})", path) from exc
        if document.get("format") != _FORMAT:
            raise DatasetIndexError(
                f"the index has format {document.get('format')!r}, but this release reads format {_FORMAT}; "
                "rebuild it with `streamload index`, or install a release that reads it",
                url=path,
            )
        try:
            fields, shards = tuple(document["fields"]), _entries_in(document)
            if not isinstance(document["fields"], list) or not _are(fields, {str}):
                raise ValueError("fields")
        except (ValueError, TypeError, LookupError, AttributeError) as exc:
            raise index_error("the index is damaged", path) from exc
        return cls(folder, fields, shards)

    def to_json(self) -> bytes:
        """Return the content of `index.json`, equal for equal entries."""
        columns = {name: [getattr(entry, name) for entry in self.shards] for name in ("name", *_NUMBERS, "etag")}
        if set(columns["etag"]) == {None}:
            del columns["etag"]
        files = Counter(entry.file for entry in self.shards)
        document = {
            "format": _FORMAT,
            "kind": _KIND,
            "fields": list(self.fields),
            "tables": [{"file": file, "shards": shards} for file, shards in files.items()],
            "shards": columns,
        }
        return (json.dumps(document, separators=(",", ":")) + "\n").encode("ascii")

    def find(self, name: str) -> IndexedShard | None:
        """Return a shard's entry, or None."""
        number = self._numbers.get(name)
        return None if number is None else self.shards[number]

    def shard(self, name: str) -> IndexedShard:
        """Return a shard's entry.

        Raises:
            DatasetIndexError: the index does not have the shard.
        """
        if (entry := self.find(name)) is None:
            folder = without_secrets(self.folder)
            raise DatasetIndexError(
                f"the index in {folder!r} does not have this shard; add it with `streamload index`", url=name
            )
        return entry

    def place(self, name: str) -> tuple[TableGroup, int]:
        """Return the group with a shard's table, and the table's number there; raise like `shard`."""
        self.shard(name)
        number = self._numbers[name]
        firsts, groups = self._groups
        at = bisect_right(firsts, number) - 1
        return groups[at], number - firsts[at]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {entry.name: number for number, entry in enumerate(self.shards)}

    @cached_property
    def _groups(self) -> tuple[list[int], list[TableGroup]]:
        firsts: list[int] = []
        file, start = "", 0
        for number, entry in enumerate(self.shards):
            if entry.file != file or entry.start + entry.table_bytes - start > GROUP_BYTES:
                firsts.append(number)
                file, start = entry.file, entry.start
        runs = [self.shards[first:after] for first, after in pairwise([*firsts, len(self.shards)])]
        return firsts, [_group(f"{self.folder}/{shards[0].file}", shards) for shards in runs]


def _from_columns(folder: str, fields: tuple[str, ...], columns: Sequence[Any]) -> DatasetIndex:
    return DatasetIndex(folder, fields, tuple(map(IndexedShard._make, zip(*columns, strict=True))))


def is_plain_name(*names: Any) -> bool:
    """Return True if all are plain file names, so that no path from an index escapes its folder."""
    if not _are(names, {str}) or not {*names}.isdisjoint(_NO_NAMES):
        return False
    text = "".join(names)
    return not any(letter in text for letter in "/\\\0")


def _entries_in(document: dict[str, Any]) -> tuple[IndexedShard, ...]:
    """Return the entries. Raises ValueError, TypeError, LookupError or AttributeError if they are damaged."""
    columns, tables = document["shards"], document["tables"]
    names, lengths, etags = columns["name"], columns["table_bytes"], columns.get("etag")
    etags = [None] * len(names) if etags is None else etags
    files, counts = [table["file"] for table in tables], [table["shards"] for table in tables]
    if not is_plain_name(*names) or len(set(names)) < len(names) or not _are(etags, {str, type(None)}):
        raise ValueError("names or versions")
    if not all(map(_TABLE_FILE.fullmatch, files)) or not _are(counts, {int}) or min(counts, default=0) < 0:
        raise ValueError("tables")
    for name, most in _NUMBERS.items():
        values = columns[name]
        if not _are(values, {int}) or min(values, default=0) < 0 or max(values, default=0) > most:
            raise ValueError(name)
    starts: list[int] = []
    in_file: list[str] = []
    for file, count in zip(files, counts, strict=True):  # tables in a file are contiguous
        inside = lengths[len(starts) : len(starts) + count]
        starts += [*accumulate(inside, initial=0)][:-1]
        in_file += [file] * len(inside)
    if sum(counts) != len(names):
        raise ValueError("tables")
    stored = (columns["bytes"], columns["samples"], etags, in_file, starts, lengths, columns["table_crc32"])
    return tuple(map(IndexedShard._make, zip(names, *stored, strict=True)))


def _are(values: Sequence[object], types: set[type]) -> bool:
    return set(map(type, values)) <= types


# -- writing -------------------------------------------------------------------------------------------------------


_Packed = Callable[[str], bytes | None]
# The entries of one table file, each with its table if the table is new.
_Run = list[tuple[IndexedShard, bytes | None]]


class IndexFolder:
    """Write the folder of an index, creating it if needed. Every method may raise StorageError."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.folder = storage.absolute(folder).rstrip("/")
        self._storage = storage

    def update_with_tables(self, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> DatasetIndex:
        """Add or replace shards with their tables; raise like `update`."""
        tables = {entry.name: table for entry, table in entries}
        fields = {name for table in tables.values() for name in table.fields}
        return self.update([entry for entry, _ in entries], fields, lambda name: pack_table(tables[name]))

    def update(
        self,
        entries: Sequence[IndexedShard],
        fields: set[str],
        packed: Callable[[str], bytes],
        *,
        gone: Callable[[str], bool] = lambda _: False,
    ) -> DatasetIndex:
        """Add or replace shards, drop those that are gone, and return the index. A broken index is replaced.

        Equal entries in any order give equal bytes. One table file at a time is in memory; files that keep all
        their tables are not read. Other writers of a local index wait.

        Args:
            entries: the shards.
            fields: the fields of the shards' tables.
            packed: returns a shard's packed table.
            gone: returns True for names whose entries are dropped.

        Raises:
            ValueError: `entries` is empty, or a name contains a folder or occurs twice.
        """
        new = {entry.name: entry for entry in entries}
        if not new or len(new) != len(entries):
            raise ValueError(f"an index needs shards, each name once, not {[entry.name for entry in entries]}")
        for name in new:
            if not is_plain_name(name):
                raise ValueError(f"{name!r} is not the plain name of a file; give it without a folder")
        with locked_folder(os.path.dirname(self.folder)):
            try:
                old = self._index()
            except DatasetIndexError as exc:
                _log.warning("making a new index, without the entries of the old one: %s", exc)
                old = None
            kept = [entry for entry in old.shards if entry.name not in new and not gone(entry.name)] if old else []
            fields = fields | set(old.fields) if old and kept else fields
            return self._replace(
                old, [*kept, *new.values()], fields, lambda name: packed(name) if name in new else None
            )

    def remove(self, matches: Callable[[str], bool]) -> None:
        """Remove entries with matching names, and the index if it is empty then.

        Raises:
            DatasetIndexError: the index is broken.
        """
        with locked_folder(os.path.dirname(self.folder)):
            old = self._index()
            kept = [entry for entry in old.shards if not matches(entry.name)] if old else []
            if old is not None and len(kept) < len(old.shards):
                self._replace(old, kept, set(old.fields) if kept else set(), lambda _: None)

    def _index(self) -> DatasetIndex | None:
        content = self._read(INDEX_FILE)
        return None if content is None else DatasetIndex.from_json(content, self.folder)

    def _read(self, name: str) -> bytes | None:
        return read_if_there(self._storage, f"{self.folder}/{name}", MOST_INDEX_BYTES)

    def _replace(
        self, old: DatasetIndex | None, entries: Sequence[IndexedShard], fields: set[str], packed: _Packed
    ) -> DatasetIndex:
        """Write the index of entries. `packed` returns a new table, or None for an existing one."""
        before: dict[str, list[IndexedShard]] = {}
        for entry in () if old is None else old.shards:
            before.setdefault(entry.file, []).append(entry)
        read = lru_cache(1)(self._read)
        shards: list[IndexedShard] = []
        try:
            for run in _runs(sorted(entries, key=lambda entry: entry.name), packed):
                in_file = [entry for entry, _ in run]
                changes = any(table for _, table in run) or before.get(in_file[0].file) != in_file
                shards += self._write_tables(run, read) if changes else in_file
            index = DatasetIndex(self.folder, tuple(sorted(fields)), tuple(shards))
            if shards:
                self._storage.write(f"{self.folder}/{INDEX_FILE}", index.to_json())
            else:
                self._storage.delete(f"{self.folder}/{INDEX_FILE}")
        except BaseException:
            with suppress(StreamloadError):  # index.json may be the old or the new one
                now = self._index()
                self._delete_unused(shards, () if now is None else now.shards)
            raise
        self._delete_unused(() if old is None else old.shards, shards)
        return index

    def _write_tables(self, run: _Run, read: Callable[[str], bytes | None]) -> list[IndexedShard]:
        """Write a table file, leave out damaged old tables, and return the entries."""
        kept: list[tuple[IndexedShard, bytes]] = []
        for entry, new in run:
            table = new or (read(entry.file) or b"")[entry.start : entry.start + entry.table_bytes]
            if new is None:
                (unpacked,) = _group(f"{self.folder}/{entry.file}", (entry,)).unpack(table)
                if isinstance(unpacked, DatasetIndexError):
                    _log.warning("dropped %r from the index, since its table cannot be read: %s", entry.name, unpacked)
                    continue
            kept.append((entry, table))
        if not kept:
            return []
        content = b"".join(table for _, table in kept)
        names = "\0".join(entry.name for entry, _ in kept)  # two files may have equal tables
        digest = blake2b(names.encode("utf-8", "surrogatepass") + content, digest_size=8).hexdigest()
        file = f"tables-{digest}.bin"
        self._storage.write(f"{self.folder}/{file}", content)
        starts = accumulate((len(table) for _, table in kept), initial=0)
        return [
            entry._replace(file=file, start=start, table_bytes=len(table), table_crc32=crc32(table))
            for (entry, table), start in zip(kept, starts, strict=False)
        ]

    def _delete_unused(self, entries: Sequence[IndexedShard], used: Sequence[IndexedShard]) -> None:
        for file in sorted({entry.file for entry in entries} - {entry.file for entry in used}):
            self._storage.delete(f"{self.folder}/{file}")


def _runs(entries: Sequence[IndexedShard], packed: _Packed) -> Iterator[_Run]:
    run: _Run = []
    run_bytes = 0
    for entry in entries:
        table = packed(entry.name)
        size = entry.table_bytes if table is None else len(table)
        if len(run) == _FILE_TABLES or (run and run_bytes + size > _FILE_BYTES):
            yield run
            run, run_bytes = [], 0
        run.append((entry, table))
        run_bytes += size
    if run:
        yield run


def read_if_there(storage: Storage, url: str, most_bytes: int) -> bytes | None:
    """Read a small file; None if it does not exist, or if a web server sends an HTML page in its place.

    Raises StorageError if it cannot be read.
    """
    try:
        content = storage.read_bytes(url, most_bytes=most_bytes)
    except ShardNotFoundError:
        return None
    return None if content[:100].lstrip()[:1] == b"<" else content


@contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Exclude other writers of a folder, if it is local and its file system has locks."""
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)
