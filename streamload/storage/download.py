"""Retry requests by one policy, and download ranges of shards."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import NamedTuple, TypeVar

from streamload.errors import ShardChangedError, StorageError, TransientStorageError, without_secrets
from streamload.storage.errors import ExpiredCredentialsError, NoConnectionError, WholeAnswerError
from streamload.storage.protocol import RangeBody, Storage, place_of, same_etag
from streamload.text import counted

_Result = TypeVar("_Result")

# Maximum number of consecutive failures of one kind, for kinds that are often permanent: the address of a host that
# never answered is probably wrong, a server without ranges never serves them, and credentials are read again only once.
_TRIES: dict[type[StorageError], int] = {NoConnectionError: 3, WholeAnswerError: 5, ExpiredCredentialsError: 2}

# A request is repeated once even if `give_up_timeout_s` has passed: the listing of a large bucket may be in progress
# without having sent a byte.
_LEAST_TRIES = 2

# A longer `Retry-After` is cut to this.
_MOST_RETRY_AFTER_S = 60.0

# Not the global generator, which belongs to the user if everything runs in the caller's process.
_JITTER = random.SystemRandom()

_log = logging.getLogger("streamload")


class RetryPolicy(NamedTuple):
    """Limits of retries. A slow request that makes progress is not retried.

    Attributes:
        stall_timeout_s: time without a byte until a request is repeated.
        give_up_timeout_s: time without a byte, over all tries, until the request fails.
        tries: maximum number of consecutive requests without a byte; None for any number.
        first_backoff_s: maximum wait after the first failure; it doubles with each further one.
        most_backoff_s: maximum wait after any failure, without a `Retry-After`.
        warn_after_s: time without a byte from a host or bucket until a warning.
    """

    stall_timeout_s: float = 30.0
    give_up_timeout_s: float = 120.0
    tries: int | None = None
    first_backoff_s: float = 0.1
    most_backoff_s: float = 10.0
    warn_after_s: float = 5.0


@dataclass(slots=True)
class _Place:
    """The state of a host or bucket."""

    reached: bool = False
    answered_s: float = -math.inf
    is_warned_of: bool = False


class Retries:
    """Hold the retry policy, and the state of each host or bucket."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self.policy = policy or RetryPolicy()
        self._places: dict[str, _Place] = {}

    def begin(self, url: str, clock: Callable[[], float] = monotonic, *, reached: bool = False) -> Attempts:
        """Return the attempts at a new request; `reached` is True if its host or bucket is known to answer."""
        place = self._places.setdefault(place_of(url), _Place())
        place.reached |= reached
        return Attempts(self.policy, place, url, clock)

    def repeat(self, url: str, act: Callable[[], _Result]) -> _Result:
        """Call a function, and retry it after a TransientStorageError as the policy says."""
        attempts = self.begin(url)
        while True:
            try:
                result = act()
            except StorageError as exc:
                if (wait_s := attempts.wait_s(exc)) is None:
                    raise
            else:
                attempts.progressed()
                return result
            sleep(wait_s)


class Attempts:
    """Time the attempts at one request; `failures` holds the errors since the last byte."""

    def __init__(self, policy: RetryPolicy, place: _Place, url: str, clock: Callable[[], float]) -> None:
        self.failures: list[StorageError] = []
        self.policy = policy
        self._place = place
        self.url = url
        self._clock = clock
        self._began_s = self.progress_s = clock()

    def left_s(self) -> float:
        """Return the seconds left for retrying; may be negative."""
        silent_s = self._clock() - self.progress_s
        return self.policy.give_up_timeout_s - silent_s

    def progressed(self) -> float:
        """Forget the failures, since bytes arrived. Return the current time."""
        self.failures.clear()
        self._place.reached, self._place.is_warned_of = True, False
        self.progress_s = self._place.answered_s = self._clock()
        return self.progress_s

    def wait_s(self, error: StorageError) -> float | None:
        """Return the seconds to wait before the next try, or None to give up.

        The wait doubles with each failure, less a random part of up to half, so that clients do not retry together. A
        `Retry-After` is added, cut to a minute.
        """
        self.failures.append(error)
        count = len(self.failures)
        self._place.reached |= not isinstance(error, NoConnectionError)
        tries: float = self.policy.tries or math.inf
        is_of_one_kind = len({type(failure) for failure in self.failures}) == 1
        if is_of_one_kind and not (self._place.reached and isinstance(error, NoConnectionError)):
            tries = min(tries, _TRIES.get(type(error), math.inf))
        is_late = count >= _LEAST_TRIES and self.left_s() <= 0
        if count >= tries or is_late or not isinstance(error, TransientStorageError):
            return None
        self.warn_of_silence()
        longest_s = min(self.policy.most_backoff_s, self.policy.first_backoff_s * 2.0 ** min(count - 1, 60))
        asked_s = min(error.retry_after_s or 0.0, _MOST_RETRY_AFTER_S)
        return min(max(0.0, self.left_s()), asked_s + longest_s * (1.0 + _JITTER.random()) / 2.0)

    def warn_of_silence(self) -> float:
        """Log a warning, once per silence, if the host or bucket has long been silent.

        Returns the seconds until the warning is due, 0 or less from then on.
        """
        silent_s = self._clock() - max(self._began_s, self._place.answered_s)
        if silent_s >= self.policy.warn_after_s and not self._place.is_warned_of:
            self._place.is_warned_of = True
            text = "%s: %s. No byte has arrived from there for %.1f s; retrying for up to %.0f s more"
            what = self.failures[-1].message if self.failures else "no answer"
            _log.warning(text, without_secrets(self.url), what, silent_s, max(0.0, self.left_s()))
        return self.policy.warn_after_s - silent_s


