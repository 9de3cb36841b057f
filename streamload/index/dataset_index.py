"""The files of an index as docs/index-format.md describes them: tables of shards as bytes, and `index.json`."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError, without_secrets
from streamload.tar.decompression import compression_of
from streamload.tar.table import ShardTable, stretches
from streamload.text import counted

# The version of the layout; a table of another version is refused.
_TABLE_FORMAT = 2

MAX_COUNT = 1 << 48
"""No shard has more bytes or samples; so the sums over all shards of a dataset fit into 63 bits."""

_MAGIC = b"slt\n"
# Magic, format, flags, the shard's bytes; the numbers of members, samples, bytes of keys, bytes of JSON.
_HEADER = struct.Struct("<4sHHQQQQQ")

_CRC32, _LABELS = 1, 2
_ALIGNMENT = 8
_INT64, _UINT32, _UINT16, _UINT8 = (np.dtype(code) for code in ("<i8", "<u4", "<u2", "u1"))


class _TableError(Exception):
    """Bytes of an index are no table; the text says why."""


def pack_table(table: ShardTable) -> bytes:
    """Return the bytes of a table, always the same for the same table."""
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
    packed = b"".join((_HEADER.pack(_MAGIC, _TABLE_FORMAT, flags, table.shard_bytes, *counts), *arrays, about))
    return packed + bytes(-len(packed) % _ALIGNMENT)


def unpack_table(content: bytes, url: str) -> ShardTable:
    """Return a table that `pack_table` packed, with views of the bytes, and check that it lies within the shard.

    Raises:
        DatasetIndexError: the table is damaged, of another version, or inconsistent; `url` is for this error.
    """
    try:
        return _joined(content, [_packed_at(content, 0, len(content))])
    except _TableError as exc:
        raise index_error(str(exc), url, 0) from exc


def index_error(why: str, url: str, offset: int | None = None) -> DatasetIndexError:
    """Return the error for a damaged file of an index."""
    return DatasetIndexError(f"{why}; rebuild the index with `streamload index`", url=url, offset=offset)


class _Packed(NamedTuple):
    """The header of a packed table, and what it says of fields."""

    start: int
    members: int
    samples: int
    key_bytes: int
    shard_bytes: int
    flags: int
    fields: tuple[str, ...]
    skipped: tuple[tuple[str, int], ...]


def _packed_at(content: bytes, start: int, end: int) -> _Packed:
    length = end - start
    if length < _HEADER.size or end > len(content):
        raise _TableError(f"a table is cut: {max(0, len(content) - start)} bytes are there")
    magic, version, flags, shard_bytes, members, samples, key_bytes, about_bytes = _HEADER.unpack_from(content, start)
    if magic != _MAGIC:
        raise _TableError("there is no table")
    if version != _TABLE_FORMAT:
        raise _TableError(f"a table of format {version}, and this release reads format {_TABLE_FORMAT}")
    bytes_of_member = 18 + (4 if flags & _CRC32 else 0)
    bytes_of_sample = 16 + (8 if flags & _LABELS else 0)
    about = _HEADER.size + bytes_of_member * members + bytes_of_sample * samples + 16 + key_bytes
    stated = about + about_bytes
    if shard_bytes > MAX_COUNT or stated + -stated % _ALIGNMENT != length or start % _ALIGNMENT:
        raise _TableError(f"a table of {length} bytes is said to have {stated}, of a shard of {shard_bytes}")
    described = _about(content[start + about : start + stated])
    return _Packed(start, members, samples, key_bytes, shard_bytes, flags, *described)


@lru_cache(64)
def _about(content: bytes) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Return the fields, and the skipped members by reason; most shards of a dataset share them."""
    try:
        about = json.loads(content)
        fields, skipped = about["fields"], about["skipped"]
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise _TableError(f"its fields cannot be read ({exc})") from exc
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        raise _TableError("its fields are not a list of names")
    if not isinstance(skipped, dict) or not all(type(n) is int and 0 <= n <= MAX_COUNT for n in skipped.values()):
        raise _TableError("its skipped members are not counts by reason")
    return tuple(fields), tuple(skipped.items())


