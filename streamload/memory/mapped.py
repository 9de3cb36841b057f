"""Map shared memory until its last view is gone, and read ranges of files.

Mapping uses the C library's `mmap`, since Python's keeps a descriptor open as long as the mapping.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import partial
from mmap import MAP_SHARED, PROT_READ, PROT_WRITE
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
"""Raw memory; every view keeps the mapping alive."""

# Maximum gap between ranges that one call reads: reading the gap takes a microsecond or two, as does another call.
_GAP_BYTES = 16 << 10

# Unused bytes before the first range: the decoder of decimal numbers also reads bytes before a short one.
_LEAD_BYTES = 64

_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object]  # the last, a weak reference, is ignored
_mappings: dict[int, weakref.ref[Bytes]] = {}  # by address, which a later mapping may have again


def map_memory(descriptor: int, size_bytes: int, *, writable: bool) -> Bytes:
    """Map the first `size_bytes` bytes of a descriptor's file as shared memory, uint8[size_bytes].

    The descriptor may be closed afterwards.

    Raises:
        OSError: the descriptor cannot be mapped.
    """
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    protection = PROT_READ | (PROT_WRITE if writable else 0)
    address = _libc.mmap(None, size_bytes, protection, MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size_bytes} bytes: {os.strerror(error)}")
    buffer_type: Any = ctypes.c_uint8 * size_bytes
    array = np.frombuffer(buffer_type.from_address(address), np.uint8)
    if not writable:
        array.flags.writeable = False
    # The callback is no Python function: a Ctrl-C during one would be printed and lost.
    _mappings[address] = weakref.ref(array, partial(_libc.munmap, address, size_bytes))
    return array


def read_fully(descriptor: int, target: memoryview, start: int) -> int:
    """Fill `target` from a file; return the number of bytes read, which is lower at the file's end."""
    done = 0
    while done < len(target):  # the kernel returns at most 2 GiB per call
        count = os.preadv(descriptor, [target[done:]], start + done)
        if count == 0:
            break
        done += count
    return done


def gather(
    descriptor: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Bytes, NDArray[np.int64]] | None:
    """Read n >= 1 ranges of a file, neighbouring ranges by one call.

    Args:
        descriptor: the file's descriptor.
        offsets: int64[n], in bytes.
        sizes: int64[n], in bytes.

    Returns:
        New memory, and the offset of each range in it, int64[n]; None if the file is too short.
    """
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    ends = np.maximum.accumulate(starts + sizes[order])
    begins_run = np.append(True, starts[1:] > ends[:-1] + _GAP_BYTES)
    first = np.flatnonzero(begins_run)
    run_starts, run_ends = starts[first], ends[np.append(first[1:], len(starts)) - 1]
    edges = _LEAD_BYTES + np.concatenate(([0], np.cumsum(run_ends - run_starts)))
    memory = np.empty(int(edges[-1]), np.uint8)
    view, preadv = memoryview(memory.data), os.preadv
    for start, begin, end in zip(run_starts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        count = preadv(descriptor, [view[begin:end]], start)
        missing = end - begin - count
        if missing and read_fully(descriptor, view[begin + count : end], start + count) < missing:
            return None
    places = np.empty_like(offsets)
    places[order] = starts + np.repeat(edges[:-1] - run_starts, np.diff(np.append(first, len(starts))))
    return memory, places
