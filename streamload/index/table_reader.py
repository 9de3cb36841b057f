"""Reading the tables of indexes, wherever they lie: many that lie beside each other at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from urllib.parse import quote

from streamload.errors import DatasetIndexError, ShardChangedError, ShardNotFoundError
from streamload.index.dataset_index import INDEX_FILE, MOST_INDEX_BYTES, DatasetIndex, no_table_file, read_local
from streamload.index.indexed_shards import IndexedShard, IndexedShards
from streamload.index.table_file import index_error
from streamload.storage.download import Pin, download
from streamload.storage.protocol import protocol_of
from streamload.storage.storages import Storages

_WEB = ("http", "https")


class TableReader:
    """Reads tables of indexes as bytes.

    Where a table file is gone, the index was written anew since it was read: then it is read once more, and must say
    the same of the shard.

    Args:
        storages: how indexes that lie remotely are read.
        indexes: those that have been read already, by folder.
    """

    def __init__(self, storages: Storages, indexes: Mapping[str, DatasetIndex] | None = None) -> None:
        self._storages = storages
        self._indexes = dict(indexes or {})
        self._locks: dict[tuple[str, str, int], asyncio.Lock] = {}

    def is_local(self, folder: str) -> bool:
        """Whether the index in a folder can be read without waiting for a remote storage."""
        return self._storages.is_local(folder)

    def index(self, folder: str) -> DatasetIndex:
        """The list of an index; blocks where it has not been read yet.

        Raises:
            DatasetIndexError: it is damaged.
            StorageError: it cannot be read.
        """
        if folder not in self._indexes:
            self._indexes[folder] = self._listed(folder, self._read(folder, INDEX_FILE))
        return self._indexes[folder]

    def read(self, folder: str, name: str) -> dict[str, bytes]:
        """The table of a shard, and those that were read with it, by shard; blocks. Of a remote index a file is read.

        Raises:
            DatasetIndexError: the index is damaged, or says something else of the shard than when it was read first.
            StorageError: it cannot be read.
        """
        index = self.index(folder)
        for _ in range(2):
            group = index.group(name) if self.is_local(folder) else index.file_group(name)
            content = self._read(folder, group.file, group.start, group.end)
            if content is not None:
                return index.tables_in(group, content)
            url = index.table_url(name)
            index = self._replaced(folder, name, self._listed(folder, self._read(folder, INDEX_FILE)))
        raise no_table_file(url)

    def read_file(self, folder: str, file: str) -> bytes | None:
        """What another file of an index holds; None where there is none. Blocks. Raises StorageError."""
        return self._read(folder, file)

    async def reading(self, folder: str, name: str) -> asyncio.Lock:
        """A lock for those who `load` what lies beside the table of a shard; the list is read before, once.

        Raises:
            DatasetIndexError: the index is damaged.
            StorageError: it cannot be read.
        """
        async with self._locks.setdefault((folder, INDEX_FILE, 0), asyncio.Lock()):
            if folder not in self._indexes:
                self._indexes[folder] = self._listed(folder, await self._download(folder, INDEX_FILE))
        group = self._indexes[folder].group(name)
        return self._locks.setdefault((folder, group.file, group.start), asyncio.Lock())

    async def load(self, folder: str, name: str) -> dict[str, bytes]:
        """`read`, on the running loop, by one request; after `reading`."""
        index = self._indexes[folder]
        for _ in range(2):
            group = index.group(name)
            content = await self._download(folder, group.file, group.start, group.end)
            if content is not None:
                return index.tables_in(group, content)
            url = index.table_url(name)
            index = self._replaced(folder, name, self._listed(folder, await self._download(folder, INDEX_FILE)))
        raise no_table_file(url)

    def _replaced(self, folder: str, name: str, new: DatasetIndex) -> DatasetIndex:
        """The index with the places that its tables have now; those of shards that are others now stay as they were.

        Raises:
            DatasetIndexError: the shard is one of these.
        """
        old = self._indexes[folder]
        now = {entry.name: entry for entry in new.shards if _same(entry, old.find(entry.name))}
        if name not in now:
            raise DatasetIndexError(
                f"the index was written anew while it was in use, and the shard {name!r} is another now; make a new "
                "loader, and give every version of a dataset a folder of its own",
                url=f"{folder}/{INDEX_FILE}",
            )
        shards = IndexedShards.of(now.get(entry.name, entry) for entry in old.shards)
        self._indexes[folder] = DatasetIndex(old.folder, old.fields, shards)
        return self._indexes[folder]

    def _listed(self, folder: str, content: bytes | None) -> DatasetIndex:
        if content is None:
            raise no_table_file(f"{folder}/{INDEX_FILE}")
        return DatasetIndex.from_json(content, folder)

    def _read(self, folder: str, file: str, start: int = 0, end: int | None = None) -> bytes | None:
        url = self._url(folder, file)
        if self.is_local(folder):
            return read_local(url, start, end)
        try:
            content = self._storages.for_url(url).read_bytes(url, most_bytes=MOST_INDEX_BYTES)
        except ShardNotFoundError:
            return None
        return content[start:end]

    async def _download(self, folder: str, file: str, start: int = 0, end: int | None = None) -> bytes | None:
        """A range of a file, retried like a shard; None where there is no such file."""
        url, content = self._url(folder, file), bytearray()

        def write(offset: int, piece: bytes) -> None:
            content[offset - start : offset - start + len(piece)] = piece

        try:
            await download(
                self._storages.for_url(url),
                url,
                start,
                MOST_INDEX_BYTES if end is None else end,
                write,
                pin=Pin(),
                retries=self._storages.retries,
            )
        except ShardNotFoundError:
            return None
        except ShardChangedError as exc:
            raise index_error(f"the file of the index is cut ({exc.message})", url, start) from exc
        return bytes(content)

    def _url(self, folder: str, file: str) -> str:
        web = protocol_of(folder) in _WEB
        return f"{folder}/{quote(file) if web else file}"


def _same(entry: IndexedShard, other: IndexedShard | None) -> bool:
    """Whether two entries are of one shard with one table, wherever that lies."""
    if other is None or entry.table is None or other.table is None:
        return False
    return (*entry[:3], entry.table.crc32) == (*other[:3], other.table.crc32)
