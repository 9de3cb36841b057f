"""The processors and the memory that this process's cgroups allow it. Linux only.

A limit holds for everything below the cgroup that has it, so the least over the process's own cgroup and all above it
counts. `/proc/self/cgroup` names its own, below the root of the hierarchy or of a namespace. Where a container has
no namespace of its own, that path does not exist in it, and what is mounted is the container's cgroup itself: so the
root of the mount is always looked at, too. What cannot be read is ignored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

__all__ = ["free_memory_bytes", "processor_quota"]

_MOUNTS = "sys/fs/cgroup"
_NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page."""


class _MemoryFiles(NamedTuple):
    """Where a version of cgroups keeps its numbers of bytes, and the names of what `memory.stat` could free."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_MEMORY_V1 = _MemoryFiles(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_MEMORY_V2 = _MemoryFiles(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
"""Above `memory.high` a cgroup is throttled until it has freed memory."""


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
