"""The verdict: which stage limits a run, by figures alone and in a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from transforms import slow

from streamload import ShardWriter, StreamLoader
from streamload.totals import Totals
from streamload.verdict import Machine, find_limit

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
        ("decode", {}, "decoding 'jpg': 2 workers are busy 98% of the time, the loop waits 90% of its time"),
        ("transform", {"transform_s/jpg: crop": 30.0}, "the transform (jpg: crop) takes 61% of the work"),
        ("collate", {"collate_s": 40.0}, "collating batches"),
        ("scan", {"scan_s": 40.0}, "reading tar headers"),
        ("network", FETCHING, "32 connections at 10.0 MB/s each, 320.0 MB/s in all"),
        ("latency", {**FETCHING, "answer_s": 250.0}, "an answer begins 500 ms after its request, on 32 connections"),
        ("throttling", {**FETCHING, "throttled_requests": 60}, "it refused 60 of 500 requests"),
        ("memory", {**FETCHING, "awaited_s/memory": 8.5}, "a larger memory_budget"),
        ("order", {**WAITING, "awaited_s/order": 9.5}, "prefetch_batches"),
        ("scan", {**WAITING, "awaited_s/scan": 9.5}, "`streamload index`"),
        ("feeder", {**WAITING, "feeder_processor_s": 9.8}, "it is busy 98% of the time"),
        ("machine", {"workers_delayed_s": 9.0, "machine_processor_s": 36.0}, "take 39% of its processors"),
        (
            "transform",
            {"workers_processor_s": 2.0, "disk_bytes": 1e9, "payload_bytes": 1e9, "transform_s/jpg: wait": 90.0},
            "it sleeps or waits",
        ),
        ("disk", {"workers_processor_s": 2.0, "disk_bytes": 1e9, "payload_bytes": 1e9}, "at 100 MB/s"),
    ],
)
def test_what_limits_a_run_is_named_with_its_figure(stage: str, changed: dict[str, float], said: str) -> None:
    limit = find_limit(run(**changed), MACHINE)
    assert (limit.stage, said in limit.sentence) == (stage, True), limit.sentence


def test_more_workers_are_advised_as_far_as_there_are_processors_and_the_loop_takes_what_they_make() -> None:
    decoding = find_limit(run(), MACHINE)
    assert (decoding.workers, round(decoding.gain, 1)) == (4, 2.0)
    assert decoding.sentence.endswith("4 workers would give 2.0x")
    with_slow_loop = find_limit(run(loop_worked_s=7.0, loop_waited_s=3.0), MACHINE)
    assert (with_slow_loop.workers, round(with_slow_loop.gain, 2)) == (3, 1.43)
    assert with_slow_loop.sentence.endswith("3 workers would end the wait")
    sleeping = find_limit(run(workers_processor_s=0.5, machine_processor_s=2.0), MACHINE)
    assert sleeping.workers == 16
    assert "it sleeps or waits" in sleeping.sentence


REMOTE = Machine(workers=4, processors=8, all_processors=2, remote_feeders=4)
"""Four feeders with a worker and two processors each, and a trainer on a small machine."""


def test_of_several_remote_feeders_the_mean_is_given() -> None:
    """Their seconds are added up; and there is the relay."""
    few = {**WAITING, "worker_s": 40.0, "feeder_processor_s": 20.0}
    assert find_limit(run(**few), REMOTE).stage != "feeder"
    many = find_limit(run(**{**few, "feeder_processor_s": 45.0}), REMOTE)
    assert (many.stage, "the feeder processes (5): they are busy 90%" in many.sentence) == ("feeder", True)


def test_with_remote_feeders_others_on_this_machine_are_no_limit() -> None:
    """What their actors take there is among these, and says nothing of other nodes."""
    limit = find_limit(run(worker_s=40.0, workers_busy_s=39.0, workers_delayed_s=9.0, machine_processor_s=80.0), REMOTE)
    assert limit.stage == "decode"
    assert limit.workers == 4
    assert "16 workers (num_workers=4) would " in limit.sentence


def test_where_all_processors_are_in_use_what_takes_most_is_to_be_made_cheaper() -> None:
    limit = find_limit(run(), Machine(workers=2, processors=2, all_processors=2))
    assert limit.workers is None
    assert limit.gain > 1.5
    assert "make it cheaper" in limit.sentence


def test_workers_without_processes_are_advised_to_the_one_that_has_none() -> None:
    limit = find_limit(run(trainer_processor_s=20.0), Machine(workers=0, processors=4, all_processors=4))
    assert limit.stage == "caller"
    assert "num_workers=4" in limit.sentence


@pytest.mark.parametrize(
    ("batches", "worked_s", "waited_s", "stage"),
    [(1, 0.0, 0.8, "unknown"), (500, 0.5, 0.7, "unknown"), (10, 0.5, 4.0, "unknown"), (10, 40.0, 1.0, "step")],
)
def test_a_run_is_judged_when_there_is_enough_of_it(batches: int, worked_s: float, waited_s: float, stage: str) -> None:
    limit = find_limit(run(batches=batches, loop_worked_s=worked_s, loop_waited_s=waited_s), MACHINE)
    assert limit.stage == stage
    if stage == "unknown":
        assert limit.sentence.startswith(f"nothing that shows yet: {batches} batch")


def test_a_real_run_is_judged_without_its_first_batch(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "some") as writer:
        for number in range(100):
            writer.write({"__key__": str(number), "cls": number})
    with StreamLoader(tmp_path / "some", 4, transform={"cls": slow}, num_workers=1) as loader:
        assert loader.statistics().verdict == "nothing yet: no batch has been delivered"
        while loader.statistics().limit.stage == "unknown":
            list(loader)
        limit = loader.statistics().limit
    assert limit.stage == "transform"
    assert limit.workers is not None
    assert limit.workers > 1
    assert "the transform (cls: slow)" in limit.sentence
