"""How fast are images packed, and what does a smaller image give to training?

The first table: 20,000 JPEG files of some 30 to 110 kB in 20 class folders are packed by `shardify`, by WebDataset's
`ShardWriter` in the loop that its documentation shows, and by LitData's `optimize`; two worker processes each, except
for ShardWriter, which has none. Each run is a process of its own, timed from its start to its end, imports included.
The packers take turns, in another order each time. The page cache holds the source; none of them waits until its shards
are on the disk. Before each run the machine is made to write out what the one before has
left behind, and has touched the memory that the shards will take: to back memory that was never used costs a virtual
machine's host time, as much for every packer, and that was a third of the time of the fastest.

The second table: batches a second from the originals, and from shards that were packed with `--resize 256`; only
decoding and RandomResizedCrop(224), two workers.

    python benchmarks/bench_shardify.py --runs 5
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from touched_memory import touch_memory
from workloads import FOLDER, RECIPE, WORKLOADS

IMAGES = 20_000
CLASSES = 20
WORKERS = 2
SHARD_BYTES = 256_000_000
SOURCE = FOLDER / f"imagefolder-{RECIPE}"
TARGET = FOLDER / "packed"
TOUCHED_BYTES = 4 << 30
RESIZED_TO = 256
BATCH = 128


def image_folder() -> Path:
    """The images of the workload of that name as an ImageFolder; made once, which takes some minutes."""
    done = SOURCE.with_suffix(".done")
    if not done.exists():
        shutil.rmtree(SOURCE, ignore_errors=True)
        for label in range(CLASSES):
            (SOURCE / f"class{label:02}").mkdir(parents=True)
        for number, sample in enumerate(WORKLOADS["images"].make(IMAGES)):
            path = SOURCE / f"class{number % CLASSES:02}" / f"{sample['__key__']}.jpg"
            path.write_bytes(sample["jpg"])
        done.touch()
    return SOURCE


def shardify(source: str, target: str, *options: str) -> None:
    from streamload.cli.shardify import app

    app([source, target, "--workers", str(WORKERS), *options], standalone_mode=False)


def shard_writer(source: str, target: str) -> None:
    """The loop in WebDataset's documentation on creating a dataset, from a folder instead of from torchvision."""
    import webdataset

    os.makedirs(target)
    names = sorted(os.listdir(source))
    paths = [
        (os.path.join(source, name, file), n)
        for n, name in enumerate(names)
        for file in sorted(os.listdir(os.path.join(source, name)))
    ]
    with webdataset.ShardWriter(f"{target}/shard-%06d.tar", maxsize=SHARD_BYTES, maxcount=IMAGES, verbose=0) as sink:
        for number, (path, label) in enumerate(paths):
            with open(path, "rb") as stream:
                image = stream.read()
            sink.write({"__key__": f"sample{number:06}", "jpg": image, "cls": label})


def litdata_sample(item: tuple[str, int]) -> dict[str, object]:
    path, label = item
    with open(path, "rb") as stream:
        return {"image": stream.read(), "label": label}


def litdata_optimize(source: str, target: str) -> None:
    from litdata import optimize

    names = sorted(os.listdir(source))
    items = [
        (os.path.join(source, name, file), n)
        for n, name in enumerate(names)
        for file in sorted(os.listdir(os.path.join(source, name)))
    ]
    optimize(fn=litdata_sample, inputs=items, output_dir=target, num_workers=WORKERS, chunk_bytes=SHARD_BYTES)


PACKERS = {
    "streamload shardify": lambda source, target: shardify(source, target),
    "WebDataset ShardWriter": shard_writer,
    "LitData optimize": litdata_optimize,
}