def _joined(content: bytes, packed: Sequence[_Packed]) -> ShardTable:
    """Return one table of the samples of packed tables with the same fields and flags, one table after the other.

    Raises:
        _TableError: a table points outside of its shard or of itself.
    """
    flags, fields = packed[0].flags, packed[0].fields
    start, members, samples, key_bytes, shard_bytes = np.array([each[:5] for each in packed], np.int64).T
    offset_at = start + _HEADER.size
    size_at = offset_at + 8 * members
    sample_at = size_at + 8 * members
    key_at = sample_at + 8 * (samples + 1)
    label_at = key_at + 8 * (samples + 1)
    crc32_at = label_at + (8 * samples if flags & _LABELS else 0)
    field_at = crc32_at + (4 * members if flags & _CRC32 else 0)
    text_at = field_at + 2 * members

    def column(dtype: np.dtype[Any], at: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[Any]:
        if len(packed) == 1:
            return np.frombuffer(content, dtype, int(counts[0]), int(at[0])) if counts[0] else np.empty(0, dtype)
        first = at // dtype.itemsize
        whole = np.frombuffer(content, dtype, len(content) // dtype.itemsize)
        return whole[stretches(first, first + counts)]

    last_edge = np.cumsum(samples + 1) - 1

    def joined_edges(name: str, at: NDArray[np.int64], ends: NDArray[np.int64], *, rising: bool) -> NDArray[np.int64]:
        """Return where samples begin in all tables together, and the end."""
        edges: NDArray[np.int64] = column(_INT64, at, samples + 1)
        # Edges are compared, not subtracted, since the difference of two large numbers may overflow.
        wrong = edges[1:] <= edges[:-1] if rising else edges[1:] < edges[:-1]
        wrong[last_edge[:-1]] = False  # there the next table begins
        if wrong.any() or edges[last_edge - samples].any() or (edges[last_edge] != ends).any():
            raise _TableError(f"its {name} does not run from 0 to {ends[0]}")
        before = np.cumsum(ends) - ends
        return np.append(np.delete(edges, last_edge) + np.repeat(before, samples), ends.sum())

    offset, size = column(_INT64, offset_at, members), column(_INT64, size_at, members)
    numbers = column(_UINT16, field_at, members)
    if ((offset | size) < 0).any() or (size > np.repeat(shard_bytes, members) - offset).any():
        raise _TableError(f"a member does not lie within the shard's {shard_bytes[0]} bytes")
    if (numbers >= len(fields)).any():
        raise _TableError("a member has a field that is not among its fields")
    return ShardTable(
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
        skipped=dict(packed[0].skipped) if len(packed) == 1 else {},
    )


class TableRun(NamedTuple):
    """The tables of neighbouring shards with the same fields as one, which costs little more than one of them.

    Attributes:
        table: the samples of all, one shard after the other; offsets are those in each sample's shard.
        firsts: the number of each shard's first sample, and the number of all samples.
        packed: the shards' own tables.
    """

    table: ShardTable
    firsts: list[int]
    packed: Sequence[_Packed]

    def table_of(self, number: int) -> ShardTable:
        """Return the table of one shard of the run."""
        if len(self.packed) == 1:
            return self.table
        own, table = self.packed[number], self.table
        samples = slice(self.firsts[number], self.firsts[number + 1])
        edges = slice(samples.start, samples.stop + 1)
        starts, keys = table.sample_start[edges], table.key_start[edges]
        members = slice(int(starts[0]), int(starts[-1]))
        return ShardTable(
            shard_bytes=own.shard_bytes,
            fields=table.fields,
            member_offset=table.member_offset[members],
            member_size=table.member_size[members],
            member_field=table.member_field[members],
            sample_start=starts - starts[0],
            key_bytes=table.key_bytes[int(keys[0]) : int(keys[-1])],
            key_start=keys - keys[0],
            member_crc32=None if table.member_crc32 is None else table.member_crc32[members],
            labels=None if table.labels is None else table.labels[samples],
            skipped=dict(own.skipped),
        )


UnpackedTables = list[tuple[TableRun, int] | DatasetIndexError]
"""For each of some shards a run of tables, and the shard's number in it; or why its table cannot be read."""


INDEX_FOLDER = ".streamload"
"""The name of the folder beside the shards."""

INDEX_FILE = "index.json"
"""The list of shards in that folder."""

MOST_INDEX_BYTES = 4 << 30
"""A larger file is refused as a part of an index."""

GROUP_BYTES = 128 << 10
"""Neighbouring tables are read at once up to this size: a request costs as much as reading these bytes."""

_FORMAT = 2
_KIND = "streamload-index"
_LOOKS_LIKE_INDEX = re.compile(rb'"kind"\s*:\s*"' + _KIND.encode() + rb'"')
_TABLE_FILE = re.compile(r"tables-[0-9a-f]{16}\.bin")
_MOST_INT64 = (1 << 63) - 1
_MOST_UINT32 = (1 << 32) - 1
_COLUMNS = {
    "bytes": MAX_COUNT,
    "samples": MAX_COUNT,
    "mtime_ns": _MOST_INT64,
    "table_bytes": MAX_COUNT,
    "table_crc32": _MOST_UINT32,
}
# Columns that may be absent, or hold null.
_OPTIONAL = ("mtime_ns", "etag")

_NO_NAMES = ("", ".", "..")
_IN_NO_NAME = re.compile(r"[/\\\0]")


class IndexedShard(NamedTuple):
    """The entry of one shard.

    Attributes:
        name: the file's name, without a folder.
        bytes: the file's size; the table of a compressed shard has the size of the archive in it.
        samples: the number of samples.
        mtime_ns: the time of modification in nanoseconds since 1970, if it was recorded.
        etag: the version in the storage, if it was recorded.
        file: the table file in the index's folder; empty for an entry that is yet to be written.
        start: offset of the table in that file.
        table_bytes: the table's size.
        table_crc32: the table's checksum.
    """

    name: str
    bytes: int
    samples: int
    mtime_ns: int | None = None
    etag: str | None = None
    file: str = ""
    start: int = 0
    table_bytes: int = 0
    table_crc32: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TableGroup:
    """Neighbouring tables, which are read at once.

    Attributes:
        url: the table file.
        shards: their entries.
    """

    url: str
    shards: list[IndexedShard]

    @property
    def start(self) -> int:
        """The offset of the first table in the file."""
        return self.shards[0].start

    @property
    def end(self) -> int:
        """The end of the last table in the file."""
        return self.shards[-1].start + self.shards[-1].table_bytes

    def unpack(self, content: bytes) -> UnpackedTables:
        """Return the tables in the bytes from `start` to `end`."""
        found: UnpackedTables = []
        packed = [self._packed(entry, content) for entry in self.shards]
        for alike, run in groupby(packed, lambda each: each if isinstance(each, str) else (each.fields, each.flags)):
            tables = [each for each in run if not isinstance(each, str)]
            shards = self.shards[len(found) : len(found) + max(1, len(tables))]
            try:
                if isinstance(alike, str):
                    raise _TableError(alike)
                firsts = [*accumulate((each.samples for each in tables), initial=0)]
                joined = TableRun(_joined(content, tables), firsts, tables)
                found += [(joined, number) for number in range(len(tables))]
            except _TableError as exc:
                if len(shards) == 1:
                    found.append(index_error(str(exc), self.url, shards[0].start))
                    continue
                for entry in shards:  # to find the wrong one
                    first = entry.start - self.start
                    found += TableGroup(self.url, [entry]).unpack(content[first : first + entry.table_bytes])
        return found

    def _packed(self, entry: IndexedShard, content: bytes) -> _Packed | str:
        """Return the packed table of a shard, or why it is wrong."""
        start, end = entry.start - self.start, entry.start - self.start + entry.table_bytes
        if zlib.crc32(memoryview(content)[start:end]) != entry.table_crc32:
            return "its checksum is not the one in the list of shards, so it was changed or belongs to another"
        try:
            packed = _packed_at(content, start, end)
        except _TableError as exc:
            return str(exc)
        if packed.samples == entry.samples and (packed.shard_bytes == entry.bytes or compression_of(entry.name)):
            return packed
        return (
            f"{INDEX_FILE} has {counted(entry.samples, 'sample')} in {entry.bytes} bytes for the shard "
            f"{entry.name!r}, and its table {packed.samples} in {packed.shard_bytes}"
        )


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """The index of the shards in one folder.

    Attributes:
        folder: the index's own folder (`.../.streamload`).
        fields: every field of some shard, sorted.
        shards: the entries, sorted by name, each with the place of its table.
    """

    folder: str
    fields: tuple[str, ...]
    shards: tuple[IndexedShard, ...]

    @classmethod
    def from_json(cls, content: bytes, folder: str) -> DatasetIndex:
        """Parse the content of an `index.json`.

        Raises:
            DatasetIndexError: the content is damaged or of another version.
        """
        path = f"{folder}/{INDEX_FILE}"
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as exc:
            raise index_error(f"the index is not JSON ({exc})", path) from exc
        if not isinstance(document, dict) or document.get("kind") != _KIND:
            raise DatasetIndexError("not a streamload index; make one with `streamload index`", url=path)
        if document.get("format") != _FORMAT:
            raise DatasetIndexError(
                f"an index of format {document.get('format')!r}, and this release reads format {_FORMAT}; "
                "rebuild it with `streamload index`, or install a release that reads it",
                url=path,
            )
        fields, shards = document.get("fields"), _entries_in(document)
        if shards is None or not isinstance(fields, list) or not _are(fields, {str}):
            raise index_error("the index is damaged", path)
        return cls(folder, tuple(fields), shards)

    def to_json(self) -> bytes:
        """Return the content of `index.json`: the same bytes for the same entries."""
        names = ("name", "bytes", "samples", "mtime_ns", "etag", "table_bytes", "table_crc32")
        columns = {name: [getattr(entry, name) for entry in self.shards] for name in names}
        unknown = [name for name in _OPTIONAL if all(value is None for value in columns[name])]
        document = {
            "format": _FORMAT,
            "kind": _KIND,
            "fields": list(self.fields),
            "tables": [
                {"file": file, "shards": shards}
                for file, shards in Counter(entry.file for entry in self.shards).items()
            ],
            "shards": {name: column for name, column in columns.items() if name not in unknown},
        }
        return (json.dumps(document, separators=(",", ":")) + "\n").encode("ascii")

    def find(self, name: str) -> IndexedShard | None:
        """Return the entry of one shard, or None."""
        return self._by_name.get(name)

    def shard(self, name: str) -> IndexedShard:
        """Return the entry of one shard.

        Raises:
            DatasetIndexError: the index does not have it.
        """
        if name not in self._by_name:
            folder = without_secrets(self.folder)
            raise DatasetIndexError(
                f"the index in {folder!r} does not have this shard; add it with `streamload index`", url=name
            )
        return self._by_name[name]

    def place(self, name: str) -> tuple[TableGroup, int]:
        """Return the tables that are read for the table of one shard, and its number among them; raise as `shard`."""
        self.shard(name)
        return self._places[name]

    def table_of(self, entry: IndexedShard, content: bytes) -> ShardTable:
        """Return the table of one shard from its bytes.

        Raises:
            DatasetIndexError: its table is damaged, or disagrees with its entry.
        """
        (found,) = TableGroup(self.table_url(entry), [entry]).unpack(content)
        if isinstance(found, DatasetIndexError):
            raise found
        return found[0].table

    def table_url(self, entry: IndexedShard) -> str:
        """Return the url of the file with the table of a shard."""
        return f"{self.folder}/{entry.file}"

    @cached_property
    def _by_name(self) -> dict[str, IndexedShard]:
        return {entry.name: entry for entry in self.shards}

    @cached_property
    def _places(self) -> dict[str, tuple[TableGroup, int]]:
        places: dict[str, tuple[TableGroup, int]] = {}
        group, file = TableGroup("", []), ""
        for entry in self.shards:
            if entry.file != file or entry.start + entry.table_bytes - group.start > GROUP_BYTES:
                group, file = TableGroup(self.table_url(entry), []), entry.file
            group.shards.append(entry)
            places[entry.name] = group, len(group.shards) - 1
        return places


def looks_like_index(content: bytes) -> bool:
    """Return True for an index, even a cut one; False for the page of a web server, say."""
    return _LOOKS_LIKE_INDEX.search(content) is not None


def check_shard(entry: IndexedShard, actual_bytes: int, url: str, actual_etag: str | None = None) -> None:
    """Raise DatasetIndexError unless a shard still has the size and, if both are known, the ETag of its entry."""
    if actual_bytes != entry.bytes:
        changed = f"{actual_bytes} bytes, and had {entry.bytes}"
    elif None in (entry.etag, actual_etag) or entry.etag == actual_etag:
        return
    else:
        changed = f"the ETag {actual_etag}, and had {entry.etag}"
    raise DatasetIndexError(
        f"the shard has {changed} when it was indexed; if it was cut, fetch or pack it again; if it was rewritten, "
        "rebuild the index with `streamload index`",
        url=url,
    )


def is_plain_name(name: object) -> bool:
    """Return True for a file's name without a folder, so that no path from an index leads elsewhere."""
    return isinstance(name, str) and _are_plain([name])


def _are_plain(names: Sequence[str]) -> bool:
    return not any(name in _NO_NAMES for name in names) and _IN_NO_NAME.search("".join(names)) is None


def _entries_in(document: dict[str, Any]) -> tuple[IndexedShard, ...] | None:
    """Return the entries of an index, or None if it is damaged."""
    files, columns = document.get("tables"), document.get("shards")
    if not isinstance(columns, dict) or not isinstance(files, list) or not all(map(_is_table_file, files)):
        return None
    names = columns.get("name")
    if not isinstance(names, list) or not _are(names, {str}) or len(set(names)) < len(names) or not _are_plain(names):
        return None
    columns = {**dict.fromkeys(_OPTIONAL, [None] * len(names)), **columns}
    for name in (*_COLUMNS, "etag"):
        if not isinstance(columns.get(name), list) or len(columns[name]) != len(names):
            return None
    for name, most in _COLUMNS.items():
        values = [value for value in columns[name] if value is not None or name not in _OPTIONAL]
        if values and not (_are(values, {int}) and min(values) >= 0 and max(values) <= most):
            return None
    if not _are(columns["etag"], {str, type(None)}) or sum(file["shards"] for file in files) != len(names):
        return None
    lengths: list[int] = columns["table_bytes"]
    starts: list[int] = []
    for file in files:  # whose tables lie one after another
        starts += [*accumulate(lengths[len(starts) : len(starts) + file["shards"]], initial=0)][:-1]
    in_file = chain.from_iterable([file["file"]] * file["shards"] for file in files)
    stored = (columns[name] for name in ("bytes", "samples", "mtime_ns", "etag"))
    return tuple(map(IndexedShard, names, *stored, in_file, starts, lengths, columns["table_crc32"]))


def _is_table_file(file: object) -> bool:
    return (
        isinstance(file, dict)
        and isinstance(file.get("file"), str)
        and _TABLE_FILE.fullmatch(file["file"]) is not None
        and type(file.get("shards")) is int
        and 0 <= file["shards"] <= MAX_COUNT
    )


def _are(values: Sequence[object], types: set[type]) -> bool:
    return set(map(type, values)) <= types
