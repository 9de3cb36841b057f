"""How many requests run at once: more as long as the storage takes them, half as many when it refuses one."""

from __future__ import annotations

from streamload.limits import FIRST_REQUESTS, MOST_REQUESTS

__all__ = ["Concurrency"]

_FEWEST = 1


class Concurrency:
    """Slow start, then additive increase and multiplicative decrease (RFC 5681). Any monotonic clock's times; no I/O.

    Until the storage refuses a request, the limit grows by one for every request that succeeds while it is reached, so
    that it doubles in a round trip. From then on it grows by one for every `limit` of them, which is about once in a
    round trip. It is halved at most once in a round trip: a request that was sent before the last halving says nothing
    about the new limit.

    Args:
        most: an upper bound of the caller's, such as how many parts fit into memory. At least 1.
        start: where the limit starts, within the bounds.
    """

    def __init__(self, *, most: int = MOST_REQUESTS, start: int = FIRST_REQUESTS) -> None:
        if most < _FEWEST:
            raise ValueError(f"most is {most}, but at least {_FEWEST} request has to be possible")
        self._most = min(most, MOST_REQUESTS)
        self._limit = max(_FEWEST, min(start, self._most))
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
