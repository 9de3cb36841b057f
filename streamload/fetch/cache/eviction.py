"""What must go so that a shard has room: the files whose next use is furthest, if that is further than its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["CachedFile", "files_to_evict", "with_old_versions_last"]


class CachedFile(NamedTuple):
    """A file of the cache.

    Attributes:
        name: its name.
        bytes: the space it counts for.
        next_use: when it is needed next; infinity for never, or not known.
        made_ns: when it was last changed; of two that are never needed the older goes first.
        path: where it is.
    """

    name: str
    bytes: int
    next_use: float
    made_ns: int = 0
    path: str = ""


def with_old_versions_last(files: Iterable[CachedFile], key: Callable[[str], str], opened: str) -> list[CachedFile]:
    """The files, where only the newest of those with one key is still needed: the others are old versions.

    Args:
        files: what is in the cache.
        key: of a file's name, the same for all versions of a shard.
        opened: the name of the file that room is made for; it is newer than all.
    """
    found = list(files)
    newest: dict[str, float] = {}
    for file in found:
        newest[key(file.name)] = max(file.made_ns, newest.get(key(file.name), 0))
    newest[key(opened)] = float("inf")
    return [file if file.made_ns == newest[key(file.name)] else file._replace(next_use=float("inf")) for file in found]


def files_to_evict(
    files: Iterable[CachedFile],
    needed_bytes: int,
    size_bytes: int,
    next_use: float,
    may_go: Callable[[CachedFile], bool] = lambda _: True,
) -> list[CachedFile] | None:
    """Which files make room for another one (Belady's rule with bypass).

    Args:
        files: what is in the cache.
        needed_bytes: how much the other one needs.
        size_bytes: how much the cache may hold.
        next_use: when the other one is needed next, after the present use.
        may_go: called with a file before it is chosen, furthest first.

    Returns:
        The files to remove, none if there is room; None if only files that are needed sooner, or as soon, would make
        room: then the other one should not be kept.
    """
    present = sorted(files, key=lambda file: (-file.next_use, file.made_ns))
    lacking = sum(file.bytes for file in present) + needed_bytes - size_bytes
    chosen: list[CachedFile] = []
    for file in present:
        if lacking <= 0 or file.next_use <= next_use:
            break
        if may_go(file):
            chosen.append(file)
            lacking -= file.bytes
    if lacking > 0:
        return None
    # With files of different sizes the last one may have made some of those before it unnecessary.
    for file in reversed(chosen[:]):
        if lacking + file.bytes <= 0:
            chosen.remove(file)
            lacking += file.bytes
    return chosen
