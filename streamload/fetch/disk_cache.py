"""Cache whole shards on a node's disk, each in a temporary file until it is whole.

Processes may die at any instant. These invariants hold:

- A file under a final name is whole: one rename gives it that name. Every other process verifies the checksums once.
- All files together take at most `size_bytes`; a temporary file has its full size from the start.
- A shard is never evicted for another one of the same dataset, so shards that fit come from disk in every epoch.
  Files of other datasets, and the shard's older versions, are evicted unless in use.
- The next process that opens the cache removes temporary files that no process has locked.

Files are created and evicted under the folder's lock.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from streamload.errors import without_secrets
from streamload.memory.unnamed import write_fully
from streamload.storage.local_files import make_private_folder
from streamload.text import counted

# In a file's name: the number of bytes of each digest, and the maximum length of the shard's own name.
_KEY_BYTES, _DIGEST_BYTES, _TAIL_LETTERS = 8, 16, 48
# Matches the files of a cache, temporary ones included; all other files in its folder are the user's.
_FILE_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}-.*")
_CRC32 = struct.Struct("<I")
_PIECE_BYTES = 1 << 20
# The longest wait for the folder's lock, after which a shard is read without the cache, and the time between two tries.
_LOCK_WAIT_S, _RETRY_S = 1.0, 0.002
_OPEN_WHOLE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# Errors after which the cache is not even read.
_UNREADABLE = (errno.EIO, errno.ESTALE)

_log = logging.getLogger("streamload")


def url_key(url: str) -> str:
    """Return a digest of a URL, 16 hexadecimal digits, equal for all versions and signatures."""
    place = without_secrets(url).encode("utf-8", "surrogateescape")
    return hashlib.blake2b(place, digest_size=_KEY_BYTES).hexdigest()


@dataclass(frozen=True)
class ShardIdentity:
    """One version of one shard.

    Attributes:
        etag: the storage's name for this version.
    """

    url: str
    etag: str
    bytes: int

    @cached_property
    def file_name(self) -> str:
        """Return the file's name: the URL's key, a digest of all attributes without signatures, and the shard's name.

        The rest of the URL is hashed, because queries may hold secrets.
        """
        identity = repr((without_secrets(self.url), self.etag, self.bytes)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(identity, digest_size=_DIGEST_BYTES).hexdigest()
        last = urlsplit(self.url).path.rpartition("/")[2]
        tail = re.sub(r"[^A-Za-z0-9._]", "_", last)[-_TAIL_LETTERS:]
        return f"{url_key(self.url)}-{digest}-{tail}"


class CacheFile:
    """A shard's file, whole or being filled by this process. Not thread-safe.

    The file holds the shard's bytes, followed by the crc32 of each part, four bytes each, little-endian. Parts are
    written in any order, each from its first byte to its last. A lock on the file, which the kernel releases with the
    last copy of the descriptor, prevents eviction.

    Args:
        descriptor: open for reading, and for writing unless the file is whole; owned by this object.
        shard_bytes: the shard's size.
        part_bytes: the size of all parts but the last.
        temporary: the path of a file being filled; None for a whole one.

    Attributes:
        missing: the parts not yet written.
    """

    def __init__(self, descriptor: int, shard_bytes: int, part_bytes: int, temporary: str | None = None) -> None:
        self.descriptor = descriptor
        self.n_parts = -(-shard_bytes // part_bytes)
        self.missing = set() if temporary is None else set(range(self.n_parts))
        self.temporary = temporary
        self._shard_bytes = shard_bytes
        self._part_bytes = part_bytes
        self._crc32s: dict[int, int] = {}

    def edges(self, part: int) -> tuple[int, int]:
        """Return the start and end of a part."""
        start = part * self._part_bytes
        return start, min(start + self._part_bytes, self._shard_bytes)

    def write(self, offset: int, data: bytes) -> None:
        """Write the next bytes of one part. Raises OSError if the disk refuses them."""
        part = offset // self._part_bytes
        start, end = self.edges(part)
        crc32 = zlib.crc32(data, 0 if offset == start else self._crc32s.pop(part))
        write_fully(self.descriptor, data, offset)
        if offset + len(data) < end:
            self._crc32s[part] = crc32
        else:
            write_fully(self.descriptor, _CRC32.pack(crc32), self._shard_bytes + part * _CRC32.size)
            self.missing.discard(part)

    def is_sound(self) -> bool:
        """Return True if all parts match their checksums. Raises OSError if the file cannot be read."""
        stored = os.pread(self.descriptor, self.n_parts * _CRC32.size, self._shard_bytes)
        for part, (expected,) in enumerate(_CRC32.iter_unpack(stored)):
            crc32 = 0
            start, end = self.edges(part)
            for offset in range(start, end, _PIECE_BYTES):
                crc32 = zlib.crc32(os.pread(self.descriptor, min(_PIECE_BYTES, end - offset), offset), crc32)
            if crc32 != expected:
                return False
        return len(stored) == self.n_parts * _CRC32.size

    def close(self) -> None:
        """Close the file, and remove it unless it is whole. Idempotent."""
        if self.descriptor < 0:
            return
        if self.temporary is not None:
            with suppress(OSError):
                os.unlink(self.temporary)
        os.close(self.descriptor)
        self.descriptor = -1


class DiskCache:
    """A folder of shards, shared by all processes of a node. Thread-safe.

    If the disk refuses an operation, this process warns once and stops writing, but still reads whole files while the
    disk can be read.

    Args:
        folder: created if missing; files go to its subfolder `streamload-shards`.
        size_bytes: maximum size of whole and temporary files together.
        part_bytes: the size of the parts that have a checksum each, equal in every process.
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
        self._verified: set[tuple[int, int, int]] = set()
        self._warned: set[str] = set()
        self._warning = Lock()
        try:
            for path in (self._folder, self._partial_folder):
                make_private_folder(path)
            with locked_file(self._lock_file, _LOCK_WAIT_S):
                self._remove_abandoned()
        except LockBusyError:
            pass  # `open` tries again
        except OSError as exc:
            self.turn_off(exc)

    def open(self, identity: ShardIdentity) -> CacheFile | None:
        """Open a shard's file, to read or fill it; the caller closes it.

        Return None if another process is filling the file or has just filled it, if the shard does not fit beside
        those that must stay, or if the cache is off or stays locked.
        """
        path = os.path.join(self._folder, identity.file_name)
        try:
            file = self._open_whole(identity, path) if self._readable else None
            if file is None and self._writable and self._fits(identity):
                with locked_file(self._lock_file, _LOCK_WAIT_S):
                    self._remove_abandoned()
                    # List temporary files first: otherwise a file that is renamed in between would be missed.
                    files = [*_listed(self._partial_folder), *_listed(self._folder)]
                    if not any(name.startswith(identity.file_name) for name, _, _ in files):
                        file = self._begin(identity, files)
        except LockBusyError:
            return None
        except OSError as exc:
            self.turn_off(exc)
            return None
        return file

    def write(self, file: CacheFile, offset: int, pieces: Iterable[bytes]) -> None:
        """Write the next bytes of a part, and rename the file once it is whole. Raises OSError if the disk refuses."""
        for piece in pieces:
            file.write(offset, piece)
            offset += len(piece)
        if file.temporary is not None and not file.missing:
            name = os.path.basename(file.temporary).rsplit(".", 2)[0]
            os.replace(file.temporary, os.path.join(self._folder, name))
            file.temporary = None
            self._verified.add(_inode(os.fstat(file.descriptor)))

    def turn_off(self, exc: OSError) -> None:
        """Stop writing after the disk refused an operation; warn the first time."""
        self._writable = False
        self._readable = self._readable and exc.errno not in _UNREADABLE
        self.warn_once("stores nothing from now on: %s", exc.strerror or exc)

    def _fits(self, identity: ShardIdentity) -> bool:
        needed_bytes = cached_bytes(identity.bytes, self._part_bytes)
        if needed_bytes > self._size_bytes:
            self.warn_once(
                "may take %s, but a shard needs %s, so shards of this size are not cached: free space on that disk, "
                "give another cache_dir, or raise cache_size if it is set",
                counted(self._size_bytes, "byte"),
                counted(needed_bytes, "byte"),
            )
        return 0 < needed_bytes <= self._size_bytes

    def warn_once(self, text: str, *arguments: object) -> None:
        """Log a warning about this folder, once for each text."""
        with self._warning:
            first = text not in self._warned
            self._warned.add(text)
        if first:
            _log.warning(f"the disk cache in %s {text}", self._folder, *arguments)

    def _open_whole(self, identity: ShardIdentity, path: str) -> CacheFile | None:
        try:
            descriptor = os.open(path, _OPEN_WHOLE)
        except FileNotFoundError:
            return None
        file = CacheFile(descriptor, identity.bytes, self._part_bytes)
        try:
            status = os.fstat(descriptor)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_size == cached_bytes(identity.bytes, self._part_bytes)
            if is_ours:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # others block this only briefly, in `_is_in_use`
                if _inode(status) in self._verified or file.is_sound():
                    self._verified.add(_inode(status))
                    return file
                advice = "so it is removed and fetched again; check the disk"
                _log.warning("%s in the disk cache does not hold what was fetched, %s", path, advice)
            file.close()
            Path(path).unlink(missing_ok=True)
        except OSError:
            file.close()
            raise
        return None

    def _begin(self, identity: ShardIdentity, files: list[tuple[str, str, os.stat_result]]) -> CacheFile | None:
        """Create a file to fill; evict others if needed, or return None. The folder's lock must be held."""
        key, size_bytes = url_key(identity.url), cached_bytes(identity.bytes, self._part_bytes)
        lacking_bytes = sum(status.st_size for _, _, status in files) + size_bytes - self._size_bytes
        if lacking_bytes > 0:
            evictable = [
                (status.st_mtime_ns, status.st_size, path)
                for name, path, status in files
                if name.startswith(key) or name.partition("-")[0] not in self._kept_keys
            ]
            chosen = []
            for _, other_bytes, path in sorted(evictable):  # oldest first
                if lacking_bytes > 0 and not _is_in_use(path):
                    chosen.append(path)
                    lacking_bytes -= other_bytes
            if lacking_bytes > 0:
                return None
            for path in chosen:
                Path(path).unlink(missing_ok=True)
        temporary = os.path.join(self._partial_folder, f"{identity.file_name}.{secrets.token_hex(8)}.part")
        file = CacheFile(os.open(temporary, _CREATE, 0o600), identity.bytes, self._part_bytes, temporary)
        try:
            os.ftruncate(file.descriptor, size_bytes)
            fcntl.flock(file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            file.close()
            raise
        return file

    @cached_property
    def _kept_keys(self) -> frozenset[str]:
        return frozenset(map(url_key, self._urls))

    def _remove_abandoned(self) -> None:
        """Remove temporary files that no process is filling. The folder's lock must be held."""
        for _, path, _ in _listed(self._partial_folder):
            if not _is_in_use(path):
                Path(path).unlink(missing_ok=True)


def cached_bytes(shard_bytes: int, part_bytes: int) -> int:
    """Return the size of a shard's file, with the checksums of its parts."""
    return shard_bytes + -(-shard_bytes // part_bytes) * _CRC32.size


def shards_folder(cache_dir: str) -> str:
    """Return the folder in a `cache_dir` that holds the cache's files."""
    return os.path.join(cache_dir, "streamload-shards")


def bytes_in_cache(cache_dir: str) -> int:
    """Return the total size of a cache's whole files; 0 if it does not exist or cannot be read."""
    with suppress(OSError):
        return sum(status.st_size for _, _, status in _listed(shards_folder(cache_dir)))
    return 0


class LockBusyError(Exception):
    """Raised if another process keeps a lock for too long."""


@contextmanager
def locked_file(path: str, wait_s: float) -> Iterator[None]:
    """Hold a file's lock for the body; the file is created if missing.

    Raises:
        LockBusyError: another process kept the lock for the whole wait.
        OSError: the file cannot be created, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise LockBusyError(path)
            time.sleep(_RETRY_S)
        try:
            yield
        finally:
            # `close` is not enough: a process that is just starting may briefly hold a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a file for this descriptor and its copies; return False if another open descriptor holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_in_use(path: str) -> bool:
    """Return True if the file exists, and a process reads or fills it. The folder's lock must be held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        is_free = _try_lock(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return not is_free
    finally:
        os.close(descriptor)


def _inode(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _listed(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and _FILE_NAME.fullmatch(entry.name):
                    yield entry.name, entry.path, status
