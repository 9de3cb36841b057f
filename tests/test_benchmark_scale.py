"""The plan for internet scale: its arithmetic against real plans, and the program at a small size."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamload.order.plan import ShardCounts

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHARDS, SAMPLES, SAMPLE_BYTES = 60, 500, 64_000


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the benchmarks as they do themselves; all of them are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(
    ("lanes", "feeders", "about"), [(4, 1, 1.0), (4, 2, 2.0), (8, 2, 1.0), (2, 1, 2.0), (1, 1, 3.9)]
)
def test_the_bytes_that_readers_fetch_are_those_of_the_formula(
    module: Callable[[str], Any], lanes: int, feeders: int, about: float, in_turn: bool
) -> None:
    """By the plans of all readers, whose rows together are the dataset once."""
    scale_traffic = module("scale_traffic")
    counts = ShardCounts.of([SAMPLES] * SHARDS)
    found = []
    for rank in range(4):
        for feeder in range(feeders):
            reader = scale_traffic.Reader(4, 32, lanes, 400, feeders, rank, feeder, in_turn)
            found.append(scale_traffic.traffic(reader.plan(counts), SAMPLES, SAMPLE_BYTES, turn=reader.turn))
    assert sum(one.rows for one in found) == SHARDS * SAMPLES // 128 * 128
    wanted = sum(one.row_bytes for one in found)
    times = sum(one.fetched_bytes for one in found) / wanted
    expected = scale_traffic.times_expected(reader, SHARDS * SAMPLES, SAMPLE_BYTES)
    assert times == pytest.approx(expected, rel=0.04)
    assert times == pytest.approx(2.0 if in_turn and feeders == 2 else about, rel=0.06)


def test_parts_that_are_held_are_those_of_the_window(module: Callable[[str], Any]) -> None:
    scale_traffic = module("scale_traffic")
    counts = ShardCounts.of([SAMPLES] * SHARDS)
    per_part = scale_traffic.PART_BYTES / SAMPLE_BYTES
    for window in (0, 2_000):
        found = scale_traffic.traffic(scale_traffic.Reader(1, 32, 1, window).plan(counts), SAMPLES, SAMPLE_BYTES)
        assert window / per_part <= found.most_held <= window / per_part + 6
        assert found.times == pytest.approx(1.0, rel=0.01)


def test_the_loss_of_a_feeder_is_hidden_by_the_batches_ahead(module: Callable[[str], Any]) -> None:
    model, traffic = module("scale_model"), module("scale_traffic")
    reader = traffic.Reader(8, 100, 32, 1_000, 4)
    stalls = []
    for ahead in (1, 10, 40, 80):
        cluster = model.Cluster(samples_per_s=1_000.0, batches_ahead=ahead)  # a step takes 0.1 s
        stalls.append(model.loss(cluster, reader, 5.0).stalled_s)
    assert stalls == sorted(stalls, reverse=True)
    assert stalls[0] == pytest.approx(5.0, abs=0.2)
    assert stalls[1] == pytest.approx(4.0, abs=0.2)
    assert stalls[-1] == 0.0


def test_a_node_that_shares_a_feeder_reads_one_list(module: Callable[[str], Any]) -> None:
    model, traffic = module("scale_model"), module("scale_traffic")
    alone, shared, thin, wide, *_ = model.layouts(16, 32, 400, 4)
    first = traffic.Traffic(rows=32, shards=1, parts=3, fetched_bytes=3 << 23, row_bytes=1 << 20, most_held=3)
    cluster, measured = model.Cluster(ranks_of_node=4), model.Measured(2.0, 1_000, 100)
    one, other = (model.start(layout, cluster, measured, first) for layout in (alone, shared))
    assert (one.index_requests, other.index_requests) == (16, 4)
    assert one.requests_of_node == 4 * (1 + 1 + model.TABLES_AHEAD + 3)
    assert one.requests - other.requests == 12
    flows = [model.links(layout, cluster, measured, 1_000, times) for layout, times in ((alone, 1.0), (wide, 1.0))]
    assert flows[0].into_trainer_node == 0
    assert flows[1].into_trainer_node == pytest.approx(4 * cluster.samples_per_s * cluster.slot_bytes)
    assert thin.reader.lanes * 4 == wide.reader.lanes


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="memory is counted in /proc")
def test_the_program_runs_at_a_small_size(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "scale.py"), "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    ((_, loader),) = found["loaders"]
    assert loader["index_requests"] == 1
    assert loader["state_bytes"] < 300
    assert found["listing"]["sent_bytes"] > 0
    for one in found["simulated"]:
        times = one["epoch"]["fetched_bytes"] / one["epoch"]["row_bytes"]
        assert times == pytest.approx(one["expected"], rel=0.05)
    assert done.stdout.count("\n| --- |") == 8
