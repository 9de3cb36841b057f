"""One range of a shard, fetched whole: broken bodies are continued, and every answer is held to what was asked."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamload.errors import ShardChangedError, StorageError, TransientStorageError
from streamload.fetch.storage.errors import WholeAnswerError
from streamload.fetch.storage.protocol import RangeBody, same_etag
from streamload.wording import counted

__all__ = ["DownloadLimits", "Downloaded", "Pin", "RangeStorage", "Watch", "download"]

_JITTER = random.SystemRandom()
"""Not the global generator: where everything runs in the caller's process, that one is the user's."""

_TRIES_OF_WHOLE_ANSWERS = 3
"""Where a server has never answered with a part; a proxy that sometimes does not is asked as often as any other."""


class RangeStorage(Protocol):
    """The part of a storage that reading a range needs."""

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> RangeBody:
        """Ask for the bytes `[start, end)` of the object, if it is still the one with this etag."""
        ...


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """How long a download is patient. There is no time-out on the whole: a slow download that goes on is one.

    Attributes:
        stall_timeout_s: a request that brings no byte for so long is given up, and the next one is sent.
        give_up_timeout_s: without a single byte for so long, over all tries and the waits between them, the download
            fails.
        tries: so many requests in a row without a byte, and the download fails.
        first_backoff_s: the longest wait after the first of them; it doubles with each.
        most_backoff_s: the longest wait of all.
    """

    stall_timeout_s: float = 30.0
    give_up_timeout_s: float = 120.0
    tries: int = 12
    first_backoff_s: float = 0.1
    most_backoff_s: float = 10.0

    def backoff_s(self, fruitless: int, luck: float) -> float:
        """How long to wait after so many requests in a row (at least one) without a byte; `luck` is in [0, 1).

        Between half of the longest wait and all of it, so that those who were refused together come back apart.
        """
        longest_s = min(self.most_backoff_s, self.first_backoff_s * 2.0 ** min(fruitless - 1, 60))
        return longest_s * (1.0 + luck) / 2.0


@dataclass(slots=True)
class Pin:
    """Which version of a shard is read: what the listing or the first answer says, every later one must say too.

    Attributes:
        total_bytes: the size of the shard; None as long as it is not known.
        etag: its version; None as long as it is not known, or where the storage has none.
    """

    total_bytes: int | None = None
    etag: str | None = None

    def check(self, url: str, total_bytes: int, etag: str | None) -> None:
        """Compare with an answer, and learn from it what was not known. No etag in an answer says nothing.

        Raises:
            ShardChangedError: the size or the etag differs; the pin stays as it is.
        """
        if self.total_bytes not in (None, total_bytes) or not same_etag(self.etag, etag):
            raise ShardChangedError(
                f"the shard was changed while it was in use: it had {_version(self.total_bytes, self.etag)} and has "
                f"{_version(total_bytes, etag)} now; make a new loader, and give every version of a dataset a folder "
                "of its own",
                url=url,
            )
        self.total_bytes = total_bytes
        self.etag = self.etag if etag is None else etag


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What a download took.

    Attributes:
        start, end: the bytes that were written, end exclusive; `end` is never behind the shard's end.
        requests: how many requests it took, at least one.
        throttled: how many of them were refused because there were too many.
    """

    start: int
    end: int
    requests: int
    throttled: int


class Watch:
    """How the running request of a download stands, for whoever looks on; its methods are called as things happen.

    Attributes:
        sent_s: when the running request was sent, by the loop's clock; None between two requests.
        answered_s: when its first byte came; None before that.
        asked_bytes: how much it asked for.
        position: the byte of the shard up to which everything has been written.
        received_bytes: how much the download has brought so far, over all its requests.
    """

    __slots__ = ("answered_s", "asked_bytes", "position", "received_bytes", "sent_s")

    def __init__(self) -> None:
        self.sent_s: float | None = None
        self.answered_s: float | None = None
        self.asked_bytes = self.position = self.received_bytes = 0

    def sent(self, now_s: float, asked_bytes: int) -> None:
        """A request is sent."""
        self.sent_s, self.answered_s, self.asked_bytes = now_s, None, asked_bytes

    def answered(self, now_s: float, asked_bytes: int) -> None:
        """Its first byte has come; `asked_bytes` is as before, or less where the shard ends earlier."""
        self.answered_s, self.asked_bytes = now_s, asked_bytes

    def completed(self, now_s: float) -> None:
        """It has brought all that it was asked for."""
        del now_s
        self.sent_s = None

    def failed(self, now_s: float, failure: TransientStorageError) -> None:
        """It has failed in a way that the next one may not."""
        del now_s, failure
        self.sent_s = None