@dataclass(slots=True)
class Pin:
    """Size and etag of a shard, from the listing or the first answer; later answers must agree.

    If `indexed`, they come from an index, which may be older than the shard.
    """

    total_bytes: int | None = None
    etag: str | None = None
    indexed: bool = False

    def check(self, url: str, total_bytes: int, etag: str | None) -> None:
        """Compare with an answer, which supplies an unknown size or etag. Raises ShardChangedError if one differs."""
        if self.total_bytes in (None, total_bytes) and same_etag(self.etag, etag):
            self.total_bytes = total_bytes
            self.etag = self.etag if etag is None else etag
            return
        versions = f"it had {_version(self.total_bytes, self.etag)}, and now has {_version(total_bytes, etag)}"
        if not self.indexed:
            what, remedy = "while it was in use", "make a new loader"
        else:
            what, remedy = "since it was indexed", "rebuild the index with `streamload index`"
            if self.total_bytes is not None and total_bytes < self.total_bytes:
                remedy = f"if it was cut, fetch or pack it again; if it was rewritten, {remedy}"
        remedy += ", and give every version of a dataset a folder of its own"
        raise ShardChangedError(f"the shard was changed {what}: {versions}; {remedy}", url=url)


@dataclass(slots=True)
class RequestCounts:
    """Count requests.

    Attributes:
        throttled: number that the storage refused as too many.
        broken: number of other failures that a retry may cure, also in the middle of a body.
        answered: number whose answer has begun.
        answer_s: total seconds from the answered requests to their first bytes.
    """

    requests: int = 0
    throttled: int = 0
    broken: int = 0
    answered: int = 0
    answer_s: float = 0.0


async def download(
    storage: Storage,
    url: str,
    start: int,
    end: int,
    write: Callable[[int, bytes], None],
    *,
    pin: Pin,
    retries: Retries | None = None,
    counts: RequestCounts | None = None,
) -> int:
    """Fetch the bytes `[start, end)` of a shard and pass each piece to `write(offset, piece)` as it arrives.

    Pieces come in order, without gap or overlap. A broken body is continued under the pinned etag, and transient
    failures are retried. A cancelled download writes nothing more.

    Args:
        storage: makes single requests.
        url: the shard.
        start: the first byte; before the shard's end.
        end: the end, exclusive; cut to the shard's end.
        write: called in the loop; an exception ends the download.
        pin: shared by all downloads of the shard.
        retries: how requests are retried.
        counts: updated with every request.

    Returns:
        The end of the written bytes: `end`, cut to the shard's.

    Raises:
        ShardChangedError: an answer's version differs from the pinned one.
        ShardNotFoundError: there is no such shard.
        StorageError: the shard cannot be read or ends before `start`, or an answer is too long.
    """
    retries, counts = retries or Retries(), counts or RequestCounts()
    clock = asyncio.get_running_loop().time
    attempts = retries.begin(url, clock, reached=True)  # the host has answered the listing
    position = start
    while True:
        stop = end if pin.total_bytes is None else min(end, pin.total_bytes)
        if position >= stop:
            if position == start > 0:
                raise StorageError(f"bytes from {position} on were requested, but the shard has {stop}", url=url)
            return stop
        counts.requests += 1
        before, sent_s = position, clock()
        try:
            async with aclosing(_answer(storage, attempts, position, stop, pin)) as pieces:
                async for piece in pieces:
                    now_s = attempts.progressed()
                    if position == before:
                        counts.answered += 1
                        counts.answer_s += now_s - sent_s
                    write(position, piece)
                    position += len(piece)
        except TransientStorageError as exc:
            counts.throttled += exc.throttled
            counts.broken += not exc.throttled
            if position == before:  # after progress, continue from `position` at once
                if (wait_s := attempts.wait_s(exc)) is None:
                    raise _given_up(url, position, attempts, clock() - attempts.progress_s) from None
                await asyncio.sleep(wait_s)