def cpu_seconds() -> float:
    """What the processes that have ended by now, and their children, have used of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def packed_seconds(packer: str) -> tuple[float, float]:
    """One run in a fresh process, from its start to its end: seconds, and seconds of processors."""
    shutil.rmtree(TARGET, ignore_errors=True)
    os.sync()  # what the run before has left in memory is not this one's burden
    for path in SOURCE.glob("*/*.jpg"):
        path.read_bytes()
    touch_memory(TOUCHED_BYTES)
    started, used = perf_counter(), cpu_seconds()
    done = subprocess.run([sys.executable, __file__, "--pack", packer], capture_output=True, text=True, check=False)
    seconds = perf_counter() - started
    if done.returncode != 0:
        raise SystemExit(f"{packer} failed:\n{done.stderr}")
    size = sum(path.stat().st_size for path in TARGET.rglob("*") if path.is_file())
    assert size > sum(path.stat().st_size for path in SOURCE.glob("*/*.jpg")), f"{packer} did not write everything"
    return seconds, cpu_seconds() - used


def loaded_rate(shards: Path) -> float:
    """Images a second over one epoch, after some batches of warming up, in this process."""
    from streamload import StreamLoader
    from streamload.images import RandomResizedCrop

    for path in shards.glob("*.tar"):
        path.read_bytes()
    with StreamLoader(
        shards,
        BATCH,
        shuffle=True,
        fields=("jpg", "cls"),
        transform={"jpg": RandomResizedCrop(224)},
        num_workers=WORKERS,
    ) as loader:
        for number, _ in enumerate(loader):
            if number == 10:
                break
        started = perf_counter()
        count = sum(len(labels) for _, labels in loader)
        return count / (perf_counter() - started)


def run_loading(folder: Path) -> float:
    """`loaded_rate` in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--load", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"loading {folder} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def spread(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def packing_table(runs: int) -> str:
    results: dict[str, list[float]] = {name: [] for name in PACKERS}
    used: dict[str, list[float]] = {name: [] for name in PACKERS}
    names = list(PACKERS)
    for run in range(runs):
        for name in names[run % len(names) :] + names[: run % len(names)]:  # so that nobody always follows the same one
            seconds, cpu = packed_seconds(name)
            results[name].append(seconds)
            used[name].append(cpu)
            print(f"run {run + 1}: {name} {seconds:.2f} s, of processors {cpu:.2f} s", file=sys.stderr, flush=True)
    shutil.rmtree(TARGET)
    peer = results["WebDataset ShardWriter"]
    lines = ["| packer | seconds, median (range) | images/s | ratio to ShardWriter | CPU s |", "|---|---|---|---|---|"]
    for name, times in results.items():
        ratio = statistics.median(theirs / ours for ours, theirs in zip(times, peer, strict=True))
        rate = IMAGES / statistics.median(times)
        cpu = statistics.median(used[name])
        lines.append(f"| {name} | {spread(times, 2)} | {rate:,.0f} | {ratio:.1f} x | {cpu:.1f} |")
    return "\n".join(lines)


def loading_table(runs: int) -> str:
    folders = {"the originals": FOLDER / f"originals-{RECIPE}", f"--resize {RESIZED_TO}": FOLDER / f"resized-{RECIPE}"}
    options = {"the originals": [], f"--resize {RESIZED_TO}": ["--resize", str(RESIZED_TO)]}
    rates: dict[str, list[float]] = {name: [] for name in folders}
    for name, folder in folders.items():
        if not (folder / "classes.json").exists():
            command = [sys.executable, "-m", "streamload.cli.shardify", str(SOURCE), str(folder), *options[name]]
            subprocess.run([*command, "--overwrite"], check=True, stdout=subprocess.DEVNULL)
    for run in range(runs):
        for name, folder in folders.items():
            rates[name].append(run_loading(folder))
            print(f"run {run + 1}: {name} {rates[name][-1]:,.0f} images/s", file=sys.stderr, flush=True)
    lines = ["| shards of | MB | images/s, median (range) | ratio |", "|---|---|---|---|"]
    for name, folder in folders.items():
        size = sum(path.stat().st_size for path in folder.glob("*.tar")) / 1e6
        pairs = zip(rates[name], rates["the originals"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        lines.append(f"| {name} | {size:,.0f} | {spread(rates[name], 0)} | {ratio:.2f} x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each packer and of each loop")
    parser.add_argument("--only", choices=["packing", "loading"], help="one of the two tables")
    parser.add_argument("--pack", choices=list(PACKERS), help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pack:
        PACKERS[arguments.pack](str(SOURCE), str(TARGET))
        return
    if arguments.load:
        print(loaded_rate(Path(arguments.load)))
        return
    image_folder()
    tables = (
        [packing_table]
        if arguments.only == "packing"
        else [loading_table]
        if arguments.only
        else [packing_table, loading_table]
    )
    sizes = [path.stat().st_size / 1000 for path in SOURCE.glob("*/*.jpg")]
    deciles = statistics.quantiles(sizes, n=20)
    about = (
        f"{len(sizes):,} JPEG files of 500 x 375 pixels, {statistics.mean(sizes):.0f} kB in the mean "
        f"({deciles[0]:.0f} to {deciles[-1]:.0f} from the 5th to the 95th percentile); {WORKERS} workers on "
        f"{os.cpu_count()} cores; Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("streamload", "webdataset", "litdata", "simplejpeg"))
    )
    text = "\n\n".join([*(table(arguments.runs) for table in tables), about]) + ".\n"
    print(text)
    (FOLDER / "shardify.md").write_text(text)


if __name__ == "__main__":
    main()
