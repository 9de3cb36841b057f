"""Unnamed memory, as a descriptor; apart from `mapped.py`, so that it can be made without importing NumPy."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress

from streamload.errors import WorkerError

_MACOS_LIMIT = 10_240
_NO_LIMIT = 1 << 20


def new_memory(size_bytes: int) -> int:
    """Make zeroed memory that lives as long as a descriptor or a mapping of it does.

    It has no name in any file system (Linux: `memfd_create`; elsewhere an unlinked temporary file), so nothing is left
    behind, however its users end, and a small /dev/shm does not limit it.

    Returns:
        A descriptor, which the caller closes.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("streamload", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="streamload-") as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def descriptor_limit() -> int:
    """How many descriptors this process may have open; at most 1,048,576."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else min(soft, _NO_LIMIT)


def naming_the_limit(error: BaseException) -> BaseException:
    """The error; for one of too many open files a WorkerError, which says how many this process may have."""
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return error
    named = WorkerError(
        f"too many open files: this process may have only {descriptor_limit():,}; raise the limit (`ulimit -n`), or "
        "close files and loaders that are not needed"
    )
    named.__cause__ = error
    return named


def raise_descriptor_limit() -> None:
    """Lift this process's soft limit of open descriptors to its hard one: shards and slots take one each."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, _MACOS_LIMIT):  # macOS reports a hard limit that it does not accept
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return
