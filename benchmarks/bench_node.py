"""Ranks of a machine with one feeder, and with a feeder each: processor time and memory of all processes.

Two ranks with a worker each read whole epochs and do nothing else. Processor time is what ranks, feeders and workers
have used in the epochs behind the first, for a sample; memory is theirs behind the last one, with what several
processes have mapped divided among them (PSS). From the web server both ranks read all shards (`lanes=1`). Run it with

    python benchmarks/bench_node.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from decoding import CROP
from workloads import FOLDER, WORKLOADS

sys.path.append(os.fspath(Path(__file__).resolve().parents[1] / "tests"))  # the same server that the tests use

from servers.faults import FaultServer

RANKS = 2
EPOCHS = 3


def run_rank(name: str, urls: list[str], options: dict[str, Any]) -> None:
    """Be a rank: read epochs when stdin says so, and say how many samples came."""
    from streamload import StreamLoader
    from streamload.images import RandomResizedCrop

    of = WORKLOADS[name]
    transform = {"jpg": RandomResizedCrop(CROP)} if "jpg" in of.fields else None
    with StreamLoader(
        urls, of.batch_size, shuffle=True, fields=of.fields, transform=transform, num_workers=1, **options
    ) as loader:
        for line in sys.stdin:
            samples = sum(len(batch[0]) for _ in range(int(line)) for batch in loader)
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


def measure(name: str, urls: list[str], **options: Any) -> tuple[float, float, float, float, int]:
    """Samples a second, microseconds a sample, MB of memory, MB fetched, and how many processes."""
    launch = str(uuid.uuid4())
    ranks = []
    for rank in range(RANKS):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": launch, **{key: str(n) for key, n in variables.items()}}
        command = [sys.executable, __file__, "--rank", json.dumps([name, urls, options])]
        ranks.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )

    def read(epochs: int) -> list[tuple[int, int]]:
        for each in ranks:
            assert each.stdin is not None
            each.stdin.write(f"{epochs}\n")
            each.stdin.flush()
        return [json.loads(each.stdout.readline()) for each in ranks if each.stdout is not None]

    read(1)
    found = [*helpers(launch), *(psutil.Process(each.pid) for each in ranks)]
    before_s, began_s = sum(map(cpu_s, found)), perf_counter()
    said = read(EPOCHS)
    seconds, used_s = perf_counter() - began_s, sum(map(cpu_s, found)) - before_s
    memory = sum(map(pss_bytes, found))
    for each in ranks:
        assert each.stdin is not None
        each.stdin.close()
    for each in ranks:
        each.wait()
    samples = sum(count for count, _ in said)
    return samples / seconds, 1e6 * used_s / samples, memory / 1e6, sum(size for _, size in said) / 1e6, len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(*arguments.rank)
        return
    lines = [
        "| shards | feeders | processes | samples/s | processor time, us/sample | memory, MB | fetched, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in arguments.workloads:
        shards = [os.path.abspath(path) for path in WORKLOADS[name].shards()]
        with FaultServer(WORKLOADS[name].folder) as server:
            remote = [f"{server.url}/{os.path.basename(path)}" for path in shards]
            for where, urls, options in (("a disk", shards, {}), ("a web server", remote, {"lanes": 1})):
                for feeders in ("node", None):
                    rate, used_us, memory, fetched, processes = measure(name, urls, feeders=feeders, **options)
                    shown = "one" if feeders else "two"
                    lines.append(
                        f"| {name}, {where} | {shown} | {processes} | {rate:,.0f} | {used_us:,.1f} | {memory:,.0f} "
                        f"| {fetched:,.0f} |"
                    )
                    print(lines[-1], flush=True)
    (FOLDER / "node.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
