"""Locks on files that the kernel releases when their owner dies, however it dies.

On Linux they are locks of an open file description on one byte each: two openings of a file exclude each other even
within one process, and a lock lives as long as any copy of its descriptor, in whichever process. Elsewhere they are
`flock`s, which are alike but know only whole files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOCKS_BYTES = sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")
"""Whether a lock is on one byte; otherwise it is on the whole file."""

# Linux's `struct flock`: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhqqi4x")

_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_RETRY_S = 0.002


class LockBusyError(Exception):
    """Another process keeps a lock for longer than is worth waiting for."""


def _set(descriptor: int, kind: int, byte: int) -> bool:
    try:
        if LOCKS_BYTES:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
        else:
            operation = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}
            fcntl.flock(descriptor, operation[kind] | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno in _HELD_BY_ANOTHER:
            return False
        raise
    return True


def try_lock(descriptor: int, byte: int) -> bool:
    """Lock a byte (which need not exist) for this opening of the file alone; False if another one has it.

    Raises:
        OSError: the file system has no locks, or the descriptor is not open for writing.
    """
    return _set(descriptor, fcntl.F_WRLCK, byte)


def unlock(descriptor: int, byte: int) -> None:
    """Let go of a byte; nothing happens if it was not locked."""
    _set(descriptor, fcntl.F_UNLCK, byte)


def mark_in_use(descriptor: int) -> None:
    """Show others that the file is in use, until the last copy of this descriptor is closed.

    Raises:
        OSError: the file system has no locks.
    """
    _set(descriptor, fcntl.F_RDLCK, 0)


def is_in_use(path: str) -> bool:
    """Whether anyone has marked the file as in use; a file that does not exist is not.

    Raises:
        OSError: the file cannot be opened, or the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        if LOCKS_BYTES:
            wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
            found: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))[0]
            return found != fcntl.F_UNLCK
        if not _set(descriptor, fcntl.F_WRLCK, 0):
            return True
        unlock(descriptor, 0)
        return False
    finally:
        os.close(descriptor)


@contextmanager
def locked_file(path: str, wait_s: float) -> Iterator[None]:
    """Hold the lock of a file, which is made if need be, for the body.

    It is tried again every few milliseconds: a wait in the kernel could be neither limited nor interrupted.

    Raises:
        LockBusyError: another one has kept it all the time.
        OSError: the file cannot be made, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while not try_lock(descriptor, 0):
            if time.monotonic() > deadline:
                raise LockBusyError(path)
            time.sleep(_RETRY_S)
        try:
            yield
        finally:
            # Not left to `close`: a process that is just being started has a copy of the descriptor for a moment.
            unlock(descriptor, 0)
    finally:
        os.close(descriptor)
