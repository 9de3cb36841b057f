"""How far the scans before a first batch are: a bar on a terminal or in a notebook, else lines in the log."""

from __future__ import annotations

import logging
import os
import sys
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING

from streamload.feeder.messages import Scanning

if TYPE_CHECKING:
    from rich.progress import Progress

_SHOWN_AFTER_S = 2.0
_LOGGED_EVERY_S = 30.0

_log = logging.getLogger("streamload")


class ScanProgress:
    """Shows how far shards without an index are scanned, while a batch waits for that. It starts no thread.

    Args:
        shows: False shows nothing; the log has it nevertheless.
    """

    def __init__(self, *, shows: bool) -> None:
        self._shows = shows
        self._began_s: float | None = None
        self._logged_s = 0.0
        self._bar: Progress | None = None

    def show(self, scanning: Scanning) -> None:
        """Show how far it is, unless it has only just begun."""
        now_s = monotonic()
        if self._began_s is None:
            self._began_s = self._logged_s = now_s
        if now_s - self._began_s < _SHOWN_AFTER_S or self._draw(scanning) or now_s - self._logged_s < _LOGGED_EVERY_S:
            return
        self._logged_s = now_s
        _log.info(
            "scanned %s of %s shards that have no index; `streamload index` makes one, which saves that",
            f"{scanning.scanned:,}",
            f"{scanning.shards:,}",
        )

    def end(self) -> None:
        """Show nothing more: a batch is there, or nobody waits any more. Idempotent."""
        self._began_s = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, scanning: Scanning) -> bool:
        """Draw the bar; False where there is none."""
        if not self._shows or not _can_draw():
            return False
        if self._bar is None:
            self._bar = _new_bar(scanning.shards)
        self._bar.update(self._bar.task_ids[0], completed=scanning.scanned, refresh=True)
        return True


def _can_draw() -> bool:
    """Whether standard error is a terminal, or a notebook that has the widgets for it."""
    if sys.stderr.isatty():
        return os.environ.get("TERM") != "dumb"
    return "ipykernel" in sys.modules and find_spec("ipywidgets") is not None


def _new_bar(shards: int) -> Progress:
    """A bar, which is gone when it ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
    bar.start()
    bar.add_task("scanning shards without an index", total=shards)
    return bar
