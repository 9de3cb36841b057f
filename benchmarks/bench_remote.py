"""Training from a bucket: how fast, how soon, beside a busy trainer, and within how much memory?

The server is a process of its own on this machine. "Far" is a server that delays each first byte by 50 ms and gives
each connection at most 40 MB/s; "near" does neither, so that the machine's processors are the limit, which server,
reader and trainer share; "thin" gives each connection 5 MB/s, so that they are not. Every run is a process of its own,
and the readers take turns.

Rates are of the files' bytes, over a whole pass from the call of `iter` on: what a loader starts before, in its
constructor, is in the time to the first batch. Ratios are of runs in the same round. Run it with

    python benchmarks/bench_remote.py           # --quick for a first look, --parts for some of it
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from pathlib import Path

from goals import Goal
from remote_budget import measure_budget
from remote_first_pass import measure_first_pass
from remote_parts import Sizes, measure_first_batch, measure_gil, measure_throughput
from remote_sleepers import measure_sleepers
from workloads import FOLDER, workload

Part = Callable[[Sizes], tuple[str, list[Goal]]]
PARTS: dict[str, Part] = {
    "first_pass": measure_first_pass,
    "throughput": measure_throughput,
    "first": measure_first_batch,
    "gil": measure_gil,
    "sleepers": measure_sleepers,
    "budget": measure_budget,
}
SMALL = Sizes(rounds=1, copies=2, shards=1000, sustained_copies=2, budget_bytes=256 << 20, sleep_s=2.0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=Sizes.rounds, help="runs of each reader")
    parser.add_argument("--budget-mib", type=int, default=Sizes.budget_bytes >> 20, help="the data are 20 times that")
    parser.add_argument("--sleep", type=float, default=Sizes.sleep_s, help="seconds that a consumer sleeps")
    parser.add_argument("--quick", action="store_true", help="one round, and little data")
    parser.add_argument("--samples", type=int, help="fewer images, to try the benchmark itself")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where data and tables are")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    images = workload("images", arguments.folder, arguments.samples)
    requested = Sizes(rounds=arguments.rounds, budget_bytes=arguments.budget_mib << 20, sleep_s=arguments.sleep)
    sizes = (SMALL if arguments.quick else requested).of(images.shards())
    texts, goals = [], []
    for name in arguments.parts:
        text, found = PARTS[name](sizes)
        texts.append(text)
        goals += found
        print(text, flush=True)
    lines = [goal.line() for goal in goals]
    about = f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}"
    (arguments.folder / "remote.md").write_text("\n\n".join([*texts, *("- " + line for line in lines), about]) + "\n")
    print("\n".join(lines), about, sep="\n")


if __name__ == "__main__":
    main()
