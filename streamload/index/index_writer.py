"""Write the index of a folder: table files, then `index.json`; then delete old table files.

`index.json` is replaced atomically and names its table files by their content, so a reader sees the old index or the
new one, never a mixture.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from zlib import crc32

from streamload.errors import DatasetIndexError, ShardNotFoundError, StreamloadError
from streamload.index.dataset_index import (
    INDEX_FILE,
    MOST_INDEX_BYTES,
    DatasetIndex,
    IndexedShard,
    index_error,
    is_plain_name,
    pack_table,
)
from streamload.index.shard_names import locked_folder
from streamload.storage.protocol import Storage
from streamload.tar.table import ShardTable

# Maximum tables and bytes of a table file.
_FILE_TABLES, _FILE_BYTES = 1000, 64 << 20

_log = logging.getLogger("streamload")


class IndexFolder:
    """The folder of an index to write, made if need be. Every method may raise StorageError."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.folder = storage.absolute(folder).rstrip("/")
        self._storage = storage

    def writing(self) -> AbstractContextManager[None]:
        """Exclude other writers of a local index, so that `train` and `val` packed at once lose no entries."""
        return locked_folder(os.path.dirname(self.folder))

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is none."""
        try:
            return self._storage.read_bytes(f"{self.folder}/{name}", most_bytes=MOST_INDEX_BYTES)
        except ShardNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Replace a file whole."""
        self._storage.write(f"{self.folder}/{name}", content)

    def delete(self, name: str) -> None:
        """Delete a file if it exists."""
        self._storage.delete(f"{self.folder}/{name}")


def update_with_tables(place: IndexFolder, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> DatasetIndex:
    """Add shards whose tables are in memory to an index, or replace them; raises what `update_index` raises."""
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
    """Add shards to an index or replace them, and drop others. A broken index is replaced.

    The bytes of the index depend on its entries alone, not on their order or the time. The tables of one table file are
    held at a time; files without a changed table are not read.

    Args:
        place: the index's folder.
        entries: the shards.
        fields: of all their tables.
        packed: returns the packed table of a shard.
        gone: returns True for a name whose entry is dropped.

    Returns:
        The whole index.

    Raises:
        ValueError: a name has a folder in it or comes twice.
        StorageError: the index cannot be written.
    """
    new = {entry.name: entry for entry in entries}
    if not new or len(new) != len(entries):
        raise ValueError(f"an index needs shards with different names, not {sorted(new)}; give each name once")
    for name in new:
        if not is_plain_name(name):
            raise ValueError(f"{name!r} is not the plain name of a file; give it without a folder")
    with place.writing():
        try:
            old = _read(place)
        except DatasetIndexError as exc:
            _log.warning("making a new index, without the entries of the old one: %s", exc)
            old = None
        return _replace(place, old, new, fields, packed, gone=gone)


def remove_entries(place: IndexFolder, matches: Callable[[str], bool]) -> None:
    """Remove the entries of shards whose names match; the index too, if it has no others.

    Raises:
        StorageError: it cannot be read or written.
        DatasetIndexError: it is broken.
    """
    if _read(place) is None:
        return  # without making a folder
    with place.writing():
        old = _read(place)
        if old is not None and any(matches(entry.name) for entry in old.shards):
            _replace(place, old, {}, set(), lambda _: b"", gone=matches)


def _read(place: IndexFolder) -> DatasetIndex | None:
    content = place.read(INDEX_FILE)
    return None if content is None else DatasetIndex.from_json(content, place.folder)


def _replace(
    place: IndexFolder,
    old: DatasetIndex | None,
    new: Mapping[str, IndexedShard],
    fields: set[str],
    packed: Callable[[str], bytes],
    *,
    gone: Callable[[str], bool],
) -> DatasetIndex:
    before = () if old is None else old.shards
    kept = [entry for entry in before if entry.name not in new and not gone(entry.name)]
    if old is not None and kept:
        fields = fields | set(old.fields)
    entries = sorted([*kept, *new.values()], key=lambda entry: entry.name)
    shards: list[IndexedShard] = []
    written: set[str] = set()
    try:
        for in_file, content in _table_files(place, old, entries, lambda name: packed(name) if name in new else None):
            shards += in_file
            if content is not None:
                file = in_file[0].file
                place.write(file, content)
                written.add(file)
        index = DatasetIndex(place.folder, tuple(sorted(fields)), tuple(shards))
        if shards:
            place.write(INDEX_FILE, index.to_json())
        else:
            place.delete(INDEX_FILE)
    except BaseException:
        with suppress(StreamloadError):  # index.json may be old or new
            now = _read(place)
            _delete(place, written, () if now is None else now.shards)
        raise
    _delete(place, {entry.file for entry in before}, shards)
    return index


def _delete(place: IndexFolder, files: set[str], referring: Sequence[IndexedShard]) -> None:
    for file in sorted(files - {entry.file for entry in referring}):
        place.delete(file)


def _table_files(
    place: IndexFolder,
    old: DatasetIndex | None,
    entries: Sequence[IndexedShard],
    packed: Callable[[str], bytes | None],
) -> Iterator[tuple[list[IndexedShard], bytes | None]]:
    """Cut sorted entries into table files, and hold one at a time.

    `packed` returns the table of a shard; None if it is in the old index.

    Yields:
        The entries of a file with their places, and its content; None if the file exists unchanged.
    """
    before: dict[str, list[IndexedShard]] = {}
    for entry in () if old is None else old.shards:
        before.setdefault(entry.file, []).append(entry)
    read = lru_cache(1)(place.read)

    def kept(entry: IndexedShard) -> bytes | None:
        """Return a table of the old index; None, with a warning, if it is damaged."""
        assert old is not None, "it has the entry"
        try:
            if (content := read(entry.file)) is None:
                raise index_error("the index has no such file", old.table_url(entry))
            table = content[entry.start : entry.start + entry.table_bytes]
            old.table_of(entry, table)
        except DatasetIndexError as exc:
            _log.warning("the index loses %r, whose table cannot be read: %s", entry.name, exc)
            return None
        return table

    def file_of(run: list[tuple[IndexedShard, bytes | None]]) -> tuple[list[IndexedShard], bytes | None]:
        in_file = [entry for entry, _ in run]
        if not any(table for _, table in run) and before.get(in_file[0].file) == in_file:
            return in_file, None
        tables = [(entry, kept(entry) if table is None else table) for entry, table in run]
        present = [(entry, table) for entry, table in tables if table is not None]
        content = b"".join(table for _, table in present)
        names = "\0".join(entry.name for entry, _ in present)  # the tables of two files may be the same
        digest = blake2b(names.encode("utf-8", "surrogatepass") + content, digest_size=8).hexdigest()
        starts = accumulate((len(table) for _, table in present), initial=0)
        places = [
            entry._replace(file=f"tables-{digest}.bin", start=start, table_bytes=len(table), table_crc32=crc32(table))
            for (entry, table), start in zip(present, starts, strict=False)
        ]
        return places, content if places else None

    run: list[tuple[IndexedShard, bytes | None]] = []
    run_bytes = 0
    for entry in entries:
        table = packed(entry.name)
        size = entry.table_bytes if table is None else len(table)
        if len(run) == _FILE_TABLES or (run and run_bytes + size > _FILE_BYTES):
            yield file_of(run)
            run, run_bytes = [], 0
        run.append((entry, table))
        run_bytes += size
    if run:
        yield file_of(run)
