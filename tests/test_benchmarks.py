"""The benchmarks run and measure what they say, and the cache is as good as its simulation."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="memory and threads are counted in /proc")
needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


@needs_matplotlib
@pytest.mark.exhaustive
def test_the_loader_benchmark_measures_and_writes_tables_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(BENCHMARKS / "bench_loader.py"), "--runs", "1", "--seconds", "0.1"]
    command += ["--samples", "2048", "--folder", str(tmp_path), "--workloads", "tiny", "--parts", "speed"]
    command += ["--loaders", "streamload", "WebDataset", "--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "of-2048" / "loader.json").read_text())
    assert not results["failures"]
    assert results["runs"]["tiny"].keys() == {"streamload", "WebDataset"}
    own = results["runs"]["tiny"]["streamload"][0]
    assert own["rate"] > 0
    assert own["cpu_s_per_1000"] > 0
    assert own["threads_more"] == 0
    assert "tiny, times WebDataset" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["equal", "uneven"])
def test_the_cache_hits_as_its_simulation_says_and_more_than_lru(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench_cache = importlib.import_module("bench_cache")
    shards = {"equal": bench_cache.equal, "uneven": bench_cache.uneven}[kind](24, 100_000)
    simulated, lru, bound, on_disk = (list(cache(shards, 5)) for cache in bench_cache.CACHES.values())
    assert on_disk == simulated
    assert sum(simulated) > 1.5 * sum(lru)
    assert 0.85 * sum(bound) < sum(simulated) <= sum(bound)
