"""One file of the disk cache, open: a whole shard, or one that this process alone is filling.

It holds the shard's bytes, and behind them the crc32 of each part, four bytes each, little-endian.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from streamload.memory.unnamed import write_fully

_RETRY_S = 0.002
_MARKED_AT_MOST = 100


class LockBusyError(Exception):
    """Another process keeps a lock for longer than is worth waiting for."""


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file for this descriptor and its copies; False if another has it. Raises OSError without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def mark_in_use(descriptor: int) -> None:
    """Show others that the file is in use, until the last copy of this descriptor is closed."""
    for _ in range(_MARKED_AT_MOST):  # `is_in_use` of another process holds the lock for a moment
        if try_lock(descriptor, fcntl.LOCK_SH):
            return
        time.sleep(_RETRY_S)


def is_in_use(path: str) -> bool:
    """Return True if a file exists, and is marked as in use or being filled. The folder's lock is held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        is_free = try_lock(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return not is_free
    finally:
        os.close(descriptor)


@contextmanager
def locked_file(path: str, wait_s: float) -> Iterator[None]:
    """Hold the lock of a file for the body; the file is made if it is missing.

    Raises:
        LockBusyError: another process has kept it all the time.
        OSError: the file cannot be made, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise LockBusyError(path)
            time.sleep(_RETRY_S)
        try:
            yield
        finally:
            # Not left to `close`: a process that is just being started has a copy of the descriptor for a moment.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


_CRC32 = struct.Struct("<I")
_PIECE_BYTES = 1 << 20


class CacheFile:
    """A shard's file, for one thread at a time.

    A whole one stays readable through its `descriptor` whatever becomes of its name. To one that is being filled, parts
    are written in any order, each from its first byte to its last. The file's lock, which the kernel releases with the
    last copy of the descriptor, shows others that it is in use.

    Args:
        descriptor: for reading, and for writing unless it is whole; this object closes it.
        shard_bytes: the shard's size.
        part_bytes: that of all parts but the last.
        path: the final path.
        temporary: the path of a file that is being filled; None for a whole one.

    Attributes:
        n_parts: how many parts the shard has.
        missing: the parts that have not been written.
    """

    def __init__(
        self, descriptor: int, shard_bytes: int, part_bytes: int, path: str, temporary: str | None = None
    ) -> None:
        self.descriptor = descriptor
        self.n_parts = -(-shard_bytes // part_bytes)
        self.missing = set() if temporary is None else set(range(self.n_parts))
        self._shard_bytes = shard_bytes
        self._part_bytes = part_bytes
        self._path = path
        self._temporary = temporary
        self._crc32s: dict[int, int] = {}

    @classmethod
    def create(cls, temporary: str, shard_bytes: int, part_bytes: int, path: str) -> CacheFile:
        """Make a file to be filled. The folder's lock is held, so that it is not removed before it is locked."""
        made = cls(os.open(temporary, _CREATE, 0o600), shard_bytes, part_bytes, path, temporary)
        try:
            os.ftruncate(made.descriptor, cached_bytes(shard_bytes, part_bytes))
            try_lock(made.descriptor)
        except BaseException:
            made.close()
            raise
        return made

    @property
    def whole(self) -> bool:
        """Whether it has its final name, and with it all bytes of the shard."""
        return self._temporary is None

    def edges(self, part: int) -> tuple[int, int]:
        """Return the first byte of a part, and its end."""
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

    def publish(self) -> None:
        """Move a file of which no part is missing to its final path. Raises OSError if the disk refuses.

        Damage by a crash of the machine is found by the checksums.
        """
        assert self._temporary is not None
        assert not self.missing
        os.replace(self._temporary, self._path)
        self._temporary = None
        mark_in_use(self.descriptor)

    def is_sound(self) -> bool:
        """Return True if each part has its checksum. Raises OSError if it cannot be read."""
        found = os.pread(self.descriptor, self.n_parts * _CRC32.size, self._shard_bytes)
        crc32s = [crc32 for (crc32,) in _CRC32.iter_unpack(found)]
        return crc32s == [self._crc32(part) for part in range(self.n_parts)]

    def close(self) -> None:
        """Close it, and remove it unless it is whole. Idempotent."""
        if self.descriptor < 0:
            return
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)
        os.close(self.descriptor)
        self.descriptor = -1

    def _crc32(self, part: int) -> int:
        crc32 = 0
        start, end = self.edges(part)
        for offset in range(start, end, _PIECE_BYTES):
            crc32 = zlib.crc32(os.pread(self.descriptor, min(_PIECE_BYTES, end - offset), offset), crc32)
        return crc32


_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def cached_bytes(shard_bytes: int, part_bytes: int) -> int:
    """Return the size of the file that holds a shard and the checksums of its parts."""
    return shard_bytes + -(-shard_bytes // part_bytes) * _CRC32.size
