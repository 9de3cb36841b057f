"""How fast is a dataset written anew by a function that changes nothing, beside `cp -r` and a WebDataset loop?

The source: samples of 110 kB of random bytes and a `cls`, 500 in a shard. Each run is a process of its own, timed from
its start to its end, imports included, and then until its files are on the disk (`sync`): whoever writes so much has to
wait for that. `cp` and the WebDataset loop have one process, `streamload map` two. The page cache holds the source; the
writers take turns.

    python benchmarks/bench_map.py --rounds 5
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from goals import Goal
from workloads import FOLDER

SAMPLES = 20_000
SAMPLE_BYTES = 110_000
PER_SHARD = 500
WORKERS = 2


def source_of(folder: Path, samples: int) -> Path:
    """The shards; made once."""
    from streamload import ShardWriter

    source = folder / f"map-{samples}"
    if not (source / ".streamload").exists():
        shutil.rmtree(source, ignore_errors=True)
        contents = [np.random.default_rng(seed).bytes(SAMPLE_BYTES) for seed in range(100)]
        with ShardWriter(source, max_count=PER_SHARD) as writer:
            for number in range(samples):
                data = number.to_bytes(8, "little") + contents[number % len(contents)]
                writer.write({"__key__": f"{number:08d}", "bin": data, "cls": number % 10})
    return source


def unchanged(sample: dict[str, Any]) -> dict[str, Any]:
    """The function that `streamload map` is given."""
    return sample


def webdataset_loop(source: str, target: str) -> None:
    """What its users write, shard by shard."""
    import webdataset

    os.makedirs(target)
    for name in sorted(name for name in os.listdir(source) if name.endswith(".tar")):
        dataset = webdataset.WebDataset(os.path.join(source, name), shardshuffle=False)
        with webdataset.TarWriter(os.path.join(target, name)) as sink:
            for sample in dataset:
                sink.write({key: value for key, value in sample.items() if key not in ("__url__", "__local_path__")})


def seconds(command: list[str], target: Path) -> float:
    """One run, and the time until what it has written is on the disk."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    started = perf_counter()
    subprocess.run(command, check=True, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL)
    os.sync()
    return perf_counter() - started


def main() -> None:
    """Measure, and print a table and the goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the shards are")
    parser.add_argument("--loop", nargs=2, metavar=("SOURCE", "TARGET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.loop:
        webdataset_loop(*arguments.loop)
        return
    folder = arguments.folder.absolute()  # the copies run elsewhere
    source, target = source_of(folder, arguments.samples), folder / "mapped"
    command = [sys.executable, "-m", "streamload", "map", "--workers", str(WORKERS), "bench_map:unchanged"]
    writers = {
        "cp -r": ["cp", "-r", str(source), str(target)],
        "streamload map": [*command, str(source), str(target)],
        "WebDataset loop": [sys.executable, __file__, "--loop", str(source), str(target)],
    }
    found: dict[str, list[float]] = {name: [] for name in writers}
    for _ in range(arguments.rounds):
        for name, line in writers.items():
            found[name].append(seconds(line, target))
    shutil.rmtree(target, ignore_errors=True)
    size_mb = sum(path.stat().st_size for path in source.glob("*.tar")) / 1e6
    print(f"| {size_mb:,.0f} MB in {arguments.samples // PER_SHARD} shards | s, median (range) | of cp's rate |")
    print("|---|---|---|")
    ratios = {}
    for name, times in found.items():
        ratios[name] = statistics.median(cp / mine for cp, mine in zip(found["cp -r"], times, strict=True))
        print(
            f"| {name} | {statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f}) | {ratios[name]:.2f} |"
        )
    print()
    print(Goal("a copy by map, of cp's rate", ratios["streamload map"], ">=", 0.5).line())
    print(f"{os.cpu_count()} processors; Python {platform.python_version()}")


if __name__ == "__main__":
    main()
