"""Answers of obstore that have yet to come: they end on its own threads, some time after they were given up."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["UnderWay"]

_PATIENCE_S = 1.0
_Result = TypeVar("_Result")


class UnderWay:
    """Knows which answers obstore's threads still hold on to.

    Such a thread tells Python that an answer has come, also where nobody waits for it any more. If Python ends
    meanwhile, that aborts the process; and until then the connection stays open. When the thread has let go of an
    answer, the answer is gone.
    """

    def __init__(self) -> None:
        self._answers: set[weakref.ref[Awaitable[object]]] = set()
        self._waits: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def add(self, answer: Awaitable[_Result]) -> Awaitable[_Result]:
        """Note an answer, and give it back to be awaited."""
        self._answers.add(weakref.ref(answer, self._gone))
        return answer

    async def over(self) -> None:
        """Wait until obstore has let go of all answers, which must have come or been cancelled; at most a second."""
        ended = asyncio.Event()
        self._waits = asyncio.get_running_loop(), ended
        if self._answers:
            try:
                await asyncio.wait_for(ended.wait(), _PATIENCE_S)
            except TimeoutError:  # someone else keeps an answer
                self._answers.clear()
        self._waits = None

    def _gone(self, answer: weakref.ref[Awaitable[object]]) -> None:
        """Called on whichever thread has let go of it last."""
        self._answers.discard(answer)
        if self._waits is not None and not self._answers:
            loop, ended = self._waits
            loop.call_soon_threadsafe(ended.set)
