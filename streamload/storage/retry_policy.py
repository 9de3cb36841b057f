"""How requests are retried: one policy for everything listed, read and written."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import NamedTuple

from streamload.errors import StorageError, TransientStorageError, without_secrets
from streamload.storage.errors import ExpiredCredentialsError, NoConnectionError, WholeAnswerError
from streamload.storage.protocol import place_of

# Failures in a row of one kind that is more often permanent: a place that has never answered probably has another
# address, a server without ranges never has them, and credentials are read again only once.
_TRIES: dict[type[StorageError], int] = {NoConnectionError: 3, WholeAnswerError: 5, ExpiredCredentialsError: 2}

# A request that was too slow for the whole time-out is repeated once: it may have been on its way, as the listing of
# a large bucket is.
_LEAST_TRIES = 2

# The longest `Retry-After` that is obeyed.
_MOST_RETRY_AFTER_S = 60.0

# Not the global generator: where everything runs in the caller's process, that one is the user's.
_JITTER = random.SystemRandom()

_log = logging.getLogger("streamload")


class RetryPolicy(NamedTuple):
    """When requests are repeated. The whole has no time-out: what is slow but progresses goes on.

    Attributes:
        stall_timeout_s: a request for a part without a byte for this long is abandoned and repeated.
        give_up_timeout_s: without a byte for this long, over all tries and the waits between them, it has failed.
        tries: this many requests in a row without a byte, and it has failed too; None for any number.
        first_backoff_s: the longest wait after the first failure; it doubles with each.
        most_backoff_s: the longest wait of all.
        warn_after_s: after this long without a byte from a host or bucket, log a warning.
    """

    stall_timeout_s: float = 30.0
    give_up_timeout_s: float = 120.0
    tries: int | None = None
    first_backoff_s: float = 0.1
    most_backoff_s: float = 10.0
    warn_after_s: float = 5.0

    def backoff_s(self, fruitless: int, luck: float) -> float:
        """Return the wait after this many requests in a row (at least one) without a byte; `luck` is in [0, 1).

        It is between half of the longest wait and all of it, so that clients refused together come back apart.
        """
        longest_s = min(self.most_backoff_s, self.first_backoff_s * 2.0 ** min(fruitless - 1, 60))
        return longest_s * (1.0 + luck) / 2.0


@dataclass(slots=True)
class _Place:
    """What the requests to a host or bucket share: whether and how often it has answered, and if a warning is out."""

    reached: bool = False
    answers: int = 0
    is_warned_of: bool = False


class Retries:
    """The policy, and the state of each place. Pickled, it is the policy alone."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self.policy = policy or RetryPolicy()
        self._places: dict[str, _Place] = {}

    def begin(self, url: str, clock: Callable[[], float] = monotonic, *, reached: bool = False) -> Attempts:
        """Return the attempts at a request that is about to be made for the first time.

        Args:
            url: what is requested.
            clock: in seconds.
            reached: the place has answered before.
        """
        place = self._places.setdefault(place_of(url), _Place())
        place.reached |= reached
        return Attempts(self.policy, place, url, clock)

    def __reduce__(self) -> tuple[type[Retries], tuple[RetryPolicy]]:
        return Retries, (self.policy,)


class Attempts:
    """The attempts at one request, repeated until it is answered or given up.

    Attributes:
        failures: why the tries since the last byte have failed.
    """

    def __init__(self, policy: RetryPolicy, place: _Place, url: str, clock: Callable[[], float]) -> None:
        self.failures: list[StorageError] = []
        self._policy = policy
        self._place = place
        self._url = url
        self._clock = clock
        self._progress_s = self._silent_since_s = clock()
        self._answers_seen = place.answers

    @property
    def spent_s(self) -> float:
        """Seconds since it began, or since the last byte."""
        return self._clock() - self._progress_s

    @property
    def left_s(self) -> float:
        """Seconds left for retrying; negative if it took longer."""
        return self._policy.give_up_timeout_s - self.spent_s

    def progressed(self) -> float:
        """Forget the failures, since bytes arrived; returns the clock's time."""
        self.failures.clear()
        place = self._place
        place.reached, place.is_warned_of = True, False
        place.answers += 1
        self._answers_seen = place.answers
        self._progress_s = self._silent_since_s = self._clock()
        return self._progress_s

    def wait_s(self, error: StorageError) -> float | None:
        """Return how long to wait before the next try, or None to give up.

        The wait doubles with each failure, and is at least the `Retry-After` of a throttled answer, if that is no
        longer than a minute.
        """
        self.failures.append(error)
        self._place.reached |= not isinstance(error, NoConnectionError)
        kinds = {type(failure) for failure in self.failures}
        tries: float = self._policy.tries or math.inf
        if len(kinds) == 1 and not (self._place.reached and isinstance(error, NoConnectionError)):
            tries = min(tries, _TRIES.get(type(error), math.inf))
        is_late = len(self.failures) >= _LEAST_TRIES and self.left_s <= 0
        if len(self.failures) >= tries or is_late or not isinstance(error, TransientStorageError):
            return None
        self.warn_of_silence()
        backoff_s = self._policy.backoff_s(len(self.failures), _JITTER.random())
        asked_s = min(error.retry_after_s or 0.0, _MOST_RETRY_AFTER_S)
        return min(max(0.0, self.left_s), backoff_s + asked_s)

    def warn_of_silence(self) -> float:
        """Log a warning if the place has been silent for long: once, until it answers again.

        Returns:
            In how many seconds the warning would be due; 0 if it was logged.
        """
        if self._answers_seen != self._place.answers:
            self._answers_seen, self._silent_since_s = self._place.answers, self._clock()
        silent_s = self._clock() - self._silent_since_s
        if silent_s < self._policy.warn_after_s:
            return self._policy.warn_after_s - silent_s
        if not self._place.is_warned_of:
            self._place.is_warned_of = True
            what = self.failures[-1].message if self.failures else "no answer"
            text = "%s: %s. Nothing has come from there for %.1f s; it is tried for up to %.0f s more"
            _log.warning(text, without_secrets(self._url), what, silent_s, max(0.0, self.left_s))
        return 0.0
