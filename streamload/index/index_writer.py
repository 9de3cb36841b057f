"""Write the index of a folder: table files, then `index.json`; then delete old table files.

`index.json` is replaced atomically and names its table files by their content, so a reader sees the old index or the
new one, never a mixture.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from zlib import crc32

from streamload.errors import DatasetIndexError, StreamloadError
from streamload.index.dataset_index import (
    INDEX_FILE,
    MOST_INDEX_BYTES,
    DatasetIndex,
    IndexedShard,
    is_plain_name,
    pack_table,
)
from streamload.index.shard_names import locked_folder, read_if_there
from streamload.storage.protocol import Storage
from streamload.tar.table import ShardTable

# Maximum tables and bytes of a table file.
_FILE_TABLES, _FILE_BYTES = 1000, 64 << 20

_log = logging.getLogger("streamload")

_Packed = Callable[[str], bytes | None]
# Entries for one table file, with their tables if these are new.
_Run = list[tuple[IndexedShard, bytes | None]]


class IndexFolder:
    """The folder of an index to write, made if need be. Every method may raise StorageError."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.folder = storage.absolute(folder).rstrip("/")
        self._storage = storage

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is none."""
        return read_if_there(self._storage, f"{self.folder}/{name}", MOST_INDEX_BYTES)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file whole."""
        self._storage.write(f"{self.folder}/{name}", content)

    def update_with_tables(self, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> DatasetIndex:
        """Add shards whose tables are in memory to the index, or replace them; raises what `update` raises."""
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
        """Add shards to the index or replace them, and drop others. A broken index is replaced.

        The bytes of the index depend on its entries alone, not on their order or the time. One table file is held at a
        time; files without a changed table are not read. Other writers of a local index wait, so that `train` and `val`
        packed at once lose no entries.

        Args:
            entries: the shards.
            fields: of all their tables.
            packed: returns the packed table of a shard.
            gone: returns True for a name whose entry is dropped.

        Returns:
            The whole index.

        Raises:
            ValueError: a name has a folder in it or comes twice.
        """
        new = {entry.name: entry for entry in entries}
        if not new or len(new) != len(entries):
            raise ValueError(f"an index needs shards with different names, not {sorted(new)}; give each name once")
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
        """Remove the entries of shards whose names match; the index too, if it has no others.

        Raises:
            DatasetIndexError: the index is broken.
        """
        if self._index() is None:
            return  # without making a folder
        with locked_folder(os.path.dirname(self.folder)):
            old = self._index()
            kept = [entry for entry in old.shards if not matches(entry.name)] if old else []
            if old is not None and len(kept) < len(old.shards):
                self._replace(old, kept, set(old.fields) if kept else set(), lambda _: None)

    def _index(self) -> DatasetIndex | None:
        content = self.read(INDEX_FILE)
        return None if content is None else DatasetIndex.from_json(content, self.folder)

    def _replace(
        self, old: DatasetIndex | None, entries: Sequence[IndexedShard], fields: set[str], packed: _Packed
    ) -> DatasetIndex:
        """Write the index of some entries; `packed` returns the table of a shard, None if it is in the old index."""
        before: dict[str, list[IndexedShard]] = {}
        for entry in () if old is None else old.shards:
            before.setdefault(entry.file, []).append(entry)
        read = lru_cache(1)(self.read)
        shards: list[IndexedShard] = []
        written: set[str] = set()
        try:
            for run in _runs(sorted(entries, key=lambda entry: entry.name), packed):
                in_file = [entry for entry, _ in run]
                if any(table for _, table in run) or before.get(in_file[0].file) != in_file:
                    present = [(entry, table or _kept(old, entry, read)) for entry, table in run]
                    in_file, content = _table_file([(entry, table) for entry, table in present if table is not None])
                    if in_file:
                        self.write(in_file[0].file, content)
                        written.add(in_file[0].file)
                shards += in_file
            index = DatasetIndex(self.folder, tuple(sorted(fields)), tuple(shards))
            if shards:
                self.write(INDEX_FILE, index.to_json())
            else:
                self._storage.delete(f"{self.folder}/{INDEX_FILE}")
        except BaseException:
            with suppress(StreamloadError):  # index.json may be old or new
                now = self._index()
                self._delete(written, () if now is None else now.shards)
            raise
        self._delete(set(before), shards)
        return index

    def _delete(self, files: set[str], referring: Sequence[IndexedShard]) -> None:
        for file in sorted(files - {entry.file for entry in referring}):
            self._storage.delete(f"{self.folder}/{file}")


def _runs(entries: Sequence[IndexedShard], packed: _Packed) -> Iterator[_Run]:
    """Cut sorted entries into table files."""
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


def _kept(old: DatasetIndex | None, entry: IndexedShard, read: Callable[[str], bytes | None]) -> bytes | None:
    """Return a table of the old index; None, with a warning, if it is damaged."""
    assert old is not None, "it has the entry"
    content = read(entry.file)
    try:
        old.table_of(entry, content)
    except DatasetIndexError as exc:
        _log.warning("the index loses %r, whose table cannot be read: %s", entry.name, exc)
        return None
    return content and content[entry.start : entry.start + entry.table_bytes]


def _table_file(tables: Sequence[tuple[IndexedShard, bytes]]) -> tuple[list[IndexedShard], bytes]:
    """Return the content of a table file, and the entries with their places there."""
    content = b"".join(table for _, table in tables)
    names = "\0".join(entry.name for entry, _ in tables)  # the tables of two files may be the same
    digest = blake2b(names.encode("utf-8", "surrogatepass") + content, digest_size=8).hexdigest()
    starts = accumulate((len(table) for _, table in tables), initial=0)
    places = [
        entry._replace(file=f"tables-{digest}.bin", start=start, table_bytes=len(table), table_crc32=crc32(table))
        for (entry, table), start in zip(tables, starts, strict=False)
    ]
    return places, content
