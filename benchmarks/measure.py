"""One run of one loader, in this process and no other: its result is the last line of the output, as JSON."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from busy_trainer import measure_busy
from peers import PEERS, Loader
from sample_table import expected_sum
from workloads import Workload, workload

MOST_EPOCHS = 50
SHUTDOWN_TIMEOUT_S = 20.0

Result = dict[str, float]


def threads() -> int:
    """Threads of this process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def children() -> list[psutil.Process]:
    """All processes below this one, but for multiprocessing's own, which lives as long as the program."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def tree_cpu_s() -> float:
    """Seconds of processor time that this process and all below it have used, those that have ended included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])  # user, system, and the same of children that have ended
    return total


def check_epoch(of: Workload, batches: Iterator[Any]) -> np.ndarray:
    """Read an epoch that must have every sample once; what its first batch had to tell apart.

    Raises:
        ValueError: it has too few or too many samples, or others than it should.
    """
    samples = total = 0
    first = None
    for batch in batches:
        values = np.asarray(batch[-1])  # not torch: its sum starts threads, which are counted here
        samples += len(values)
        total += int(values.sum(dtype=np.int64))
        first = values.copy() if first is None else first
    if samples != of.samples or first is None:
        raise ValueError(f"an epoch has {samples} samples, the dataset {of.samples}")
    if total != expected_sum(of):
        raise ValueError("an epoch has as many samples as the dataset, but not each of them once")
    return first


def read_epoch(of: Workload, batches: Iterator[Any]) -> None:
    """Read an epoch as a training loop would that did nothing else.

    Raises:
        ValueError: it has too few or too many samples.
    """
    samples = sum(len(batch[0]) for batch in batches)
    if samples != of.samples:
        raise ValueError(f"an epoch has {samples} samples, the dataset {of.samples}")


def shutdown_s(loader: list[Loader], python_threads_before: int) -> float:
    """Seconds until the only loader in the list is closed, and no child and no Python thread of it is left."""
    began = perf_counter()
    loader.pop().close()
    while children() or threading.active_count() > python_threads_before:
        if perf_counter() - began > SHUTDOWN_TIMEOUT_S:
            break
        gc.collect()
        time.sleep(0.005)
    return perf_counter() - began


def measure(kind: type[Loader], of: Workload, seconds: float, reshuffles: bool) -> Result:
    """An epoch to warm up, whose first batch is timed and which is checked; then whole epochs for `seconds`.

    Of these the first does not count, since a loader may have worked for it in the pause before: then what each of the
    others finds done, it has to do for the next one.
    """
    of.shards()
    threads_before, python_threads_before = threads(), threading.active_count()
    began = perf_counter()
    loader = [kind(of)]
    batches = loader[0].epoch()
    first_batch = next(batches)
    first_batch_s = perf_counter() - began
    order = check_epoch(of, chain([first_batch], batches))
    rates: list[float] = []
    most_threads = 0
    cpu_began, own_cpu_began, since = tree_cpu_s(), time.process_time(), perf_counter()
    while len(rates) < 2 or (perf_counter() - since < seconds and len(rates) < MOST_EPOCHS):
        started = perf_counter()
        batches = loader[0].epoch()
        first_batch = next(batches)
        most_threads = max(most_threads, threads())
        if reshuffles and not rates and np.array_equal(order, np.asarray(first_batch[-1])):
            raise ValueError("two epochs begin with the same batch: it does not shuffle")
        read_epoch(of, chain([first_batch], batches))
        rates.append(of.samples / (perf_counter() - started))
    wall_s, own_cpu_s = perf_counter() - since, time.process_time() - own_cpu_began
    cpu_s = tree_cpu_s() - cpu_began
    del batches, first_batch
    return {
        "rate": statistics.median(rates[1:]) * kind.processes,
        "first_batch_s": first_batch_s,
        "cpu_s_per_1000": 1000 * cpu_s / (of.samples * len(rates)),
        "trainer_cpu": own_cpu_s / wall_s,
        "threads_more": most_threads - threads_before,
        "shutdown_s": shutdown_s(loader, python_threads_before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["prepare", "speed", "memory", "busy"])
    parser.add_argument("loader", choices=list(PEERS))
    parser.add_argument("workload")
    parser.add_argument("root", type=Path)
    parser.add_argument("samples", type=int)
    parser.add_argument("seconds", type=float)
    arguments = parser.parse_args()
    of = workload(arguments.workload, arguments.root, arguments.samples)
    kind = PEERS[arguments.loader].load()
    result: Result = {}
    with contextlib.redirect_stdout(sys.stderr):  # some libraries print
        if arguments.what == "prepare":
            kind.prepare(of)
            expected_sum(of)
        elif arguments.what == "busy":
            result = measure_busy(kind, of, arguments.seconds)
        else:
            result = measure(kind, of, arguments.seconds, PEERS[arguments.loader].reshuffles)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
