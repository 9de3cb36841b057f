"""Progress of a command: a bar on a terminal, a line every few seconds elsewhere; both with rates and time left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from streamload.pack.output import shown_bytes, shown_time

LINE_INTERVAL_S = 5.0


class LineProgress:
    """Plain lines, about every five seconds and at the end unless it fails."""

    def __init__(
        self, label: str, total: int, unit: str, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label, self._total, self._unit, self._stream, self._clock = label, total, unit, stream, clock
        self._done = self._bytes = 0
        self._reported = -1
        self._start = self._last_line = clock()

    def advance(self, items: int, item_bytes: int) -> None:
        """Add finished items, and write a line if the last one is old enough."""
        self._done += items
        self._bytes += item_bytes
        now = self._clock()
        if now - self._last_line >= LINE_INTERVAL_S:
            self._last_line = now
            self._write(now)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._reported != self._done:
            self._write(self._clock())

    def _write(self, now: float) -> None:
        self._reported = self._done
        spent_s = max(now - self._start, 1e-9)
        rates = _shown_rates(self._done / spent_s, self._unit, self._bytes / spent_s)
        left_s = (self._total - self._done) * spent_s / max(self._done, 1)
        tail = f", {shown_time(left_s)} left" if 0 < self._done < self._total else ""
        self._stream.write(f"{self._label}: {self._done:,} of {self._total:,} {self._unit}, {rates}{tail}\n")
        self._stream.flush()


def _shown_rates(items_per_s: float, unit: str, bytes_per_s: float) -> str:
    """The rate of bytes is left out where none are counted, as when only an index is read."""
    return f"{items_per_s:,.0f} {unit}/s" + (f", {shown_bytes(bytes_per_s)}/s" if bytes_per_s else "")


class _BarProgress:
    """A rich progress bar on standard error."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._unit = unit
        self._done = self._bytes = 0
        self._start = time.monotonic()
        self._task = self._bar.add_task(label, total=total, rates="")

    def advance(self, items: int, item_bytes: int) -> None:
        """Add finished items; rich redraws at its own rate."""
        self._done += items
        self._bytes += item_bytes
        spent_s = max(time.monotonic() - self._start, 1e-9)
        rates = _shown_rates(self._done / spent_s, self._unit, self._bytes / spent_s)
        self._bar.update(self._task, advance=items, rates=rates)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()


Progress = LineProgress | _BarProgress
"""Reports progress; a context manager, which restores the terminal."""


def open_progress(label: str, total: int, unit: str) -> Progress:
    """A bar if standard error is a terminal that can draw one, lines otherwise.

    Args:
        label: the activity, such as "packing".
        total: number of items.
        unit: what the items are, in the plural.
    """
    bar = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return _BarProgress(label, total, unit) if bar else LineProgress(label, total, unit, sys.stderr)
