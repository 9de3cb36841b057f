"""An event loop that turns only while its owner waits for it, on a thread of its own.

So whatever runs in the loop and whatever the owner does never run at the same time, and need no locks; and it works in
a thread that has a running loop already, as a notebook's has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["LoopThread"]


class LoopThread:
    """The thread is started with the first turn, and ended by `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = ThreadPoolExecutor(1, "streamload-fetch")
        self._called = asyncio.Event()

    def call(self, action: Callable[[], None]) -> None:
        """Have something called in the next turn, or in this one."""
        self._loop.call_soon(self._call, action)

    def turn(self, timeout_s: float | None) -> None:
        """Run the loop until something was called in it.

        Raises:
            TimeoutError: nothing was called in time.
        """
        self._called.clear()
        self._thread.submit(self._loop.run_until_complete, asyncio.wait_for(self._called.wait(), timeout_s)).result()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end, and then end the loop and the thread."""
        self._loop.call_soon_threadsafe(self._called.set)  # a turn that its owner does not wait for any more
        self._thread.submit(self._end, last).result()
        self._thread.shutdown()

    def _call(self, action: Callable[[], None]) -> None:
        action()
        self._called.set()

    def _end(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            self._loop.run_until_complete(last)
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
