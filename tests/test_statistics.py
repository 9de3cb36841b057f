"""What a loader measures of itself: its parts add up, the verdict names what limits a run, and traces agree."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_samples
from servers.faults import FaultServer
from transforms import slow, wait_a_little

from streamload import StreamLoader
from streamload.statistics import Machine, Meter, Statistics, find_limit
from streamload.totals import Event, Totals, trace_json


def shards(folder: Path) -> Path:
    samples = [{"cls": number, "bin": bytes(2000)} for number in range(200)]
    return Path(write_samples(folder / "some", samples, max_count=50))


def test_the_table_says_how_much_of_the_wait_was_for_the_first_batch() -> None:
    """Otherwise the share of the verdict contradicts the table above it."""
    meter = Meter()
    for batch in range(240):
        if batch:
            meter.add_time("step", 0.05)
        meter.add_batch(8)
        meter.add_time("wait", 3.7 if batch == 0 else 0.001)
    lines = str(meter.statistics(skipped_samples=0)).splitlines()
    (loop,) = [line for line in lines if line.startswith("  loop")]
    assert loop.endswith("waited    3.939 s, 3.700 s of it for the first batch")
    assert lines[-1] == "  limited by the training step: after the first batch the loop waits 2.0% of its time"


def test_a_run_adds_up(tmp_path: Path) -> None:
    with StreamLoader(shards(tmp_path), 10, fields=("cls",), transform={"cls": slow}, num_workers=2) as loader:
        before = loader.statistics()
        began_s = time.perf_counter()
        for _ in loader:
            pass
        wall_s = time.perf_counter() - began_s
        once = loader.statistics()
        list(loader)
        twice = loader.statistics()
    totals = once.totals
    assert before.totals["samples"] == 0
    assert (once.samples, once.batches, twice.since(once).samples) == (200, 20, 200)
    assert totals["transform_s"] == pytest.approx(totals["transform_s/cls: slow"])
    assert totals["decode_s"] == pytest.approx(totals["decode_s/cls"])
    stages_s = totals["decode_s"] + totals["transform_s"] + totals["collate_s"]
    assert 200 * 0.002 <= stages_s <= totals["workers_busy_s"] <= totals["worker_s"] <= 2 * (wall_s + 60)
    assert totals["workers_processor_s"] < totals["workers_busy_s"], "they sleep"
    assert totals["loop_worked_s"] + totals["loop_waited_s"] <= wall_s
    waits = sum(amount for name, amount in totals.items() if name.startswith("awaited_s/"))
    assert 0 < waits <= totals["feeder_s"]
    numbers = once.as_dict()
    assert numbers["samples"] == 200
    assert all(isinstance(value, int | float) for value in numbers.values())


# -- the verdict -----------------------------------------------------------------------------------------------------

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
        ("step", {"loop_worked_s": 9.8, "loop_waited_s": 0.2}, "the loop waits 2.0% of its time"),
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
        (
            "work",
            {"workers_processor_s": 2.0, "machine_processor_s": 4.0},
            "busy workers are off the processors 90% of the time",
        ),
    ],
)
def test_what_limits_a_run_is_named_with_its_figure(stage: str, changed: dict[str, float], said: str) -> None:
    limit = find_limit(run(**changed), MACHINE)
    assert (limit.stage, said in limit.sentence) == (stage, True), limit.sentence


def test_more_workers_are_advised_while_there_are_processors() -> None:
    assert find_limit(run(), MACHINE).sentence.endswith("num_workers=4 would use all processors")
    assert "make it cheaper" in find_limit(run(), MACHINE._replace(processors=2)).sentence
    alone = find_limit(run(trainer_processor_s=20.0), MACHINE._replace(workers=0))
    assert (alone.stage, "num_workers=4 would make the batches during the step" in alone.sentence) == ("work", True)


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
        assert limit.sentence.startswith(f"nothing visible yet: {batches} batch")


def test_a_first_batch_that_took_longer_than_all_others_is_mentioned() -> None:
    settled = run(loop_worked_s=9.8, loop_waited_s=0.2)
    late = Statistics(Totals({**settled, "first_batch_s": 26.0}), settled, {}, MACHINE)
    assert late.verdict.endswith("2.0% of its time; the first batch came after 26.0 s")
    assert "first batch came" not in Statistics(Totals({**settled, "first_batch_s": 8.0}), settled, {}, MACHINE).verdict


# -- traces ----------------------------------------------------------------------------------------------------------


def recorded(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The complete events by name, checked against the format."""
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    read = json.loads(path.read_text())
    tracks = {each["tid"]: each["args"]["name"] for each in read["traceEvents"] if each["name"] == "thread_name"}
    for event in read["traceEvents"]:
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            events[event["name"]].append({**event, "track": tracks[event["tid"]]})
    return events


