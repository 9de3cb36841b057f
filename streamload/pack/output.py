"""Print output of commands: usage errors, lines on standard error, numbers, and progress."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from streamload.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

_LINE_INTERVAL_S, _BAR_INTERVAL_S = 5.0, 0.1


class UsageError(ValueError):
    """Raised for wrong arguments; the message says what to do."""


def say(line: str) -> None:
    """Print a line to standard error, with control characters escaped."""
    print(printable(line), file=sys.stderr, flush=True)


def shown_bytes(size: float) -> str:
    """Return bytes in a suitable unit, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def shown_time(seconds: float) -> str:
    """Return seconds as `1.2 s`, and from a minute on as `0:03:04`."""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))


class Progress:
    """Report progress on standard error: a line every five seconds, or rich's bar on a terminal."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = self._bytes = 0
        self._start = self._last = time.monotonic()
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns, screen = (TextColumn("{task.description}"), BarColumn(None)), Console(stderr=True)
            self._bar = Progress(*columns, console=screen, transient=True, redirect_stdout=sys.stdout.isatty())
            self._bar.add_task(self._label, total=self._total)
            self._bar.start()
        return self

    def advance(self, items: int, item_bytes: int) -> None:
        """Add finished items and bytes."""
        self._done += items
        self._bytes += item_bytes
        if time.monotonic() - self._last >= (_LINE_INTERVAL_S if self._bar is None else _BAR_INTERVAL_S):
            self._report()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._report()

    def _report(self) -> None:
        self._last = time.monotonic()
        spent_s = max(self._last - self._start, 1e-9)
        line = (
            f"{self._label}: {self._done:,} of {self._total:,} {self._unit}, {self._done / spent_s:,.0f} {self._unit}/s"
        )
        line += f", {shown_bytes(self._bytes / spent_s)}/s" if self._bytes else ""
        if 0 < self._done < self._total:
            line += f", {shown_time((self._total - self._done) * spent_s / self._done)} left"
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.update(self._bar.task_ids[0], completed=self._done, description=line)