async def download(
    storage: RangeStorage,
    url: str,
    start: int,
    end: int,
    write: Callable[[int, bytes], None],
    *,
    pin: Pin,
    limits: DownloadLimits | None = None,
    watch: Watch | None = None,
) -> Downloaded:
    """Fetch the bytes `[start, end)` of a shard and hand each piece to `write(offset, piece)` as it arrives.

    The pieces come in order, without gap or overlap, and never beyond what was asked. A body that breaks is continued
    from where it broke, under the pinned etag. What fails in passing is tried again after a wait that grows with every
    request in a row that brought no byte. A cancelled download writes nothing more.

    Args:
        storage: asks once; trying again is done here.
        url: the shard.
        start: the first byte; before the shard's end.
        end: exclusive; cut to the shard's end, which the first answer tells where the pin does not know it.
        write: called in the loop; what it raises ends the download.
        pin: the version of the shard; shared by all downloads of it.
        limits: patience.
        watch: is told how the download goes.

    Raises:
        ShardChangedError: an answer is of another version than the pinned one; names both.
        ShardNotFoundError: there is no such shard.
        StorageError: it cannot be read, or did not bring a byte within the limits: says what happened how often. Also
            where an answer holds more than was asked for, or the shard ends before `start`.
    """
    watch = watch or Watch()
    watch.position = start
    one = _Download(storage, url, write, start=start, end=end, pin=pin, limits=limits or DownloadLimits(), watch=watch)
    return await one.run()


class _StalledError(TransientStorageError):
    """No byte came in time."""


