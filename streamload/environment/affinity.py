"""Processors that several processes share although a launcher has bound each to some of its own.

On its own because it changes processes that others have started.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["share_processors_of"]


def share_processors_of(process: int, others: Iterable[int]) -> None:
    """Let other processes run where a process may run and this one may not, with all of their threads. Linux only.

    srun and mpirun bind each rank to some processors, which a process that serves several ranks inherits from one.

    Args:
        process: its number.
        others: the numbers of the others.
    """
    with suppress(OSError):  # it has ended, or is in another container
        more = os.sched_getaffinity(process) - os.sched_getaffinity(0)
        for other in others if more else ():
            _add_processors(other, more)


def _add_processors(process: int, processors: set[int]) -> None:
    with suppress(OSError):  # it ends
        for thread in map(int, os.listdir(f"/proc/{process}/task")):
            os.sched_setaffinity(thread, os.sched_getaffinity(thread) | processors)