def seconds(events: list[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in events) / 1e6


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_events_add_up_to_the_statistics(tmp_path: Path, workers: int) -> None:
    with StreamLoader(
        shards(tmp_path), 10, fields=("cls", "bin"), transform={"cls": wait_a_little}, num_workers=workers
    ) as loader:
        list(loader)
        before = loader.statistics()
        with loader.trace(tmp_path / "run.json"):
            list(loader)
            seen = loader.statistics().since(before).totals
        list(loader)
    events = recorded(tmp_path / "run.json")
    assert {event["track"] for event in events["step"] + events["wait"]} == {"loop"}
    assert len({event["track"] for event in events["task"]}) in (1, 2)
    assert len(events["wait"]) == 20
    assert seconds(events["wait"]) == pytest.approx(seen["loop_waited_s"], rel=0.02, abs=1e-4)
    assert seconds(events["step"]) == pytest.approx(seen["loop_worked_s"], rel=0.02, abs=1e-4)
    # Tasks of the epochs before and after, which overlap with it, are only in one of the two.
    assert 0.5 * seen["workers_busy_s"] < seconds(events["task"]) < 1.5 * seen["workers_busy_s"]
    assert sum(event["args"]["samples"] for event in events["task"]) >= 50


def test_fetches_have_lines_of_their_own_from_where_the_trace_begins(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    files = {f"data/{path.name}": path.read_bytes() for path in folder.glob("*.tar")}
    with (
        FaultServer(files) as server,
        StreamLoader([f"{server.url}/{name}" for name in sorted(files)], 10, num_workers=1) as loader,
        loader.trace(tmp_path / "run.json"),
    ):
        list(loader)
        requests = loader.statistics().requests
    events = recorded(tmp_path / "run.json")
    assert len(events["fetch"]) == requests == 4
    assert all(event["track"].startswith("connection") for event in events["fetch"])
    assert events["scan"]


def test_events_of_one_line_do_not_overlap() -> None:
    events = [Event("fetch", "connection", start, 2.0, {}) for start in (0.0, 1.0, 2.0, 2.5, 9.0)]
    tracks = [each["tid"] for each in json.loads(trace_json(events))["traceEvents"] if each["ph"] == "X"]
    assert [sorted(set(tracks)).index(track) for track in tracks] == [0, 1, 0, 2, 0]


def test_it_is_written_where_the_block_raises_and_recorded_once(tmp_path: Path) -> None:
    with StreamLoader(shards(tmp_path), 10, fields=("cls",), num_workers=0) as loader:
        with pytest.raises(ZeroDivisionError), loader.trace(tmp_path / "run.json"):
            with pytest.raises(RuntimeError, match="recorded already"), loader.trace(tmp_path / "other.json"):
                pass
            next(iter(loader))
            raise ZeroDivisionError
        with pytest.raises(FileNotFoundError), loader.trace(tmp_path / "nowhere" / "run.json"):
            pass
    assert recorded(tmp_path / "run.json")["wait"]
    assert not (tmp_path / "other.json").exists()
