"""When a part that takes far longer than its fellows is requested again, and what happens then."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from streamload.errors import ShardChangedError, ShardNotFoundError
from streamload.storage.download import Downloaded, Watch

__all__ = ["HedgedRequests", "download_with_second"]

_SAMPLES = 64
_ENOUGH_SAMPLES = 5
_TIMES_THE_MEDIAN = 3.0
_SHORTEST_S = 0.2
_SHARE = 0.05
_BURST = 8.0
_FIRST_TOKENS = 4.0


class HedgedRequests:
    """Knows how long requests usually take, and how many more may be sent. Does no I/O; any monotonic clock's times.

    A request is judged in two steps: by the time until its first byte, then by the time that the rest takes for its
    size. It is late when a step has taken three times the median of the latest 64, and at least 0.2 s. With fewer than
    five to compare with, none is late.

    Second requests are held to 5 % of the first ones. Four may be sent before there were any first ones to earn them,
    and eight in a row at most, so that a storage that slows down as a whole is not sent every request twice.
    """

    def __init__(self) -> None:
        self._waits = _Typical()
        self._rates = _Typical()
        self._tokens = _FIRST_TOKENS

    def started(self) -> None:
        """The first request for a part is sent, which earns a share of a second one."""
        self._tokens = min(_BURST, self._tokens + _SHARE)

    def answered(self, wait_s: float) -> None:
        """The first byte of an answer came so long after its request."""
        self._waits.add(wait_s)

    def finished(self, transfer_s: float, transferred_bytes: int) -> None:
        """So many bytes came whole within so long after the first of them."""
        if transferred_bytes > 0:
            self._rates.add(transfer_s / transferred_bytes)

    def late_at(self, watch: Watch) -> float | None:
        """The time from which the running request is late; None as long as that cannot be said.

        A download that is between two tries is not late: it waits because the storage refused it.
        """
        if watch.sent_s is None:
            return None
        if watch.answered_s is None:
            return _later(watch.sent_s, self._waits.median)
        per_byte_s = self._rates.median
        return _later(watch.answered_s, None if per_byte_s is None else per_byte_s * watch.requested_bytes)

    def allows(self) -> bool:
        """Whether one more request is within the share; if so, it is counted."""
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass(slots=True)
class _Typical:
    """The median of the latest samples, computed on request."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    known: float | None = None

    def add(self, sample: float) -> None:
        self.samples.append(sample)
        self.known = None

    @property
    def median(self) -> float | None:
        if self.known is None and len(self.samples) >= _ENOUGH_SAMPLES:
            self.known = median(self.samples)
        return self.known


def _later(since_s: float, usual_s: float | None) -> float | None:
    return None if usual_s is None else since_s + max(_TIMES_THE_MEDIAN * usual_s, _SHORTEST_S)


async def download_with_second(
    request: Callable[[], tuple[Watch, Coroutine[Any, Any, Downloaded]]], late: asyncio.Event
) -> Downloaded:
    """Download once, and once more beside it whenever `late` is set; the first to finish counts.

    All downloads write the same bytes to the same place, and what one of them has written the others need not ask for.
    When this returns, raises or is cancelled, all of them have ended.

    Args:
        request: begins a download of what is still missing: its watch, and the coroutine to run.
        late: set by whoever decides that the latest download takes too long; cleared here.

    Raises:
        ShardChangedError, ShardNotFoundError: from any of the downloads.
        StorageError, and what writing raises: from the first download; as long as a later one receives bytes, it is
            waited for.
    """
    downloads: dict[asyncio.Task[Downloaded], Watch] = {}
    waiting: asyncio.Task[bool] | None = None
    try:
        while True:
            if waiting is None or waiting.done():
                late.clear()
                watch, coroutine = request()
                downloads[asyncio.create_task(coroutine)] = watch
                waiting = asyncio.create_task(late.wait())
            running = [task for task in downloads if not task.done()]
            await asyncio.wait({waiting, *running}, return_when=asyncio.FIRST_COMPLETED)
            if (ended := _that_decides(downloads)) is not None:
                return ended.result()
    finally:
        left = {waiting, *downloads} if waiting is not None else {*downloads}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _that_decides(downloads: dict[asyncio.Task[Downloaded], Watch]) -> asyncio.Task[Downloaded] | None:
    """The download whose end is the end of all; None as long as there is none."""
    ended = [task for task in downloads if task.done()]
    for task in ended:
        if task.exception() is None:
            return task
    for task in ended:
        if isinstance(task.exception(), ShardChangedError | ShardNotFoundError):
            return task
    first = next(iter(downloads))
    fetches_bytes = any(watch.received_bytes for task, watch in downloads.items() if not task.done())
    return first if first.done() and not fetches_bytes else None
