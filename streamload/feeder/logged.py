"""What a feeder's process logs is logged in the trainer's, where the user's handlers are.

Without handlers of its own a process writes warnings to stderr, past the user's log files, formats and levels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamload.feeder.messages import Logged

__all__ = ["log_in_trainer"]

_log = logging.getLogger("streamload")


def log_in_trainer(send: Callable[[Logged], None]) -> None:
    """From now on, give what is logged in this process to `send`, in the running event loop, whoever logs it."""
    _log.addHandler(_ToTrainer(asyncio.get_running_loop(), send))
    _log.propagate = False


class _ToTrainer(logging.Handler):
    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._loop, self._to = loop, send

    def emit(self, record: logging.LogRecord) -> None:
        self._loop.call_soon_threadsafe(self._to, Logged(record.levelno, record.getMessage()))
