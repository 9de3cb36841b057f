"""A trace of a run: what is in it adds up to the statistics, and the file is what Perfetto reads."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from servers.faults import FaultServer
from transforms import wait_a_little

from streamload import ShardWriter, StreamLoader
from streamload.trace import Event, trace_json


def shards(folder: Path) -> Path:
    with ShardWriter(folder / "some", max_count=50) as writer:
        for number in range(200):
            writer.write({"__key__": f"{number:03d}", "cls": number, "bin": bytes(2000)})
    return folder / "some"


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
