"""The verdict: which stage limits a run, by its figures."""

from __future__ import annotations

import pytest

from streamload.statistics import Machine, Statistics, find_limit
from streamload.totals import Totals

MACHINE = Machine(workers=2, processors=4, all_processors=4)


def run(**changed: float) -> Totals:
    """A run of 10 s in which the loop waits for two workers, who decode all the time."""
    return Totals(
        {
            "samples": 10_000,
            "made_samples": 10_000,
            "batches": 100,
            "loop_worked_s": 1.0,
            "loop_waited_s": 9.0,
            "feeder_s": 10.0,
            "feeder_processor_s": 0.5,
            "trainer_processor_s": 1.0,
            "worker_s": 20.0,
            "workers_busy_s": 19.5,
            "workers_processor_s": 19.0,
            "machine_processor_s": 20.5,
            "decode_s": 19.0,
            "decode_s/jpg": 18.0,
            "decode_s/cls": 1.0,
            "collate_s": 0.5,
            "awaited_s/work": 9.0,
            **changed,
        }
    )


WAITING = {"workers_busy_s": 2.0, "workers_processor_s": 1.9, "decode_s/jpg": 1.5, "decode_s/cls": 0.1}
FETCHING = {
    **WAITING,
    "awaited_s/network": 8.0,
    "awaited_s/work": 1.0,
    "requests": 500,
    "answered_requests": 500,
    "connection_s": 320.0,
    "answer_s": 20.0,
    "fetched_bytes": 3.2e9,
}


@pytest.mark.parametrize(
    ("stage", "changed", "said"),
    [
        ("step", {"loop_worked_s": 9.8, "loop_waited_s": 0.2}, "waits for data 2.0% of its time"),
        ("work", {}, "decoding 'jpg' is 92% of the work: 2 workers are busy 98% of the time, and the loop waits 90%"),
        ("work", {"transform_s/jpg: crop": 30.0}, "the transform (jpg: crop) is 61% of the work"),
        ("work", {"collate_s": 40.0}, "collating is 68% of the work"),
        ("network", FETCHING, "32 connections at 10.0 MB/s each, 320.0 MB/s in all"),
        ("network", {**FETCHING, "answer_s": 250.0}, "answers begin after 500 ms"),
        ("network", {**FETCHING, "throttled_requests": 60}, "60 of 500 requests were refused"),
        ("memory", {**FETCHING, "awaited_s/memory": 8.5}, "a larger memory_budget"),
        ("scan", {**WAITING, "awaited_s/scan": 9.5}, "`streamload index`"),
        ("scan", {"scan_s": 40.0}, "reading tar headers is 67% of the work"),
        ("machine", {"workers_delayed_s": 9.0, "machine_processor_s": 36.0}, "take 39% of its processors"),
        ("work", {"workers_processor_s": 2.0, "machine_processor_s": 4.0}, "they are off the processors 90% of that"),
    ],
)
def test_what_limits_a_run_is_named_with_its_figure(stage: str, changed: dict[str, float], said: str) -> None:
    limit = find_limit(run(**changed), MACHINE)
    assert (limit.stage, said in limit.sentence) == (stage, True), limit.sentence


def test_more_workers_are_advised_while_there_are_processors() -> None:
    assert find_limit(run(), MACHINE).sentence.endswith("num_workers=4 would use all processors")
    assert "make it cheaper" in find_limit(run(), MACHINE._replace(processors=2)).sentence
    alone = find_limit(run(trainer_processor_s=20.0), MACHINE._replace(workers=0))
    assert (alone.stage, "num_workers=4 would make the batches beside the step" in alone.sentence) == ("work", True)


def test_with_workers_elsewhere_the_load_of_this_machine_is_no_limit() -> None:
    elsewhere = MACHINE._replace(all_processors=0)
    assert find_limit(run(workers_delayed_s=9.0, machine_processor_s=80.0), elsewhere).stage == "work"


@pytest.mark.parametrize(
    ("batches", "worked_s", "waited_s", "stage"),
    [(1, 0.0, 8.0, "unknown"), (500, 0.2, 0.7, "unknown"), (19, 0.5, 4.5, "work"), (124, 0.1, 1.8, "work")],
)
def test_a_run_is_judged_when_there_is_enough_of_it(batches: int, worked_s: float, waited_s: float, stage: str) -> None:
    limit = find_limit(run(batches=batches, loop_worked_s=worked_s, loop_waited_s=waited_s), MACHINE)
    assert limit.stage == stage
    if stage == "unknown":
        assert limit.sentence.startswith(f"nothing that shows yet: {batches} batch")


def test_a_first_batch_that_took_longer_than_all_others_is_mentioned() -> None:
    settled = run(loop_worked_s=9.8, loop_waited_s=0.2)
    late = Statistics(Totals({**settled, "first_batch_s": 26.0}), settled, {}, MACHINE)
    assert late.verdict.endswith("2.0% of its time; the first batch came after 26.0 s")
    assert "first batch came" not in Statistics(Totals({**settled, "first_batch_s": 8.0}), settled, {}, MACHINE).verdict
