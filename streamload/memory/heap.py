"""How this process's heap returns memory to the system: by default at once, which costs page faults.

On its own because it concerns the whole process, while the room is about memory that is shared.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8
"""The names of glibc's `mallopt(3)`."""

_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Make the heap keep freed memory for later allocations. Only for our own processes.

    What arrives from a network goes through buffers of some hundred kilobytes, thousands a second. glibc maps and
    unmaps such buffers one by one, or trims the heap behind them, so their pages are faulted in again and again.

    Returns:
        Whether the C library knows how: glibc only.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(name, value) == 1
        for name, value in ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, _KEPT_BYTES), (_ARENAS, 2))
    )
