"""Read the limits of cgroups, and define those of a loader. A share is a divisor: 4 means a quarter.

Limits of one resource add up, so they are defined together; others are in the modules that use them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

_MOUNTS = "sys/fs/cgroup"
# This value and larger ones mean "no limit": cgroup version 1 reports the largest multiple of a page.
_NO_LIMIT = 1 << 60


class _MemoryFiles(NamedTuple):
    """The names of a cgroup version's files of byte counts, and of the reclaimable entries in `memory.stat`."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_MEMORY_V1 = _MemoryFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
# Above `memory.high` a cgroup is throttled until it has freed memory.
_MEMORY_V2 = _MemoryFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def processor_quota(root: str = "/") -> int | None:
    """Return the CPU quota as a number of processors, rounded up; None if there is no quota.

    `root` contains `proc` and `sys`.
    """
    quotas = [[*_text(folder, "cpu.max").split(), "", ""][:2] for folder in _folders(root)]
    quotas += [
        [_text(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period")] for folder in _folders(root, "cpu")
    ]
    # "No quota" is "max" in version 2 and -1 in version 1.
    numbers = [(int(quota), int(period)) for quota, period in quotas if quota.isdecimal() and period.isdecimal()]
    return min((-(-quota // period) for quota, period in numbers if quota and period), default=None)


def free_memory_bytes(root: str = "/") -> int | None:
    """Return the memory, in bytes, that can be allocated within all cgroup limits; None if there is no limit.

    The page cache counts as free, since the kernel reclaims it before refusing an allocation.
    """
    free = [_free_bytes(folder, _MEMORY_V2) for folder in _folders(root)]
    free += [_free_bytes(folder, _MEMORY_V1) for folder in _folders(root, "memory")]
    return min((each for each in free if each is not None), default=None)


def _folders(root: str, controller: str = "") -> Iterator[str]:
    """Yield the folders of this process's cgroups and their parents, up to the mount.

    A version 1 controller may be mounted under any name that `proc` lists for it. "" stands for version 2, which hybrid
    systems mount as `unified`.
    """
    own = [(names, path) for names, path in _own_cgroups(root) if controller in names.split(",")]
    mounts = [controller, *(names for names, _ in own)] if controller else ["", "unified"]
    for mount in dict.fromkeys(mounts):
        for _, path in own:
            inner = path.strip("/")
            while inner:
                yield os.path.join(root, _MOUNTS, mount, inner)
                inner = os.path.dirname(inner)
        yield os.path.join(root, _MOUNTS, mount)


def _own_cgroups(root: str) -> list[tuple[str, str]]:
    lines = [line.split(":", 2) for line in _text(root, "proc/self/cgroup").splitlines()]
    own = [(line[1], line[2]) for line in lines if len(line) == 3]
    # A path with ".." leads out of the namespace.
    return [(names, path) for names, path in own if path.startswith("/") and ".." not in path.split("/")]


def _free_bytes(folder: str, files: _MemoryFiles) -> int | None:
    limits = [int(text) for name in files.limits if (text := _text(folder, name)).isdecimal()]
    limit = min(limits, default=_NO_LIMIT)
    if limit >= _NO_LIMIT:
        return None
    usage = _text(folder, files.usage)
    pairs = (line.partition(" ") for line in _text(folder, "memory.stat").splitlines())
    reclaimable = sum(int(number) for name, _, number in pairs if name in files.reclaimable and number.isdecimal())
    used = max(0, int(usage) - reclaimable) if usage.isdecimal() else 0
    return max(0, limit - used)


def _text(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="utf-8", errors="surrogateescape") as file:
            return file.read().strip()
    except OSError:
        return ""


# -- memory within the budget ----------------------------------------------------------------------------------------
# The default budget of all ranks on this machine together, as a share of the initially free memory.
FREE_MEMORY_SHARE = 4
# The minimum default budget of a rank.
LEAST_BUDGET_BYTES = 64 << 20
# The bytes of the budget for request buffers: the measured growth of the feeder with `MOST_REQUESTS` in flight.
REQUESTS_BYTES = 112 << 20
# The bytes of buffers that a request is assumed to need, if a small budget limits the number of requests.
REQUEST_BYTES = REQUESTS_BYTES // 28
# The ratio in which a budget too small for `REQUESTS_BYTES` is divided into parts and request buffers.
PARTS_PROPORTION, REQUESTS_PROPORTION = 25, 7
# Maximum number of remote shards scanned ahead of the plan.
SCANNED_SHARDS = 32
# Maximum number of parts that scans hold ahead of the one being read, and their share of the budget.
SCANNED_PARTS, SCANNED_PARTS_SHARE = 96, 4
# Maximum number of compressed shards decompressed concurrently, each on one thread.
DECOMPRESSED_AT_ONCE = 4
# The share of the budget for tables in memory, with its minimum and maximum; without a budget, the maximum applies.
TABLES_SHARE, LEAST_TABLES_BYTES, MOST_TABLES_BYTES = 16, 32 << 20, 256 << 20
# Rows planned at once: few at first, for an early first batch; then, for a remote dataset, more.
FIRST_BLOCK_ROWS, BLOCK_ROWS = 256, 2048

# -- memory beside the budget -----------------------------------------------------------------------------------------
# Local shards that stay mapped between epochs: their maximum total bytes and number.
RESIDENT_BYTES, RESIDENT_SHARDS = 256 << 20, 64
# Free slots: how many are always kept. Beyond the number in flight, more are kept only up to this many bytes in all.
LEAST_FREE_SLOTS, FREE_SLOTS_BYTES = 8, 128 << 20
# Maximum number of free slots: usually more than there are batches in flight, so that slots are reused.
MOST_FREE_SLOTS = 640
# Maximum number of slots whose batches the user keeps; beyond it the pool forgets the oldest.
MOST_KEPT_SLOTS = 128

# -- descriptors: shares of a process's limit -------------------------------------------------------------------------
# Feeder: fetched shards, each with a descriptor or two.
FETCHED_SHARDS_SHARE = 6
# Feeder: the shards of concurrently scheduled tasks.
SCHEDULED_SHARDS_SHARE = 8
# Feeder: the slots of batches in flight, and of batches that the user keeps.
SLOTS_IN_FLIGHT_SHARE, SLOTS_KEPT_SHARE = 4, 8
# Worker: open shards.
WORKER_SHARDS_SHARE = 4
# Caller's process, with 0 workers: open shards; the program has descriptors of its own.
CALLER_SHARDS_SHARE = 6

# -- concurrent requests ----------------------------------------------------------------------------------------------
# For parts: initially, and at most.
FIRST_REQUESTS, MOST_REQUESTS = 32, 64
# For each other kind: sizes, tables, labels, ranges of single samples, files of the cache, copies of whole files.
SMALL_REQUESTS = 16
