"""How much of each resource a loader may take. A share is a divisor: 4 is a quarter.

Shares of one resource add up, so they stand together; what is never shared, such as limits of formats, stays with its
module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

_MOUNTS = "sys/fs/cgroup"
# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


class _MemoryFiles(NamedTuple):
    """Where a version of cgroups keeps its numbers of bytes, and the names of what `memory.stat` could free."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_MEMORY_V1 = _MemoryFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
# Above `memory.high` a cgroup is throttled until it has freed memory.
_MEMORY_V2 = _MemoryFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def processor_quota(root: str = "/") -> int | None:
    """How many processors the CPU quota is worth, rounded up; None if there is no quota.

    Args:
        root: the folder below which `proc` and `sys` are.
    """
    found = [_quota_v2(folder) for folder in _folders_v2(root)]
    found += [_quota_v1(folder) for folder in _folders_v1(root, "cpu")]
    return min((quota for quota in found if quota is not None), default=None)


def free_memory_bytes(root: str = "/") -> int | None:
    """The memory that can still be allocated before a limit is reached; None if there is no limit.

    The page cache counts as free, since the kernel reclaims it before it refuses an allocation.

    Args:
        root: the folder below which `proc` and `sys` are.
    """
    found = [_free_bytes(folder, _MEMORY_V2) for folder in _folders_v2(root)]
    found += [_free_bytes(folder, _MEMORY_V1) for folder in _folders_v1(root, "memory")]
    return min((free for free in found if free is not None), default=None)


# -- where limits may lie ------------------------------------------------------------------------------------------


def _folders_v2(root: str) -> Iterator[str]:
    """The folders of this process's cgroup and of all above it; `unified` is where hybrid systems mount version 2."""
    paths = [path for controllers, path in _own_cgroups(root) if not controllers]
    for mount in ("", "unified"):
        yield from _upwards(os.path.join(root, _MOUNTS, mount), paths)


def _folders_v1(root: str, controller: str) -> Iterator[str]:
    """The same of a controller of version 1, whose hierarchy may be mounted under all names that it has there."""
    own = [(names, path) for names, path in _own_cgroups(root) if controller in names.split(",")]
    paths = [path for _, path in own]
    for mount in dict.fromkeys((controller, *(names for names, _ in own))):
        yield from _upwards(os.path.join(root, _MOUNTS, mount), paths)


def _own_cgroups(root: str) -> list[tuple[str, str]]:
    """The controllers (none for version 2) and the path of each cgroup that this process is in."""
    found = []
    with suppress(OSError), open(os.path.join(root, "proc/self/cgroup"), "rb") as file:
        for line in file:
            _, controllers, path = [*os.fsdecode(line.rstrip(b"\n")).split(":", 2), "", ""][:3]
            if path.startswith("/") and ".." not in path.split("/"):  # ".." leads out of the namespace
                found.append((controllers, path))
    return found


def _upwards(mount: str, paths: list[str]) -> Iterator[str]:
    """The folders of these cgroups and of all above them, up to the mount, which comes whatever the paths are."""
    for path in paths:
        inner = path.strip("/")
        while inner:
            yield os.path.join(mount, inner)
            inner = os.path.dirname(inner)
    yield mount


# -- what stands there ---------------------------------------------------------------------------------------------


def _quota_v2(folder: str) -> int | None:
    quota, period = [*_text(folder, "cpu.max").split(), "", ""][:2]
    return _processors(quota, period)


def _quota_v1(folder: str) -> int | None:
    return _processors(_text(folder, "cpu.cfs_quota_us"), _text(folder, "cpu.cfs_period_us"))


