"""The disk cache of a node: whole shards under their final names, evicted by next use, and shards being filled.

What is promised, whatever process dies at whatever instant:

- A file under a final name is whole and right. It gets the name by one rename, after its bytes were made durable.
- What a disk does to it afterwards is found: each part is compared with its checksum when a process first uses it. A
  file that is damaged, or was made by a release without checksums, is removed, and fetched again.
- The final and the partial files together count for at most `size_bytes`. A partial file counts in full from the
  moment at which it is made, as long as it is in use, so processes that fill files at the same time cannot together
  exceed the bound; when nobody uses it, it counts for the blocks that it has.
- A file in use is not evicted: its space would not come free.
- Making and removing files happens under the folder's lock. Nobody holds it while waiting for anything but the disk.

The folder belongs to one user, who alone may read and write it, and one machine fills a file at a time: on a network
file system that several machines share, each fills files of its own, and whole ones serve all.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock

from streamload.fetch.cache.cached_shard import CachedShard, ShardEvents
from streamload.fetch.cache.eviction import CachedFile, files_to_evict, with_old_versions_last
from streamload.fetch.cache.file_locks import LockBusyError, is_in_use, locked_file, mark_in_use
from streamload.fetch.cache.next_use import NextUse, Unforeseen
from streamload.fetch.cache.partial_shard import PartialFiles, PartialShard, boot_tag, cached_bytes, private_tag
from streamload.fetch.cache.shard_identity import ShardIdentity, key_in_name
from streamload.storage.local_files import make_private_folder

__all__ = ["DiskCache", "shards_folder"]

_log = logging.getLogger("streamload")

_OPEN_WAIT_S = 1.0
"""How long to wait for the folder's lock before a shard is read without the cache."""
_PUBLISH_WAIT_S = 60.0
_BLOCK_BYTES = 512
_OPEN_WHOLE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_UNREADABLE = (errno.EIO, errno.ESTALE)


_MOST_PUBLISHING = 16
"""Each file that waits to be made durable has three descriptors, and small shards come faster than a disk syncs."""


