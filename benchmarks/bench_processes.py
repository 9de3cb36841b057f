"""Where does the time go? Processor time of trainer, feeder and workers for each sample that streamload delivers.

It is read from the kernel's scheduler, to the nanosecond, over whole epochs behind the first. Run it with

    make bench            # or: python benchmarks/bench_processes.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from time import perf_counter

import psutil
from decoding import CROP
from peers import WORKERS
from workloads import FOLDER, WORKLOADS, Workload

from streamload import StreamLoader
from streamload.images import RandomResizedCrop

LEAST_S = 4.0


def cpu_s(process: psutil.Process) -> float:
    """Seconds of processor time of all threads of a process."""
    tasks = f"/proc/{process.pid}/task"
    return sum(int(Path(tasks, task, "schedstat").read_text().split()[0]) for task in os.listdir(tasks)) / 1e9


def processes() -> dict[str, list[psutil.Process]]:
    """Those of the only loader of this process."""
    trainer = psutil.Process()
    (feeder,) = trainer.children()
    return {"trainer": [trainer], "feeder": [feeder], "workers": feeder.children()}


def measure(of: Workload) -> tuple[float, dict[str, float]]:
    """Samples a second, and microseconds of processor time a sample by kind of process."""
    transform = {"jpg": RandomResizedCrop(CROP)} if "jpg" in of.fields else None
    with StreamLoader(
        of.shards(), of.batch_size, shuffle=True, fields=of.fields, transform=transform, num_workers=WORKERS
    ) as loader:
        for _ in loader:
            pass
        kinds = processes()
        before = {kind: sum(map(cpu_s, found)) for kind, found in kinds.items()}
        began, samples = perf_counter(), 0
        while perf_counter() - began < LEAST_S:
            samples += sum(len(batch[0]) for batch in loader)
        rate = samples / (perf_counter() - began)
        used = {kind: sum(map(cpu_s, found)) - before[kind] for kind, found in kinds.items()}
    return rate, {kind: 1e6 * seconds / samples for kind, seconds in used.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    lines = ["| workload | samples/s | trainer, us | feeder, us | workers, us | all, us |", "|---|---|---|---|---|---|"]
    for name in parser.parse_args().workloads:
        rate, used = measure(WORKLOADS[name])
        cells = [f"{rate:,.0f}", *(f"{value:,.2f}" for value in (*used.values(), sum(used.values())))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    (FOLDER / "processes.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
