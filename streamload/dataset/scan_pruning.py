"""Keeping the folder of kept scans small: what was not used for long goes, oldest use first."""

from __future__ import annotations

import contextlib
import math
import os

__all__ = ["MOST_BYTES", "MOST_IDLE_S", "note_use", "prune_once_a_day"]

MOST_BYTES = 1 << 30
MOST_IDLE_S = 90 * 86_400.0
_DAY_S = 86_400.0
_MARK = ".pruned"
_KEPT = ".npz"
_UNFINISHED = ".tmp"


def note_use(file: str, now_s: float) -> None:
    """Remember that a file was used, by its time of change; at most once a day, and never an error."""
    with contextlib.suppress(OSError):
        if now_s - os.stat(file).st_mtime > _DAY_S:
            os.utime(file, (now_s, now_s))


def prune_once_a_day(
    folder: str, now_s: float, *, most_bytes: int = MOST_BYTES, most_idle_s: float = MOST_IDLE_S
) -> None:
    """Remove what was not used for `most_idle_s`, and then the longest unused until no more than `most_bytes` are left.

    Nothing happens within a day of the last time that any process did it. Others may load, store and prune meanwhile:
    whoever opens a file that is gone scans the shard again. Only files of the kinds that are kept here are touched.
    What cannot be removed stays, and nothing is raised.

    Args:
        folder: where the files are; it need not exist.
        now_s: the time, as `time.time()` gives it.
        most_bytes: what may stay.
        most_idle_s: since when a file was not used.
    """
    mark = os.path.join(folder, _MARK)
    with contextlib.suppress(OSError):
        if now_s - os.stat(mark).st_mtime < _DAY_S:
            return
    with contextlib.suppress(OSError):
        with open(mark, "ab"):  # first, so that others who start now need not do it as well
            os.utime(mark, (now_s, now_s))
        _prune(folder, now_s, most_bytes, most_idle_s)


def _prune(folder: str, now_s: float, most_bytes: int, most_idle_s: float) -> None:
    longest_idle_s = {_KEPT: most_idle_s, _UNFINISHED: _DAY_S}
    kept: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                idle_s = now_s - status.st_mtime
                if idle_s > longest_idle_s.get(os.path.splitext(entry.name)[1], math.inf):
                    os.unlink(entry.path)
                elif entry.name.endswith(_KEPT):
                    kept.append((status.st_mtime, status.st_size, entry.path))
    total_bytes = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total_bytes <= most_bytes:
            return
        with contextlib.suppress(OSError):
            os.unlink(path)
            total_bytes -= size
