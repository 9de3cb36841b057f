"""Run concurrent downloads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streamload.storage.download import Pin, RequestCounts, Retries, download
from streamload.storage.protocol import Storage
from streamload.totals import TimeIntegral
from streamload.trace import Event

PIECE_BYTES = 2 << 20
"""Bytes of each request of `Transfers.read_all`."""

PIECES_AHEAD = 3
"""Number of pieces that `Transfers.read_all` requests ahead."""


class Source(NamedTuple):
    """The source of a shard's bytes; all its downloads share one pin."""

    storage: Storage
    url: str
    pin: Pin


@dataclass(slots=True)
class TransferCounts(RequestCounts):
    """Totals since the start.

    Attributes:
        received_bytes: all bytes, including those that arrived twice.
        cached_bytes: of parts that were in the disk cache when needed.
    """

    received_bytes: int = 0
    cached_bytes: int = 0


@dataclass(slots=True)
class Download:
    """A download in flight; `started_s` is by the loop's clock."""

    url: str
    start: int
    started_s: float
    received_bytes: int = 0


class Transfers:
    """Run concurrent downloads in a running loop until `close`, with `retries`.

    Attributes:
        running: the downloads in flight, oldest first.
        counts: of requests.
        in_flight: the number of downloads in flight, over time.
        events: receives an event for each ended download, for a trace; None for no trace.
    """

    def __init__(self, retries: Retries) -> None:
        self.running: dict[asyncio.Task[int], Download] = {}
        self.counts = TransferCounts()
        self.events: list[Event] | None = None
        self._retries = retries
        self._loop = asyncio.get_running_loop()
        self.in_flight = TimeIntegral(self._loop.time)

    def begin(self, source: Source, start: int, end: int, write: Callable[[int, bytes], None]) -> asyncio.Task[int]:
        """Begin a download; see `download`."""
        storage, url, pin = source
        running = Download(url, start, self._loop.time())

        def receive(offset: int, piece: bytes) -> None:
            self.counts.received_bytes += len(piece)
            running.received_bytes += len(piece)
            write(offset, piece)

        task = asyncio.create_task(
            download(storage, url, start, end, receive, pin=pin, retries=self._retries, counts=self.counts)
        )
        self.running[task] = running
        self.in_flight.set(len(self.running))
        task.add_done_callback(partial(self._ended, end - start))
        return task

    def _ended(self, part_bytes: int, task: asyncio.Task[int]) -> None:
        ended = self.running.pop(task)
        self.in_flight.set(len(self.running))
        if self.events is not None:
            details = {"url": ended.url, "start": ended.start, "bytes": part_bytes}
            seconds = self._loop.time() - ended.started_s
            self.events.append(Event("fetch", "connection", ended.started_s, seconds, details))

    async def read(self, source: Source, start: int, end: int) -> bytes:
        """Fetch a range, clipped to the shard. Raises what `download` raises."""
        content = bytearray()
        await self.begin(source, start, end, lambda _, piece: content.extend(piece))
        return bytes(content)

    async def read_all(self, source: Source) -> AsyncGenerator[bytes]:
        """Fetch a whole shard, a few requests ahead. Raises what `download` raises."""
        ahead: deque[asyncio.Task[bytes]] = deque()
        start = 0
        try:
            while True:
                end = source.pin.total_bytes  # stated by the first answer
                while not ahead if end is None else len(ahead) <= PIECES_AHEAD and start < end:
                    ahead.append(asyncio.create_task(self.read(source, start, start + PIECE_BYTES)))
                    start += PIECE_BYTES
                if not ahead:
                    return
                yield await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def close(self) -> None:
        """Cancel downloads in flight, and wait for them. Idempotent."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