class _Download:
    """The state of one `download`."""

    def __init__(
        self,
        storage: RangeStorage,
        url: str,
        write: Callable[[int, bytes], None],
        *,
        start: int,
        end: int,
        pin: Pin,
        limits: DownloadLimits,
        watch: Watch,
    ) -> None:
        self._storage = storage
        self._url = url
        self._start = start
        self._end = end
        self._write = write
        self._pin = pin
        self._limits = limits
        self._watch = watch
        self._clock = asyncio.get_running_loop().time
        self._requests = 0
        self._throttled = 0
        self._progress_s = self._clock()
        self._fruitless: list[TransientStorageError] = []

    async def run(self) -> Downloaded:
        while not self._requests or self._watch.position < self._stop():
            before = self._watch.position
            if self._stop() <= before:
                raise StorageError(
                    f"bytes from {before} on were asked for, and the shard has {self._stop()}", url=self._url
                )
            try:
                await self._request()
            except TransientStorageError as exc:
                self._watch.failed(self._clock(), exc)
                self._throttled += exc.throttled
                if self._watch.position > before:
                    self._fruitless.clear()  # and on from here at once
                else:
                    self._fruitless.append(exc)
                    await self._back_off()
        return Downloaded(self._start, self._stop(), self._requests, self._throttled)

    def _stop(self) -> int:
        total_bytes = self._pin.total_bytes
        return self._end if total_bytes is None else min(self._end, total_bytes)

    async def _request(self) -> None:
        """One request for all that is missing. Raises TransientStorageError for what may be tried again."""
        self._requests += 1
        sent_s = self._clock()
        self._watch.sent(sent_s, self._stop() - self._watch.position)
        limits, body = self._limits, None
        patience_s = min(limits.stall_timeout_s, self._progress_s + limits.give_up_timeout_s - sent_s)
        deadline = asyncio.timeout(patience_s)
        try:
            async with deadline:
                body = await self._open()
                self._pin.check(self._url, body.total_bytes, body.etag)
                await self._receive(body, deadline)
                body = None  # read to its end, so its connection can be used again
        except TimeoutError:
            if not deadline.expired():
                raise
            raise _StalledError(f"no byte for {limits.stall_timeout_s:g} s", url=self._url) from None
        finally:
            if body is not None:
                await body.aclose()
        self._watch.completed(self._clock())

    async def _open(self) -> RangeBody:
        try:
            return await self._storage.open_range(self._url, self._watch.position, self._stop(), etag=self._pin.etag)
        except ShardChangedError:
            await self._name_both_versions()
            raise

    async def _name_both_versions(self) -> None:
        """A refused etag does not say what took its place; asking without one does. Raises ShardChangedError then."""
        try:
            body = await self._storage.open_range(self._url, 0, 1, etag=None)
        except TransientStorageError:
            return  # then the refusal has to do
        await body.aclose()
        self._pin.check(self._url, body.total_bytes, body.etag)

    async def _receive(self, body: RangeBody, deadline: asyncio.Timeout) -> None:
        watch, stop = self._watch, self._stop()
        async for piece in body.chunks():
            piece_bytes = len(piece)
            if not piece_bytes:
                continue
            if watch.position + piece_bytes > stop:
                raise StorageError(
                    f"the answer to a request for bytes up to {stop} holds more than that; the server, or a proxy "
                    "before it, does not keep to ranges",
                    url=self._url,
                )
            self._progress_s = self._clock()
            deadline.reschedule(self._progress_s + self._limits.stall_timeout_s)
            if watch.answered_s is None:
                watch.answered(self._progress_s, stop - watch.position)
            self._write(watch.position, piece)
            watch.position += piece_bytes
            watch.received_bytes += piece_bytes
        if watch.position < stop:
            raise TransientStorageError(
                f"an answer ended {counted(stop - watch.position, 'byte')} too early", url=self._url
            )

    async def _back_off(self) -> None:
        now_s = self._clock()
        left_s = self._progress_s + self._limits.give_up_timeout_s - now_s
        whole = [exc for exc in self._fruitless if isinstance(exc, WholeAnswerError)]
        only_whole = len(whole) == len(self._fruitless)
        tries = self._limits.tries
        if only_whole and whole[-1].never_parts:
            tries = min(tries, _TRIES_OF_WHOLE_ANSWERS)
        if len(self._fruitless) >= tries or left_s <= 0:
            if only_whole:
                raise self._no_parts() from whole[-1]
            raise self._given_up(now_s) from self._fruitless[-1]
        await asyncio.sleep(min(left_s, self._limits.backoff_s(len(self._fruitless), _JITTER.random())))

    def _no_parts(self) -> StorageError:
        times = counted(len(self._fruitless), "request")
        return StorageError(
            f"this server does not serve parts of files (the answer to {times} in a row for one was a whole file); "
            "use another one (nginx, caddy, rclone serve), or let fsspec fetch whole files, by simplecache:: before "
            "the urls of the shards",
            url=self._url,
        )

    def _given_up(self, now_s: float) -> StorageError:
        throttled = sum(exc.throttled for exc in self._fruitless)
        stalled = sum(isinstance(exc, _StalledError) for exc in self._fruitless)
        failed = len(self._fruitless) - throttled - stalled
        happened = (
            (throttled, "refused because there were too many"),
            (stalled, f"without a byte for up to {self._limits.stall_timeout_s:g} s"),
            (failed, "failed"),
        )
        advice = max(
            (throttled, "use fewer ranks at once, or ask for a higher rate limit"),
            (stalled, "check the network, the endpoint and whether the server is overloaded"),
            (failed, "check whether the server is healthy, and run again"),
        )[1]
        return StorageError(
            f"cannot be read: {counted(len(self._fruitless), 'request')} in a row brought no byte, over "
            f"{now_s - self._progress_s:.1f} s ({', '.join(f'{count} {how}' for count, how in happened if count)}; the "
            f"last: {self._fruitless[-1].message}); {advice}",
            url=self._url,
            offset=self._watch.position,
        )


def _version(total_bytes: int | None, etag: str | None) -> str:
    size = "an unknown size" if total_bytes is None else f"{total_bytes} bytes"
    return size if etag is None else f"{size} and the version {etag}"
