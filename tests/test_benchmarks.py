"""The benchmarks run, measure what they say, and say so where a loader fails."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
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
    text, results = run_benchmark(
        tmp_path,
        "--workloads",
        "tiny",
        "--loaders",
        "streamload",
        "WebDataset",
        "--parts",
        "speed",
        "--plot",
        str(picture),
    )
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


@needs_matplotlib
def test_a_loader_that_fails_is_shown_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark_module: Callable[[str], Any]
) -> None:
    module = benchmark_module("bench_loader")
    requested = []

    def run(what: str, loader: str, of: Any, seconds: float) -> dict[str, float]:
        requested.append((what, loader))
        if (what, loader) == ("speed", "WebDataset"):
            raise module.RunFailedError("ValueError: no luck")
        names = ("rate", "first_batch_s", "cpu_s_per_1000", "trainer_cpu", "threads_more", "shutdown_s", "peak_bytes")
        return dict.fromkeys(names, 2.0)

    monkeypatch.setattr(module, "run", run)
    benchmark = module.Benchmark([module.workload("tokens", tmp_path, 8)], ["streamload", "WebDataset"], 1.0)
    benchmark.prepare()
    benchmark.speed(3)
    benchmark.memory()
    tables = module.report(benchmark.results, ["streamload", "WebDataset"])
    assert "| tokens | WebDataset | failed: ValueError: no luck |" in tables["loader-speed.md"]
    assert "| tokens | streamload | 2 (2 to 2) |" in tables["loader-speed.md"]
    assert "WebDataset |" not in tables["loader-cost.md"]
    assert requested.count(("speed", "streamload")) == 3
    assert requested.count(("speed", "WebDataset")) == 1


def test_what_was_measured_before_a_late_failure_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark_module: Callable[[str], Any]
) -> None:
    """A peer that fails beside a busy trainer is no less fast for it."""
    module = benchmark_module("bench_loader")

    def run(what: str, loader: str, of: Any, seconds: float) -> dict[str, float]:
        if (what, loader) == ("busy", "SPDL"):
            raise module.RunFailedError("ValueError: no luck")
        names = ("rate", "first_batch_s", "cpu_s_per_1000", "trainer_cpu", "threads_more", "shutdown_s", "peak_bytes")
        return dict.fromkeys([*names, "batches_per_s", "alone_per_s", "share"], 2.0)

    monkeypatch.setattr(module, "run", run)
    benchmark = module.Benchmark([module.workload("tiny", tmp_path, 8)], ["streamload", "SPDL"], 1.0)
    benchmark.prepare()
    benchmark.speed(2)
    benchmark.memory()
    benchmark.busy(2)
    tables = module.report(benchmark.results, ["streamload", "SPDL"])
    assert "| tiny | SPDL | 2 (2 to 2) |" in tables["loader-speed.md"]
    assert "| SPDL | failed: ValueError: no luck | - |" in tables["loader-busy.md"]


def test_a_run_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, benchmark_module: Callable[[str], Any]
) -> None:
    module = benchmark_module("running")
    program = tmp_path / "hangs.py"
    child = tmp_path / "child"
    program.write_text(
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({f'{child}.part'!r}, 'w').write(str(child.pid))\n"
        f"os.rename({f'{child}.part'!r}, {str(child)!r})\n"
        "child.wait()"
    )
    monkeypatch.setattr(module, "PROGRAM", program)
    of = benchmark_module("workloads").workload("tiny", tmp_path, 4)
    for longest in (0.5, 5.0, 50.0):  # a busy machine needs longer to start the child
        monkeypatch.setattr(module, "LONGEST_RUN_S", longest)
        with pytest.raises(module.RunFailedError, match="did not end"):
            module.run("speed", "streamload", of, 1.0)
        if child.exists():
            break
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(child.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(child.read_text()))


def test_memory_is_that_of_the_whole_tree(benchmark_module: Callable[[str], Any]) -> None:
    module = benchmark_module("running")
    alone = module.tree_pss(os.getpid())
    program = "memory = bytearray(100_000_000); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert module.tree_pss(os.getpid()) > alone + 90_000_000
        child.communicate(b"\n")


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


def test_the_busy_trainer_waits_for_no_loader_that_is_fast(
    monkeypatch: pytest.MonkeyPatch, benchmark_module: Callable[[str], Any]
) -> None:
    module = benchmark_module("busy_trainer")
    monkeypatch.setattr(_Batches, "epochs", [[0]], raising=False)
    result = module.measure_busy(_Batches, None, 0.1)
    assert result["share"] == pytest.approx(result["batches_per_s"] / result["alone_per_s"])
    assert result["alone_per_s"] < 100_000  # it does work
