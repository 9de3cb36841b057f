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
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError, without_secrets
from streamload.tar.decompression import compression_of
from streamload.tar.table import ShardTable
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


def unpack_table(content: bytes, url: str, crc32: int | None = None, *, offset: int | None = None) -> ShardTable:
    """Return a table that `pack_table` packed, with views of the bytes, and check that it lies within the shard.

    `url` and `offset` are for errors.

    Raises:
        DatasetIndexError: the table is damaged, of another version, or inconsistent.
    """
    try:
        if crc32 is not None and zlib.crc32(content) != crc32:
            raise _TableError(
                "its checksum is not the one in the list of shards, so it was changed or belongs to another"
            )
        return _table_in(content)
    except _TableError as exc:
        raise index_error(str(exc), url, offset) from exc


def index_error(why: str, url: str, offset: int | None = None) -> DatasetIndexError:
    """Return the error for a damaged file of an index."""
    return DatasetIndexError(f"{why}; rebuild the index with `streamload index`", url=url, offset=offset)


def _table_in(content: bytes) -> ShardTable:
    if len(content) < _HEADER.size:
        raise _TableError(f"a table is cut: {len(content)} bytes are there")
    magic, version, flags, shard_bytes, members, samples, key_bytes, about_bytes = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise _TableError("there is no table")
    if version != _TABLE_FORMAT:
        raise _TableError(f"a table of format {version}, and this release reads format {_TABLE_FORMAT}")
    has_crc32, has_labels = bool(flags & _CRC32), bool(flags & _LABELS)
    numbers = 2 * members + 2 * (samples + 1) + (samples if has_labels else 0)
    end = _HEADER.size + 8 * numbers + (4 if has_crc32 else 0) * members + 2 * members + key_bytes + about_bytes
    if shard_bytes > MAX_COUNT or end + -end % _ALIGNMENT != len(content):
        raise _TableError(f"a table of {len(content)} bytes is said to have {end}, of a shard of {shard_bytes}")
    ints = np.frombuffer(content, _INT64, numbers, _HEADER.size)
    starts = 2 * members
    keys, labels = starts + samples + 1, starts + 2 * (samples + 1)
    at = _HEADER.size + 8 * numbers
    crc32s = _view(content, _UINT32, members, at) if has_crc32 else None
    at += 4 * members if has_crc32 else 0
    fields, skipped = _about(content[end - about_bytes : end])
    table = ShardTable(
        shard_bytes=shard_bytes,
        fields=fields,
        member_offset=ints[:members],
        member_size=ints[members:starts],
        member_field=_view(content, _UINT16, members, at),
        sample_start=ints[starts:keys],
        key_bytes=_view(content, _UINT8, key_bytes, at + 2 * members),
        key_start=ints[keys:labels],
        member_crc32=crc32s,
        labels=ints[labels:] if has_labels else None,
        skipped=dict(skipped),
    )
    _check_table(table)
    return table


def _view(content: bytes, dtype: np.dtype[Any], count: int, start: int) -> NDArray[Any]:
    return np.frombuffer(content, dtype, count, start) if count else np.empty(0, dtype)


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


def _check_table(table: ShardTable) -> None:
    """Raise _TableError for a table that points outside of its shard or of itself.

    Edges are compared, not subtracted, since the difference of two large numbers may overflow; and counted, since `any`
    takes ten times as long for the table of a small shard.
    """
    members, offset, size = len(table.member_offset), table.member_offset, table.member_size
    starts, keys = table.sample_start, table.key_start
    if starts[0] != 0 or starts[-1] != members or count_nonzero(starts[1:] <= starts[:-1]):
        raise _TableError(f"its sample_start does not run from 0 to {members}")
    if keys[0] != 0 or keys[-1] != len(table.key_bytes) or count_nonzero(keys[1:] < keys[:-1]):
        raise _TableError(f"its key_start does not run from 0 to {len(table.key_bytes)}")
    if members:
        if count_nonzero((offset | size) < 0) or count_nonzero(size > table.shard_bytes - offset):
            raise _TableError(f"a member does not lie within the shard's {table.shard_bytes} bytes")
        if count_nonzero(table.member_field >= len(table.fields)):
            raise _TableError("a member has a field that is not among its fields")


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

    def group(self, entry: IndexedShard) -> tuple[str, int, int]:
        """Return the file, start and end of the neighbouring tables that are read for the table of one shard."""
        return self._groups[entry.file, entry.start]

    def table_of(self, entry: IndexedShard, content: bytes) -> ShardTable:
        """Return the table of one shard from its bytes.

        Raises:
            DatasetIndexError: its table is damaged, or disagrees with its entry.
        """
        url = self.table_url(entry)
        table = unpack_table(content, url, entry.table_crc32, offset=entry.start)
        if len(table) != entry.samples or not (table.shard_bytes == entry.bytes or compression_of(entry.name)):
            raise index_error(
                f"{INDEX_FILE} has {counted(entry.samples, 'sample')} in {entry.bytes} bytes for the shard "
                f"{entry.name!r}, and its table {len(table)} in {table.shard_bytes}",
                url,
                entry.start,
            )
        return table

    def table_url(self, entry: IndexedShard) -> str:
        """Return the url of the file with the table of a shard."""
        return f"{self.folder}/{entry.file}"

    @cached_property
    def _by_name(self) -> dict[str, IndexedShard]:
        return {entry.name: entry for entry in self.shards}

    @cached_property
    def _groups(self) -> dict[tuple[str, int], tuple[str, int, int]]:
        """The group of each table, by its file and start."""
        first_of: dict[tuple[str, int], tuple[str, int]] = {}
        end_of: dict[tuple[str, int], int] = {}
        first = "", 0
        for entry in self.shards:
            end = entry.start + entry.table_bytes
            if entry.file != first[0] or end - first[1] > GROUP_BYTES:
                first = entry.file, entry.start
            first_of[entry.file, entry.start] = first
            end_of[first] = end
        return {table: (*first, end_of[first]) for table, first in first_of.items()}


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
