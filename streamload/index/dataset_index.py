"""The index of a dataset, read and written: a hidden folder beside the shards that says what each of them holds.

`.streamload/index.json` lists the shards; a `.npz` for each of them has its table. Files are replaced one by one and
`index.json` last, so a reader sees the old or the new entry of a shard, and a mixture of the two is found and refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any, BinaryIO, NamedTuple

from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError, without_secrets
from streamload.index.table_file import MAX_COUNT, table_crc32, table_from_npz, table_to_npz
from streamload.storage.local_files import open_regular, replace_file, why_not_opened
from streamload.tar.decompression import is_compressed
from streamload.tar.scan import scan_file
from streamload.tar.table import ShardTable
from streamload.text import counted

__all__ = [
    "INDEX_FILE",
    "INDEX_FOLDER",
    "DatasetIndex",
    "IndexedShard",
    "check_entries",
    "check_shard",
    "merged_index",
    "table_path",
    "write_index",
    "write_index_files",
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
    """The entry of one shard; a tuple, because there may be hundreds of thousands.

    Attributes:
        name: the file's name, without a folder.
        bytes: its size; that of the compressed file where it is one, and its table says how long the archive is.
        samples: how many samples it holds.
        mtime_ns: when it was last changed, in nanoseconds since 1970; None where that was not recorded.
        etag: its version in the storage it was indexed in; None where that has none, or it was not recorded.
        table_crc32: the checksum of its table's file; None in old indexes.
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
                f"the index is not JSON ({exc}); rebuild it with `streamload index`", url=path
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
                f"table {len(table)} in {table.shard_bytes}; rebuild the index with `streamload index`",
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
            "rebuild it with `streamload index`, or install a release that reads it",
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
        raise DatasetIndexError("the index is damaged; rebuild it with `streamload index`", url=path)
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


_log = logging.getLogger("streamload")


def write_index(
    folder: str, entries: Sequence[tuple[IndexedShard, ShardTable]], *, durable: bool = True
) -> DatasetIndex:
    """Add shards to the index in a folder, or replace them there; entries of other shards stay.

    The bytes of the index depend on its entries alone, not on their order or the time.

    Args:
        folder: the index's own folder (`.../.streamload`); made if need be.
        entries: the shards with their tables.
        durable: wait until all is on the disk, for shards that are there already.

    Returns:
        The whole index.

    Raises:
        ValueError: a name has a folder in it or comes twice, or an entry disagrees with its table.
        StorageError: the folder cannot be written.
    """
    check_entries(entries)
    fields = {name for _, table in entries for name in table.fields}
    with _writing(folder, durable=durable):
        for entry, table in entries:
            _write_table(folder, entry, table, durable=durable)
        return _merge(folder, [entry for entry, _ in entries], fields, durable=durable)


def write_index_files(
    folder: str,
    entries: Sequence[IndexedShard],
    fields: set[str],
    table_file: Callable[[str], bytes],
    *,
    gone: Collection[str] = (),
) -> DatasetIndex:
    """`write_index` from tables that are files already, of which one is held at a time.

    Args:
        folder: as for `write_index`.
        entries: the shards.
        fields: of all the tables.
        table_file: gives what `table_to_npz` made for a shard, by the shard's name.
        gone: names of shards whose entries are dropped.

    Raises:
        ValueError, StorageError: as for `write_index`.
    """
    _check_names([entry.name for entry in entries])
    with _writing(folder):
        for entry in entries:
            content = table_file(entry.name)
            replace_file(table_path(folder, entry.name), partial(_write_all, content))
        return _merge(folder, entries, fields, gone=gone)


def index_shards(
    paths: Sequence[str], folder: str | None = None, *, on_shard: Callable[[str, int], None] | None = None
) -> DatasetIndex:
    """Scan local uncompressed shards, with crc32 and labels, and write their index.

    Args:
        paths: the shards. Their names, without folders, must differ.
        folder: the index's own folder; by default `.streamload` beside the shards, which then lie in one folder.
        on_shard: called with the path and the number of samples of each shard after it was scanned.

    Returns:
        The whole index, with the shards that it had before.

    Raises:
        ValueError: there are no paths, two shards have one name, or they are in several folders and `folder` is None.
        ShardNotFoundError: a shard does not exist.
        ShardFormatError: a shard is damaged; `index.json` is then as it was.
        StorageError: a shard cannot be read or the index cannot be written.
    """
    _check_names([os.path.basename(path) for path in paths])
    folder = _folder_beside(paths) if folder is None else folder
    entries: list[IndexedShard] = []
    fields: set[str] = set()
    for path in paths:
        entry, table = _scan(path)
        _check_entry(entry, table)
        # Written at once, since the tables of very many shards together may not fit in memory.
        with _writing(folder):
            _write_table(folder, entry, table)
        entries.append(entry)
        fields.update(table.fields)
        if on_shard is not None:
            on_shard(path, len(table))
    with _writing(folder):
        return _merge(folder, entries, fields)


