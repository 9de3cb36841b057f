"""The disk cache of a node: whole shards under their final names, evicted by next use, and shards being filled.

What is promised, whatever process dies at whatever instant:

- A file under a final name is whole; it gets the name by one rename. A process that opens it first compares all of it
  with its checksums: a damaged file is removed, and fetched again.
- The final and the temporary files together count for at most `size_bytes`; a temporary file counts in full as soon as
  it is made.
- A file in use is not evicted: its space would not come free.
- A temporary file that no process has locked is removed by the next one that makes or opens a cache there.
- Files are made and removed under the folder's lock, which is held only while waiting for the disk.

Only one user may read and write the folder.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from streamload.fetch.cache.cache_file import (
    CacheFile,
    LockBusyError,
    cached_bytes,
    is_in_use,
    locked_file,
    mark_in_use,
)
from streamload.fetch.cache.next_use import FILE_NAME, OrderNextUse, ShardIdentity, key_in_name, url_key
from streamload.storage.local_files import make_private_folder
from streamload.text import counted


class CachedFile(NamedTuple):
    """A file of the cache; of two that are needed at the same time the older is evicted first.

    Attributes:
        next_use: when it is needed next; infinity for never, or not known.
        made_ns: when it was last changed.
    """

    name: str
    bytes: int
    next_use: float
    made_ns: int = 0
    path: str = ""


def files_to_evict(
    files: Iterable[CachedFile],
    needed_bytes: int,
    size_bytes: int,
    next_use: float,
    may_go: Callable[[CachedFile], bool] = lambda _: True,
) -> list[CachedFile] | None:
    """Return which files make room for a new one (Belady's rule with bypass), the furthest next use first.

    Args:
        files: what is in the cache.
        needed_bytes: of the new file.
        size_bytes: how much the cache may hold.
        next_use: when the new file is needed next, after the present use.
        may_go: called with a file before it is chosen.

    Returns:
        None if there is room only in place of files that are needed as soon or sooner.
    """
    present = sorted(files, key=lambda file: (-file.next_use, file.made_ns))
    lacking = sum(file.bytes for file in present) + needed_bytes - size_bytes
    chosen: list[CachedFile] = []
    for file in present:
        if lacking <= 0 or file.next_use <= next_use:
            break
        if may_go(file):
            chosen.append(file)
            lacking -= file.bytes
    return chosen if lacking <= 0 else None


_log = logging.getLogger("streamload")

# How long to wait for the folder's lock before a shard is read without the cache.
_LOCK_WAIT_S = 1.0
_OPEN_WHOLE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_UNREADABLE = (errno.EIO, errno.ESTALE)


class DiskCache:
    """A folder of shards that all processes of a node share.

    It never fails: if the disk refuses something, the cache takes nothing more from this process, which warns once, but
    whole files are still read as long as the disk can be read. May be used by several threads.

    Args:
        folder: made if it is not there; the files are in `streamload-shards` in it.
        size_bytes: how much final and temporary files together may take.
        part_bytes: the size of the parts that have a checksum each, the same for every process.

    Attributes:
        next_use: when files are needed next; None evicts the oldest.
    """

    def __init__(self, folder: str, size_bytes: int, *, part_bytes: int) -> None:
        self._folder = shards_folder(folder)
        self._partial_folder = os.path.join(self._folder, "partial")
        self._lock_file = os.path.join(self._folder, "lock")
        self._size_bytes = size_bytes
        self._part_bytes = part_bytes
        self.next_use: OrderNextUse | None = None
        self._writable = self._readable = True
        self._compared: set[tuple[int, int, int]] = set()
        self._warned_of_size = False
        self._warning = Lock()
        try:
            for made in (self._folder, self._partial_folder):
                make_private_folder(made)
            with locked_file(self._lock_file, _LOCK_WAIT_S):
                self._remove_abandoned()
        except LockBusyError:
            pass  # they are removed when room is made
        except OSError as exc:
            self.turn_off(exc)

    def open(self, identity: ShardIdentity) -> CacheFile | None:
        """Open a shard to read it, or to fill it if it is not whole, and begin its present use.

        A whole file is compared with its checksums once in each process.

        Returns:
            The file, which the caller closes; None if it is not to be cached: another process is filling it, there is
            room only in place of shards that are needed sooner, or the cache is off.
        """
        if self.next_use is not None:
            self.next_use.begin(identity.file_name)
        try:
            file = self._open_whole(identity) if self._readable else None
            if file is None and self._writable and self._fits(identity):
                with locked_file(self._lock_file, _LOCK_WAIT_S):
                    self._remove_abandoned()
                    files = list(self._files())
                    came = os.path.exists(self._path(identity))  # another process has filled it meanwhile
                    fills = any(file.name.startswith(f"{identity.file_name}.") for file in files)
                    file = self._begin(identity, files) if not came and not fills else None
                file = self._open_whole(identity) if came else file
        except LockBusyError:
            return None
        except OSError as exc:
            self.turn_off(exc)
            return None
        return file

    def write(self, file: CacheFile, offset: int, data: bytes) -> None:
        """Write the next bytes of a part, and publish the file with the last. Raises OSError if the disk refuses."""
        file.write(offset, data)
        if not file.missing and not file.whole:
            file.publish()
            self._compared.add(_inode(os.fstat(file.descriptor)))

    def turn_off(self, exc: OSError) -> None:
        """Take nothing more, and warn the first time, since the disk refused something."""
        with self._warning:
            first, self._writable = self._writable, False
        self._readable = self._readable and exc.errno not in _UNREADABLE
        if first:
            _log.warning(
                "the disk cache in %s is off from now on, and shards are read without it (%s)",
                self._folder,
                exc.strerror or exc,
            )

    # -- opening ---------------------------------------------------------------------------------------------------

    def _fits(self, identity: ShardIdentity) -> bool:
        """Return True if the whole cache may be as large as a shard; warn of the first that is larger."""
        needed_bytes = self._file_bytes(identity)
        with self._warning:
            first = needed_bytes > self._size_bytes and not self._warned_of_size
            self._warned_of_size |= first
        if first:
            _log.warning(
                "the disk cache in %s may take %s, and a shard needs %s there, so shards of this size are not cached: "
                "free space on that disk, or give another cache_dir, or a larger cache_size where one is given",
                self._folder,
                counted(self._size_bytes, "byte"),
                counted(needed_bytes, "byte"),
            )
        return 0 < needed_bytes <= self._size_bytes

    def _open_whole(self, identity: ShardIdentity) -> CacheFile | None:
        path = self._path(identity)
        try:
            descriptor = os.open(path, _OPEN_WHOLE)
        except FileNotFoundError:
            return None
        file = CacheFile(descriptor, identity.bytes, self._part_bytes, path)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != self._file_bytes(identity):
                os.unlink(path)  # the cache has not made it, or a release has whose files have no checksums
                file.close()
                return None
            mark_in_use(descriptor)
            if _inode(found) not in self._compared and not file.is_sound():
                _log.warning(
                    "%s in the disk cache does not hold what was fetched, so it is removed and fetched again; check "
                    "the disk",
                    path,
                )
                file.close()
                _unlink(path)
                return None
        except OSError:
            file.close()
            raise
        self._compared.add(_inode(found))
        return file

    def _begin(self, identity: ShardIdentity, files: list[CachedFile]) -> CacheFile | None:
        """Make a file to be filled, if there is room beside the others. The folder's lock is held."""
        name, key = identity.file_name, url_key(identity.url)
        chosen = files_to_evict(
            # Other versions of the shard are not needed any more.
            [file._replace(next_use=math.inf) if key_in_name(file.name) == key else file for file in files],
            self._file_bytes(identity),
            self._size_bytes,
            self._position(name),
            lambda file: not is_in_use(file.path),
        )
        if chosen is None:
            return None
        for file in chosen:
            _unlink(file.path)
        temporary = os.path.join(self._partial_folder, f"{name}.{secrets.token_hex(8)}.part")
        return CacheFile.create(temporary, identity.bytes, self._part_bytes, self._path(identity))

    def _position(self, name: str) -> float:
        return math.inf if self.next_use is None else self.next_use.position(name)

    def _files(self) -> Iterator[CachedFile]:
        """Yield every temporary and final file; the other way round one renamed meanwhile would be missed."""
        for folder in (self._partial_folder, self._folder):
            for name, path, found in _listed(folder):
                yield CachedFile(name, found.st_size, self._position(name), found.st_mtime_ns, path)

    def _remove_abandoned(self) -> None:
        """Remove the temporary files that no process is filling. The folder's lock is held."""
        for _, path, _ in _listed(self._partial_folder):
            if not is_in_use(path):
                _unlink(path)

    def _path(self, identity: ShardIdentity) -> str:
        return os.path.join(self._folder, identity.file_name)

    def _file_bytes(self, identity: ShardIdentity) -> int:
        return cached_bytes(identity.bytes, self._part_bytes)


def shards_folder(cache_dir: str) -> str:
    """Return the folder in a `cache_dir` that holds the files of a cache."""
    return os.path.join(cache_dir, "streamload-shards")


def bytes_in_cache(cache_dir: str) -> int:
    """Return what the whole files of a cache take; 0 if there is none, or if it cannot be read."""
    with suppress(OSError):
        return sum(found.st_size for _, _, found in _listed(shards_folder(cache_dir)))
    return 0


def _inode(found: os.stat_result) -> tuple[int, int, int]:
    """Return a value that differs for every file, and for one file after every change."""
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _listed(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield name, path and status of a cache's files in a folder; skip what is removed meanwhile."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and FILE_NAME.fullmatch(entry.name):
                    yield entry.name, entry.path, found


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
