"""The index of a dataset, as it is read: a hidden folder beside the shards that says what each of them holds.

`.streamload/index.json` lists the shards, and table files hold the tables of many shards each, one after another; see
docs/index-format.md. `index_writer` writes it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from streamload.errors import DatasetIndexError, without_secrets
from streamload.index.indexed_shards import IndexedShard, IndexedShards, TablePlace
from streamload.index.table_file import MAX_COUNT, index_error, unpack_table
from streamload.storage.local_files import open_regular, why_not_opened
from streamload.tar.table import ShardTable
from streamload.text import counted

INDEX_FOLDER = ".streamload"
"""The name of the folder beside the shards."""

INDEX_FILE = "index.json"
"""The list of shards in that folder."""

TABLE_FILE = re.compile(r"tables-[0-9a-f]{16}\.bin")
"""The names of table files. The digits are a checksum of what one holds, so a name never stands for two contents."""

MOST_INDEX_BYTES = 4 << 30
"""A larger file is refused as a part of an index."""

GROUP_BYTES = 128 << 10
"""Tables that lie beside each other are read at once up to this, since a request costs as much as so many bytes."""

_FORMAT = 2
_KIND = "streamload-index"
_INT64_MAX = (1 << 63) - 1
_UINT32_MAX = (1 << 32) - 1

_IN_NO_NAME = re.compile(r"[/\\\0]")


class TableGroup(NamedTuple):
    """Tables that lie beside each other and are read at once.

    Attributes:
        file: the file's name in the index's folder.
        start: offset of the first byte.
        end: offset after the last one; None for all of the file.
        shards: the shards whose tables they are.
    """

    file: str
    start: int
    end: int | None
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """The index of the shards in one folder.

    Attributes:
        folder: the index's own folder (`.../.streamload`).
        fields: every field that some shard has, sorted.
        shards: one entry a shard, sorted by name, each with the place of its table.
    """

    folder: str
    fields: tuple[str, ...]
    shards: IndexedShards
    _numbers: Mapping[str, int] = field(init=False, repr=False, compare=False)
    _groups: dict[str, TableGroup] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {name: number for number, name in enumerate(self.shards.names)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], read: Callable[[str], bytes] | None = None) -> DatasetIndex:
        """Read the list of shards in an index folder (tables are read by `table`).

        Args:
            folder: a path, or whatever `read` understands.
            read: gives what a file holds whose name is that of the folder, a slash, and the file's own; the default
                reads local files. What it raises comes through.

        Raises:
            DatasetIndexError: there is no index, or it is damaged or of another version.
        """
        folder = os.fspath(folder)
        path = os.path.join(folder, INDEX_FILE)
        content = read_local(path) if read is None else read(path)
        if content is None:
            raise DatasetIndexError(
                "the index cannot be read, since there is none; make it with `streamload index`", url=path
            )
        return cls.from_json(content, folder)

    @classmethod
    def from_json(cls, content: bytes, folder: str) -> DatasetIndex:
        """Take in what an `index.json` holds, wherever it was read from.

        Raises:
            DatasetIndexError: the content is damaged or of another version.
        """
        path = os.path.join(folder, INDEX_FILE)
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
        fields, shards = document.get("fields"), _shards_in(document)
        if shards is None or not isinstance(fields, list) or not _are(fields, {str}) or not _are_names(shards.names):
            raise index_error("the index is damaged", path)
        return cls(folder, tuple(fields), shards)

    def to_json(self) -> bytes:
        """The content of `index.json`: the same bytes for the same entries, which all have the place of a table."""
        shards = self.shards
        columns: dict[str, Sequence[Any]] = {
            "name": shards.names,
            "bytes": shards.sizes,
            "samples": shards.samples,
            "mtime_ns": shards.mtimes_ns,
            "etag": shards.etags,
            "table_bytes": shards.table_sizes,
            "table_crc32": shards.crc32s,
        }
        known = {name: column for name, column in columns.items() if any(value is not None for value in column)}
        document = {
            "format": _FORMAT,
            "kind": _KIND,
            "fields": list(self.fields),
            "tables": [{"file": file, "shards": shards} for file, shards in Counter(shards.files).items()],
            "shards": {name: list(known.get(name, ())) for name in columns if name in known or name not in _OPTIONAL},
        }
        return (json.dumps(document, separators=(",", ":")) + "\n").encode("ascii")

    def number(self, name: str) -> int | None:
        """The number of one shard in `shards`, or None."""
        return self._numbers.get(name)

    def find(self, name: str) -> IndexedShard | None:
        """The entry of one shard, or None."""
        number = self.number(name)
        return None if number is None else self.shards[number]

    def shard(self, name: str) -> IndexedShard:
        """The entry of one shard.

        Raises:
            DatasetIndexError: the index does not have it.
        """
        return self.shards[self._known_number(name)]

    def _known_number(self, name: str) -> int:
        number = self.number(name)
        if number is None:
            raise DatasetIndexError(
                f"the index in {without_secrets(self.folder)!r} does not have this shard; add it with "
                "`streamload index`",
                url=name,
            )
        return number

    def place(self, name: str) -> TablePlace:
        """Where the table of one shard lies. Raises what `shard` raises."""
        return self.shards.place(self._known_number(name))

    def group(self, name: str) -> TableGroup:
        """What to read for the table of one shard. Raises what `shard` raises."""
        if name not in self._groups:
            first, end = self._range_of_file(self._known_number(name))
            self._groups.update({name: group for group in _groups_of(self.shards, first, end) for name in group.shards})
        return self._groups[name]

    def _range_of_file(self, number: int) -> tuple[int, int]:
        """The shards whose tables are in the same file as that of one, which are neighbours."""
        files = self.shards.files
        first, end = number, number + 1
        while first and files[first - 1] == files[number]:
            first -= 1
        while end < len(files) and files[end] == files[number]:
            end += 1
        return first, end

    def file_group(self, name: str) -> TableGroup:
        """All tables of the file that holds the table of one shard. Raises what `shard` raises."""
        file = self.place(name).file
        names = (other for other, its in zip(self.shards.names, self.shards.files, strict=True) if its == file)
        return TableGroup(file, 0, None, tuple(names))

    def tables_in(self, group: TableGroup, content: bytes) -> dict[str, bytes]:
        """The bytes of each table of a group, by shard; fewer of them where the content is cut."""
        places = {name: self.place(name) for name in group.shards}
        starts = {name: place.start - group.start for name, place in places.items()}
        return {name: content[starts[name] : starts[name] + place.bytes] for name, place in places.items()}

    def table_of(self, name: str, content: bytes) -> ShardTable:
        """The table of one shard, of its bytes.

        Raises:
            DatasetIndexError: the index does not have the shard, its table is damaged, or the two disagree.
        """
        entry, place = self.shard(name), self.place(name)
        url = self.table_url(name)
        table = unpack_table(content, url, place.crc32, offset=place.start)
        if not entry.describes(table):
            raise index_error(
                f"{INDEX_FILE} has {counted(entry.samples, 'sample')} in {entry.bytes} bytes for the shard {name!r}, "
                f"and its table {len(table)} in {table.shard_bytes}",
                url,
                place.start,
            )
        return table

    def table(self, name: str) -> ShardTable:
        """Read the table of one shard of a local index; nothing is kept. Raises what `table_of` raises."""
        place, url = self.place(name), self.table_url(name)
        content = read_local(url, place.start, place.start + place.bytes)
        if content is None:
            raise no_table_file(url)
        return self.table_of(name, content)

    def table_url(self, name: str) -> str:
        """The file with the table of a shard."""
        return os.path.join(self.folder, self.place(name).file)


def no_table_file(url: str) -> DatasetIndexError:
    """The error for a table file that is not there."""
    return index_error("the index has no such file", url)


def read_local(path: str, start: int = 0, end: int | None = None) -> bytes | None:
    """Bytes of a local file of an index, cut at its end; None where there is no such file.

    Raises:
        DatasetIndexError: it cannot be read.
    """
    try:
        with open(open_regular(path), "rb") as file:
            left_bytes = os.fstat(file.fileno()).st_size - start  # an index may claim more than memory holds
            if left_bytes <= 0:
                return b""
            file.seek(start)
            return file.read(left_bytes if end is None else min(left_bytes, end - start))
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DatasetIndexError(f"the index cannot be read: {why_not_opened(exc)}", url=path) from exc


def check_shard(entry: IndexedShard, actual_bytes: int, url: str, actual_etag: str | None = None) -> None:
    """Make sure that a shard still has the size and, where both are known, the ETag that it was indexed with.

    Raises:
        DatasetIndexError: it has another.
    """
    if None not in (entry.etag, actual_etag) and entry.etag != actual_etag:
        raise DatasetIndexError(
            f"the shard has the ETag {actual_etag}, and had {entry.etag} when it was indexed, so it was rewritten; "
            "rebuild the index with `streamload index`",
            url=url,
        )
    if actual_bytes != entry.bytes:
        rebuild = "rebuild the index with `streamload index`"
        cut = f"it was cut, so fetch or pack it again; or it was rewritten, then {rebuild}"
        raise DatasetIndexError(
            f"the shard has {actual_bytes} bytes, and had {entry.bytes} when it was indexed: "
            + (cut if actual_bytes < entry.bytes else f"it was rewritten; {rebuild}"),
            url=url,
        )


def is_plain_name(name: object) -> bool:
    """Whether something is the name of a file and nothing else, so that no path from an index leads elsewhere."""
    return isinstance(name, str) and name not in _NO_NAMES and _IN_NO_NAME.search(name) is None


_NO_NAMES = ("", ".", "..")
_OPTIONAL = ("mtime_ns", "etag")


def _shards_in(document: dict[str, Any]) -> IndexedShards | None:
    """The entries of an index of format 2, or None where it is damaged."""
    files, columns = document.get("tables"), document.get("shards")
    if not isinstance(columns, dict) or not isinstance(files, list) or not all(map(_is_table_file, files)):
        return None
    names = columns.get("name")
    if not isinstance(names, list) or not _are(names, {str}):
        return None
    unknown: list[None] = [None] * len(names)
    mtimes, etags = columns.get("mtime_ns", unknown), columns.get("etag", unknown)
    sizes, samples = columns.get("bytes", ()), columns.get("samples", ())
    lengths, checksums = columns.get("table_bytes", ()), columns.get("table_crc32", ())
    if not (
        all(isinstance(each, list) and len(each) == len(names) for each in (sizes, samples, lengths, checksums))
        and all(isinstance(each, list) and len(each) == len(names) for each in (mtimes, etags))
        and all(_are_counts(each, MAX_COUNT) for each in (sizes, samples, lengths))
        and _are_counts(checksums, _UINT32_MAX)
        and _are_counts([time for time in mtimes if time is not None], _INT64_MAX)
        and _are(etags, {str, type(None)})
        and sum(file["shards"] for file in files) == len(names)
    ):
        return None
    in_file = [file["file"] for file in files for _ in range(file["shards"])]
    starts: list[int] = []
    for file in files:  # whose tables lie one after another
        starts += [*accumulate(lengths[len(starts) : len(starts) + file["shards"]], initial=0)][:-1]
    return IndexedShards(names, sizes, samples, mtimes, etags, in_file, starts, lengths, checksums)


def _groups_of(shards: IndexedShards, first: int, end: int) -> list[TableGroup]:
    """Shards of one table file, whose tables lie beside each other and are read at once."""
    groups: list[TableGroup] = []
    for number in range(first + 1, end):
        if shards.starts[number] + shards.table_sizes[number] - shards.starts[first] > GROUP_BYTES:
            groups.append(_group(shards, first, number))
            first = number
    return [*groups, _group(shards, first, end)]


def _group(shards: IndexedShards, first: int, end: int) -> TableGroup:
    last = shards.place(end - 1)
    return TableGroup(last.file, shards.starts[first], last.start + last.bytes, tuple(shards.names[first:end]))


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_table_file(file: object) -> bool:
    return (
        isinstance(file, dict)
        and isinstance(file.get("file"), str)
        and TABLE_FILE.fullmatch(file["file"]) is not None
        and _is_count(file.get("shards"), MAX_COUNT)
    )


def _are(values: Sequence[object], types: set[type]) -> bool:
    return set(map(type, values)) <= types


def _are_counts(values: Sequence[Any], most: int) -> bool:
    return not values or (_are(values, {int}) and min(values) >= 0 and max(values) <= most)


def _are_names(names: Sequence[str]) -> bool:
    """Whether names are different, and plain."""
    found = set(names)
    return len(found) == len(names) and found.isdisjoint(_NO_NAMES) and _IN_NO_NAME.search("".join(found)) is None
