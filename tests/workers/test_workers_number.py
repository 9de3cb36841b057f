"""How many workers there should be: simulated pools, whose rate is known, and a real one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import exhaustive
from processes import children

from streamload import ShardWriter, StreamLoader
from streamload.workers.worker_number import Observed, WorkerNumber


def simulated(
    wanted: WorkerNumber,
    intervals: int,
    *,
    service_s: float,
    processor_s: float,
    processors: int,
    loop_rate: float = 1e9,
    noise: float = 0.0,
) -> list[int]:
    """The number after each interval, where a worker takes `service_s` for a sample, and `processor_s` of it really."""
    random = np.random.default_rng(0)
    numbers = []
    for _ in range(intervals):
        possible = min(wanted.number / service_s, processors / max(processor_s, 1e-9))
        rate = min(possible, loop_rate) * (1 + noise * random.uniform(-1, 1))
        busy_s = wanted.number if rate >= 0.99 * possible or possible <= loop_rate else rate * service_s
        starved_s = 1.0 if possible < loop_rate else 0.0
        numbers.append(wanted.observe(Observed(1.0, rate, busy_s, rate * processor_s, 0.0, starved_s)))
    return numbers


def test_workers_that_sleep_become_as_many_as_may() -> None:
    wanted = WorkerNumber(2, most=16, processors=2)
    assert simulated(wanted, 40, service_s=0.01, processor_s=0.0001, processors=2)[-1] == 16


def test_workers_that_keep_up_with_the_loop_become_no_more() -> None:
    wanted = WorkerNumber(2, most=16, processors=2)
    numbers = simulated(wanted, 60, service_s=0.01, processor_s=0.0001, processors=2, loop_rate=550.0)
    assert 6 <= numbers[-1] <= 9
    assert len(set(numbers[-20:])) == 1, "it settles"


def test_there_are_no_more_than_find_a_processor() -> None:
    wanted = WorkerNumber(2, most=16, processors=2)
    assert set(simulated(wanted, 100, service_s=0.01, processor_s=0.01, processors=2)) == {2}


@pytest.mark.parametrize("seed_processor_s", [0.006, 0.007, 0.008])
def test_a_trial_that_does_not_pay_is_undone_and_made_less_and_less_often(seed_processor_s: float) -> None:
    """The rate is bounded by something else than the workers."""
    wanted = WorkerNumber(2, most=16, processors=4)
    numbers = [2]
    for _ in range(1000):
        numbers.append(wanted.observe(Observed(1.0, 200.0, float(wanted.number), 200 * seed_processor_s, 0.0, 1.0)))
    changes = sum(one != other for one, other in pairwise(numbers))
    assert numbers[-1] == 2
    assert 2 <= changes <= 16
    assert changes % 2 == 0


def test_a_worker_that_waits_for_a_processor_is_retired() -> None:
    """Such as one that was tried while a server was slow."""
    wanted = WorkerNumber(3, most=16, processors=2)
    numbers = [wanted.observe(Observed(1.0, 200.0, 3.0, 2.0, 0.9, 1.0)) for _ in range(20)]
    assert numbers[-1] == 2
    assert sorted(numbers, reverse=True) == numbers, "it stays so"


def test_workers_that_wait_for_processors_which_others_use_are_kept() -> None:
    wanted = WorkerNumber(2, most=16, processors=2)
    assert {wanted.observe(Observed(1.0, 100.0, 2.0, 1.2, 0.7, 1.0)) for _ in range(20)} == {2}


def test_idle_workers_are_retired_and_come_back_when_they_are_needed() -> None:
    wanted = WorkerNumber(4, most=16, processors=4)
    numbers = simulated(wanted, 60, service_s=0.001, processor_s=0.001, processors=4, loop_rate=300.0)
    assert numbers[-1] == 1
    assert sorted(numbers, reverse=True) == numbers, "never one too many"
    assert simulated(wanted, 60, service_s=0.01, processor_s=0.01, processors=4)[-1] == 4


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_does_not_make_it_oscillate(noise: float) -> None:
    wanted = WorkerNumber(2, most=8, processors=2)
    numbers = simulated(wanted, 400, service_s=0.01, processor_s=0.0001, processors=2, noise=noise)
    assert Counter(numbers[100:]).most_common(1)[0] == (8, 300)


def test_nothing_is_decided_while_nothing_is_made() -> None:
    wanted = WorkerNumber(3, most=8, processors=8)
    assert {wanted.observe(Observed(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)) for _ in range(20)} == {3}


@pytest.mark.parametrize(
    ("worker_s", "loop_s", "compares"), [(0.002, 0.0, int.__gt__), exhaustive((0.0, 0.02, int.__lt__))]
)
def test_a_loader_adapts_and_gives_the_same_batches(
    tmp_path: Path,
    worker_s: float,
    loop_s: float,
    compares: Callable[[int, int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a function that sleeps it gets more workers, and with a slow loop fewer."""
    with ShardWriter(tmp_path / "some", max_count=100) as writer:
        for number in range(400):
            writer.write({"__key__": str(number), "cls": number})
    sleep = time.sleep

    def sleeping(value: Any) -> Any:
        sleep(worker_s)
        return value

    options: dict[str, Any] = {"shuffle": True, "fields": ("cls",), "transform": {"cls": sleeping}}
    monkeypatch.setattr("streamload.options.processors_of_rank", lambda: 2)
    with StreamLoader(tmp_path / "some", 8, num_workers=1, **options) as fixed:
        expected = [batch[0].tolist() for _ in range(2) for batch in fixed]
    got: list[list[int]] = []
    with StreamLoader(tmp_path / "some", 8, **options) as loader:
        assert loader.num_workers == 2
        ends_s = time.monotonic() + 30
        adapted = False
        while not adapted:
            assert time.monotonic() < ends_s, "it never adapts"
            for batch in loader:
                got.append(batch[0].tolist())
                time.sleep(loop_s)
            adapted = compares(len(children("workers")), 2)
        if len(got) < len(expected):
            got += [batch[0].tolist() for batch in loader]
    assert got[: len(expected)] == expected
