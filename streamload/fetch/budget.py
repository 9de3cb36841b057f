"""Compute the default `memory_budget`, and a budget's shares for parts and request buffers."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from streamload.limits import (
    FREE_MEMORY_SHARE,
    LEAST_BUDGET_BYTES,
    MOST_REQUESTS,
    PARTS_PROPORTION,
    REQUEST_BYTES,
    REQUESTS_BYTES,
    REQUESTS_PROPORTION,
    free_memory_bytes,
)


def available_bytes(root: str = "/") -> int:
    """Return the free memory of this machine or of this process's cgroup (its container or job), if that has less.

    `root` is the folder of `proc` and `sys`.
    """
    limits = []
    meminfo = os.path.join(root, "proc/meminfo")
    with suppress(OSError, ValueError, IndexError), open(meminfo, encoding="ascii") as file:
        limits += [1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    allowed = free_memory_bytes(root)
    limits += [] if allowed is None else [allowed]
    return min(limits or [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2])


def default_budget(local_ranks: int) -> int:
    """Return a quarter of the free memory, divided among this machine's ranks; at least `LEAST_BUDGET_BYTES`."""
    return max(LEAST_BUDGET_BYTES, available_bytes() // (FREE_MEMORY_SHARE * local_ranks))


def bytes_for_parts(budget_bytes: int) -> int:
    """Return the share of a budget for parts; the rest is for request buffers."""
    return budget_bytes - requests_bytes(budget_bytes)


def budget_for(parts_bytes: int) -> int:
    """Return a budget whose share for parts is at least this large: the inverse of `bytes_for_parts`, rounded up."""
    small_bytes = -(-parts_bytes * (PARTS_PROPORTION + REQUESTS_PROPORTION) // PARTS_PROPORTION)
    return min(small_bytes, parts_bytes + REQUESTS_BYTES)


def requests_at_once(budget_bytes: int) -> int:
    """Return the number of concurrent requests that a budget allows, at least one."""
    share_bytes = requests_bytes(budget_bytes)
    return MOST_REQUESTS if share_bytes == REQUESTS_BYTES else max(1, share_bytes // REQUEST_BYTES)


def requests_bytes(budget_bytes: int) -> int:
    """Return the share of a budget for request buffers."""
    return min(REQUESTS_BYTES, budget_bytes * REQUESTS_PROPORTION // (PARTS_PROPORTION + REQUESTS_PROPORTION))


def shown_bytes(size_bytes: float, rounded: Callable[[float], int] = round) -> str:
    """Format a size in kB or MB: `999 kB`, `1.3 MB`, `24 MB`."""
    if 0 < size_bytes < 1e6:
        return f"{rounded(size_bytes / 1e3)} kB"
    steps = 10 if size_bytes < 10e6 else 1
    return f"{rounded(size_bytes / 1e6 * steps) / steps:g} MB"
