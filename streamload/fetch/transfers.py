"""Downloads in flight, beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streamload.errors import TransientStorageError
from streamload.limits import MOST_REQUESTS
from streamload.storage.download import Pin, Retries, Watch, download
from streamload.storage.protocol import Storage
from streamload.totals import TimeIntegral


class Waiting(NamedTuple):
    """A download in flight: since when, of what, and how much has come."""

    seconds: float
    url: str
    start: int
    received_bytes: int


class Source(NamedTuple):
    """Where the bytes of a shard come from; all its downloads share one pin."""

    storage: Storage
    url: str
    pin: Pin


@dataclass(slots=True)
class TransferCounts:
    """What has happened since the start.

    Attributes:
        requests: all that were sent, failed ones too.
        throttled: those refused because there were too many.
        broken: those that failed otherwise, also in the middle of a body.
        received_bytes: what arrived, with what arrived twice.
        cached_bytes: of shards that were in the disk cache when they were needed.
        answered: requests whose answer has begun.
        answer_s: seconds from these requests to the first bytes of their answers.
        connection_s: seconds in flight of all downloads together.
        ended: for a trace, each download's url, start, begin and end by the loop's clock, and bytes; or None.
    """

    requests: int = 0
    throttled: int = 0
    broken: int = 0
    received_bytes: int = 0
    cached_bytes: int = 0
    answered: int = 0
    answer_s: float = 0.0
    connection_s: float = 0.0
    ended: list[tuple[str, int, float, float, int]] | None = None


class Transfers:
    """Downloads ranges beside each other, in a running loop, until `close`.

    Args:
        on_end: called in the loop when a download has ended, so that there may be room.
        retries: how requests are repeated.
        most: the most downloads beside each other, at least 1.
    """

    def __init__(
        self, on_end: Callable[[], None], *, retries: Retries | None = None, most: int = MOST_REQUESTS
    ) -> None:
        self.most = most
        self.running: dict[asyncio.Task[int], _Running] = {}
        self._on_end = on_end
        self._retries = retries or Retries()
        self._loop = asyncio.get_running_loop()
        self._counts = TransferCounts()
        self._in_flight = TimeIntegral(self._loop.time)
        self._closed = False

    def slowest(self) -> Waiting | None:
        """Return the download that has been in flight for the longest time; None if there is none."""
        now_s = self._loop.time()
        found = [
            Waiting(now_s - each.started_s, each.url, each.start, each.position - each.start)
            for each in self.running.values()
        ]
        return max(found, default=None)

    @property
    def counts(self) -> TransferCounts:
        """What has happened since the start."""
        self._counts.connection_s = self._in_flight.now()
        return self._counts

    def room(self) -> int:
        """Return how many more downloads may begin now; it grows when one ends."""
        return max(0, self.most - len(self.running))

    def begin(self, source: Source, start: int, end: int, write: Callable[[int, bytes], None]) -> asyncio.Task[int]:
        """Begin a download, also beyond `room()`; see `download`. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("these transfers are closed")
        storage, url, pin = source
        running = _Running(self._counts, url, start, self._loop.time())

        def receive(offset: int, piece: bytes) -> None:
            self._counts.received_bytes += len(piece)
            write(offset, piece)

        task = asyncio.create_task(
            download(storage, url, start, end, receive, pin=pin, retries=self._retries, watch=running)
        )
        self.running[task] = running
        self._in_flight.set(len(self.running))
        task.add_done_callback(partial(self._ended, end - start))
        return task

    async def read(self, source: Source, start: int, end: int) -> bytes:
        """Fetch some bytes, fewer if the shard ends before. Raises what `download` raises."""
        content = bytearray()
        await self.begin(source, start, end, lambda _, piece: content.extend(piece))
        return bytes(content)

    async def close(self) -> None:
        """Cancel what is in flight, and wait until it has ended. Idempotent."""
        self._closed = True
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    def _ended(self, part_bytes: int, task: asyncio.Task[int]) -> None:
        running = self.running.pop(task)
        self._in_flight.set(len(self.running))
        if self._counts.ended is not None:
            self._counts.ended.append((running.url, running.start, running.started_s, self._loop.time(), part_bytes))
        self._on_end()


class _Running(Watch):
    """A download in flight, which counts its requests."""

    def __init__(self, counts: TransferCounts, url: str, start: int, started_s: float) -> None:
        super().__init__(start)
        self.url, self.start, self.started_s = url, start, started_s
        self._counts = counts

    def sent(self) -> None:
        self._counts.requests += 1

    def answered(self, after_s: float) -> None:
        self._counts.answered += 1
        self._counts.answer_s += after_s

    def failed(self, failure: TransientStorageError) -> None:
        self._counts.throttled += failure.throttled
        self._counts.broken += not failure.throttled
