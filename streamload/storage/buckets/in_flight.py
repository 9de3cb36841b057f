"""Answers of obstore that have yet to come: they end on its own threads, some time after they were given up."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["InFlight"]

_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.5
_Result = TypeVar("_Result")


class InFlight:
    """Knows which answers obstore's threads still hold on to.

    Such a thread tells Python that an answer has come, also where nobody waits for it any more. If Python ends
    meanwhile, that aborts the process; and until then the connection stays open. When the thread has release an
    answer, the answer is gone.

    Args:
        settle: a call into obstore. What its threads have release is freed with the next such call only.
    """

    def __init__(self, settle: Callable[[], object]) -> None:
        self._answers: weakref.WeakSet[Awaitable[object]] = weakref.WeakSet()
        self._settle = settle

    def add(self, answer: Awaitable[_Result]) -> Awaitable[_Result]:
        """Note an answer, and give it back to be awaited."""
        self._answers.add(answer)
        return answer

    async def over(self) -> None:
        """Wait until obstore has release all answers, which must have come or been cancelled; at most a second.

        It looks again and again, mostly twice: nothing tells of it.
        """
        wait_s = _FIRST_WAIT_S
        while self._answers and wait_s <= _LONGEST_WAIT_S:
            self._settle()
            if self._answers:
                await asyncio.sleep(wait_s)
                wait_s *= 2
        self._answers.clear()