def check_entries(entries: Sequence[tuple[IndexedShard, ShardTable]]) -> None:
    """Raises ValueError if a name has a folder in it or comes twice, or an entry disagrees with its table."""
    _check_names([entry.name for entry, _ in entries])
    for entry, table in entries:
        _check_entry(entry, table)


def _write_all(content: bytes, file: BinaryIO) -> None:
    file.write(content)


def _check_names(names: Sequence[str]) -> None:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"an index needs shards with different names, not {sorted(names)}; give each name once")


def _folder_beside(paths: Sequence[str]) -> str:
    folders = {os.path.dirname(path) for path in paths}
    if len(folders) > 1:
        some = ", ".join(map(without_secrets, sorted(folders)[:3]))
        raise ValueError(
            f"the shards lie in {len(folders)} folders ({some}); index each folder by "
            "itself, or name the folder for the index"
        )
    return os.path.join(folders.pop(), INDEX_FOLDER)


def _scan(path: str) -> tuple[IndexedShard, ShardTable]:
    try:
        with open(open_regular(path), "rb") as file:
            status = os.fstat(file.fileno())
            table = scan_file(file.fileno(), status.st_size, path, crc32=True, labels=True)
    except FileNotFoundError as exc:
        raise ShardNotFoundError("no such shard; check the path", url=path) from exc
    except OSError as exc:
        raise StorageError(f"the shard cannot be read: {why_not_opened(exc)}", url=path) from exc
    return IndexedShard.of(os.path.basename(path), table, status.st_mtime_ns), table


def _check_entry(entry: IndexedShard, table: ShardTable) -> None:
    if not is_plain_name(entry.name):
        raise ValueError(f"{entry.name!r} is not the plain name of a file; give it without a folder")
    if not entry.describes(table):
        raise ValueError(
            f"{entry} does not belong to a table of {counted(len(table), 'sample')} in {table.shard_bytes} bytes; "
            "take both from one scan"
        )


@contextlib.contextmanager
def _writing(folder: str, *, durable: bool = True) -> Iterator[None]:
    """Make the index's folder if need be, and keep out other processes that write to it.

    Packing `train` and `val` into one folder at once would lose entries otherwise.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise StorageError(
            f"the index cannot be written ({exc.strerror}); check permissions and free space, or name another folder",
            url=folder,
        ) from exc


def _write_table(folder: str, entry: IndexedShard, table: ShardTable, *, durable: bool = True) -> None:
    replace_file(table_path(folder, entry.name), lambda file: table_to_npz(table, file), durable=durable)


def _write_list(index: DatasetIndex, *, durable: bool) -> None:
    content = index.to_json()
    replace_file(os.path.join(index.folder, INDEX_FILE), lambda file: file.write(content), durable=durable)


def _merge(
    folder: str,
    entries: Sequence[IndexedShard],
    fields: set[str],
    *,
    gone: Collection[str] = (),
    durable: bool = True,
) -> DatasetIndex:
    """Write the list of shards with some new entries, keeping those of other shards. A broken list is replaced."""
    old: DatasetIndex | None = None
    if os.path.exists(os.path.join(folder, INDEX_FILE)):
        try:
            old = DatasetIndex.load(folder)
        except DatasetIndexError as exc:
            _log.warning("making a new index, without the entries of the old one: %s", exc)
    index = merged_index(folder, old, entries, fields, gone)
    _write_list(index, durable=durable)
    return index


def merged_index(
    folder: str,
    old: DatasetIndex | None,
    entries: Sequence[IndexedShard],
    fields: set[str],
    gone: Collection[str] = (),
) -> DatasetIndex:
    """An index with some new entries and those that it had of other shards.

    Args:
        folder: the index's own folder.
        old: the index as it was, or None.
        entries: new, or in the stead of old ones.
        fields: of the new entries' tables.
        gone: names of old entries that are dropped.
    """
    by_name = {} if old is None else {entry.name: entry for entry in old.shards if entry.name not in gone}
    if old is not None and by_name.keys() - {entry.name for entry in entries}:
        fields = fields | set(old.fields)
    by_name |= {entry.name: entry for entry in entries}
    return DatasetIndex(folder, tuple(sorted(fields)), tuple(by_name[name] for name in sorted(by_name)))
