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
from workloads import FOLDER, workload

sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "tests"))  # the same server that the tests use

from servers.faults import Script

from streamload.images import RandomResizedCrop

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


_SMALL: dict[str, Any] = {"fields": ("bin", "cls"), "decode": {"bin": as_array, "cls": int}}
WORKLOADS: dict[str, dict[str, Any]] = {
    "small": _SMALL,
    "computing": {**_SMALL, "transform": {"cls": computing}},
    "sleeping": {**_SMALL, "transform": {"cls": sleeping}},
    "tiny": {"fields": ("npy", "cls")},
    "tokens": {"fields": ("npy",)},
    "images": {"fields": ("jpg", "cls"), "transform": {"jpg": RandomResizedCrop(224)}},
}
OF_SPEED_BENCHMARK = ("tiny", "tokens", "images")
"""On the datasets that loaders are compared on."""
SLOW = Script(first_byte_s=0.05, bytes_per_s=2e6)


def measure(name: str, urls: list[str], number: int | str) -> dict[str, float]:
    """One run, in this process."""
    from streamload import StreamLoader

    workers: Any = number
    with StreamLoader(urls, BATCH, shuffle=True, num_workers=workers, **WORKLOADS[name]) as loader:
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


def run(name: str, urls: list[str], *numbers: int | str) -> list[dict[str, float]]:
    """The same in a process for each of these numbers, beside each other."""
    calls = [json.dumps([name, urls, number]) for number in numbers]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--call", call], stdout=subprocess.PIPE, text=True)
        for call in calls
    ]
    found = [json.loads(process.communicate()[0] or "null") for process in processes]
    if None in found:
        raise SystemExit("a run has failed")
    return found


def compare_beside(urls: list[str], rounds: int) -> Goal:
    """Two loaders beside each other that compute: "auto" for both, and the processors divided by hand."""
    rates: dict[tuple[int | str, int | str], list[float]] = {}
    for _ in range(rounds):
        for split in ((1, 1), (1, 2), (2, 2), ("auto", "auto")):
            rates.setdefault(split, []).append(sum(each["rate"] for each in run("computing", urls, *split)))
    medians = {split: statistics.median(found) for split, found in rates.items()}
    shown = "  ".join(f"{one} and {other}: {rate:,.0f}" for (one, other), rate in medians.items())
    print(f"two loaders that compute, samples/s together with workers  {shown}", flush=True)
    auto = medians.pop(("auto", "auto"))
    return Goal("two loaders: auto by the best split", auto / max(medians.values()), ">=", 0.95)


def compare(title: str, urls: list[str], name: str, rounds: int) -> Goal:
    """Runs with each number, in turn."""
    rates: dict[int | str, list[float]] = {number: [] for number in NUMBERS}
    workers = []
    for each in range(rounds):
        for number in NUMBERS if each % 2 == 0 else reversed(NUMBERS):
            (found,) = run(name, urls, number)
            rates[number].append(found["rate"])
            if number == "auto":
                workers.append(found["workers"])
    medians = {number: statistics.median(found) for number, found in rates.items()}
    shown = "  ".join(f"{number}: {rate:,.0f}" for number, rate in medians.items())
    print(f"{title:<24} samples/s with workers  {shown}  (auto had {statistics.median(workers):.1f})", flush=True)
    best = max(rate for number, rate in medians.items() if number != "auto")
    return Goal(f"{title}: auto by the best of 1 to 4", medians["auto"] / best, ">=", 0.95)


def _shards(folder: Path) -> list[str]:
    return sorted(map(os.fspath, folder.glob("*.tar")))


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
    goals = []
    for name in arguments.only:
        of_speed = name in OF_SPEED_BENCHMARK
        shards = workload(name, arguments.folder).shards() if of_speed else _shards(dataset(arguments.folder))
        goals.append(compare(name, shards, name, arguments.rounds))
        with bucket_of(shards) as bucket:
            bucket.server.play(SLOW)
            goals.append(compare(f"{name}, slow server", bucket.urls(), name, arguments.rounds))
    if "computing" in arguments.only:
        goals.append(compare_beside(_shards(dataset(arguments.folder)), arguments.rounds))
    for goal in goals:
        print(goal.line())


if __name__ == "__main__":
    main()
