"""What the feeder's process logs, and what its workers do, is logged in the trainer's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from streamload.log_records import Logged, forward_records

__all__ = ["log_in_trainer"]


def log_in_trainer(send: Callable[[Logged], None]) -> None:
    """From now on, give what is logged in this process to `send`, in the running event loop, and to nobody else."""
    loop, loops_thread = asyncio.get_running_loop(), threading.get_ident()

    def to_trainer(logged: Logged) -> None:
        if threading.get_ident() == loops_thread:
            send(logged)  # now: what a worker logged comes before the batch that it was making
        else:
            loop.call_soon_threadsafe(send, logged)

    forward_records(to_trainer)
