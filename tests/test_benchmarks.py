"""The benchmark of loaders runs and measures what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="memory and threads are counted in /proc")
@pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")
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
