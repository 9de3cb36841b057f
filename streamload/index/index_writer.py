"""Writes the index of a folder, local or remote: table files, then `index.json`, then what is no longer needed goes.

`index.json` is replaced at once and names its table files, whose names stand for their content. So a reader sees the
old index or the new one, never a mixture.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from zlib import crc32

from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError, StreamloadError
from streamload.index.dataset_index import (
    INDEX_FILE,
    MOST_INDEX_BYTES,
    TABLE_FILE,
    DatasetIndex,
    TableGroup,
    is_plain_name,
    no_table_file,
    read_local,
)
from streamload.index.indexed_shards import IndexedShard, IndexedShards, TablePlace
from streamload.index.table_file import pack_table
from streamload.storage.local_files import replace_file
from streamload.storage.protocol import Storage
from streamload.tar.table import ShardTable
from streamload.text import counted

FILE_TABLES, FILE_BYTES = 1000, 64 << 20
"""A table file ends when it has so many tables or bytes."""

_log = logging.getLogger("streamload")


class LocalIndexFolder:
    """An index on a local disk; its writers wait for each other.

    Args:
        folder: its path; made when it is written to.
        durable: wait until all is on the disk.
    """

    def __init__(self, folder: str, *, durable: bool = True) -> None:
        self.folder = folder
        self._durable = durable

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the index: packing `train` and `val` into one folder at once would lose entries otherwise."""
        made = not os.path.isdir(self.folder)
        try:
            os.makedirs(self.folder, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with contextlib.suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.makedirs(self.folder, exist_ok=True)  # who had the lock may have failed and removed it
                yield
                if self._durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as exc:
            raise StorageError(
                f"the index cannot be written ({exc.strerror}); check permissions and free space, or name another "
                "folder",
                url=self.folder,
            ) from exc
        finally:
            if made:
                with contextlib.suppress(OSError):  # usually the index is there
                    os.rmdir(self.folder)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is none; raise DatasetIndexError if it cannot be read."""
        return read_local(os.path.join(self.folder, name))

    def write(self, name: str, content: bytes) -> None:
        """Replace a file whole."""
        replace_file(os.path.join(self.folder, name), lambda file: file.write(content), durable=self._durable)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.folder, name))

    def table_files(self) -> Sequence[str]:
        """Return the table files that a killed writer may have left; those of running ones wait for the lock."""
        return [name for name in os.listdir(self.folder) if TABLE_FILE.fullmatch(name)]


class RemoteIndexFolder:
    """An index in a bucket. There are no locks: of two processes that change it at the same moment, one may undo what
    the other did.

    Args:
        storage: its storage.
        folder: its url.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self.folder = folder
        self._storage = storage

    def writing(self) -> AbstractContextManager[None]:
        """Lock nothing."""
        return contextlib.nullcontext()

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is none; raise DatasetIndexError if it cannot be read."""
        try:
            return self._storage.read_bytes(f"{self.folder}/{name}", most_bytes=MOST_INDEX_BYTES)
        except ShardNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Replace a file whole."""
        self._storage.write(f"{self.folder}/{name}", content)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        self._storage.delete(f"{self.folder}/{name}")

    def table_files(self) -> Sequence[str]:
        """Return none, since table files may be another writer's."""
        return ()


IndexFolder = LocalIndexFolder | RemoteIndexFolder
"""The folder of an index, as it is written; its methods may raise StorageError."""


def write_index(
    folder: str, entries: Sequence[tuple[IndexedShard, ShardTable]], *, durable: bool = True
) -> DatasetIndex:
    """Add shards to the index in a local folder, or replace them there; entries of other shards stay.

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
    return update_with_tables(LocalIndexFolder(folder, durable=durable), entries)


def update_with_tables(place: IndexFolder, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> DatasetIndex:
    """`update_index` with tables that are in memory. Raises what `write_index` raises."""
    _check_entries(entries)
    tables = {entry.name: table for entry, table in entries}
    fields = {name for table in tables.values() for name in table.fields}
    return update_index(place, [entry for entry, _ in entries], fields, lambda name: pack_table(tables[name]))


def update_index(
    place: IndexFolder,
    entries: Sequence[IndexedShard],
    fields: set[str],
    packed: Callable[[str], bytes],
    *,
    gone: Callable[[str], bool] = lambda _: False,
) -> DatasetIndex:
    """Add shards to an index, or replace them there, and drop others. A broken index is replaced.

    The bytes of the index depend on its entries alone, not on their order or the time. The tables of one table file are
    held at a time; those of which no table changes are not read.

    Args:
        place: where the index is.
        entries: the shards.
        fields: of all their tables.
        packed: gives the table of one of them, as `pack_table` made it.
        gone: of a name in the index whether its entry is dropped.

    Returns:
        The whole index.

    Raises:
        ValueError: a name has a folder in it or comes twice.
        StorageError: the index cannot be written.
    """
    _check_names([entry.name for entry in entries])
    with place.writing():
        try:
            old = _read(place)
        except DatasetIndexError as exc:
            _log.warning("making a new index, without the entries of the old one: %s", exc)
            old = None
        try:
            return _replace(place, old, {entry.name: entry for entry in entries}, fields, packed, gone=gone)
        except BaseException:
            _delete_unreferenced(place)
            raise


def remove_entries(place: IndexFolder, matches: Callable[[str], bool]) -> None:
    """Remove what an index says of the shards whose names match; the index too, if it says nothing else.

    Raises:
        StorageError: it cannot be read or written.
        DatasetIndexError: it is broken.
    """
    if _read(place) is None:
        return
    with place.writing():
        old = _read(place)
        if old is not None and any(map(matches, old.shards.names)):
            _replace(place, old, {}, set(), lambda _: b"", gone=matches)


def _replace(
    place: IndexFolder,
    old: DatasetIndex | None,
    new: Mapping[str, IndexedShard],
    fields: set[str],
    packed: Callable[[str], bytes],
    *,
    gone: Callable[[str], bool],
) -> DatasetIndex:
    kept = [entry for entry in old.shards if entry.name not in new and not gone(entry.name)] if old else []
    if old is not None and kept:
        fields = fields | set(old.fields)
    tables = _Tables(place, old, new, packed)
    shards: list[IndexedShard] = []
    for entry in sorted([*kept, *new.values()], key=lambda entry: entry.name):
        shards += tables.add(entry)
    shards += tables.end_file()
    index = DatasetIndex(place.folder, tuple(sorted(fields)), IndexedShards.of(shards))
    if shards:
        place.write(INDEX_FILE, index.to_json())
    else:
        place.delete(INDEX_FILE)
    before = set(old.shards.files) if old is not None else set()
    now = {_place(entry).file for entry in shards}
    for name in sorted(before.union(place.table_files()) - now):
        place.delete(name)
    return index


def _delete_unreferenced(place: IndexFolder) -> None:
    """Delete the table files of an index that could not be written, whether its last step was taken or not."""
    with contextlib.suppress(OSError, StreamloadError):
        index = _read(place)
        referenced = set(index.shards.files) if index is not None else set()
        for name in sorted(set(place.table_files()) - referenced):
            place.delete(name)


class _Tables:
    """Writes table files, one after another.

    Args:
        place: where to.
        old: the index as it was.
        new: the entries whose tables `packed` gives; those of others are in the old index.
        packed: gives the table of a new entry.
    """

    def __init__(
        self,
        place: IndexFolder,
        old: DatasetIndex | None,
        new: Mapping[str, IndexedShard],
        packed: Callable[[str], bytes],
    ) -> None:
        self._place = place
        self._old = old
        self._new = new
        self._packed = packed
        self._in_file: dict[str, list[IndexedShard]] = {}
        for entry in old.shards if old is not None else ():
            self._in_file.setdefault(_place(entry).file, []).append(entry)
        self._read: tuple[str, bytes | None] = ("", None)
        self._entries: list[IndexedShard] = []
        self._contents: list[bytes | None] = []
        self._bytes = 0

    def add(self, entry: IndexedShard) -> list[IndexedShard]:
        """Add a table, in the order of names; the entries of the table file that is full before it, written."""
        content = self._packed(entry.name) if entry.name in self._new else None
        size = _place(entry).bytes if content is None else len(content)
        full = len(self._entries) == FILE_TABLES or self._bytes + size > FILE_BYTES
        written = self.end_file() if full else []
        self._entries.append(entry)
        self._contents.append(content)
        self._bytes += size
        return written

    def end_file(self) -> list[IndexedShard]:
        """Write the table file that was begun; its entries."""
        entries, contents = self._entries, self._contents
        self._entries, self._contents, self._bytes = [], [], 0
        if not entries:
            return []
        if contents.count(None) == len(entries) and self._in_file.get(_place(entries[0]).file) == entries:
            return entries  # the file is there as it is
        found = [
            self._kept(entry) if content is None else content for entry, content in zip(entries, contents, strict=True)
        ]
        tables = [(entry, content) for entry, content in zip(entries, found, strict=True) if content is not None]
        joined = b"".join(content for _, content in tables)
        names = "\0".join(entry.name for entry, _ in tables)  # too, since the tables of two files may be the same
        digest = blake2b(names.encode("utf-8", "surrogatepass") + joined, digest_size=8)
        file = f"tables-{digest.hexdigest()}.bin"
        if tables:
            self._place.write(file, joined)
        written, start = [], 0
        for entry, content in tables:
            written.append(entry._replace(table=TablePlace(file, start, len(content), crc32(content))))
            start += len(content)
        return written

    def _kept(self, entry: IndexedShard) -> bytes | None:
        """A table of the old index; None, with a warning, where it cannot be read."""
        assert self._old is not None, "it keeps entries"
        try:
            file = _place(entry).file
            if self._read[0] != file:
                self._read = file, self._place.read(file)
            held = self._read[1]
            if held is None:
                raise no_table_file(self._old.table_url(entry.name))
            content = self._old.tables_in(TableGroup(file, 0, None, (entry.name,)), held)[entry.name]
            self._old.table_of(entry.name, content)
            return content
        except DatasetIndexError as exc:
            if isinstance(exc.__cause__, OSError):
                raise  # it may be readable the next time
            _log.warning("the index loses %r, whose table cannot be read: %s", entry.name, exc)
            return None


def _place(entry: IndexedShard) -> TablePlace:
    assert entry.table is not None, "it was read or written"
    return entry.table


def _read(place: IndexFolder) -> DatasetIndex | None:
    content = place.read(INDEX_FILE)
    return None if content is None else DatasetIndex.from_json(content, place.folder)


def _check_entries(entries: Sequence[tuple[IndexedShard, ShardTable]]) -> None:
    """Raises ValueError if a name has a folder in it or comes twice, or an entry disagrees with its table."""
    _check_names([entry.name for entry, _ in entries])
    for entry, table in entries:
        if not entry.describes(table):
            raise ValueError(
                f"{entry} does not belong to a table of {counted(len(table), 'sample')} in {table.shard_bytes} bytes; "
                "take both from one scan"
            )


def _check_names(names: Sequence[str]) -> None:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"an index needs shards with different names, not {sorted(names)}; give each name once")
    for name in names:
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not the plain name of a file; give it without a folder")
