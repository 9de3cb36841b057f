"""What a feeder's process warns of is logged in the trainer's, where the user's handlers are.

A process without handlers of its own writes warnings to stderr, past the user's log files and formats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from streamload.feeder.messages import Logged

__all__ = ["log_in_trainer"]

_log = logging.getLogger("streamload")


def log_in_trainer(send: Callable[[Logged], None]) -> Callable[[], None]:
    """From now on, give what is logged in this process to `send`, in the running event loop, and to nobody else.

    Returns:
        What ends that, for when nobody listens any more: what is logged then goes to stderr.
    """
    loop = asyncio.get_running_loop()

    def to_trainer(record: logging.LogRecord) -> bool:
        loop.call_soon_threadsafe(send, Logged(record.levelno, record.getMessage()))
        return False  # before any handler: threads may have imported the user's modules, which add some

    _log.addFilter(to_trainer)
    return lambda: _log.removeFilter(to_trainer)
