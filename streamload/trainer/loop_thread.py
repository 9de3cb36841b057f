"""An event loop that turns only while its owner waits for it, on a thread of its own.

So whatever runs in the loop and whatever the owner does never run at the same time, and need no locks; and it works in
a thread that has a running loop already, as a notebook's has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["LoopThread"]

_Result = TypeVar("_Result")


class LoopThread:
    """The loop is made with the first call, the thread is started with the first turn, and `close` ends both."""

    def __init__(self) -> None:
        self._made: _PausedLoop | None = None
        self._thread = ThreadPoolExecutor(1, "streamload-fetch")
        self._called = asyncio.Event()

    @property
    def started(self) -> bool:
        """Whether anything was ever called in it."""
        return self._made is not None

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
        """Run a coroutine to its end, and then end the loop and the thread. Also while the interpreter exits."""
        self._loop.call_soon_threadsafe(self._called.set)  # a turn that its owner does not wait for any more
        try:
            ended = self._thread.submit(self._end, last)
        except RuntimeError:  # the interpreter exits, so all threads of pools have ended
            self._end(last)
        else:
            ended.result()
        self._thread.shutdown()

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._made is None:
            self._made = _PausedLoop()
        return self._made

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


class _PausedLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while it does not turn.

    Else a time-out would count how long its owner was busy with something else, as with a breakpoint: a download would
    be given up although all of its bytes have come.
    """

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._paused_since_s: float | None = None
        super().__init__()

    def time(self) -> float:
        """Seconds of turning, from any start."""
        now_s = super().time() if self._paused_since_s is None else self._paused_since_s
        return now_s - self._stood_s

    def run_until_complete(self, future: Generator[Any, None, _Result] | Awaitable[_Result]) -> _Result:
        """See `asyncio`."""
        if self._paused_since_s is not None:
            self._stood_s += super().time() - self._paused_since_s
            self._paused_since_s = None
        try:
            return super().run_until_complete(future)
        finally:
            self._paused_since_s = super().time()
