"""A progress bar for scans before the first batch."""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING, Any

from streamload.feeder.messages import Scanning

if TYPE_CHECKING:
    from rich.progress import Progress

_SHOWN_AFTER_S = 2.0
_LOGGED_EVERY_S = 30.0

_log = logging.getLogger("streamload")


class ScanProgress:
    """Shows how far shards without an index are scanned, while a batch waits for that. It starts no thread.

    Args:
        shows: False only logs it.
    """

    def __init__(self, *, shows: bool) -> None:
        self._shows = shows
        self._began_s: float | None = None
        self._logged_s = 0.0
        self._bar: Progress | None = None

    def update(self, message: Any) -> None:
        """Show how far scans are, unless they have only just begun; any other message ends the wait for them."""
        now_s = monotonic()
        if not isinstance(message, Scanning):
            self._began_s = None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
        elif self._began_s is None:
            self._began_s = self._logged_s = now_s
        elif now_s - self._began_s >= _SHOWN_AFTER_S and not self._draw(message):
            self._log(message, now_s)

    def _log(self, scanning: Scanning, now_s: float) -> None:
        if now_s - self._logged_s >= _LOGGED_EVERY_S:
            self._logged_s = now_s
            _log.info(
                "scanned %s of %s shards that have no index; `streamload index` makes one, which saves that",
                f"{scanning.scanned:,}",
                f"{scanning.shards:,}",
            )

    def _draw(self, scanning: Scanning) -> bool:
        """Draw the bar; return False if there is neither a terminal nor a notebook."""
        if not self._shows:
            return False
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not console.is_interactive and not console.is_jupyter:
            return False
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
            self._bar.start()
            self._bar.add_task("scanning shards without an index", total=scanning.shards)
        self._bar.update(self._bar.task_ids[0], completed=scanning.scanned, refresh=True)
        return True
