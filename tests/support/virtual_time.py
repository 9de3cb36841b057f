"""An event loop whose clock jumps to the next timer, so that tests of waiting take no time and are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class _JumpingSelector(selectors.DefaultSelector):
    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise AssertionError("the loop waits for something that will never happen")
        self.now_s += 0.0 if events else timeout or 0.0
        return events


def run_in_virtual_time(main: Coroutine[Any, Any, _Result]) -> _Result:
    """As asyncio.run; `loop.time()` starts at 1000. Nothing in `main` may use threads or wait for sockets."""

    def new_loop() -> asyncio.AbstractEventLoop:
        selector = _JumpingSelector()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now_s
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
