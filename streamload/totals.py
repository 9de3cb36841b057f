"""What adds up over a run: named counts, seconds and bytes, and integrals over time of what rises and falls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import perf_counter

_BUCKETS_OF_TWO = 4
_SHORTEST_S = 1e-7


class Totals(dict[str, float]):
    """Numbers by name, 0 where there is none. A name ends in its unit, as in `decode_s`; names of parts follow a slash,
    as in `decode_s/jpg`.
    """

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, amounts: Mapping[str, float]) -> None:
        """Add to some of them."""
        for name, amount in amounts.items():
            self[name] = self[name] + amount

    def plus(self, other: Mapping[str, float]) -> Totals:
        """The sums of two."""
        total = Totals(self)
        total.add(other)
        return total

    def since(self, earlier: Mapping[str, float]) -> Totals:
        """What has been added since an earlier copy."""
        return Totals({name: amount - earlier.get(name, 0.0) for name, amount in self.items()})

    def parts(self, name: str) -> dict[str, float]:
        """The parts of one of them, by the name behind the slash, the largest first."""
        found = {key[len(name) + 1 :]: amount for key, amount in self.items() if key.startswith(f"{name}/")}
        return dict(sorted(found.items(), key=lambda each: -each[1]))


class TimeIntegral:
    """A number that changes in time, and its integral: a mean is the difference of two integrals by the time between.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._value = self._sum = 0.0
        self._since_s = clock()

    def set(self, value: float) -> None:
        """The number is another one from now on."""
        if value != self._value:
            self._sum, self._since_s, self._value = self.now(), self._clock(), value

    def now(self) -> float:
        """The integral until now, in seconds times the number's unit."""
        return self._sum + self._value * (self._clock() - self._since_s)


def duration_bucket(name: str, seconds: float) -> str:
    """The name of the count of durations as long as this one, which are within 19 % of each other."""
    return f"{name}_durations/{math.ceil(_BUCKETS_OF_TWO * math.log2(max(seconds, _SHORTEST_S)))}"


def quantile_s(totals: Totals, name: str, quantile: float) -> float:
    """The duration that a share of those counted do not exceed, at most 19 % too long; 0 where none was counted."""
    counts = sorted((int(bucket), count) for bucket, count in totals.parts(f"{name}_durations").items() if count > 0)
    left = quantile * sum(count for _, count in counts)
    for bucket, count in counts:
        left -= count
        if left <= 1e-9:
            return float(2.0 ** (bucket / _BUCKETS_OF_TWO))
    return 0.0
