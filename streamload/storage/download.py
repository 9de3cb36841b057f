"""One range of a shard, fetched whole: broken bodies are continued, and every answer must match the request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from streamload.errors import ShardChangedError, StorageError, TransientStorageError
from streamload.storage.errors import WholeAnswerError
from streamload.storage.protocol import RangeBody, same_etag
from streamload.storage.retry_policy import Retries
from streamload.text import counted

# In a row: some proxies send a whole file now and then, and servers without ranges always do.
_TRIES_OF_WHOLE_ANSWERS = 5


class RangeStorage(Protocol):
    """The part of a storage that reading a range needs."""

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> RangeBody:
        """Request the bytes `[start, end)` of the object, if it is still the one with this etag."""
        ...


@dataclass(slots=True)
class Pin:
    """Which version of a shard is read: what the listing or the first answer says, every later one must say too.

    Attributes:
        total_bytes: the size of the shard; None as long as it is not known.
        etag: its version; None as long as it is not known, or where the storage has none.
        indexed: what the pin began with is of an index, which may be older than the shard.
    """

    total_bytes: int | None = None
    etag: str | None = None
    indexed: bool = False

    def check(self, url: str, total_bytes: int, etag: str | None) -> None:
        """Compare with an answer, and take from it what was unknown. An answer without an etag matches any.

        Raises:
            ShardChangedError: the size or the etag differs; the pin stays as it is.
        """
        if self.total_bytes not in (None, total_bytes) or not same_etag(self.etag, etag):
            raise ShardChangedError(self._change(total_bytes, etag), url=url)
        self.total_bytes = total_bytes
        self.etag = self.etag if etag is None else etag

    def _change(self, total_bytes: int, etag: str | None) -> str:
        """What has changed, and what to do: of what is in an index a new loader would say the same."""
        versions = f"it had {_version(self.total_bytes, self.etag)} and has {_version(total_bytes, etag)} now"
        if not self.indexed:
            what, remedy = "while it was in use", "make a new loader"
        else:
            what, remedy = "since it was indexed", "rebuild the index with `streamload index`"
            if self.total_bytes is not None and total_bytes < self.total_bytes:
                remedy = f"if it was cut, fetch or pack it again; if it was rewritten, {remedy}"
        remedy += ", and give every version of a dataset a folder of its own"
        return f"the shard was changed {what}: {versions}; {remedy}"


class Downloaded(NamedTuple):
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
    """The progress of a download's running request, for observers; its methods are called as things happen.

    Attributes:
        sent_s: when the running request was sent, by the loop's clock; None between two requests.
        answered_s: when its first byte came; None before that.
        position: the byte of the shard up to which everything has been written.
    """

    __slots__ = ("answered_s", "position", "sent_s")

    def __init__(self) -> None:
        self.sent_s: float | None = None
        self.answered_s: float | None = None
        self.position = 0

    def sent(self, now_s: float) -> None:
        """A request is sent."""
        self.sent_s, self.answered_s = now_s, None

    def answered(self, now_s: float) -> None:
        """Its first byte has arrived."""
        self.answered_s = now_s

    def completed(self, now_s: float) -> None:
        """It has fetched everything requested."""
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
    retries: Retries | None = None,
    watch: Watch | None = None,
) -> Downloaded:
    """Fetch the bytes `[start, end)` of a shard and hand each piece to `write(offset, piece)` as it arrives.

    The pieces come in order, without gap or overlap, and never beyond what was requested. A body that breaks is
    continued from where it broke, under the pinned etag. Transient failures are retried after a wait that grows with
    every request in a row without a byte. A cancelled download writes nothing more.

    Args:
        storage: makes one request; retrying is done here.
        url: the shard.
        start: the first byte; before the shard's end.
        end: exclusive; cut to the shard's end, which the first answer says where the pin does not know it.
        write: called in the loop; what it raises ends the download.
        pin: the version of the shard; shared by all downloads of it.
        retries: how requests are retried.
        watch: follows the download.

    Raises:
        ShardChangedError: an answer is of another version than the pinned one; names both.
        ShardNotFoundError: there is no such shard.
        StorageError: it cannot be read, or no byte came within the limits: says what happened how often. Also
            where an answer holds more than was requested, or the shard ends before `start`.
    """
    watch = watch or Watch()
    watch.position = start
    one = _Download(storage, url, write, start=start, end=end, pin=pin, retries=retries or Retries(), watch=watch)
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
        retries: Retries,
        watch: Watch,
    ) -> None:
        self._storage = storage
        self._url = url
        self._start = start
        self._end = end
        self._write = write
        self._pin = pin
        self._policy = retries.policy
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._attempts = retries.begin(url, self._clock, reached=True)  # by whoever listed it
        self._warning: asyncio.TimerHandle | None = None
        self._requests = 0
        self._throttled = 0

    async def run(self) -> Downloaded:
        while not self._requests or self._watch.position < self._stop():
            before = self._watch.position
            if self._stop() <= before:
                raise StorageError(
                    f"bytes from {before} on were requested, and the shard has {self._stop()}", url=self._url
                )
            try:
                await self._request()
            except TransientStorageError as exc:
                self._watch.failed(self._clock(), exc)
                self._throttled += exc.throttled
                if self._watch.position == before:  # otherwise continue from here at once
                    await self._back_off(exc)
        return Downloaded(self._start, self._stop(), self._requests, self._throttled)

    def _stop(self) -> int:
        total_bytes = self._pin.total_bytes
        return self._end if total_bytes is None else min(self._end, total_bytes)

    async def _request(self) -> None:
        """One request for all that is missing. Raises TransientStorageError for what may be tried again."""
        self._requests += 1
        sent_s = self._clock()
        self._watch.sent(sent_s)
        body, stall_timeout_s = None, self._policy.stall_timeout_s
        deadline = asyncio.timeout(min(stall_timeout_s, self._attempts.left_s))
        self._warn_when_silent()
        try:
            async with deadline:
                body = await self._open()
                self._pin.check(self._url, body.total_bytes, body.etag)
                await self._receive(body, deadline)
                body = None  # read to its end, so its connection can be used again
        except TimeoutError:
            if not deadline.expired():
                raise
            raise _StalledError(f"no byte for {stall_timeout_s:g} s", url=self._url) from None
        finally:
            if self._warning is not None:
                self._warning.cancel()
            if body is not None:
                await body.aclose()
        self._watch.completed(self._clock())

    def _warn_when_silent(self) -> None:
        """Warn if nothing arrives for long; a request that hangs fails much later."""
        if left_s := self._attempts.warn_of_silence():
            self._warning = self._loop.call_later(max(left_s, 0.01), self._warn_when_silent)

    async def _open(self) -> RangeBody:
        try:
            return await self._storage.open_range(self._url, self._watch.position, self._stop(), etag=self._pin.etag)
        except ShardChangedError:
            await self._name_both_versions()
            raise

    async def _name_both_versions(self) -> None:
        """A refusal does not name the present version; a request without an etag does. Raises ShardChangedError."""
        try:
            body = await self._storage.open_range(self._url, 0, 1, etag=None)
        except TransientStorageError:
            return  # then the refusal must do
        await body.aclose()
        self._pin.check(self._url, body.total_bytes, body.etag)

    async def _receive(self, body: RangeBody, deadline: asyncio.Timeout) -> None:
        watch, stop = self._watch, self._stop()
        async for piece in body.chunks():
            piece_bytes = len(piece)
            if watch.position + piece_bytes > stop:
                raise StorageError(
                    f"the answer to a request for bytes up to {stop} holds more than that; the server, or a proxy "
                    "before it, does not keep to ranges",
                    url=self._url,
                )
            if not piece_bytes:  # the answer is on its way; only bytes count as progress
                deadline.reschedule(self._clock() + self._policy.stall_timeout_s)
                continue
            now_s = self._attempts.progressed()
            deadline.reschedule(now_s + self._policy.stall_timeout_s)
            if watch.answered_s is None:
                watch.answered(now_s)
            self._write(watch.position, piece)
            watch.position += piece_bytes
        if watch.position < stop:
            raise TransientStorageError(
                f"an answer ended {counted(stop - watch.position, 'byte')} too early", url=self._url
            )

    async def _back_off(self, failure: TransientStorageError) -> None:
        failures = [*self._attempts.failures, failure]
        only_whole = all(isinstance(each, WholeAnswerError) for each in failures)
        wait_s = self._attempts.wait_s(failure, _TRIES_OF_WHOLE_ANSWERS if only_whole else math.inf)
        if wait_s is None:
            raise (self._no_parts() if only_whole else self._given_up()) from failure
        await asyncio.sleep(wait_s)

    def _no_parts(self) -> StorageError:
        times = counted(len(self._attempts.failures), "request")
        return StorageError(
            f"this server does not serve parts of files (the answer to {times} in a row for one was a whole file); "
            "use another one (nginx, caddy, rclone serve), or copy the shards to a disk",
            url=self._url,
        )

    def _given_up(self) -> StorageError:
        failures = self._attempts.failures
        throttled = [exc for exc in failures if isinstance(exc, TransientStorageError) and exc.throttled]
        stalled = [exc for exc in failures if isinstance(exc, _StalledError)]
        failed = [exc for exc in failures if exc not in throttled and exc not in stalled]
        kinds: list[tuple[Sequence[StorageError], str, str]] = [
            (
                throttled,
                "refused because there were too many",
                "use fewer ranks at once, or ask for a higher rate limit",
            ),
            (
                stalled,
                f"without a byte for up to {self._policy.stall_timeout_s:g} s",
                "check the network, the endpoint and whether the server is overloaded",
            ),
            (failed, "failed", "check whether the server is healthy, and run again"),
        ]
        kinds.sort(key=lambda kind: len(kind[0]))
        most, _, advice = kinds[-1]
        happened = ", ".join(f"{len(alike)} {how}" for alike, how, _ in kinds if alike)
        return StorageError(
            f"cannot be read: {counted(len(failures), 'request')} in a row brought no byte, over "
            f"{self._attempts.spent_s:.1f} s ({happened}; the last: {most[-1].message}); {advice}",
            url=self._url,
            offset=self._watch.position,
        )


def _version(total_bytes: int | None, etag: str | None) -> str:
    size = "an unknown size" if total_bytes is None else f"{total_bytes} bytes"
    return size if etag is None else f"{size} and the version {etag}"
