"""The clock of a task: what it takes of the thread that does it, in time and of the processors."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from time import perf_counter
from typing import Any

from streamload.decode.tasks import TaskCosts

_WHOSE: int = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)  # there are no figures of threads but on Linux


class DelayCounter:
    """For how long this process's main thread was ready to run, while others had the processors. Elsewhere than on
    Linux, and where the kernel does not count it, 0.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def delayed_s(self) -> float:
        """Seconds since the process began."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0

    def close(self) -> None:
        """Close what is open. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class TaskClock:
    """Runs from its creation on.

    Args:
        waited_s: how long the task was waited for.
        delays: the counter of this process; None where delays are not wanted.
    """

    def __init__(self, waited_s: float = 0.0, delays: DelayCounter | None = None) -> None:
        self._waited_s = waited_s
        self._delays = delays
        self._delayed_s = 0.0 if delays is None else delays.delayed_s()
        self._usage = resource.getrusage(_WHOSE)
        self._started_s = perf_counter()

    def costs(self, **stages: Any) -> TaskCosts:
        """What the task has taken until now; the stages are given."""
        whole_s = perf_counter() - self._started_s
        begun, usage = self._usage, resource.getrusage(_WHOSE)
        return TaskCosts(
            started=self._started_s,
            process=os.getpid(),
            waited=self._waited_s,
            whole=whole_s,
            processor=usage.ru_utime + usage.ru_stime - begun.ru_utime - begun.ru_stime,
            delayed=0.0 if self._delays is None else self._delays.delayed_s() - self._delayed_s,
            **stages,
        )
