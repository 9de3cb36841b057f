"""Where a writer's shards go: a local folder, or one in a bucket."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard
from streamload.index.index_writer import IndexFolder, remove_entries, update_with_tables
from streamload.index.shard_names import SHARD_WRITER, ShardNaming, UnfinishedSet, mark_finished, mark_unfinished
from streamload.storage.local_files import LocalStorage, local_path
from streamload.storage.protocol import WEB, Storage, escaped, protocol_of
from streamload.storage.storages import Storages
from streamload.tar.table import ShardTable
from streamload.write.shard_file import GrowingShard, Member, ShardFile, remove_abandoned


class Destination:
    """A folder for shards in a bucket or another storage; every method may raise OSError or StreamloadError.

    Attributes:
        folder: its path or url, without a slash at the end.
        path: its path; None if it is remote.
        storage: its storage.
    """

    path: str | None = None

    def __init__(self, folder: str, storage: Storage) -> None:
        self.folder = folder.rstrip("/") or "/"
        self.storage = storage
        self._index = IndexFolder(storage, f"{self.folder}/{INDEX_FOLDER}")

    def existing(self, names: ShardNaming) -> list[str]:
        """Return the existing shards of this form, sorted; one listing."""
        listed = [info.url.rpartition("/")[2] for info in self.storage.list(f"{escaped(self.folder)}/*")]
        return sorted(filter(names.matches, listed))

    def mark(self, names: ShardNaming, writer: str) -> None:
        """Mark the folder as unfinished, before anything is changed in it."""
        mark_unfinished(self.storage, self.folder, UnfinishedSet(names, writer))

    def remove(self, names: ShardNaming, shards: Sequence[str]) -> None:
        """Remove the entries of all shards of this form from the index, then some shards, so no entry is ever stale."""
        remove_entries(self._index, names.matches)
        for shard in shards:
            self.storage.delete(f"{self.folder}/{shard}")

    def clear(self, names: ShardNaming, *, shards: bool) -> None:
        """Mark the folder as unfinished, and remove what shards of this form will replace.

        If all shards were deleted by hand, their entries are removed.
        """
        self.mark(names, SHARD_WRITER)
        self.remove_abandoned(names)
        existing = self.existing(names)
        if shards or not existing:
            self.remove(names, existing)

    def remove_abandoned(self, names: ShardNaming) -> None:
        """Remove the hidden files of writers that were killed, if those leave any."""

    def create(self, name: str) -> GrowingShard:
        """Start a shard, which grows in the system's folder for temporary files."""
        return _UploadedShard(name, self.storage, f"{self.folder}/{name}")

    def write_index(self, entries: Sequence[tuple[IndexedShard, ShardTable]]) -> None:
        """Add published shards to the index, when all of them are there."""
        update_with_tables(self._index, entries)

    def finish(self, names: ShardNaming) -> None:
        """Remove the mark: all shards of this form are there."""
        mark_finished(self.storage, self.folder, names)

    def close(self) -> None:
        """Release everything. Idempotent."""


class LocalFolder(Destination):
    """A folder of the local file system, made with the first shard, and removed again if none is published."""

    def __init__(self, folder: str, *, durable: bool = True) -> None:
        """Raise StorageError for a file; `durable` flushes shards and index to the disk."""
        super().__init__(folder, LocalStorage(durable=durable))
        self.path = self.folder
        self._durable = durable
        if os.path.isfile(self.folder):
            raise StorageError("this is a file; name a folder", url=folder)
        self._made: list[str] = []

    def remove_abandoned(self, names: ShardNaming) -> None:
        """Remove the hidden files of writers that were killed."""
        remove_abandoned(self.folder, names.matches)

    def create(self, name: str) -> GrowingShard:
        """Start a shard."""
        missing = os.path.abspath(self.folder)
        while not os.path.isdir(missing):
            self._made.append(missing)
            missing = os.path.dirname(missing)
        os.makedirs(self.folder, exist_ok=True)
        return ShardFile(os.path.join(self.folder, name), durable=self._durable)

    def close(self) -> None:
        """Remove the folders that were made and are empty."""
        made, self._made = self._made, []
        with suppress(OSError):  # something is in it
            for folder in made:
                os.rmdir(folder)


class _UploadedShard(GrowingShard):
    """A shard that grows in a file without a name, or on systems where that cannot be reopened, with a hidden one."""

    def __init__(self, name: str, storage: Storage, url: str) -> None:
        self._storage, self._url = storage, url
        local = tempfile.NamedTemporaryFile if not os.path.isdir("/proc/self/fd") else tempfile.TemporaryFile
        self._opened = local(prefix=".streamload-", buffering=0)
        super().__init__(name, os.dup(self._opened.fileno()))

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """See `GrowingShard.append`; raises StorageError instead of OSError."""
        try:
            super().append(key, members, label)
        except OSError as exc:
            raise _no_local_room(exc) from exc

    def publish(self, *, replace: bool) -> ShardTable:
        """Upload the shard whole or not at all, and check that it is there.

        Raises:
            StorageError: the shard cannot be written, or its size differs after the upload.
        """
        del replace  # existing shards have been refused or removed
        try:
            self._end()
        except OSError as exc:
            raise _no_local_room(exc) from exc
        name = self._opened.name
        self._storage.write(self._url, name if isinstance(name, str) else f"/proc/self/fd/{self._opened.fileno()}")
        uploaded = self._storage.info(self._url)
        if uploaded.bytes != self.bytes:
            self._storage.delete(self._url)
            raise StorageError(
                f"the shard has {uploaded.bytes:,} bytes after the upload, and {self.bytes:,} were sent; write it "
                "again",
                url=without_secrets(self._url),
            )
        self.etag = uploaded.etag
        self.discard()
        return self._table()

    def discard(self) -> None:
        """Close the local file, which deletes it."""
        super().discard()
        self._opened.close()


def _no_local_room(exc: OSError) -> StreamloadError:
    return StorageError(
        f"the shard cannot be written to the folder for temporary files, {tempfile.gettempdir()!r} ({exc.strerror}); "
        "make room there, name another one with TMPDIR, or make shards smaller with max_bytes"
    )


def destination_in(folder: str, storages: Storages, *, durable: bool = True) -> Destination:
    """Return the folder to write to: local, or in the storage that its url names.

    Args:
        folder: its path or url.
        storages: find its storage.
        durable: flush local files to the disk.

    Raises:
        ValueError: the url is that of no folder.
        StorageError: it is that of a web server.
    """
    if folder.endswith(":"):
        raise ValueError(f"{folder!r} names no bucket or folder; give one, as in s3://bucket/train-%06d.tar")
    if "://" in folder and not folder.rstrip("/").partition("://")[2]:
        raise ValueError(f"{folder!r} names no bucket or folder; give one, as in s3://bucket/train")
    if protocol_of(folder) in WEB:
        raise StorageError("a web server cannot be written to; name a bucket or a folder", url=without_secrets(folder))
    storage = storages.for_url(folder.rstrip("/") or "/")
    if not isinstance(storage, LocalStorage):
        return Destination(folder, storage)
    return LocalFolder(local_path(folder) if folder.startswith("file:") else folder, durable=durable)
