"""What remote feeders cost: processor time for a sample through Ray feeders, beside that of the local loader.

    python benchmarks/bench_ray.py

All nodes are on this machine, so nothing is faster here, but where transforms sleep: processor time is what counts,
of all processes of the loader, the actors and Ray.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from ray_cluster import LocalRayCluster, ray_cluster

from streamload import RayFeeders, ShardWriter, StreamLoader
from streamload.images import RandomResizedCrop

Row = tuple[str, float, float, float]


class Sleeping:
    """A transform that waits for something, as a request does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, sample: Any) -> Any:
        time.sleep(self._seconds)
        return sample


def write_images(folder: Path, number: int) -> None:
    """Photos of 500 x 375 pixels or so: smooth, with some noise."""
    rng = np.random.default_rng(0)
    with ShardWriter(folder, max_count=500) as writer:
        for each in range(number):
            small = rng.integers(0, 255, (12, 16, 3)).astype(np.uint8)
            image = cv2.resize(small, (500, 375), interpolation=cv2.INTER_CUBIC)
            noisy = np.clip(image.astype(np.int16) + rng.integers(-8, 9, image.shape), 0, 255).astype(np.uint8)
            encoded = cv2.imencode(".jpg", noisy)[1].tobytes()
            writer.write({"__key__": f"{each:06d}", "jpg": encoded, "cls": each % 10})


def processor_s(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def all_of(cluster: LocalRayCluster | None) -> list[psutil.Process]:
    """This process and its children; those of the cluster, the raylets and the head's services among them."""
    found = [psutil.Process(), *psutil.Process().children(recursive=True)]
    if cluster is not None:
        found += [psutil.Process(pid) for pid in cluster.processes("")]
    return found


def measure(name: str, loader: StreamLoader, cluster: LocalRayCluster | None, epochs: int) -> Row:
    """Processor time and rate of whole epochs, after one that has started everything."""
    with loader:
        for _ in loader:
            pass
        processes = all_of(cluster)
        before, began = processor_s(processes), time.perf_counter()
        samples, made_bytes = 0, 0
        for _ in range(epochs):
            for batch in loader:
                samples += len(batch[-1])
                made_bytes += batch[0].nbytes
        took = time.perf_counter() - began
        used = processor_s(processes) - before
    return name, used / samples * 1e3, samples / took, made_bytes / samples


def images(folder: str, cluster: LocalRayCluster, epochs: int) -> list[Row]:
    options: dict[str, Any] = {
        "batch_size": 64,
        "shuffle": True,
        "fields": ("jpg", "cls"),
        "transform": {"jpg": RandomResizedCrop(224)},
        "num_workers": 1,
    }
    rows = []
    for _ in range(2):
        rows.append(measure("local", StreamLoader(folder, **options), None, epochs))
        for number in (1, 2, 4):
            loader = StreamLoader(folder, **{**options, "num_workers": RayFeeders(number, address=cluster.address)})
            rows.append(measure(f"{number} Ray feeder{'s' * (number > 1)}", loader, cluster, epochs))
    best = {name: min(row for row in rows if row[0] == name) for name, *_ in rows}
    return list(best.values())


def sleeping(folder: str, cluster: LocalRayCluster) -> list[Row]:
    rows = []
    for number in (1, 4):
        options: dict[str, Any] = {"batch_size": 32, "fields": ("cls", "__key__"), "transform": Sleeping(0.02)}
        feeders = RayFeeders(number, num_cpus=2, address=cluster.address)
        loader = StreamLoader(folder, **options, sampler=range(960), num_workers=feeders)
        rows.append(measure(f"{number} Ray feeder{'s' * (number > 1)}", loader, cluster, 1))
    return rows


def show(title: str, rows: list[Row]) -> None:
    print(f"{title}\n\n| | processor ms a sample | times the first | samples/s | times the first | bytes of a sample |")
    print("|---|---|---|---|---|---|")
    for name, cost_ms, rate, size in rows:
        cost, gain = cost_ms / rows[0][1], rate / rows[0][2]
        print(f"| {name} | {cost_ms:.3f} | {cost:.2f} | {rate:,.0f} | {gain:.2f} | {size:,.0f} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--only-sleep", action="store_true", help="only the transform that sleeps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ray_cluster({"a": 4, "b": 4}) as cluster:
        write_images(Path(folder) / "images", arguments.images)
        if not arguments.only_sleep:
            show("Images", images(f"{folder}/images", cluster, arguments.epochs))
        show("A transform that sleeps 20 ms", sleeping(f"{folder}/images", cluster))


if __name__ == "__main__":
    main()
