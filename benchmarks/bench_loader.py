"""How fast is each loader, and what does it cost? streamload, its peers, and what decoding alone would allow.

Every run is a process of its own; the loaders take turns; all get the same bytes in a warm page cache, the same decode
functions, two workers and a shuffle, and are used as their documentation advises (each module in peers/ says where). A
loader that fails is shown as failed. A run reads an epoch to warm up, which is checked: every sample once, and another
order in the next. Then it reads whole epochs, each timed from `iter` to its end.

Ratios are of runs in the same round, and medians over rounds. Processor time is that of the whole process tree over the
measured epochs. Peak PSS comes from runs of its own, sampled every 100 ms from outside. Run it with

    make bench            # or: python benchmarks/bench_loader.py --runs 5 --workloads tiny tokens images
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic

from goals import goals
from peers import CEILINGS, PEERS, WORKERS
from plot import plot
from results import Results
from running import RunFailedError, run
from tables import busy_table, cost_table, speed_table
from workloads import FOLDER, WORKLOADS, Workload, workload

STARTED = monotonic()
PARTS = ["speed", "memory", "busy"]


class Benchmark:
    """Runs everything in turn and keeps what it finds."""

    def __init__(self, workloads: list[Workload], loaders: list[str], seconds: float) -> None:
        self.results = Results()
        self._workloads = workloads
        self._loaders = loaders
        self._seconds = seconds

    def prepare(self) -> None:
        """Make what the loaders read, before any of them is measured."""
        for of in self._workloads:
            self.results.runs[of.name], self.results.memory[of.name] = {}, {}
            of.shards()
            for loader in self._cursor(of):
                self._try("prepare", loader, of, 0)

    def speed(self, rounds: int) -> None:
        """The loaders take turns, `rounds` times on each workload."""
        for of in self._workloads:
            for number in range(rounds):
                for loader in self._cursor(of):
                    if result := self._try("speed", loader, of, self._seconds):
                        self.results.runs[of.name].setdefault(loader, []).append(result)
                        _tell(f"{of.name} round {number + 1} of {rounds}: {loader} {result['rate']:,.0f}/s")

    def memory(self) -> None:
        """One run of each loader, in which its memory is watched."""
        for of in self._workloads:
            for loader in self._cursor(of):
                if loader not in CEILINGS and (result := self._try("memory", loader, of, self._seconds / 2)):
                    self.results.memory[of.name][loader] = result
                    _tell(f"{of.name} memory: {loader} {result['peak_bytes'] / 1e6:,.0f} MB")

    def busy(self, rounds: int) -> None:
        """The loaders take turns beside a busy trainer."""
        for of in (of for of in self._workloads if of.name == "tiny"):
            for number in range(rounds):
                for loader in self._cursor(of):
                    if loader not in CEILINGS and (result := self._try("busy", loader, of, self._seconds)):
                        self.results.busy.setdefault(loader, []).append(result)
                        _tell(f"busy round {number + 1} of {rounds}: {loader} {result['share']:.2f}")

    def _cursor(self, of: Workload) -> Iterator[str]:
        """The loaders that can be measured on a workload and have not failed on it."""
        for loader in self._loaders:
            failed = self.results.failures.keys() & {(part, of.name, loader) for part in ("prepare", *PARTS)}
            if of.name in PEERS[loader].workloads and not failed:
                yield loader

    def _try(self, what: str, loader: str, of: Workload, seconds: float) -> dict[str, float]:
        """A run's result, or nothing and a failure that is kept: that loader is not run again on that workload."""
        try:
            return run(what, loader, of, seconds)
        except RunFailedError as error:
            self.results.failures[what, of.name, loader] = str(error)
            if what == "speed":
                self.results.runs[of.name].pop(loader, None)
            _tell(f"{of.name}: {loader} failed: {error}")
            return {}


def _tell(text: str) -> None:
    print(f"[{monotonic() - STARTED:4.0f} s] {text}", file=sys.stderr, flush=True)


def _conditions(loaders: list[str]) -> str:
    versions = []
    for name in dict.fromkeys([*(PEERS[loader].library for loader in loaders), "torch", "numpy", "simplejpeg"]):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} not installed")
    machine = f"{WORKERS} workers on {os.cpu_count()} processors, warm page cache; Python {platform.python_version()}"
    return (
        f"{machine}; {', '.join(versions)}. The ceiling is one process, times {WORKERS}; at once: {WORKERS} processes."
    )


def report(results: Results, loaders: list[str]) -> dict[str, str]:
    """The tables, by the name of their files."""
    conditions = _conditions(loaders)
    texts = {"speed": speed_table(results), "cost": cost_table(results)}
    if results.busy:
        texts["busy"] = busy_table(results)
    written = {f"loader-{name}.md": f"{text}\n\n{conditions}\n" for name, text in texts.items()}
    return written | {"loader-goals.txt": "".join(goal.line() + "\n" for goal in goals(results))}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each loader on each workload")
    parser.add_argument("--seconds", type=float, default=2.5, help="how long a run measures, at least one epoch")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--loaders", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is measured")
    parser.add_argument("--quick", action="store_true", help="one run of a second each")
    parser.add_argument(
        "--samples", type=int, help="fewer samples than the workloads have, to try the benchmark itself"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where data and tables are")
    parser.add_argument("--plot", type=Path, help="write the picture there")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.seconds = 1, 1.0
    if arguments.samples:
        arguments.folder = arguments.folder / f"of-{arguments.samples}"
    return arguments


def main() -> None:
    arguments = _arguments()
    chosen = [workload(name, arguments.folder, arguments.samples) for name in arguments.workloads]
    benchmark = Benchmark(chosen, arguments.loaders, arguments.seconds)
    _tell("making the data")
    benchmark.prepare()
    if "speed" in arguments.parts:
        benchmark.speed(arguments.runs)
    if "memory" in arguments.parts:
        benchmark.memory()
    if "busy" in arguments.parts:
        benchmark.busy(min(arguments.runs, 3))
    results = benchmark.results
    for name, text in report(results, arguments.loaders).items():
        (arguments.folder / name).write_text(text)
        print(f"{text}")
    kept = asdict(results) | {"failures": {", ".join(key): why for key, why in results.failures.items()}}
    (arguments.folder / "loader.json").write_text(json.dumps(kept, indent=1))
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
