"""Ranks of a machine with one feeder, and with a feeder each: processor time and memory of all processes.

Two ranks with a worker each read epochs and do nothing else. The first pass counts from the constructor on, with all
that is listed, fetched and scanned; the later ones find everything in memory. Processor time is that of ranks, feeders
and workers, for a sample; memory is theirs at the end, with what several processes have mapped divided among them
(PSS). From the web server both ranks read all shards (`lanes=1`). The two take turns, and the medians are shown. Run it
with

    python benchmarks/bench_node.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import uuid
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import psutil
from decoding import CROP
from workloads import FOLDER, WORKLOADS

sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "tests"))  # the same server that the tests use

from servers.faults import FaultServer

RANKS = 2
EPOCHS = {"tiny": 60, "tokens": 60, "images": 3}
"""How many are read behind the first: some seconds."""


class Pass(NamedTuple):
    """What all ranks together have read and used.

    Attributes:
        rate: samples a second.
        used_us: microseconds of processor time a sample.
    """

    rate: float
    used_us: float


class Run(NamedTuple):
    """Both passes, MB of memory, MB fetched in the later passes, and how many processes there are."""

    first: Pass
    later: Pass
    memory_mb: float
    fetched_mb: float
    processes: int


def run_rank(name: str, urls: list[str], options: dict[str, Any]) -> None:
    """Be a rank: read epochs when stdin says so, and say how many samples came."""
    from streamload import StreamLoader
    from streamload.images import RandomResizedCrop

    of = WORKLOADS[name]
    transform = {"jpg": RandomResizedCrop(CROP)} if "jpg" in of.fields else None
    print(json.dumps("ready"), flush=True)
    first = int(sys.stdin.readline())
    with StreamLoader(
        urls, of.batch_size, shuffle=True, fields=of.fields, transform=transform, num_workers=1, **options
    ) as loader:
        for epochs in itertools.chain((first,), map(int, sys.stdin)):
            samples = sum(len(batch[0]) for _ in range(epochs) for batch in loader)
            print(json.dumps([samples, loader.statistics().fetched_bytes]), flush=True)


def helpers(launch: str) -> list[psutil.Process]:
    """The feeders and workers of a launch."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        is_of_launch = (process.info["environ"] or {}).get("TORCHELASTIC_RUN_ID") == launch
        if is_of_launch and any(part.startswith("streamload.") for part in process.info["cmdline"] or []):
            found.append(process)
    return found


def cpu_s(process: psutil.Process) -> float:
    """Seconds of processor time of all threads of a process."""
    tasks = f"/proc/{process.pid}/task"
    return sum(int(Path(tasks, task, "schedstat").read_text().split()[0]) for task in os.listdir(tasks)) / 1e9


def pss_bytes(process: psutil.Process) -> int:
    """Its memory."""
    with open(f"/proc/{process.pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def measure(name: str, urls: list[str], **options: Any) -> Run:
    """Start the ranks, have them read, and end them."""
    launch = str(uuid.uuid4())
    ranks = []
    for rank in range(RANKS):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": launch, **{key: str(n) for key, n in variables.items()}}
        command = [sys.executable, __file__, "--rank", json.dumps([name, urls, options])]
        ranks.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )

    def hear() -> list[Any]:
        return [json.loads(each.stdout.readline()) for each in ranks if each.stdout is not None]

    def processes() -> list[psutil.Process]:
        return [*helpers(launch), *(psutil.Process(each.pid) for each in ranks)]

    def read(epochs: int) -> tuple[Pass, int]:
        used_s, began_s = sum(map(cpu_s, processes())), perf_counter()
        for each in ranks:
            assert each.stdin is not None
            each.stdin.write(f"{epochs}\n")
            each.stdin.flush()
        said = hear()
        seconds, used_s = perf_counter() - began_s, sum(map(cpu_s, processes())) - used_s
        samples = sum(count for count, _ in said)
        return Pass(samples / seconds, 1e6 * used_s / samples), sum(size for _, size in said)

    hear()
    first, _ = read(1)
    later, fetched_bytes = read(EPOCHS[name])
    found = processes()
    memory = sum(map(pss_bytes, found))
    for each in ranks:
        assert each.stdin is not None
        each.stdin.close()
    for each in ranks:
        each.wait()
    return Run(first, later, memory / 1e6, fetched_bytes / 1e6, len(found))


def row(title: str, feeders: str, runs: list[Run]) -> str:
    """A line of the table: medians, and for processor time of the first pass the range."""
    columns = zip(*((*run.first, *run.later, run.memory_mb, run.fetched_mb) for run in runs), strict=True)
    first, first_us, later, later_us, memory, fetched = map(statistics.median, columns)
    used_us = [run.first.used_us for run in runs]
    return (
        f"| {title} | {feeders} | {runs[0].processes} | {first:,.0f} "
        f"| {first_us:,.1f} ({min(used_us):,.1f} to {max(used_us):,.1f}) "
        f"| {later:,.0f} | {later_us:,.1f} | {memory:,.0f} | {fetched:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(*arguments.rank)
        return
    lines = [
        "| shards | feeders | processes | first pass: samples/s | processor time, us/sample | later: samples/s "
        "| processor time, us/sample | memory, MB | fetched, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in arguments.workloads:
        shards = [os.path.abspath(path) for path in WORKLOADS[name].shards()]
        with FaultServer(WORKLOADS[name].folder) as server:
            remote = [f"{server.url}/{os.path.basename(path)}" for path in shards]
            for where, urls, options in (("a disk", shards, {}), ("a web server", remote, {"lanes": 1})):
                runs: dict[str, list[Run]] = {"one": [], "two": []}
                for _, (shown, found) in itertools.product(range(arguments.rounds), runs.items()):
                    found.append(measure(name, urls, feeders="node" if shown == "one" else None, **options))
                for shown, found in runs.items():
                    lines.append(row(f"{name}, {where}", shown, found))
                    print(lines[-1], flush=True)
    (FOLDER / "node.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
