"""How many samples a second does a loader give, against WebDataset on the same shards?

Every run is a process of its own; the loaders take turns; all get two worker processes, the same bytes in a warm page
cache, the same decode functions, and a shuffle: streamload over its window of 10,000 samples, WebDataset over 1,000 in
each worker and then, as its documentation advises, over 1,000 among the workers. Its last step is left out in the runs
"not mixed". Run it with

    make bench            # or: python benchmarks/bench_loader.py --runs 5 --workloads tiny tokens images

A run reads one epoch to warm up (its first batch is timed from before the loader is made, after the imports), and then
whole epochs, each timed from `iter` to its end. The table has medians over runs, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from workloads import FOLDER, WORKLOADS, Workload

WORKERS = 2
CROP = 224


class DecodeAndCrop:
    """RandomResizedCrop from a JPEG's bytes, the function that streamload's workers call as well."""

    def __init__(self) -> None:
        from streamload.images import RandomResizedCrop

        self._crop = RandomResizedCrop(CROP)
        self._rng = np.random.default_rng()

    def __call__(self, data: bytes) -> np.ndarray:
        return self._crop.from_encoded(memoryview(data), self._rng)


def streamload_epochs(workload: Workload) -> Iterator[Iterable[Any]]:
    from streamload import StreamLoader
    from streamload.images import RandomResizedCrop

    transform = {"jpg": RandomResizedCrop(CROP)} if workload.name == "images" else None
    loader = StreamLoader(
        workload.shards(),
        workload.batch_size,
        shuffle=True,
        fields=workload.fields,
        transform=transform,
        num_workers=WORKERS,
    )
    with loader:
        while True:
            yield loader


def webdataset_batches(workload: Workload) -> Any:
    """WebDataset's loader of batches, each from one worker."""
    import webdataset

    from streamload.decode.array_files import decode_npy

    def decode_array(data: bytes) -> np.ndarray:
        return decode_npy(memoryview(data))

    decoders = {"npy": decode_array, "jpg": DecodeAndCrop(), "cls": int}
    dataset = (
        webdataset.WebDataset(workload.shards(), shardshuffle=100)
        .shuffle(1000)
        .to_tuple(*workload.fields)
        .map_tuple(*(decoders[name] for name in workload.fields))
        .batched(workload.batch_size)
    )
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)


def webdataset_epochs(workload: Workload) -> Iterator[Iterable[Any]]:
    """As its documentation has it: batches from the workers are taken apart, shuffled and batched again."""
    loader = webdataset_batches(workload).unbatched().shuffle(1000).batched(workload.batch_size)
    while True:
        yield loader


def lean_webdataset_epochs(workload: Workload) -> Iterator[Iterable[Any]]:
    """Without that step, which costs it most: a batch then mixes the samples of a thousand of one worker only."""
    loader = webdataset_batches(workload)
    while True:
        yield loader


LOADERS: dict[str, Callable[[Workload], Iterator[Iterable[Any]]]] = {
    "streamload": streamload_epochs,
    "WebDataset": webdataset_epochs,
    "WebDataset, not mixed": lean_webdataset_epochs,
}


def measure(loader: str, workload: Workload, seconds: float) -> dict[str, float]:
    """One run: the seconds to the first batch, and the median rate of the epochs behind the first."""
    workload.shards()
    began = perf_counter()
    epochs = LOADERS[loader](workload)
    batches = iter(next(epochs))
    first = next(batches)
    first_batch_s = perf_counter() - began
    samples = sum(len(batch[0]) for batch in chain([first], batches))
    assert samples == workload.samples, f"{loader} gave {samples} of {workload.samples} samples"
    rates: list[float] = []
    measuring_since = perf_counter()
    while not rates or (perf_counter() - measuring_since < seconds and len(rates) < 20):
        started = perf_counter()
        samples = sum(len(batch[0]) for batch in next(epochs))
        rates.append(samples / (perf_counter() - started))
    epochs.close()  # type: ignore[attr-defined]
    return {"rate": statistics.median(rates), "first_batch_s": first_batch_s}


def run_apart(loader: str, workload: str, seconds: float) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--measure", loader, workload, str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{loader} on {workload} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """The results in Markdown."""

    def spread(values: list[float], digits: int) -> str:
        low, middle, high = min(values), statistics.median(values), max(values)
        return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"

    lines = [
        "| workload | loader | samples/s, median (range) | ratio to WebDataset | first batch, s |",
        "|---|---|---|---|---|",
    ]
    for workload, by_loader in results.items():
        for loader, runs in by_loader.items():
            pairs = zip(runs, by_loader["WebDataset"], strict=True)
            ratio = statistics.median(run["rate"] / peer["rate"] for run, peer in pairs)
            rates = spread([run["rate"] for run in runs], 0)
            firsts = spread([run["first_batch_s"] for run in runs], 2)
            lines.append(f"| {workload} | {loader} | {rates} | {ratio:.1f} x | {firsts} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs of each loader on each workload")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a run measures, at least one epoch")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--measure", nargs=3, metavar=("LOADER", "WORKLOAD", "SECONDS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        loader, workload, seconds = arguments.measure
        print(json.dumps(measure(loader, WORKLOADS[workload], float(seconds))))
        return
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in arguments.workloads:
        WORKLOADS[name].shards()
        results[name] = {loader: [] for loader in LOADERS}
        for run in range(arguments.runs):
            for loader in LOADERS:
                result = run_apart(loader, name, arguments.seconds)
                results[name][loader].append(result)
                print(f"{name} run {run + 1}: {loader} {result['rate']:,.0f}/s", file=sys.stderr, flush=True)
    names = ("streamload", "webdataset", "torch", "numpy", "simplejpeg")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    machine = f"{WORKERS} workers on {torch.get_num_threads()} cores; Python {platform.python_version()}"
    text = f"{table(results)}\n\n{machine}; {versions}.\n"
    print(text)
    Path(FOLDER / "loader.md").write_text(text)


if __name__ == "__main__":
    main()
