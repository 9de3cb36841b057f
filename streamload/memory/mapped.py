"""Memory that several processes share: made without a name, passed by descriptor, unmapped with its last view.

The mapping is made with the C library's `mmap` and not with Python's module, because that one keeps a duplicate of
the descriptor for as long as the mapping lives: a user who keeps two thousand batches would run out of descriptors.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bytes", "map_memory", "new_memory", "raise_descriptor_limit"]

Bytes = NDArray[np.uint8]
"""Raw memory as NumPy sees it; every view of it keeps the mapping alive."""

_PROT_READ = 1
_PROT_WRITE = 2
_MAP_SHARED = 1
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


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


def map_memory(descriptor: int, size_bytes: int, *, writable: bool) -> Bytes:
    """Map the first bytes of what a descriptor stands for, shared with everyone who maps the same.

    Args:
        descriptor: may be closed as soon as this returns.
        size_bytes: how much to map; 0 gives an empty array.
        writable: without it the array is read-only, for NumPy and for the processor.

    Returns:
        uint8[size_bytes]. The mapping is undone when the array and every view of it are gone.

    Raises:
        OSError: the descriptor cannot be mapped so.
    """
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    address = _libc.mmap(None, size_bytes, protection, _MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size_bytes} bytes: {os.strerror(error)}")
    buffer_type: Any = ctypes.c_uint8 * size_bytes
    array = np.frombuffer(buffer_type.from_address(address), np.uint8)
    if not writable:
        array.flags.writeable = False
    # At exit the kernel unmaps; running munmap then would pull memory from under threads that still read it.
    weakref.finalize(array, _libc.munmap, address, size_bytes).atexit = False
    return array


def raise_descriptor_limit() -> None:
    """Lift this process's soft limit of open descriptors to its hard one: shards and slots take one each."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # macOS reports a hard limit that it does not accept; the soft one stays
        return