class DiskCache:
    """A folder of shards that all processes of a node share.

    It never fails: where the disk refuses something, the cache turns itself off for this process with one warning, the
    partial files that this process has open are removed, and the caller is notified by None and `CacheOffError`.
    Files that are whole are still read then, unless the disk cannot be read.

    Args:
        folder: made if it is not there; the files are in `streamload-shards` in it.
        size_bytes: how much final and partial files together may take.
        part_bytes: in parts of what size shards are fetched, the same for every process; processes that differ
            don't fill the same file.
    """

    def __init__(self, folder: str, size_bytes: int, *, part_bytes: int) -> None:
        self._folder = shards_folder(folder)
        self._partial_folder = os.path.join(self._folder, "partial")
        self._lock_file = os.path.join(self._folder, "lock")
        self._size_bytes = size_bytes
        self._part_bytes = part_bytes
        self._boot = boot_tag()
        self._next_use: NextUse = Unforeseen()
        self._writable = self._readable = True
        self._closed = False
        self._mutex = Lock()
        self._shards: dict[CachedShard, str] = {}
        """Those that are open, with the paths of their files."""
        self._publisher: ThreadPoolExecutor | None = None
        self._publishing: list[Future[None]] = []
        self._events = ShardEvents(self._publish_later, self._turn_off, self._remove_damaged, self._forget)
        try:
            for made in (self._folder, self._partial_folder):
                make_private_folder(made)
            with locked_file(self._lock_file, _OPEN_WAIT_S):
                self._remove_abandoned()
        except LockBusyError:
            pass  # whoever makes room next removes them
        except OSError as exc:
            self._turn_off(exc)

    def expect(self, next_use: NextUse) -> None:
        """A new epoch began: files are evicted by these next uses from now on."""
        self._next_use = next_use

    def open(self, identity: ShardIdentity) -> CachedShard | None:
        """Open a shard to read it, and to fill it if it is not whole. The present use of the shard begins.

        It lists the folder when a file has to be made, which takes a millisecond for a thousand files, and may wait up
        to a second for other processes.

        Returns:
            The shard, which the caller closes; None if it is not to be cached: it would have to displace shards that
            are needed sooner, there is no room, or the cache is off.
        """
        self._next_use.begin(identity.file_name)
        try:
            shard = self._open_whole(identity) if self._readable else None
            if shard is None and self._writable and 0 < self._file_bytes(identity) <= self._size_bytes:
                with locked_file(self._lock_file, _OPEN_WAIT_S):
                    shard = self._open_whole(identity) or self._open_partial(identity)
        except LockBusyError:
            return None
        except OSError as exc:
            self._turn_off(exc)
            return None
        if shard is not None:
            with self._mutex:
                self._shards[shard] = os.path.join(self._folder, identity.file_name)
                late = self._closed
            if late:  # by another thread, while this one opened it
                shard.close()
                return None
            shard.announce()
        return shard

    def flush(self) -> None:
        """Wait until every shard that was completed in this process has its final name, or could not get it."""
        with self._mutex:
            waiting, self._publishing = self._publishing, []
        for future in waiting:
            future.result()

    def close(self) -> None:
        """Close every shard that is still open, and wait for those that are being made durable. Idempotent."""
        with self._mutex:
            self._closed = True
            shards = tuple(self._shards)
        for shard in shards:
            shard.close()
        self.flush()
        if self._publisher is not None:
            self._publisher.shutdown()
            self._publisher = None
        self._writable = self._readable = False

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open_whole(self, identity: ShardIdentity) -> CachedShard | None:
        path = os.path.join(self._folder, identity.file_name)
        try:
            descriptor = os.open(path, _OPEN_WHOLE)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self._file_bytes(identity):
                os.unlink(path)  # the cache has not made it, or a release has whose files have no checksums
                os.close(descriptor)
                return None
            mark_in_use(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return CachedShard(descriptor, identity.bytes, self._part_bytes, None, self._events)

    def _open_partial(self, identity: ShardIdentity) -> CachedShard | None:
        """Join what is being filled, or begin. The folder's lock is held."""
        tag = private_tag() if self._boot is None else self._boot
        files = PartialFiles(self._partial_folder, identity.file_name, tag, identity.bytes, self._part_bytes)
        if is_in_use(files.data):  # so it is paid for
            partial = PartialShard.join(files)
        elif not self._make_room(files):
            return None
        else:
            partial = PartialShard.join(files) or PartialShard.create(files)
        if partial is None:
            return None  # it has parts of another size
        return CachedShard(partial.descriptor, identity.bytes, self._part_bytes, partial, self._events)

    def _file_bytes(self, identity: ShardIdentity) -> int:
        return cached_bytes(identity.bytes, self._part_bytes)

    def _remove_damaged(self, shard: CachedShard) -> None:
        """Remove a shard's file, which others may go on reading: what they use of it they have compared."""
        with self._mutex:
            path = self._shards.get(shard)
        if path is None:
            return
        _log.warning(
            "%s in the disk cache does not hold what was fetched, so it is removed and fetched again; check the disk",
            path,
        )
        with suppress(OSError):
            if shard.partial is not None:
                shard.partial.remove()
            named, opened = os.stat(path), os.fstat(shard.descriptor)
            if (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino):
                os.unlink(path)

    # -- room ------------------------------------------------------------------------------------------------------

    def _make_room(self, files: PartialFiles) -> bool:
        """Evict what is needed later than this one, if it needs room; False if there is none for it."""
        self._remove_abandoned()
        present = [file for file in self._files() if file.path != files.data]
        chosen = files_to_evict(
            with_old_versions_last(present, key_in_name, files.name),
            files.file_bytes,
            self._size_bytes,
            self._next_use.position(files.name),
            lambda file: not is_in_use(file.path),
        )
        for file in chosen or ():
            _unlink(file.path)
            if os.path.dirname(file.path) == self._partial_folder:
                _unlink(os.path.splitext(file.path)[0] + ".state")
        return chosen is not None

    def _files(self) -> Iterator[CachedFile]:
        """Every final and partial file."""
        for name, path, found in _listed(self._folder):
            if path != self._lock_file:
                yield CachedFile(name, found.st_size, self._next_use.position(name), found.st_mtime_ns, path)
        for name, path, found in _listed(self._partial_folder):
            if name.endswith(".part"):
                taken = found.st_size if is_in_use(path) else found.st_blocks * _BLOCK_BYTES
                yield CachedFile(name, taken, self._next_use.position(name), found.st_mtime_ns, path)

    def _remove_abandoned(self, *, all_idle: bool = False) -> None:
        """Remove partial files that nobody can go on with: of another boot, or one of the two without the other.

        Args:
            all_idle: also those that are only not in use now.
        """
        pairs: dict[str, set[str]] = {}
        for _, path, _ in _listed(self._partial_folder):
            stem, kind = os.path.splitext(path)
            pairs.setdefault(stem, set()).add(kind)
        for stem, kinds in pairs.items():
            usable = self._boot is not None and stem.endswith(f".{self._boot}") and kinds == {".part", ".state"}
            if (all_idle or not usable) and not is_in_use(f"{stem}.part"):
                _unlink(f"{stem}.part")
                _unlink(f"{stem}.state")

    # -- the end of filling ----------------------------------------------------------------------------------------

    def _publish_later(self, shard: CachedShard) -> None:
        """Have a complete file made durable and moved to its place by a thread, because that may take seconds."""
        with self._mutex:
            self._publishing = [waiting for waiting in self._publishing if not waiting.done()]
            waiting = len(self._publishing)
        if shard.partial is None or waiting >= _MOST_PUBLISHING:
            return  # it stays as it is, complete, and is moved when it is opened next
        try:
            partial = shard.partial.duplicate()
        except OSError as exc:
            shard.partial.remove()
            self._turn_off(exc)
            return
        with self._mutex:
            if self._publisher is None:
                self._publisher = ThreadPoolExecutor(1, "streamload-cache")
            self._publishing.append(self._publisher.submit(self._publish, shard, partial))

    def _publish(self, shard: CachedShard, partial: PartialShard) -> None:
        try:
            if not partial.has_its_name():
                return
            os.fsync(partial.descriptor)
            with locked_file(self._lock_file, _PUBLISH_WAIT_S):
                # Another process may have done it, or evicted it; then the name is free, or stands for another file.
                if partial.has_its_name():
                    os.replace(partial.files.data, os.path.join(self._folder, partial.files.name))
                    with suppress(FileNotFoundError):
                        os.unlink(partial.files.state)
        except LockBusyError:
            pass  # it stays as it is, complete, and is moved when it is opened next
        except OSError as exc:
            partial.remove()
            shard.turn_off(withdrawn=True)
            self._turn_off(exc)
        finally:
            partial.close()

    def _turn_off(self, exc: OSError) -> None:
        with self._mutex:
            first, self._writable = self._writable, False
            self._readable = self._readable and exc.errno not in _UNREADABLE
            shards = tuple(self._shards)
        if first:
            _log.warning(
                "the disk cache in %s is off from now on, and shards are read without it (%s)",
                self._folder,
                exc.strerror or exc,
            )
        for shard in shards:
            shard.turn_off()
        with suppress(OSError, LockBusyError), locked_file(self._lock_file, _OPEN_WAIT_S):
            self._remove_abandoned(all_idle=True)

    def _forget(self, shard: CachedShard) -> None:
        with self._mutex:
            self._shards.pop(shard, None)


def shards_folder(cache_dir: str) -> str:
    """The folder in a `cache_dir` that holds the files of a cache."""
    return os.path.join(cache_dir, "streamload-shards")


def _listed(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Name, path and status of the files in a folder; one that is removed meanwhile is skipped."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield entry.name, entry.path, found


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
