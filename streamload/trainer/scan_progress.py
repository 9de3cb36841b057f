"""Messages of the feeder that the loop has not taken yet, and a progress bar for scans before the first batch."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Iterable
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any

from streamload.decode.failure import error_from
from streamload.feeder.messages import Answer, Failed, Scanning

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


class Inbox:
    """Messages in order, and awaited answers by their number.

    Args:
        progress: shows how far scans are; nothing is kept of that.
    """

    def __init__(self, progress: ScanProgress | None = None) -> None:
        self._progress = progress or ScanProgress(shows=False)
        self._messages: deque[Any] = deque()
        self._answers: dict[int, Answer | None] = {}
        self._failed: Failed | None = None

    def __len__(self) -> int:
        """How many messages are here; answers do not count."""
        return len(self._messages)

    def put(self, message: Any) -> None:
        """Add what has come. An answer that nobody awaits any more is dropped."""
        if isinstance(message, Scanning):
            self._progress.show(message)
            return
        self._progress.end()
        if not isinstance(message, Answer):
            self._messages.append(message)
        elif message.number in self._answers:
            self._answers[message.number] = message
        if isinstance(message, Failed):
            self._failed = message

    def put_back(self, messages: Iterable[Any]) -> None:
        """Have messages taken again, before any other."""
        self._messages.extendleft(reversed(list(messages)))

    def take(self) -> Any | None:
        """The next message, or None."""
        try:
            return self._messages.popleft()
        except IndexError:
            return None

    def expect(self, number: int) -> None:
        """Keep the answer to a call when it comes. To be called before the call is sent."""
        self._answers[number] = None

    def forget(self, number: int) -> None:
        """Do not keep the answer to a call any longer. Idempotent."""
        self._answers.pop(number, None)

    def answer(self, number: int) -> Answer | None:
        """The answer to a call, if it is here.

        Raises:
            Exception: what the feeder has failed with: nothing more will come.
        """
        found = self._answers.get(number)
        if found is None and self._failed is not None:
            raise error_from(self._failed.failure)
        return found

    def clear(self) -> None:
        """Drop all messages; nothing more is waited for."""
        self._messages.clear()
        self._progress.end()
