"""What an index says: the list of shards in `index.json`, and a table for each, read and checked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

from streamload.errors import DatasetIndexError, without_secrets
from streamload.index.table_file import MAX_COUNT, table_crc32, table_from_npz
from streamload.storage.local_files import open_regular, why_not_opened
from streamload.tar.decompression import is_compressed
from streamload.tar.table import ShardTable
from streamload.text import counted

__all__ = [
    "INDEX_FILE",
    "INDEX_FOLDER",
    "INDEX_FORMAT",
    "DatasetIndex",
    "IndexedShard",
    "check_shard",
    "is_plain_name",
    "table_path",
]

INDEX_FOLDER = ".streamload"
"""The name of the folder beside the shards."""

INDEX_FILE = "index.json"
"""The list of shards in that folder."""

INDEX_FORMAT = 1
"""The version of `index.json`; another version is refused."""

_KIND = "streamload-index"
_INT64_MAX = (1 << 63) - 1
_UINT32_MAX = (1 << 32) - 1

_IN_NO_NAME = re.compile(r"[/\\\0]")


class IndexedShard(NamedTuple):
    """What an index says of one shard as a whole; a tuple, because there may be hundreds of thousands.

    Attributes:
        name: the file's name, without a folder.
        bytes: its size; that of the compressed file where it is one, and its table says how long the archive is.
        samples: how many samples it holds.
        mtime_ns: when it was last changed, in nanoseconds since 1970; None where that was not recorded.
        etag: its version in the storage it was indexed in; None where that has none, or it was not recorded.
        table_crc32: the checksum of its table's file; None in indexes of before there were any.
    """

    name: str
    bytes: int
    samples: int
    mtime_ns: int | None
    etag: str | None = None
    table_crc32: int | None = None

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
        """The entry of a shard with this table; `size` is that of its file where it is compressed."""
        shard_bytes = table.shard_bytes if size is None else size
        return cls(name, shard_bytes, len(table), mtime_ns, etag, table_crc32(table))

    def describes(self, table: ShardTable) -> bool:
        """Whether a table can be that of this shard."""
        return len(table) == self.samples and (is_compressed(self.name) or table.shard_bytes == self.bytes)


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """The index of the shards in one folder.

    Attributes:
        folder: the index's own folder (`.../.streamload`).
        fields: every field that some shard has, sorted.
        shards: one entry a shard, sorted by name.
    """

    folder: str
    fields: tuple[str, ...]
    shards: tuple[IndexedShard, ...]
    _by_name: Mapping[str, IndexedShard] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {entry.name: entry for entry in self.shards})

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
        if read is not None:
            return cls.from_json(read(path), folder)
        try:
            with open(open_regular(path), "rb") as file:
                content = file.read()
        except FileNotFoundError as exc:
            raise DatasetIndexError(
                "the index cannot be read, since there is none; make it with `streamload index`", url=path
            ) from exc
        except OSError as exc:
            raise DatasetIndexError(f"the index cannot be read: {why_not_opened(exc)}", url=path) from exc
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
            raise DatasetIndexError(
                f"the index is not JSON ({exc}); make it anew with `streamload index`", url=path
            ) from exc
        fields, shards = _checked(document, path)
        return cls(folder, fields, shards)

    def to_json(self) -> bytes:
        """The content of `index.json`: the same bytes for the same entries."""
        document = {
            "format": INDEX_FORMAT,
            "kind": _KIND,
            "fields": list(self.fields),
            "shards": [_without_unknown(entry._asdict()) for entry in self.shards],
        }
        return (json.dumps(document, indent=1) + "\n").encode("ascii")

    def find(self, name: str) -> IndexedShard | None:
        """The entry of one shard, or None."""
        return self._by_name.get(name)

    def shard(self, name: str) -> IndexedShard:
        """The entry of one shard.

        Raises:
            DatasetIndexError: the index does not have it.
        """
        entry = self.find(name)
        if entry is None:
            raise DatasetIndexError(
                f"the index in {without_secrets(self.folder)!r} does not have this shard; add it with "
                "`streamload index`",
                url=name,
            )
        return entry

    def table(self, name: str, content: bytes | None = None) -> ShardTable:
        """Read the table of one shard; nothing is kept.

        Args:
            name: of the shard.
            content: what the file at `table_path` holds; the default reads it as a local file.

        Raises:
            DatasetIndexError: the index does not have the shard, its table is damaged, or the two disagree.
        """
        entry = self.shard(name)
        path = table_path(self.folder, name)
        table = table_from_npz(path if content is None else BytesIO(content), path, entry.table_crc32)
        if not entry.describes(table):
            raise DatasetIndexError(
                f"{INDEX_FILE} has {counted(entry.samples, 'sample')} in {entry.bytes} bytes for this shard, and its "
                f"table {len(table)} in {table.shard_bytes}; make the index anew with `streamload index`",
                url=path,
            )
        return table


def check_shard(entry: IndexedShard, actual_bytes: int, url: str, actual_etag: str | None = None) -> None:
    """Make sure that a shard still has the size and, where both are known, the ETag that it was indexed with.

    Raises:
        DatasetIndexError: it has another.
    """
    if None not in (entry.etag, actual_etag) and entry.etag != actual_etag:
        raise DatasetIndexError(
            f"the shard has the ETag {actual_etag}, and had {entry.etag} when it was indexed, so it was written anew; "
            "make the index anew with `streamload index`",
            url=url,
        )
    if actual_bytes != entry.bytes:
        anew = "make the index anew with `streamload index`"
        cut = f"it was cut, so fetch or pack it again; or it was written anew, then {anew}"
        raise DatasetIndexError(
            f"the shard has {actual_bytes} bytes, and had {entry.bytes} when it was indexed: "
            + (cut if actual_bytes < entry.bytes else f"it was written anew; {anew}"),
            url=url,
        )


def is_plain_name(name: object) -> bool:
    """Whether something is the name of a file and nothing else, so that no path from an index leads elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and _IN_NO_NAME.search(name) is None


