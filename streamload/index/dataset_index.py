"""Writing the index of a dataset: a hidden folder beside the shards that says what each of them holds.

`.streamload/index.json` lists the shards; a `.npz` for each of them has its table. Files are replaced one by one and
`index.json` last, so a reader sees the old or the new entry of a shard, and a mixture of the two is found and refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import BinaryIO

from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError, without_secrets
from streamload.index.index_file import (
    INDEX_FILE,
    INDEX_FOLDER,
    INDEX_FORMAT,
    DatasetIndex,
    IndexedShard,
    check_shard,
    is_plain_name,
    table_path,
)
from streamload.index.table_file import table_to_npz
from streamload.storage.local_files import open_regular, replace_file, why_not_opened
from streamload.tar.scan import scan_file
from streamload.tar.table import ShardTable
from streamload.text import counted

__all__ = [
    "INDEX_FILE",
    "INDEX_FOLDER",
    "INDEX_FORMAT",
    "DatasetIndex",
    "IndexedShard",
    "check_entries",
    "check_shard",
    "index_shards",
    "merged_index",
    "table_path",
    "write_index",
    "write_index_files",
]

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
    """Write the list of shards with some new entries, keeping those of other shards. A broken one is made anew."""
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