def _processors(quota_us: str, period_us: str) -> int | None:
    """No quota is "max" in version 2 and -1 in version 1."""
    if not quota_us.isdecimal() or not period_us.isdecimal() or not int(quota_us) or not int(period_us):
        return None
    return -(-int(quota_us) // int(period_us))


def _free_bytes(folder: str, files: _MemoryFiles) -> int | None:
    limits = [int(text) for name in files.limits if (text := _text(folder, name)).isdecimal()]
    limit = min(limits, default=_NO_LIMIT)
    if limit >= _NO_LIMIT:
        return None
    usage = _text(folder, files.usage)
    used = int(usage) - _reclaimable_bytes(folder, files) if usage.isdecimal() else 0
    return max(0, limit - max(0, used))


def _reclaimable_bytes(folder: str, files: _MemoryFiles) -> int:
    pairs = (line.partition(" ") for line in _text(folder, "memory.stat").splitlines())
    return sum(int(number) for name, _, number in pairs if name in files.reclaimable and number.isdecimal())


def _text(folder: str, name: str) -> str:
    """A file's text, stripped; empty where it cannot be read."""
    try:
        with open(os.path.join(folder, name), encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


# -- memory: the byte budget and its parts --------------------------------------------------------------------------

FREE_MEMORY_SHARE = 4
"""Of the memory that is free at the start: the default budget of all ranks of this machine together."""

LEAST_BUDGET_BYTES = 64 << 20
"""The smallest default budget of a rank."""

REQUESTS_BYTES = 112 << 20
"""For the buffers of requests; measured: the feeder grows by about as much with as many in flight as there may be."""

REQUEST_BYTES = REQUESTS_BYTES // 28

PARTS_PROPORTION, REQUESTS_PROPORTION = 25, 7
"""How a budget is divided that is too small for `REQUESTS_BYTES`: parts to requests."""

EXPANSION_SHARE = 4
"""Of the budget, for what fields expand to in all workers together; nothing where no field can expand."""

GUESSED_PARTS, GUESSED_PARTS_SHARE = 32, 4
"""The most parts that are fetched on a guess, and their share of the budget."""

SCANNED_SHARDS = 32
"""Remote shards that are scanned before the plan comes to them."""

SCANNED_PARTS, SCANNED_PARTS_SHARE = 64, 4
"""The most parts that scans hold ahead of the one that is read, and their share of the budget."""

DECOMPRESSED_AT_ONCE = 4
"""Compressed shards that are decompressed side by side for scans: each on a thread, and no faster than that."""

TABLES_SHARE, LEAST_TABLES_BYTES, MOST_TABLES_BYTES = 16, 32 << 20, 256 << 20
"""The share of the budget that bounds the tables held in memory, and the bounds of that; without a budget the most."""

FIRST_BLOCK_ROWS, BLOCK_ROWS = 256, 2048
"""Rows of a remote dataset that are planned at once: first, so that the first batch comes soon, and later."""

# -- memory beside the budget -----------------------------------------------------------------------------------------

RESIDENT_BYTES, RESIDENT_SHARDS = 256 << 20, 64
"""Small local shards that stay mapped between epochs: bytes together, and how many."""

LEAST_FREE_SLOTS, FREE_SLOTS_BYTES = 8, 128 << 20
"""Free slots that are kept whatever their size, and the bytes up to which more are."""

MOST_FREE_SLOTS = 640
"""More than the batches that are ever in flight, so that slots are reused."""

MOST_KEPT_SLOTS = 128
"""The most slots that a user who keeps batches can hold before the pool gives some away."""

# -- descriptors: shares of what a process may have open --------------------------------------------------------------

FETCHED_SHARDS_SHARE = 6
"""Feeder: fetched shards, each with a descriptor or two."""

SCHEDULED_SHARDS_SHARE = 8
"""Feeder: the shards of tasks that are scheduled at the same time."""

SLOTS_IN_FLIGHT_SHARE, SLOTS_KEPT_SHARE = 4, 8
"""Feeder: the slots of batches in flight, and those that the user keeps."""

WORKER_SHARDS_SHARE = 4
"""Worker: the shards that it keeps open."""

CALLER_SHARDS_SHARE = 6
"""The caller's process in place of a worker: its own descriptors are open there too."""

# -- processors -----------------------------------------------------------------------------------------------------

MOST_WORKERS_PER_PROCESSOR = 4
"""Workers beyond that take long to start, and are hardly ever faster, unless they sleep."""

# -- requests at once -------------------------------------------------------------------------------------------------

FIRST_REQUESTS, MOST_REQUESTS = 32, 64
"""For parts: how many at the start, and the most as long as the storage keeps up."""

SMALL_REQUESTS = 16
"""For anything else, each by itself: sizes, tables, labels, ranges of single samples, files of the cache,
copies of whole files."""
