"""Sum counts, seconds and bytes of a run by name, and integrate over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter


class Totals(dict[str, float]):
    """Numbers by name, 0 by default. A name ends in its unit, as in `decode_s`, or has a part, as in `decode_s/jpg`."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, amounts: Mapping[str, float]) -> Totals:
        """Add amounts in place, and return the sums."""
        for name, amount in amounts.items():
            self[name] = self[name] + amount
        return self

    def since(self, earlier: Mapping[str, float]) -> Totals:
        """Return the difference from an earlier copy."""
        return Totals({name: amount - earlier.get(name, 0.0) for name, amount in self.items()})

    def parts(self, name: str) -> dict[str, float]:
        """Return the parts of a name, by the text after the slash, largest first."""
        found = {key[len(name) + 1 :]: amount for key, amount in self.items() if key.startswith(f"{name}/")}
        return dict(sorted(found.items(), key=lambda each: -each[1]))


class TimeIntegral:
    """Integrate a changing number over time. Two integrals give the mean between them."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._value = self._sum = 0.0
        self._since_s = clock()

    def set(self, value: float) -> None:
        """Change the number."""
        self._sum = self.now()
        self._value = value

    def now(self) -> float:
        """Return the integral until now, in seconds times the number's unit."""
        before_s, self._since_s = self._since_s, self._clock()
        self._sum += self._value * (self._since_s - before_s)
        return self._sum
