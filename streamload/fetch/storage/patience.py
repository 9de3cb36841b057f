"""How often listings, sizes, small files and writes by fsspec are tried again; ranges have `transfer/`'s patience."""

from __future__ import annotations

import random
from collections.abc import Callable
from time import monotonic

from streamload.errors import StorageError, TransientStorageError
from streamload.fetch.storage.errors import NoConnectionError

__all__ = ["TRIES", "Patience"]

TRIES, _TRIES_TO_CONNECT = 10, 3
"""In a row and in vain. Where nothing has ever answered the address is wrong more often than not."""

_GIVE_UP_S, _LEAST_TRIES = 60.0, 2
"""After so long without progress there is no next try. But one that took so long for itself has a second: nothing tells
whether it got on, as the listing of a large bucket does."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_JITTER = random.SystemRandom()


class Patience:
    """The patience with one request that is made until it is answered.

    Args:
        tries: how often it is made, in a row and in vain.
        clock: in seconds.

    Attributes:
        reached: whether anything has answered there, for this request or another one.
    """

    def __init__(self, tries: int = TRIES, clock: Callable[[], float] = monotonic) -> None:
        self.reached = False
        self._tries = tries
        self._clock = clock
        self._failed = 0
        self._progress_s = clock()

    def progressed(self) -> None:
        """Bytes came, so what fails next is the first to fail."""
        self.reached = True
        self._failed = 0
        self._progress_s = self._clock()

    def wait_s(self, error: StorageError) -> float | None:
        """How long to wait before the next try, twice as long after each and with jitter; None if there is none."""
        self._failed += 1
        self.reached = self.reached or not isinstance(error, NoConnectionError)
        tries = self._tries if self.reached else min(self._tries, _TRIES_TO_CONNECT)
        is_late = self._failed >= _LEAST_TRIES and self._clock() - self._progress_s >= _GIVE_UP_S
        if self._failed >= tries or is_late or not isinstance(error, TransientStorageError):
            return None
        longest_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (self._failed - 1))
        return longest_s * (1.0 + _JITTER.random()) / 2.0
