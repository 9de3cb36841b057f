"""The parts that are in flight: started by whoever knows the order, fetched as fast as the storage takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from streamload.errors import TransientStorageError
from streamload.limits import FIRST_REQUESTS, MOST_REQUESTS
from streamload.storage.download import Downloaded, Pin, Retries, Watch, download
from streamload.storage.protocol import Storage
from streamload.totals import TimeIntegral

_FEWEST = 1


class Concurrency:
    """Slow start, then additive increase and multiplicative decrease (RFC 5681). Any monotonic clock's times; no I/O.

    Until the storage refuses a request, the limit grows by one for every request that succeeds while it is reached, so
    that it doubles in a round trip. From then on it grows by one for every `limit` of them, which is about once in a
    round trip. It is halved at most once in a round trip: a request that was sent before the last halving says nothing
    about the new limit.

    Args:
        most: an upper bound of the caller's, such as how many parts fit into memory. At least 1.
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
        """How many requests may run at once now; from 1 to 64."""
        return self._limit

    def succeeded(self, in_flight: int) -> None:
        """A request has been answered in full; `in_flight` ran beside each other, it included.

        Fewer than the limit say nothing about whether more would be taken, and are not counted.
        """
        if in_flight < self._limit or self._limit >= self._most:
            return
        self._succeeded += 1
        if self._is_starting or self._succeeded >= self._limit:
            self._limit += 1
            self._succeeded = 0

    def throttled(self, sent_s: float, now_s: float) -> None:
        """A request that was sent at `sent_s` has been refused because there were too many."""
        if sent_s < self._halved_s:
            return
        self._halved_s = now_s
        self._is_starting = False
        self._limit = max(_FEWEST, self._limit // 2)
        self._succeeded = 0


class Part(NamedTuple):
    """A range of a shard that is fetched as one.

    Attributes:
        shard: its number in the listing.
        number: of the part in the shard.
        start, end: its bytes, end exclusive. The end may lie behind that of the shard where its size is not known.
        generation: whatever tells whoever started it where it was to be written.
    """

    shard: int
    number: int
    start: int
    end: int
    generation: int = 0


class Waiting(NamedTuple):
    """A part in flight: since when it has been requested, where it lies, and how much of it has come."""

    seconds: float
    url: str
    start: int
    received_bytes: int


class Source(NamedTuple):
    """Where a shard's parts come from. All parts of a shard share one pin."""

    storage: Storage
    url: str
    pin: Pin


@dataclass(slots=True)
class TransferCounts:
    """What has happened since the start.

    Attributes:
        requests: all that were sent, with those that failed.
        throttled: those that were refused because there were too many.
        broken: those that failed otherwise, also in the middle of a body.
        received_bytes: what arrived, with what arrived twice.
        cached_bytes: of shards that were in the disk cache when they were needed.
        answered: those whose answer has begun.
        answer_s: seconds from these requests to the first bytes of their answers.
        connection_s: seconds in flight of all parts together.
        limit_s: the integral of how many parts may be in flight, over the seconds in which there were any.
        full_s: seconds in which as many were in flight as may.
        in_flight: parts now.
        ended: what has been fetched, if that is to be noted: its url, its start, when it was begun and when it ended
            by the loop's clock, and its bytes.
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
    """Fetches parts beside each other, in a running loop, until `close`.

    What is started is not waited for: `on_done` or `on_failed` is called once for each part, in the loop, unless
    `close` comes first. Both may start other parts. `start` does not refuse a part beyond `room()`.

    Args:
        write: `write(part, offset, piece)` is called for each piece as it arrives, in order; offset is in the shard. It
            is never called after the part's `on_done`, `on_failed` or `close`.
        on_done: a part has been written whole.
        on_failed: it cannot be: a StorageError, or what `write` has raised.
        on_read: a `read` has ended, so there may be room.
        retries: how requests are made again.
        most: an upper bound of the parts beside each other, at least 1.
    """

    def __init__(
        self,
        write: Callable[[Part, int, bytes], None],
        on_done: Callable[[Part, Downloaded], None],
        on_failed: Callable[[Part, BaseException], None],
        on_read: Callable[[], None],
        *,
        retries: Retries | None = None,
        most: int = MOST_REQUESTS,
    ) -> None:
        self._write = write
        self._on_done = on_done
        self._on_failed = on_failed
        self._on_read = on_read
        self._retries = retries or Retries()
        self._steering = _Steering(asyncio.get_running_loop(), most)
        self._closed = False

    def slowest(self) -> Waiting | None:
        """The part that has been in flight for the longest time; None where there is none."""
        now_s = asyncio.get_running_loop().time()
        return max((running.waiting(now_s) for running in self._steering.running.values()), default=None)

    @property
    def in_flight(self) -> int:
        """How many parts are in flight."""
        return len(self._steering.running)

    @property
    def counts(self) -> TransferCounts:
        """What has happened since the start."""
        return self._steering.counted()

    def room(self) -> int:
        """How many more may be started now; 0 or more. It grows when a part ends."""
        return max(0, self._steering.concurrency.limit - self.in_flight)

    def start(self, part: Part, source: Source) -> None:
        """Begin to fetch a part. Raises RuntimeError after `close`."""
        task = self._begin(source, part.start, part.end, partial(self._write, part))
        task.add_done_callback(partial(self._ended, part))

    async def read(self, source: Source, start: int, end: int) -> bytes:
        """Fetch some bytes, fewer where the shard ends before. Raises what `download` raises."""
        content = bytearray()

        def write(offset: int, piece: bytes) -> None:  # bytes may come twice
            content[offset - start : offset - start + len(piece)] = piece

        try:
            await self._begin(source, start, end, write)
        finally:
            self._on_read()
        return bytes(content)

    def _begin(
        self, source: Source, start: int, end: int, write: Callable[[int, bytes], None]
    ) -> asyncio.Task[Downloaded]:
        if self._closed:
            raise RuntimeError("these transfers are closed")
        watch = _ReportingWatch(self._steering)
        watch.position = start

        def receive(offset: int, piece: bytes) -> None:
            self._steering.counts.received_bytes += len(piece)
            write(offset, piece)

        storage, url, pin = source
        task = asyncio.create_task(
            download(storage, url, start, end, receive, pin=pin, retries=self._retries, watch=watch)
        )
        self._steering.add(task, _Running(start, url, self._steering.loop.time(), watch))
        task.add_done_callback(lambda task: self._steering.remove(task, end - start))
        return task

    async def close(self) -> None:
        """Give up what is in flight and wait until it has ended; neither callback is called again. Idempotent."""
        self._closed = True
        tasks = list(self._steering.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, part: Part, task: asyncio.Task[Downloaded]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._closed or task.cancelled():
            return
        if error is None:
            self._on_done(part, task.result())
        else:
            self._on_failed(part, error)


class _Steering:
    """What is learned from all requests together, and what follows from it for those that run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self.concurrency = Concurrency(most=most)
        self.counts = TransferCounts()
        self.running: dict[asyncio.Task[Downloaded], _Running] = {}
        self.loop = loop
        self._in_flight, self._limit, self._full = (TimeIntegral(loop.time) for _ in range(3))

    def add(self, task: asyncio.Task[Downloaded], running: _Running) -> None:
        """A part is in flight, until `remove`."""
        self.running[task] = running
        self._note_in_flight()

    def remove(self, task: asyncio.Task[Downloaded], part_bytes: int) -> None:
        """A part is in flight no more."""
        running = self.running.pop(task)
        if self.counts.ended is not None:
            now_s = self.loop.time()
            waiting = running.waiting(now_s)
            self.counts.ended.append((waiting.url, waiting.start, now_s - waiting.seconds, now_s, part_bytes))
        self._note_in_flight()

    def counted(self) -> TransferCounts:
        """The counts until now."""
        self.counts.connection_s, self.counts.limit_s = self._in_flight.now(), self._limit.now()
        self.counts.full_s = self._full.now()
        return self.counts

    def _note_in_flight(self) -> None:
        in_flight, limit = len(self.running), self.concurrency.limit
        self.counts.in_flight = in_flight
        self._in_flight.set(in_flight)
        self._limit.set(limit if in_flight else 0)
        self._full.set(in_flight >= limit)


class _Running(NamedTuple):
    """A part in flight, and the progress of its download."""

    start: int
    url: str
    started_s: float
    watch: Watch

    def waiting(self, now_s: float) -> Waiting:
        """Since when it is in flight, and how far it has come."""
        return Waiting(now_s - self.started_s, self.url, self.start, self.watch.position - self.start)


class _ReportingWatch(Watch):
    """Report the progress of one download to the steering of all."""

    __slots__ = ("_steering",)

    def __init__(self, steering: _Steering) -> None:
        super().__init__()
        self._steering = steering

    def sent(self, now_s: float) -> None:
        """See `Watch.sent`."""
        super().sent(now_s)
        self._steering.counts.requests += 1

    def answered(self, now_s: float) -> None:
        """See `Watch.answered`."""
        if self.sent_s is not None:
            self._steering.counts.answered += 1
            self._steering.counts.answer_s += now_s - self.sent_s
        super().answered(now_s)

    def completed(self, now_s: float) -> None:
        """See `Watch.completed`."""
        self._steering.concurrency.succeeded(len(self._steering.running))
        super().completed(now_s)

    def failed(self, now_s: float, failure: TransientStorageError) -> None:
        """See `Watch.failed`."""
        if failure.throttled and self.sent_s is not None:
            self._steering.concurrency.throttled(self.sent_s, now_s)
        self._steering.counts.throttled += failure.throttled
        self._steering.counts.broken += not failure.throttled
        super().failed(now_s, failure)