def table_path(folder: str, name: str) -> str:
    """The file with the table of a shard."""
    return os.path.join(folder, f"{name}.npz")


def _checked(document: Any, path: str) -> tuple[tuple[str, ...], tuple[IndexedShard, ...]]:
    """The fields and shards of a parsed `index.json`."""
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise DatasetIndexError("not a streamload index; make one with `streamload index`", url=path)
    if document.get("format") != INDEX_FORMAT:
        raise DatasetIndexError(
            f"an index of format {document.get('format')!r}, and this release reads format {INDEX_FORMAT}; "
            "make it anew with `streamload index`, or install a release that reads it",
            url=path,
        )
    fields, shards = document.get("fields"), document.get("shards")
    if not (
        isinstance(fields, list)
        and all(isinstance(name, str) for name in fields)
        and isinstance(shards, list)
        and all(map(_is_entry, shards))
        and len({shard["name"] for shard in shards}) == len(shards)
    ):
        raise DatasetIndexError("the index is damaged; make it anew with `streamload index`", url=path)
    return tuple(fields), tuple(
        IndexedShard(
            shard["name"],
            shard["bytes"],
            shard["samples"],
            shard["mtime_ns"],
            shard.get("etag"),
            shard.get("table_crc32"),
        )
        for shard in shards
    )


def _without_unknown(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry as it is written: an ETag or a checksum that is not known is left out, as before there were any."""
    return {name: value for name, value in entry.items() if value is not None or name not in ("etag", "table_crc32")}


def _is_entry(shard: object) -> bool:
    if not isinstance(shard, dict) or not is_plain_name(shard.get("name")):
        return False
    if not isinstance(shard.get("etag"), str | None):
        return False
    known = shard.get("mtime_ns", -1)
    if "table_crc32" in shard and not _is_count(shard["table_crc32"], _UINT32_MAX):
        return False
    return (
        _is_count(shard.get("bytes"), MAX_COUNT)
        and _is_count(shard.get("samples"), MAX_COUNT)
        and (known is None or _is_count(known, _INT64_MAX))
    )


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most
