"""Finding the indexes of folders, local or remote, each read once."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError, without_secrets
from streamload.index.dataset_index import INDEX_FILE, INDEX_FOLDER, MOST_INDEX_BYTES, DatasetIndex
from streamload.index.indexed_shards import IndexedShard
from streamload.index.table_reader import TableReader
from streamload.index.unfinished import UnfinishedSet, read_mark, unfinished_error, unfinished_sets
from streamload.storage.errors import NoConnectionError, UntrustedServerError
from streamload.storage.storages import Storages
from streamload.tar.table import ShardTable

_log = logging.getLogger("streamload")


class IndexLookup:
    """The indexes of the folders that shards lie in, each read once: one request for each remote folder.

    Where a shard is in no index, one more request for its folder shows whether its writer has finished.
    """

    def __init__(self, elsewhere: str | os.PathLike[str] | None = None, storages: Storages | None = None) -> None:
        """Prepare to look beside the shards, or read the one index that lies elsewhere.

        Raises:
            DatasetIndexError: there is none where `elsewhere` says, or it is broken.
            StorageError: the storage there cannot be read.
        """
        self._storages = Storages() if storages is None else storages
        self._by_folder: dict[str, DatasetIndex | None] = {}
        self._unfinished: dict[str, Sequence[UnfinishedSet]] = {}
        self._unreadable: dict[str, StorageError] = {}
        self._guard = threading.Lock()
        self._locks: dict[tuple[str, str], threading.Lock] = {}
        self._packed: dict[tuple[str, str], bytes] = {}  # tables that were read with others, until they are taken
        self._elsewhere = None if elsewhere is None else self._find_elsewhere(os.fspath(elsewhere))

    def of_folder(self, folder: str, named: str | None = None) -> DatasetIndex | None:
        """The index for the shards in a folder, or None.

        Args:
            folder: the shards'.
            named: what the user named, for errors; by default the folder.

        Raises:
            DatasetIndexError: it is broken.
            StorageError: it cannot be read.
        """
        if self._elsewhere is not None:
            return self._elsewhere
        if folder in self._by_folder:
            return self._by_folder[folder]
        with self._guard:
            lock = self._locks.setdefault((folder, INDEX_FOLDER), threading.Lock())
        with lock:  # else many threads begin with the same index, which may be large and far away
            if folder not in self._by_folder:
                self._by_folder[folder] = self._beside(folder, named or folder)
            return self._by_folder[folder]

    def entry_of(self, folder: str, name: str) -> IndexedShard | None:
        """The index entry of one shard, or None. Raises what `of_folder` raises."""
        index = self.of_folder(folder, f"{folder}/{name}")
        return None if index is None else index.find(name)

    def refuse_unfinished(self, folder: str, name: str | None = None) -> None:
        """Refuse a shard, or the folder as a whole, if its writer was interrupted or is still running.

        Only for shards that no index beside them knows: an index is written when all of its shards are there, and its
        entries are removed before any of them is.

        Args:
            folder: the shards'.
            name: of one shard; None stands for all that a folder may hold.

        Raises:
            DatasetIndexError: it is unfinished, or its mark is damaged.
            StorageError: the storage cannot be read.
        """
        if folder not in self._unfinished:
            self._unfinished[folder] = self._marked(folder)
        for found in self._unfinished[folder]:
            if name is None or found.shards.matches(name):
                raise unfinished_error(found, folder)

    def _marked(self, folder: str) -> Sequence[UnfinishedSet]:
        try:
            content = read_mark(self._storages.for_url(folder), folder)
        except StorageError as exc:
            if type(exc) is not StorageError:
                raise
            return ()  # as for an index: those who may not list are refused missing objects
        return () if content is None else unfinished_sets(content, folder)

    def table_of(self, folder: str, name: str) -> ShardTable | None:
        """The table of one shard, or None where there is no index for its folder; may be called by several threads.

        Raises:
            DatasetIndexError: the index does not have the shard, or is broken.
            StorageError: it cannot be read.
        """
        index = self.of_folder(folder)
        if index is None or self._storages.is_local(index.folder):
            return None if index is None else index.table(name)
        with self._guard:
            lock = self._locks.setdefault((folder, index.place(name).file), threading.Lock())
        with lock:
            packed = self._packed.pop((folder, name), None)
            if packed is None:
                read = TableReader(self._storages, {index.folder: index}).read(index.folder, name)
                packed = read.pop(name)
                self._packed.update({(folder, other): content for other, content in read.items()})
        return index.table_of(name, packed)

    def _beside(self, folder: str, named: str) -> DatasetIndex | None:
        try:
            return self._read(f"{folder.rstrip('/')}/{INDEX_FOLDER}")
        except (NoConnectionError, UntrustedServerError) as exc:
            raise type(exc)(exc.message, url=without_secrets(named)) from None
        except StorageError as exc:
            if type(exc) is not StorageError:
                raise
            # Those who may read but not list are refused missing objects, too.
            self._unreadable[folder] = exc
            return None

    def why_unreadable(self, folder: str) -> StorageError | None:
        """Why the index of a folder, which may not be there, could not be read; None where it was, or is not there."""
        return self._unreadable.get(folder)

    def warn_of_unreadable(self) -> None:
        """Warn of the indexes that could not be read; once it is known that the shards beside them can be."""
        unreadable, self._unreadable = self._unreadable, {}
        for exc in unreadable.values():
            _log.warning("going on without an index, since it cannot be read: %s", exc)

    def _find_elsewhere(self, index: str) -> DatasetIndex:
        place = index.rstrip("/") or "/"
        for folder in (place, f"{place.rstrip('/')}/{INDEX_FOLDER}"):
            if (found := self._read(folder)) is not None:
                return found
        shown = without_secrets(index)
        raise DatasetIndexError(
            f"index={shown!r} holds no index.json; write one there with `streamload index SHARDS --output {shown}`"
        )

    def _read(self, folder: str) -> DatasetIndex | None:
        """The index in its own folder, or None."""
        if self._storages.is_local(folder):
            folder = self._storages.for_url(folder).absolute(folder)
            return DatasetIndex.load(folder) if os.path.exists(os.path.join(folder, INDEX_FILE)) else None
        storage = self._storages.for_url(folder)
        try:
            return DatasetIndex.load(folder, lambda url: storage.read_bytes(url, most_bytes=MOST_INDEX_BYTES))
        except ShardNotFoundError:
            return None
