"""The folder that shards are written to, local or in a bucket, and the cutting of samples into shards."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from streamload.errors import StorageError, without_secrets
from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard, IndexFolder
from streamload.index.shard_names import ShardNaming
from streamload.storage.local_files import LocalStorage, local_path
from streamload.storage.protocol import WEB, ShardInfo, escaped, protocol_of
from streamload.storage.storages import Storages
from streamload.tar.header_writer import END_OF_ARCHIVE
from streamload.tar.table import ShardTable
from streamload.write.shard_file import GrowingShard, Member, size_of

_HIDDEN = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")


class Destination:
    """A folder for shards. Every method may raise OSError or StreamloadError.

    Attributes:
        folder: its path or url, without a slash at the end.
        path: its path; None if it is remote.
        storage: its storage.
        index: the folder of its index.
    """

    def __init__(self, folder: str, storages: Storages, *, durable: bool = True) -> None:
        """Write nothing yet; `durable` flushes local files to the disk.

        Raises:
            ValueError: the url names no folder.
            StorageError: it names a web server, or a file.
        """
        if folder.endswith(":") or ("://" in folder and not folder.rstrip("/").partition("://")[2]):
            raise ValueError(f"{folder!r} names no bucket or folder; give one, as in s3://bucket/train")
        if protocol_of(folder) in WEB:
            url = without_secrets(folder)
            raise StorageError("a web server cannot be written to; name a bucket or a folder", url=url)
        self.storage = storages.for_url(folder.rstrip("/") or "/")
        self.path = None
        if isinstance(self.storage, LocalStorage):
            folder = local_path(folder) if folder.startswith("file:") else folder
            if os.path.isfile(folder):
                raise StorageError("this is a file; name a folder", url=folder)
            self.storage = LocalStorage(durable=durable)
            self.path = folder.rstrip("/") or "/"
        self.folder = folder.rstrip("/") or "/"
        self.index = IndexFolder(self.storage, f"{self.folder}/{INDEX_FOLDER}")
        self._durable = durable
        self._created: list[str] = []

    def existing(self, names: ShardNaming) -> list[str]:
        """Return the existing shards with such names, sorted."""
        listed = [info.url.rpartition("/")[2] for info in self.storage.list(f"{escaped(self.folder)}/*")]
        return sorted(filter(names.matches, listed))

    def remove(self, names: ShardNaming, shards: Sequence[str]) -> None:
        """Remove the index entries of all shards with such names, then some shards."""
        self.index.remove(names.matches)
        for shard in shards:
            self.storage.delete(f"{self.folder}/{shard}")

    def remove_abandoned(self, names: ShardNaming) -> None:
        """Remove the hidden files of killed writers for such names; a bucket has none."""
        for hidden in os.listdir(self.path) if self.path is not None and os.path.isdir(self.path) else ():
            match = _HIDDEN.fullmatch(hidden)
            if match is not None and names.matches(match[1]):
                # It may be gone by now, or another user's, or locked by a writer that lives.
                with suppress(OSError), open(f"{self.path}/{hidden}", "r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(f"{self.path}/{hidden}")

    def create(self, name: str) -> GrowingShard:
        """Start a shard; a missing local folder is created."""
        if self.path is not None:
            missing = os.path.abspath(self.path)
            while not os.path.isdir(missing):
                self._created.append(missing)
                missing = os.path.dirname(missing)
            os.makedirs(self.path, exist_ok=True)
        return GrowingShard(name, self.path, durable=self._durable)

    def close(self) -> None:
        """Remove the created folders that are empty. Idempotent."""
        created, self._created = self._created, []
        with suppress(OSError):  # not empty
            for folder in created:
                os.rmdir(folder)


class PublishedShard(NamedTuple):
    """A complete shard: its name in the folder, its file or object, and its table."""

    name: str
    info: ShardInfo
    table: ShardTable


def indexed(shards: Iterable[PublishedShard]) -> list[tuple[IndexedShard, ShardTable]]:
    """Return the index entries and tables of shards."""
    return [(IndexedShard(name, info.bytes, len(table), info.etag), table) for name, info, table in shards]


class ConsecutiveShards:
    """Cuts samples into shards, each as full as allowed.

    Attributes:
        growing: the unpublished shard, if there is one.
        published: the complete shards in order.
    """

    def __init__(
        self,
        folder: Destination,
        name: Callable[[int], str],
        *,
        max_bytes: int | None,
        max_count: int | None,
        replace: bool = True,
        before_first: Callable[[], None] = lambda: None,
    ) -> None:
        """Write nothing yet. `name` returns a shard's name by number; `before_first` is called before the first one."""
        self._folder, self._name = folder, name
        self._max_bytes, self._max_count = max_bytes, max_count
        self._replace, self._before_first = replace, before_first
        self.growing: GrowingShard | None = None
        self.published: list[PublishedShard] = []

    def append(self, key: str, members: Sequence[Member], label: int | None) -> None:
        """Append a sample, to a further shard if this one is full.

        Raises StreamloadError; or ValueError, with nothing written, if it fits into no shard or its key repeats.
        """
        size, limit = size_of(members), self._max_bytes
        if limit is not None and size + len(END_OF_ARCHIVE) > limit:
            raise too_large(key, size, limit)
        with self._writing():
            shard = self.growing
            if shard is not None and (
                (limit is not None and shard.bytes + size > limit) or len(shard.keys) == self._max_count
            ):
                self._publish(shard)
                shard = None
            if shard is None:
                shard = self.growing = self._folder.create(self._name(len(self.published)))
            if key in shard.keys:
                raise ValueError(f"two samples have the key {key!r}; give each one of its own")
            shard.append(key, members, label)

    def finish(self, *, may_be_empty: bool = False) -> None:
        """Publish the last shard; without any sample an empty one if `may_be_empty`."""
        with self._writing():
            if self.growing is None and may_be_empty and not self.published:
                self.growing = self._folder.create(self._name(0))
            if self.growing is not None:
                self._publish(self.growing)

    def close(self) -> None:
        """Discard the unpublished shard. Idempotent."""
        shard, self.growing = self.growing, None
        if shard is not None:
            shard.discard()
        self._folder.close()

    def _publish(self, shard: GrowingShard) -> None:
        if not self.published:
            self._before_first()
        url, storage = f"{self._folder.folder}/{shard.name}", self._folder.storage
        table = shard.publish(storage, url, replace=self._replace)
        self.growing = None
        info = storage.info(url)
        if info.bytes != table.shard_bytes:
            storage.delete(url)
            raise StorageError(
                f"the shard has {info.bytes:,} bytes after the upload instead of {table.shard_bytes:,}; write it again",
                url=without_secrets(url),
            )
        self.published.append(PublishedShard(shard.name, info, table))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            folder, url = self._folder, exc.filename if isinstance(exc.filename, str) else None
            reason = exc.strerror or exc
            if folder.path is None:
                raise StorageError(
                    f"the shard cannot be written to the folder for temporary files, {tempfile.tempdir!r} ({reason}); "
                    "make room there, name another one with TMPDIR, or make shards smaller with max_bytes",
                    url=url,
                ) from exc
            message = f"cannot write shards to {folder.folder!r}: {reason}; make room, or check its rights"
            raise StorageError(message, url=url) from exc


def too_large(key: str, size: int, max_bytes: int) -> ValueError:
    """Return the error for a sample that is larger than a shard may be."""
    shard_bytes = size + len(END_OF_ARCHIVE)
    return ValueError(
        f"sample {key!r} makes a shard of {shard_bytes:,} bytes on its own, and a shard may have {max_bytes:,}; raise "
        f"--max-bytes (max_bytes) to {shard_bytes} at least"
    )
