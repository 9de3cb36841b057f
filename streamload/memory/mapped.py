"""Maps memory that several processes share; it is unmapped with its last view.

The mapping is made with the C library's `mmap` and not with Python's module, because that one keeps a duplicate of
the descriptor for as long as the mapping lives: a user who keeps two thousand batches would run out of descriptors.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