async def read_range(storage: Storage, url: str, start: int, end: int, *, pin: Pin, retries: Retries) -> bytes:
    """Fetch and return the bytes `[start, end)` of a shard as `download` does; fewer if the shard ends first."""
    content = bytearray()
    await download(storage, url, start, end, lambda _, piece: content.extend(piece), pin=pin, retries=retries)
    return bytes(content)


class _StalledError(TransientStorageError):
    """No byte arrived in time."""


async def _answer(
    storage: Storage, attempts: Attempts, position: int, stop: int, pin: Pin
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of one answer as they arrive. Raises _StalledError if none comes in time."""
    clock, url, stall_timeout_s = asyncio.get_running_loop().time, attempts.url, attempts.policy.stall_timeout_s
    body: RangeBody | None = None
    deadline = asyncio.timeout(min(stall_timeout_s, attempts.left_s()))
    warning: asyncio.TimerHandle | None = None

    def warn() -> None:
        nonlocal warning
        if (left_s := attempts.warn_of_silence()) > 0.0:
            warning = asyncio.get_running_loop().call_later(max(left_s, 0.01), warn)

    warn()
    try:
        async with deadline:
            body = await _open(storage, url, position, stop, pin)
            pin.check(url, body.total_bytes, body.etag)
            stop = min(stop, body.total_bytes)
            async for piece in body.pieces:
                position += len(piece)
                if position > stop:
                    raise StorageError(
                        f"the answer to a request for bytes up to {stop} holds more; the server, or a proxy in "
                        "front of it, does not respect ranges",
                        url=url,
                    )
                deadline.reschedule(clock() + stall_timeout_s)
                if piece:  # an empty one shows that the request is alive, but only bytes count as progress
                    yield piece
            if position < stop:
                early = counted(stop - position, "byte")
                raise TransientStorageError(f"an answer ended {early} too early", url=url)
            body = None  # read to its end, so its connection can be used again
    except TimeoutError:
        if not deadline.expired():
            raise
        raise _StalledError(f"no byte for {stall_timeout_s:g} s", url=url) from None
    finally:
        if warning is not None:
            warning.cancel()
        if body is not None:
            await body.aclose()


async def _open(storage: Storage, url: str, start: int, end: int, pin: Pin) -> RangeBody:
    try:
        return await storage.open_range(url, start, end)
    except ShardChangedError:
        # A refusal does not tell the current size, which `check` needs to explain the change.
        with suppress(TransientStorageError):
            body = await storage.open_range(url, 0, 1)
            await body.aclose()
            pin.check(url, body.total_bytes, body.etag)
        raise


def _given_up(url: str, offset: int, attempts: Attempts, spent_s: float) -> StorageError:
    failures = attempts.failures
    in_a_row, last = f"{counted(len(failures), 'request')} in a row", failures[-1]
    if all(isinstance(failure, WholeAnswerError) for failure in failures):
        return StorageError(last.message, url=url)
    advice = "check whether the server is healthy, and run again"
    if isinstance(last, TransientStorageError) and last.throttled:
        advice = "use fewer ranks at once, or ask for a higher rate limit"
    elif isinstance(last, _StalledError):
        advice = "check the network, the endpoint and whether the server is overloaded"
    what = f"cannot be read: {in_a_row} received no byte, over {spent_s:.1f} s (the last: {last.message})"
    return StorageError(f"{what}; {advice}", url=url, offset=offset)


def _version(total_bytes: int | None, etag: str | None) -> str:
    size = "an unknown size" if total_bytes is None else f"{total_bytes} bytes"
    return size if etag is None else f"{size} and the version {etag}"
