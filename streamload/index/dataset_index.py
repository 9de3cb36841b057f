"""The list of shards in an index, `.streamload/index.json`, as docs/index-format.md describes it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

from streamload.errors import DatasetIndexError, without_secrets
from streamload.index.table_file import MAX_COUNT, index_error, unpack_table
from streamload.tar.decompression import is_compressed
from streamload.tar.table import ShardTable
from streamload.text import counted

INDEX_FOLDER = ".streamload"
"""The name of the folder beside the shards."""

INDEX_FILE = "index.json"
"""The list of shards in that folder."""

MOST_INDEX_BYTES = 4 << 30
"""A larger file is refused as a part of an index."""

GROUP_BYTES = 128 << 10
"""Neighbouring tables are read at once up to this size, since a request costs as much as reading so many bytes."""

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
        bytes: the file's size; a compressed shard's table has the length of the archive in it.
        samples: the number of samples.
        mtime_ns: the time of modification in nanoseconds since 1970; None if it was not recorded.
        etag: the version in the storage; None if the storage has none, or it was not recorded.
        file: the table file in the index's folder; empty for an entry that is yet to be written.
        start: offset of the table's first byte in it.
        table_bytes: its length.
        table_crc32: its checksum.
    """

    name: str
    bytes: int
    samples: int
    mtime_ns: int | None
    etag: str | None = None
    file: str = ""
    start: int = 0
    table_bytes: int = 0
    table_crc32: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        table: ShardTable,
        mtime_ns: int | None = None,
        etag: str | None = None,
        *,
        size: int | None = None,
    ) -> IndexedShard:
        """Make the entry of a shard with this table; `size` is the file's if it is compressed."""
        return cls(name, table.shard_bytes if size is None else size, len(table), mtime_ns, etag)

    def describes(self, table: ShardTable) -> bool:
        """Return True if a table can be this shard's."""
        return len(table) == self.samples and (table.shard_bytes == self.bytes or is_compressed(self.name))


class TableGroup(NamedTuple):
    """Neighbouring tables in one file, which are read by one request.

    Attributes:
        file: the file's name in the index's folder.
        start: offset of the first byte.
        end: offset after the last byte.
    """

    file: str
    start: int
    end: int


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
        rows = [(*entry[:5], entry.table_bytes, entry.table_crc32) for entry in self.shards]
        names = ("name", "bytes", "samples", "mtime_ns", "etag", "table_bytes", "table_crc32")
        columns = dict(zip(names, map(list, zip(*rows, strict=True)) if rows else ([] for _ in names), strict=True))
        known = {name: any(value is not None for value in column) for name, column in columns.items()}
        document = {
            "format": _FORMAT,
            "kind": _KIND,
            "fields": list(self.fields),
            "tables": [
                {"file": file, "shards": shards}
                for file, shards in Counter(entry.file for entry in self.shards).items()
            ],
            "shards": {name: column for name, column in columns.items() if known[name] or name not in _OPTIONAL},
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

    def group(self, entry: IndexedShard) -> TableGroup:
        """Return the bytes to read for the table of one shard."""
        return self._groups[entry.file, entry.start]

    def table_of(self, entry: IndexedShard, content: bytes) -> ShardTable:
        """Return the table of one shard from its bytes.

        Raises:
            DatasetIndexError: its table is damaged, or disagrees with its entry.
        """
        url = self.table_url(entry)
        table = unpack_table(content, url, entry.table_crc32, offset=entry.start)
        if not entry.describes(table):
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
    def _groups(self) -> dict[tuple[str, int], TableGroup]:
        """The group of each table, by its file and start."""
        groups: dict[tuple[str, int], TableGroup] = {}
        starts: list[int] = []
        file, end = "", 0
        for entry in chain(self.shards, [None]):
            table_end = 0 if entry is None else entry.start + entry.table_bytes
            if starts and (entry is None or entry.file != file or table_end - starts[0] > GROUP_BYTES):
                groups.update(dict.fromkeys(((file, start) for start in starts), TableGroup(file, starts[0], end)))
                starts = []
            if entry is not None:
                starts.append(entry.start)
                file, end = entry.file, table_end
        return groups


def looks_like_index(content: bytes) -> bool:
    """Return True for anything that an index was made of, be it cut; False for the page of a web server, say."""
    return _LOOKS_LIKE_INDEX.search(content) is not None


def check_shard(entry: IndexedShard, actual_bytes: int, url: str, actual_etag: str | None = None) -> None:
    """Make sure that a shard still has the size and, if both are known, the ETag of its entry.

    Raises:
        DatasetIndexError: it has another.
    """
    same_etag = None in (entry.etag, actual_etag) or entry.etag == actual_etag
    if same_etag and actual_bytes == entry.bytes:
        return
    now, before = (
        (f"{actual_bytes} bytes", f"{entry.bytes}")
        if actual_bytes != entry.bytes
        else (f"the ETag {actual_etag}", f"{entry.etag}")
    )
    raise DatasetIndexError(
        f"the shard has {now}, and had {before} when it was indexed; if it was cut, fetch or pack it again; if it was "
        "rewritten, rebuild the index with `streamload index`",
        url=url,
    )


def is_plain_name(name: object) -> bool:
    """Return True for the name of a file and nothing else, so that no path from an index leads elsewhere."""
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
