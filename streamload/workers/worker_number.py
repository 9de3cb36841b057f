"""How many workers there should be, by what they do: more where that pays, fewer where some are idle."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Observed", "WorkerNumber"]

_STARVED = 0.2
"""Of an interval: the loop waits for the workers, often enough to be worth a trial."""

_BUSY = 0.85
_IDLE = 0.6
"""Of their time: all workers have enough to do; all but one would be at work no more than so much."""

_CROWDED = 0.2
"""Of their time at work: workers that outnumber the processors wait for these."""

_RETIRE_AFTER = 3
"""Intervals for which a worker was not needed."""

_SHARE_OF_GAIN = 0.35
"""A trial pays if it gains at least so much of what as many times the workers could."""

_PROCESSORS_EXCESS = 1.1
_FIRST_REST, _LONGEST_REST = 10, 640
"""Intervals without a trial after one that did not pay; twice as many after each further one."""


class Observed(NamedTuple):
    """What happened in an interval.

    Attributes:
        seconds: its length.
        samples: that the workers made.
        busy_s: their time at work, added up.
        processor_s: of that on a processor.
        delayed_s: of that ready to run, while others had the processors.
        starved_s: in which the loop waited, and the workers were at work.
    """

    seconds: float
    samples: float
    busy_s: float
    processor_s: float
    delayed_s: float
    starved_s: float


class WorkerNumber:
    """Decides, interval by interval; does no I/O and starts nothing.

    While the loop waits for busy workers, half as many more are tried, if there are processors for them: as many as the
    workers ask for by measure, so that those that sleep do not count. If the rate does not grow by a good part of what
    that could gain, the trial is undone, and the next one is made later. A worker is retired when for some intervals
    the others would have had little to do, or more workers than processors waited for these. The bounds lie so far
    apart that the number does not oscillate.

    Args:
        first: how many there are.
        most: never more.
        processors: that they may use.

    Attributes:
        processors: as given; may be set.
        number: how many there should be now.
    """

    def __init__(self, first: int, *, most: int, processors: int) -> None:
        self.number = first
        self._most = max(first, most)
        self.processors = processors
        self._before_trial: tuple[int, float] | None = None
        self._is_first_of_trial = False
        self._rest = 0
        self._next_rest = _FIRST_REST
        self._too_many = 0

    def observe(self, seen: Observed) -> int:
        """Take in an interval; how many there should be from now on."""
        if seen.seconds <= 0 or seen.samples <= 0:
            return self.number
        rate = seen.samples / seen.seconds
        self._rest = max(0, self._rest - 1)
        if self._before_trial is not None:
            self._judge(rate)
        elif not self._rest and self._is_starved(seen) and (wanted := self._affordable(seen)) > self.number:
            self._before_trial = self.number, rate
            self._is_first_of_trial = True
            self.number = wanted
        else:
            self._retire(seen)
        return self.number

    def _judge(self, rate: float) -> None:
        """Keep or undo a trial, after an interval in which the new workers have started."""
        assert self._before_trial is not None
        if self._is_first_of_trial:
            self._is_first_of_trial = False
            return
        before, rate_before = self._before_trial
        self._before_trial = None
        possible = self.number / before - 1
        if rate / rate_before - 1 >= _SHARE_OF_GAIN * possible:
            self._next_rest = _FIRST_REST
            return
        self.number = before
        self._rest, self._next_rest = self._next_rest, min(_LONGEST_REST, 2 * self._next_rest)

    def _is_starved(self, seen: Observed) -> bool:
        return seen.starved_s >= _STARVED * seen.seconds and seen.busy_s >= _BUSY * self.number * seen.seconds

    def _affordable(self, seen: Observed) -> int:
        """How many to try: half as many more, as far as they find processors."""
        of_one = max(1e-9, (seen.processor_s + seen.delayed_s) / seen.seconds / self.number)
        fit = math.floor(_PROCESSORS_EXCESS * self.processors / of_one)
        return min(self._most, fit, self.number + max(1, self.number // 2))

    def _retire(self, seen: Observed) -> None:
        is_idle = seen.busy_s < _IDLE * (self.number - 1) * seen.seconds
        is_crowded = self.number > self.processors and seen.delayed_s > _CROWDED * seen.busy_s
        self._too_many = self._too_many + 1 if is_idle or is_crowded else 0
        if self._too_many >= _RETIRE_AFTER:
            self._too_many = 0
            self.number -= 1
