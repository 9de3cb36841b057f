"""The benchmarks run, measure what they say, and say so where a loader fails."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="memory and threads are counted in /proc")
needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is not installed")


def run_benchmark(folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / "bench_loader.py"), "--runs", "1", "--seconds", "0.1"]
    command += ["--samples", "2048", "--folder", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "of-2048" / "loader.json").read_text())


@needs_matplotlib
@pytest.mark.exhaustive
def test_the_loader_benchmark_measures_and_writes_tables_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    arguments = ["--workloads", "tiny", "--loaders", "streamload", "WebDataset", "--parts", "speed", "--plot"]
    text, results = run_benchmark(tmp_path, *arguments, str(picture))
    assert not results["failures"]
    assert results["runs"]["tiny"].keys() == {"streamload", "WebDataset"}
    own = results["runs"]["tiny"]["streamload"][0]
    assert own["rate"] > 0
    assert own["cpu_s_per_1000"] > 0
    assert own["threads_more"] == 0
    assert "tiny, times WebDataset" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of the benchmarks as they do themselves; all of them are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


class _Batches:
    """A loader whose epochs are given: lists of labels, the last one forever."""

    processes = 1
    epochs: list[list[int]]

    def __init__(self, _: Any) -> None:
        self._number = 0

    def epoch(self) -> Iterator[Any]:
        labels = self.epochs[min(self._number, len(self.epochs) - 1)]
        self._number += 1
        return iter([(labels, labels)])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("epochs", "complaint"),
    [
        ([[3, 2, 1, 0], [0, 1, 2, 3]], None),
        ([[0, 1, 2]], "3 samples"),
        ([[0, 1, 2, 2]], "not each of them once"),
        ([[0, 1, 2, 3]], "does not shuffle"),
        ([[3, 2, 1, 0], [0, 1, 2]], "3 samples"),
    ],
)
def test_a_loader_that_gives_other_samples_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    benchmark_module: Callable[[str], Any],
    epochs: list[list[int]],
    complaint: str | None,
) -> None:
    module = benchmark_module("measure")
    monkeypatch.setattr(module, "children", list)  # servers of other tests
    of = module.workload("tiny", tmp_path, 4)  # with the labels 0 to 3
    monkeypatch.setattr(_Batches, "epochs", epochs, raising=False)
    if complaint is None:
        assert module.measure(_Batches, of, 0.0, True)["rate"] > 0
    else:
        with pytest.raises(ValueError, match=complaint):
            module.measure(_Batches, of, 0.0, True)
