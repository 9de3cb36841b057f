"""What recording a trace costs: epochs with and without one, alternating, on samples that take next to nothing.

python benchmarks/bench_trace.py --rounds 7
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from goals import Goal
from workloads import FOLDER, workload

from streamload import StreamLoader
from streamload.images import RandomResizedCrop

EPOCHS = {"tiny": 20, "images": 2}


def main() -> None:
    """Parse the arguments, run, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    for name, epochs in EPOCHS.items():
        ratio = compare(name, arguments.folder, epochs, arguments.rounds)
        print(Goal(f"{name}: seconds with a trace by those without", ratio, "<=", 1.02).line())


def compare(name: str, folder: Path, epochs: int, rounds: int) -> float:
    """The median of the ratios of neighbouring runs."""
    work = workload(name, folder)
    transform = {"jpg": RandomResizedCrop(224)} if "jpg" in work.fields else None
    ratios = []
    with StreamLoader(
        work.shards(), work.batch_size, shuffle=True, fields=work.fields, transform=transform, num_workers=2
    ) as loader:
        seconds(loader, epochs, traces=False)
        for number in range(rounds):
            order = (False, True) if number % 2 else (True, False)
            took_s = {traces: seconds(loader, epochs, traces=traces) for traces in order}
            ratios.append(took_s[True] / took_s[False])
    print(f"{name}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return statistics.median(ratios)


def seconds(loader: StreamLoader, epochs: int, *, traces: bool) -> float:
    """How long some epochs take."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        with loader.trace(f"{folder}/trace.json") if traces else nullcontext():
            for _ in range(epochs):
                for _ in loader:
                    pass
            took_s = time.perf_counter() - began_s
    return took_s


if __name__ == "__main__":
    main()
