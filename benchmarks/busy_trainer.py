"""How many batches a second a loop gets that works in pure Python on each: beside a loader, and without one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import chain, repeat
from time import perf_counter
from typing import Any

from peers import Loader
from workloads import Workload

STEP_S = 0.005


def _step(rounds: int) -> int:
    """Work that holds the GIL, always the same amount."""
    total = 0
    for number in range(rounds):
        total += number * number % 7
    return total


def _rounds_of_a_step() -> int:
    """How many rounds take STEP_S on this machine, now."""
    rounds = 20_000

    def seconds() -> float:
        began = perf_counter()
        _step(rounds)
        return perf_counter() - began

    return round(rounds * STEP_S / statistics.median(seconds() for _ in range(50)))


def _batches_per_s(batches: Iterator[Any], rounds: int, seconds: float) -> float:
    """The rate of a loop with `rounds` of work on each batch."""
    began = perf_counter()
    for count, _ in enumerate(batches, 1):
        _step(rounds)
        if (now := perf_counter()) - began >= seconds:
            return count / (now - began)
    raise ValueError("there are too few batches")


def measure_busy(kind: type[Loader], workload: Workload, seconds: float) -> dict[str, float]:
    """The loop's rate with the loader, from its second epoch on, and the mean of its rates before and after it."""
    rounds = _rounds_of_a_step()
    alone_s = min(seconds, 1.0)
    alone = [_batches_per_s(repeat(None), rounds, alone_s)]
    loader = kind(workload)
    for _ in loader.epoch():  # to warm up
        pass
    beside = _batches_per_s(chain.from_iterable(loader.epoch() for _ in repeat(None)), rounds, seconds)
    loader.close()
    del loader
    alone.append(_batches_per_s(repeat(None), rounds, alone_s))
    return {"batches_per_s": beside, "alone_per_s": statistics.mean(alone), "share": beside / statistics.mean(alone)}
