"""How long does a training wait at the end of an epoch? From one epoch's last batch to the next one's first.

Beside it stand the median, the mean and the longest hundredth of the times between two batches of an epoch, and all of
it for torch's DataLoader with workers that are kept. A step of the training is a pause as long as the loader takes for
a batch, so that the loader could just keep up; or there is none. Then a loop over small batches takes them faster than
anyone can make them: they come in bursts, most a few microseconds apart, and between the bursts the loop waits for
workers. That wait, not the median, is what the end of an epoch is to be compared with. Run it with

    make bench            # or: python benchmarks/bench_epochs.py
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

from peers import PEERS, STREAMLOAD
from running import run_command
from workloads import FOLDER, WORKLOADS, Workload

LOADERS = (STREAMLOAD, "DataLoader, files")
EPOCHS = 6
LONGEST_S = 240.0


def arrivals(name: str, of: Workload, step_s: float) -> list[list[float]]:
    """When each batch of each epoch came, in seconds; the first epoch, which starts the processes, is left out."""
    loader = PEERS[name].load()(of)
    epochs = []
    for _ in range(1 + EPOCHS):
        times = []
        for _batch in loader.epoch():
            times.append(perf_counter())
            if step_s:
                sleep(step_s)
        epochs.append(times)
    loader.close()
    return epochs[1:]


def measure(name: str, of: Workload) -> dict[str, float]:
    """Milliseconds between batches and between epochs, without steps and with steps."""
    found = {}
    step_s = 0.0
    for kind in ("without steps", "with steps"):
        epochs = arrivals(name, of, step_s)
        between = [later - sooner for times in epochs for sooner, later in pairwise(times)]
        gaps = [later[0] - sooner[-1] for sooner, later in pairwise(epochs)]
        mean_s = sum(between) / len(between)
        found[f"{kind}: median"] = 1e3 * median(between)
        found[f"{kind}: mean"] = 1e3 * mean_s
        found[f"{kind}: longest hundredth"] = 1e3 * sorted(between)[len(between) * 99 // 100]
        found[f"{kind}: gap"] = 1e3 * median(gaps)
        step_s = step_s or mean_s
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["images", "tokens"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("LOADER", "WORKLOAD"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, workload = arguments.one
        print(json.dumps(measure(name, WORKLOADS[workload])))
        return
    lines = [
        "| workload | loader | steps | batches: median, ms | mean | longest hundredth | epochs | times median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in arguments.workloads:
        for name in LOADERS:
            PEERS[name].load().prepare(WORKLOADS[workload])
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in LOADERS}
        for _ in range(arguments.runs):
            for name in LOADERS:
                runs[name].append(run_command([sys.executable, __file__, "--one", name, workload], LONGEST_S))
        lines += [line for name in LOADERS for line in rows(workload, name, runs[name])]
    text = "\n".join(lines) + "\n"
    Path(FOLDER, "epochs.md").write_text(text)
    print(text)


def rows(workload: str, name: str, runs: list[dict[str, float]]) -> list[str]:
    """Lines of the table: medians over the runs."""
    lines = []
    for kind in ("without steps", "with steps"):
        kinds = ("median", "mean", "longest hundredth", "gap")
        times = [median(run[f"{kind}: {what}"] for run in runs) for what in kinds]
        cells = (workload, name, kind.split()[0], *(f"{each:.2f}" for each in times), f"{times[-1] / times[0]:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
