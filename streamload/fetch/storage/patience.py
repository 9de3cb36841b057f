"""How often a listing, a size or a small file is asked for again; ranges of shards have the patience of `transfer/`."""

from __future__ import annotations

import random

from streamload.errors import StorageError, TransientStorageError
from streamload.fetch.storage.errors import NoConnectionError

__all__ = ["Patience"]

_TRIES, _TRIES_TO_CONNECT = 10, 3
"""In a row and in vain. Where there is no connection at all the address is wrong more often than not."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0
_JITTER = random.SystemRandom()


class Patience:
    """The patience with one request that is made until it is answered."""

    def __init__(self) -> None:
        self._failed = 0

    def progressed(self) -> None:
        """Bytes came, so what fails next is the first to fail."""
        self._failed = 0

    def wait_s(self, error: StorageError) -> float | None:
        """How long to wait before the next try, twice as long after each and with jitter; None if there is none."""
        self._failed += 1
        tries = _TRIES_TO_CONNECT if isinstance(error, NoConnectionError) else _TRIES
        if self._failed >= tries or not isinstance(error, TransientStorageError):
            return None
        longest_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** (self._failed - 1))
        return longest_s * (1.0 + _JITTER.random()) / 2.0
