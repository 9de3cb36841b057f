"""Downloads in flight: as many beside each other as the storage takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streamload.errors import TransientStorageError
from streamload.limits import FIRST_REQUESTS, MOST_REQUESTS
from streamload.storage.download import Pin, Retries, Watch, download
from streamload.storage.protocol import Storage
from streamload.totals import TimeIntegral

_FEWEST = 1


class Concurrency:
    """Slow start, then additive increase and multiplicative decrease (RFC 5681), without I/O.

    Until the storage refuses a request, the limit grows by one for every request that succeeds while it is reached, so
    it doubles in a round trip; from then on by one in a round trip. It is halved at most once in a round trip: a
    request sent before the last halving says nothing about the new limit.

    Args:
        most: an upper bound of the caller's, at least 1.
    """

    def __init__(self, *, most: int = MOST_REQUESTS) -> None:
        if most < _FEWEST:
            raise ValueError(f"most is {most}, but at least {_FEWEST} request has to be possible")
        self._most = min(most, MOST_REQUESTS)
        self._limit = min(FIRST_REQUESTS, self._most)
        self._succeeded = 0
        self._is_starting = True
        self._halved_s = float("-inf")

    @property
    def limit(self) -> int:
        """How many requests may run at once now, from 1 to 64."""
        return self._limit

    def succeeded(self, in_flight: int) -> None:
        """Note that one of `in_flight` requests was answered in full.

        Fewer than the limit do not show that the storage would take more, and are not counted.
        """
        if in_flight < self._limit or self._limit >= self._most:
            return
        self._succeeded += 1
        if self._is_starting or self._succeeded >= self._limit:
            self._limit += 1
            self._succeeded = 0

    def throttled(self, sent_s: float, now_s: float) -> None:
        """Note that a request sent at `sent_s` was refused because there were too many."""
        if sent_s < self._halved_s:
            return
        self._halved_s = now_s
        self._is_starting = False
        self._limit = max(_FEWEST, self._limit // 2)
        self._succeeded = 0


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
        limit_s: the integral of how many may be in flight, over the seconds in which there were any.
        full_s: seconds in which as many were in flight as may.
        in_flight: downloads now.
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
    limit_s: float = 0.0
    full_s: float = 0.0
    in_flight: int = 0
    ended: list[tuple[str, int, float, float, int]] | None = None


class Transfers:
    """Downloads ranges beside each other, in a running loop, until `close`.

    Args:
        on_end: called in the loop when a download has ended, so that there may be room.
        retries: how requests are repeated.
        most: an upper bound of the downloads beside each other, at least 1.
    """

    def __init__(
        self, on_end: Callable[[], None], *, retries: Retries | None = None, most: int = MOST_REQUESTS
    ) -> None:
        self.concurrency = Concurrency(most=most)
        self.running: dict[asyncio.Task[int], _Running] = {}
        self._on_end = on_end
        self._retries = retries or Retries()
        self._loop = asyncio.get_running_loop()
        self._counts = TransferCounts()
        self._in_flight, self._limit, self._full = (TimeIntegral(self._loop.time) for _ in range(3))
        self._closed = False

    def slowest(self) -> Waiting | None:
        """Return the download that has been in flight for the longest time; None if there is none."""
        now_s = self._loop.time()
        return max((running.waiting(now_s) for running in self.running.values()), default=None)

    @property
    def counts(self) -> TransferCounts:
        """What has happened since the start."""
        self._counts.connection_s, self._counts.limit_s = self._in_flight.now(), self._limit.now()
        self._counts.full_s = self._full.now()
        return self._counts

    def room(self) -> int:
        """Return how many more downloads may begin now; it grows when one ends."""
        return max(0, self.concurrency.limit - len(self.running))

    def begin(self, source: Source, start: int, end: int, write: Callable[[int, bytes], None]) -> asyncio.Task[int]:
        """Begin a download, also beyond `room()`; see `download`. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("these transfers are closed")
        storage, url, pin = source
        running = _Running(self, self._counts, url, start, self._loop.time())

        def receive(offset: int, piece: bytes) -> None:
            self._counts.received_bytes += len(piece)
            write(offset, piece)

        task = asyncio.create_task(
            download(storage, url, start, end, receive, pin=pin, retries=self._retries, watch=running)
        )
        self.running[task] = running
        self._note_in_flight()
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
        if self._counts.ended is not None:
            now_s = self._loop.time()
            self._counts.ended.append((running.url, running.start, running.started_s, now_s, part_bytes))
        self._note_in_flight()
        self._on_end()

    def _note_in_flight(self) -> None:
        in_flight, limit = len(self.running), self.concurrency.limit
        self._counts.in_flight = in_flight
        self._in_flight.set(in_flight)
        self._limit.set(limit if in_flight else 0)
        self._full.set(in_flight >= limit)


class _Running(Watch):
    """A download in flight: it counts its requests, and adapts how many there may be."""

    def __init__(self, transfers: Transfers, counts: TransferCounts, url: str, start: int, started_s: float) -> None:
        super().__init__(start)
        self.url, self.start, self.started_s = url, start, started_s
        self._transfers = transfers
        self._counts = counts

    def waiting(self, now_s: float) -> Waiting:
        return Waiting(now_s - self.started_s, self.url, self.start, self.position - self.start)

    def sent(self) -> None:
        self._counts.requests += 1

    def answered(self, after_s: float) -> None:
        self._counts.answered += 1
        self._counts.answer_s += after_s

    def completed(self) -> None:
        self._transfers.concurrency.succeeded(len(self._transfers.running))

    def failed(self, sent_s: float, now_s: float, failure: TransientStorageError) -> None:
        if failure.throttled:
            self._transfers.concurrency.throttled(sent_s, now_s)
        self._counts.throttled += failure.throttled
        self._counts.broken += not failure.throttled
