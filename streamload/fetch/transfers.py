"""Downloads in flight, beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streamload.limits import MOST_REQUESTS
from streamload.storage.download import Pin, RequestCounts, Retries, download
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
class TransferCounts(RequestCounts):
    """What has happened since the start.

    Attributes:
        received_bytes: what arrived, with what arrived twice.
        cached_bytes: of shards that were in the disk cache when they were needed.
        connection_s: seconds in flight of all downloads together.
        ended: for a trace, each download's url, start, begin and end by the loop's clock, and bytes; or None.
    """

    received_bytes: int = 0
    cached_bytes: int = 0
    connection_s: float = 0.0
    ended: list[tuple[str, int, float, float, int]] | None = None


@dataclass(slots=True)
class _Running:
    started_s: float
    url: str
    start: int
    received_bytes: int = 0


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
            Waiting(now_s - each.started_s, each.url, each.start, each.received_bytes) for each in self.running.values()
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
        running = _Running(self._loop.time(), url, start)

        def receive(offset: int, piece: bytes) -> None:
            self._counts.received_bytes += len(piece)
            running.received_bytes += len(piece)
            write(offset, piece)

        task = asyncio.create_task(
            download(storage, url, start, end, receive, pin=pin, retries=self._retries, counts=self._counts)
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
