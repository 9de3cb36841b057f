"""How this process's heap returns memory to the system: by default at once, which costs page faults.

On its own because it concerns the whole process, while the room is about memory that is shared.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENAS = -1, -3, -8
"""The names of glibc's `mallopt(3)`."""


def keep_freed_memory(kept_bytes: int) -> bool:
    """Make the heap keep freed memory for later allocations. Only for our own processes.

    What arrives from a network goes through buffers of some hundred kilobytes, thousands a second; so do images through
    users' functions. glibc maps and unmaps such buffers one by one, or trims the heap behind them, so their pages are
    faulted in again and again.

    Args:
        kept_bytes: how much free memory stays at the heap's end; buffers of up to an eighth of that come from it.

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
        for name, value in ((_MMAP_THRESHOLD, kept_bytes // 8), (_TRIM_THRESHOLD, kept_bytes), (_ARENAS, 2))
    )
