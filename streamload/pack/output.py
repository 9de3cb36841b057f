"""Print output of commands: usage errors, lines on standard error, numbers, and progress."""

from __future__ import annotations

import os
import sys
import time
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
    """Return seconds as `1.2 s`, `12 s`, `3:04` or `1:02:03`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Progress:
    """Report progress on standard error; as a context manager, it restores the terminal."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = self._bytes = 0
        self._start = self._last = time.monotonic()
        self._bar = _bar() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else None
        self._task = None if self._bar is None else self._bar.add_task(label, total=total, rates="")

    def advance(self, items: int, item_bytes: int) -> None:
        """Add finished items and bytes."""
        self._done += items
        self._bytes += item_bytes
        now = time.monotonic()
        if now - self._last < (_LINE_INTERVAL_S if self._bar is None else _BAR_INTERVAL_S):
            return
        self._last = now
        if self._bar is None:
            self._write_line(now)
        elif self._task is not None:
            self._bar.update(self._task, completed=self._done, rates=self._rates(now))

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._write_line(time.monotonic())

    def _write_line(self, now: float) -> None:
        left_s = (self._total - self._done) * (now - self._start) / max(self._done, 1)
        tail = f", {shown_time(left_s)} left" if 0 < self._done < self._total else ""
        count = f"{self._done:,} of {self._total:,} {self._unit}"
        print(f"{self._label}: {count}, {self._rates(now)}{tail}", file=sys.stderr, flush=True)

    def _rates(self, now: float) -> str:
        spent_s = max(now - self._start, 1e-9)
        byte_rate = f", {shown_bytes(self._bytes / spent_s)}/s" if self._bytes else ""
        return f"{self._done / spent_s:,.0f} {self._unit}/s{byte_rate}"


def _bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}"))
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
