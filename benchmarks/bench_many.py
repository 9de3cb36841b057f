"""How soon, and how fast, are very many small shards read? With an index and without, from disk and from a web server.

30,000 shards of two samples each are written once. Every run is a process of its own: from the constructor on to the
first batch, and to the end of the epoch, shuffled, by two workers. The server is a process on this machine; a fetched
shard takes a descriptor, so the window is small there.
Processor time is of all processes of the reader. Run it with

    make bench            # or: python benchmarks/bench_many.py --shards 3000
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from goals import Goal
from remote_bucket import FaultServer
from running import run_command
from workloads import FOLDER

from streamload import ShardWriter, StreamLoader

SAMPLES = 2
WINDOW, WINDOW_OF_FETCHED = 10_000, 250
LONGEST_S = 300.0
MOST_INDEX_FILES, FIRST_S, EPOCH_S = 40, 1.0, 4.0


def written(folder: Path, shards: int) -> Path:
    """The folder with the shards and their index; both are written if need be."""
    place = folder / f"many-{shards}"
    if not (place / ".streamload" / "index.json").exists():
        with ShardWriter(place, max_count=SAMPLES, overwrite=True) as writer:
            for number in range(SAMPLES * shards):
                value = np.full(64, number, np.int32)
                writer.write({"__key__": f"{number:08d}", "npy": value, "cls": number % 10})
    return place


@contextmanager
def without_index(place: Path) -> Iterator[Path]:
    """The same shards in a folder without an index, by links."""
    bare = place.with_name(f"{place.name}-bare")
    shutil.rmtree(bare, ignore_errors=True)
    bare.mkdir()
    for shard in place.glob("*.tar"):
        os.link(shard, bare / shard.name)
    try:
        yield bare
    finally:
        shutil.rmtree(bare)


def measure(urls: str) -> dict[str, float]:
    """Seconds to the first batch and of the epoch, and the processor time."""
    before_s = processor_s()
    began_s = perf_counter()
    window = WINDOW_OF_FETCHED if "://" in urls else WINDOW
    with StreamLoader(urls, 64, shuffle=window, num_workers=2) as loader:
        batches = iter(loader)
        next(batches)
        first_s = perf_counter() - began_s
        for _ in batches:
            pass
        epoch_s = perf_counter() - began_s
    return {"first_s": first_s, "epoch_s": epoch_s, "processor_s": processor_s() - before_s}


def processor_s() -> float:
    """Of this process and those that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def rounds_of(urls: str, rounds: int) -> dict[str, float]:
    """Medians over runs."""
    runs = [run_command([sys.executable, __file__, "--one", urls], LONGEST_S) for _ in range(rounds)]
    return {what: median(run[what] for run in runs) for what in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the shards and the table are")
    parser.add_argument("--one", metavar="URLS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    place = written(arguments.folder, arguments.shards)
    found = {"disk, index": rounds_of(os.fspath(place), arguments.rounds)}
    with without_index(place) as bare:
        found["disk, no index"] = rounds_of(os.fspath(bare), arguments.rounds)
    files = {f"data/{path.relative_to(place)}": path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with FaultServer(files) as server:
        found["web server, index"] = rounds_of(f"{server.url}/data", arguments.rounds)
    lines = [
        f"| {arguments.shards:,} shards from | first batch, s | epoch, s | processor time, s |",
        "|---|---|---|---|",
    ]
    for name, of in found.items():
        lines.append(f"| {name} | {of['first_s']:.2f} | {of['epoch_s']:.2f} | {of['processor_s']:.2f} |")
    indexed = found["disk, index"]
    n_files = len(list((place / ".streamload").iterdir()))
    lines += [
        "",
        Goal("first batch, s", indexed["first_s"], "<", FIRST_S).line(),
        Goal("epoch, s", indexed["epoch_s"], "<", EPOCH_S).line(),
        Goal("files of the index", n_files, "<=", MOST_INDEX_FILES).line(),
    ]
    text = "\n".join(lines) + "\n"
    Path(arguments.folder, "many.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
