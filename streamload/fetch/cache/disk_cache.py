"""The disk cache of a node: whole shards under their final names, and shards being filled.

What is promised, whatever process dies at whatever instant:

- A file under a final name is whole; it gets the name by one rename. A process that opens it first compares all of it
  with its checksums: a damaged file is removed, and fetched again.
- The final and the temporary files together count for at most `size_bytes`; a temporary file counts in full as soon as
  it is made.
- A shard of the dataset is never evicted for another of it: so as much as fits comes from the disk in every epoch,
  whatever the order. Files of other datasets and older versions of shards are, unless they are in use.
- A temporary file that no process has locked is removed by the next one that makes or opens a cache there.
- Files are made and removed under the folder's lock, which is held only while waiting for the disk.

Only one user may read and write the folder.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from urllib.parse import urlsplit

from streamload.errors import without_secrets
from streamload.fetch.cache.cache_file import (
    CacheFile,
    LockBusyError,
    cached_bytes,
    is_in_use,
    locked_file,
    mark_in_use,
)
from streamload.storage.local_files import make_private_folder
from streamload.text import counted

_KEY_BYTES = 8
_DIGEST_BYTES = 16
_TAIL_LETTERS = 48
# The files of a cache, temporary ones included; all others in its folder are the user's.
_FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-.*")


def url_key(url: str) -> str:
    """Return a digest of a URL, 16 hexadecimal digits, which is the same for all versions and signatures.

    It says which file may be evicted, not what a file holds.
    """
    place = without_secrets(url).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(place, digest_size=_KEY_BYTES).hexdigest()


@dataclass(frozen=True)
class ShardIdentity:
    """One version of one shard.

    Attributes:
        url: where it is.
        etag: the storage's name for this version.
        bytes: its size.
    """

    url: str
    etag: str
    bytes: int

    @cached_property
    def file_name(self) -> str:
        """The name of its file in a cache: the URL's key, a digest of all three, and for people the shard's name.

        Only the last component of the URL's path is readable, because queries may hold secrets. The signature is not in
        the digest: if it chooses among objects, the ETag tells them apart.
        """
        identity = repr((without_secrets(self.url), self.etag, self.bytes)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(identity, digest_size=_DIGEST_BYTES).hexdigest()
        last = urlsplit(self.url).path.rpartition("/")[2]
        tail = re.sub(r"[^A-Za-z0-9._]", "_", last)[-_TAIL_LETTERS:]
        return f"{url_key(self.url)}-{digest}-{tail}"


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
        urls: the shards of the dataset, which are not evicted.
    """

    def __init__(self, folder: str, size_bytes: int, *, part_bytes: int, urls: Collection[str] = ()) -> None:
        self._folder = shards_folder(folder)
        self._partial_folder = os.path.join(self._folder, "partial")
        self._lock_file = os.path.join(self._folder, "lock")
        self._size_bytes = size_bytes
        self._part_bytes = part_bytes
        self._urls = urls
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
        """Open a shard to read it, or to fill it if it is not whole.

        A whole file is compared with its checksums once in each process.

        Returns:
            The file, which the caller closes; None if it is not to be cached: another process is filling it, the cache
            is full of shards that stay, or it is off.
        """
        try:
            file = self._open_whole(identity) if self._readable else None
            if file is None and self._writable and self._fits(identity):
                with locked_file(self._lock_file, _LOCK_WAIT_S):
                    self._remove_abandoned()
                    # Temporary files first: the other way round one renamed meanwhile would be missed.
                    files = [*_listed(self._partial_folder), *_listed(self._folder)]
                    came = os.path.exists(self._path(identity))  # another process has filled it meanwhile
                    fills = any(name.startswith(f"{identity.file_name}.") for name, _, _ in files)
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

    def _begin(self, identity: ShardIdentity, files: list[tuple[str, str, os.stat_result]]) -> CacheFile | None:
        """Make a file to be filled, if there is room beside the others. The folder's lock is held."""
        name, key = identity.file_name, url_key(identity.url)
        lacking_bytes = sum(found.st_size for _, _, found in files) + self._file_bytes(identity) - self._size_bytes
        if lacking_bytes > 0:
            evictable = [
                (_key_of(other) != key, found.st_mtime_ns, found.st_size, path)
                for other, path, found in files
                if _key_of(other) == key or _key_of(other) not in self._kept_keys
            ]
            chosen = []
            for _, _, size_bytes, path in sorted(evictable):  # older versions of the shard first, then the oldest
                if lacking_bytes > 0 and not is_in_use(path):
                    chosen.append(path)
                    lacking_bytes -= size_bytes
            if lacking_bytes <= 0:
                for path in chosen:
                    _unlink(path)
        if lacking_bytes > 0:
            return None
        temporary = os.path.join(self._partial_folder, f"{name}.{secrets.token_hex(8)}.part")
        return CacheFile.create(temporary, identity.bytes, self._part_bytes, self._path(identity))

    @cached_property
    def _kept_keys(self) -> frozenset[str]:
        return frozenset(map(url_key, self._urls))

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


def _key_of(name: str) -> str:
    """Return the `url_key` that a cached file's name begins with."""
    return name.partition("-")[0]


def _inode(found: os.stat_result) -> tuple[int, int, int]:
    """Return a value that differs for every file, and for one file after every change."""
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _listed(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield name, path and status of a cache's files in a folder; skip what is removed meanwhile."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and _FILE_NAME.fullmatch(entry.name):
                    yield entry.name, entry.path, found


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
