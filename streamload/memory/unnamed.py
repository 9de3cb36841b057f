"""Allocate unnamed memory, raise the limit on open descriptors, and tune the heap. Does not import NumPy."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING

from streamload.errors import WorkerError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MACOS_LIMIT = 10_240
_NO_LIMIT = 1 << 20

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8  # of glibc's `mallopt(3)`


def new_memory(size_bytes: int) -> int:
    """Return a descriptor of new zeroed memory.

    The memory has no name (Linux: `memfd_create`; elsewhere an unlinked temporary file), so nothing is left behind. A
    small /dev/shm does not limit it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("streamload", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="streamload-") as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def write_fully(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all bytes at an offset."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def descriptor_limit() -> int:
    """Return the limit on open descriptors, at most 1,048,576."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else min(soft, _NO_LIMIT)


def raise_descriptor_limit() -> None:
    """Raise the soft limit on open descriptors to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, _MACOS_LIMIT):  # macOS reports a hard limit that it does not accept
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def with_limit_named(error: BaseException) -> BaseException:
    """Return the error, or in place of EMFILE a WorkerError that names the limit."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return error
    named = WorkerError(
        f"too many open files: the limit of this process is {descriptor_limit():,}; raise the limit (`ulimit -n`), or "
        "close files and loaders that are not needed"
    )
    named.__cause__ = error
    return named


def keep_freed_memory(kept_bytes: int) -> None:
    """Make glibc's heap keep freed memory; other C libraries stay as they are.

    By default glibc unmaps freed buffers of a few hundred kilobytes, so that new ones cause page faults again.

    Args:
        kept_bytes: free memory to keep; buffers of up to an eighth of that size come from it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, kept_bytes // 8)
        mallopt(_TRIM_THRESHOLD, kept_bytes)
        mallopt(_ARENAS, 2)
