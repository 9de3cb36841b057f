"""Is `num_workers="auto"` as fast as the best fixed number?

Each run is a process of its own: a loop without work of its own reads for some seconds, and the rate counts from the
tenth second on, when "auto" has had time to adapt. The numbers take turns.

    python benchmarks/bench_auto.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_verdict import burn, dataset
from goals import Goal
from remote_bucket import bucket_of
from workloads import FOLDER

sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "tests"))  # the same server that the tests use

from servers.faults import Script

SETTLES_S, MEASURED_S = 10.0, 8.0
NUMBERS: tuple[int | str, ...] = (1, 2, 3, 4, "auto")
BATCH = 64


def as_array(data: bytes) -> np.ndarray[Any, Any]:
    """A decoder that takes next to nothing."""
    return np.frombuffer(data, np.uint8)


def computing(value: Any) -> Any:
    """A transform that takes a millisecond of a processor."""
    burn(0.001)
    return value


def sleeping(value: Any) -> Any:
    """A transform that waits for something else."""
    time.sleep(0.002)
    return value


WORKLOADS: dict[str, dict[str, Any]] = {
    "small": {"decode": {"bin": as_array, "cls": int}},
    "computing": {"decode": {"bin": as_array, "cls": int}, "transform": {"cls": computing}},
    "sleeping": {"decode": {"bin": as_array, "cls": int}, "transform": {"cls": sleeping}},
}
SLOW = Script(first_byte_s=0.05, bytes_per_s=2e6)


def measure(workload: str, urls: list[str], number: int | str) -> dict[str, float]:
    """One run, in this process."""
    from streamload import StreamLoader

    workers: Any = number
    with StreamLoader(
        urls, BATCH, fields=("bin", "cls"), shuffle=True, num_workers=workers, **WORKLOADS[workload]
    ) as loader:
        began_s = time.perf_counter()
        before = None
        while True:
            for _ in loader:
                passed_s = time.perf_counter() - began_s
                if before is None and passed_s > SETTLES_S:
                    before, since_s = loader.statistics(), time.perf_counter()
                if before is not None and passed_s > SETTLES_S + MEASURED_S:
                    seen = loader.statistics().since(before)
                    totals = seen.totals
                    return {
                        "rate": seen.samples / (time.perf_counter() - since_s),
                        "workers": totals["worker_s"] / max(1e-9, totals["feeder_s"]),
                    }


def run(workload: str, urls: list[str], number: int | str) -> dict[str, float]:
    """The same in a process of its own."""
    call = json.dumps([workload, urls, number])
    ended = subprocess.run([sys.executable, __file__, "--call", call], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def compare(name: str, urls: list[str], workload: str, rounds: int) -> Goal:
    """Runs with each number, in turn."""
    rates: dict[int | str, list[float]] = {number: [] for number in NUMBERS}
    workers = []
    for each in range(rounds):
        for number in NUMBERS if each % 2 == 0 else reversed(NUMBERS):
            found = run(workload, urls, number)
            rates[number].append(found["rate"])
            if number == "auto":
                workers.append(found["workers"])
    medians = {number: statistics.median(found) for number, found in rates.items()}
    shown = "  ".join(f"{number}: {rate:,.0f}" for number, rate in medians.items())
    print(f"{name:<24} samples/s with workers  {shown}  (auto had {statistics.median(workers):.1f})", flush=True)
    best = max(rate for number, rate in medians.items() if number != "auto")
    return Goal(f"{name}: auto by the best of 1 to 4", medians["auto"] / best, ">=", 0.95)


def main() -> None:
    """Parse the arguments, run, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.call:
        print(json.dumps(measure(*json.loads(arguments.call))))
        return
    folder = dataset(arguments.folder)
    goals = [compare(name, [os.fspath(folder)], name, arguments.rounds) for name in arguments.only]
    with bucket_of(sorted(map(os.fspath, folder.glob("*.tar")))) as bucket:
        bucket.server.play(SLOW)
        goals += [compare(f"{name}, slow server", bucket.urls(), name, arguments.rounds) for name in arguments.only]
    for goal in goals:
        print(goal.line())


if __name__ == "__main__":
    main()
