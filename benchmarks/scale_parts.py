"""One measurement of what a process does at a scale, in this process and no other: its result is a line of JSON."""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from running import tree_pss
from scale_dataset import FIELDS, Scale
from scale_traffic import Reader

from streamload import StreamLoader
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import list_shards
from streamload.order.options import OrderOptions
from streamload.order.plan import RankPlan, ShardCounts
from streamload.order.sampling import Sampling, Stretched, Weighted
from streamload.order.state import fingerprint

MOST_MEMORY_BYTES = 6 << 30
CLASSES = 200

Found = dict[str, float]


def listing(url: str) -> Found:
    """What a feeder does once with the list of shards, and what its trainer does."""
    before = _resident_bytes()
    indexes: dict[str, DatasetIndex] = {}
    list_s, found = _timed(lambda: list_shards(url, indexes_read=indexes))
    held = _resident_bytes() - before
    send_s, sent = _timed(lambda: pickle.dumps(found, pickle.HIGHEST_PROTOCOL))
    (index,) = indexes.values()
    content, name, folder = index.to_json(), found.shards[-1].name, index.folder
    group_s, _ = _timed(partial(index.group, name))
    gc.collect()
    read_s, _ = _timed(partial(DatasetIndex.from_json, content, folder))
    fingerprint_s, _ = _timed(lambda: fingerprint((shard.name, shard.bytes) for shard in found.shards))
    before = _resident_bytes()
    receive_s, _received = _timed(lambda: pickle.loads(sent))
    return {
        "read_s": read_s,
        "list_s": list_s,
        "feeder_bytes": held,
        "send_s": send_s,
        "sent_bytes": len(sent),
        "receive_s": receive_s,
        "trainer_bytes": _resident_bytes() - before,
        "group_s": group_s,
        "fingerprint_s": fingerprint_s,
    }


def plans(scale: Scale, window: int, cases: list[dict[str, int]], seconds: float) -> Found:
    """The plans of some ranks, one after another."""
    found = {}
    for number, case in enumerate(cases):
        found |= {f"{what} {number}": value for what, value in _plan(scale, window, seconds, **case).items()}
    return found


def _plan(scale: Scale, window: int, seconds: float, *, lanes: int, rank: int, start_batch: int, ranks: int) -> Found:
    """An epoch's plan for one rank, from a batch on."""
    reader = Reader(ranks, scale.batch_size, lanes, window, rank=rank)
    counts = ShardCounts.of([scale.samples] * scale.shards)
    start = start_batch * scale.batch_size * scale.ranks

    def begin() -> tuple[RankPlan, Any]:
        made = reader.plan(counts, epoch=1, start=start)
        made.shards_ahead()
        block = made.take(scale.batch_size)
        made.finished()
        return made, block

    begin_s, (made, first) = _timed(begin)
    rows_began, rows = perf_counter(), 0
    while perf_counter() - rows_began < seconds and (block := made.take(2_048)) is not None:
        rows += len(block.shard)
        made.finished()
    rate = rows / (perf_counter() - rows_began)
    lanes_read = len(made.lanes_read)
    del made
    tracemalloc.start()
    kept = begin()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return {
        "begin_s": begin_s,
        "rows_per_s": rate,
        "held_bytes": held,
        "peak_bytes": peak,
        "lanes_read": lanes_read,
        "first_shards": len(np.unique(first.shard)),
    }


def drawn(scale: Scale, kind: str, ranks: int) -> Found:
    """The first batch of an epoch drawn by the weights of labels, or of half of the samples."""
    total = scale.total
    counts = ShardCounts.of([scale.samples] * scale.shards)
    sampling: Sampling
    if kind == "weights":
        group = np.tile(np.arange(CLASSES, dtype=np.uint8), -(-total // CLASSES))[:total]
        sampling, given = Weighted(group, 1.0 + np.arange(CLASSES) % 7, total), group.nbytes
    else:
        selected = np.tile(np.array([True, False]), -(-total // 2))[:total]
        sampling, given = Stretched(-(-total // 2), selected), selected.nbytes
    options = OrderOptions(0, True, 10_000, ranks, scale.batch_size, True, False, sampling)
    tracemalloc.start()
    began = perf_counter()
    made = RankPlan(options, counts, 1, ranks // 2, ranks)
    made.take(scale.batch_size)
    seconds = perf_counter() - began
    held, peak = tracemalloc.get_traced_memory()
    return {
        "first_s": seconds,
        "given_bytes_of_sample": given / total,
        "held_bytes_of_sample": held / total,
        "peak_bytes_of_sample": peak / total,
    }


def loader(url: str, scale: Scale, lanes: int, rank: int) -> Found:
    """A loader from its constructor to the first batch, what its processes hold then, and a state resumed elsewhere."""
    options = {"shuffle": True, "num_workers": 1, "fields": FIELDS, "lanes": lanes}
    began = perf_counter()
    with StreamLoader(url, scale.batch_size, rank=rank, world_size=scale.ranks, **options) as made:
        opened_s = perf_counter() - began
        batches = iter(made)
        next(batches)
        first_s = perf_counter() - began
        state = made.state_dict()
        (feeder,) = psutil.Process().children()
        time.sleep(0.3)  # for what is in flight
        trainer_bytes, feeder_bytes = _pss(os.getpid()), _pss(feeder.pid)
        tree_bytes = tree_pss(os.getpid())
        del batches
    with StreamLoader(url, scale.batch_size, rank=0, world_size=max(1, scale.ranks // 2 * 3), **options) as other:
        resume_s, _ = _timed(lambda: other.load_state_dict(state))
        next(iter(other))
    return {
        "opened_s": opened_s,
        "first_s": first_s,
        "trainer_bytes": trainer_bytes,
        "feeder_bytes": feeder_bytes,
        "tree_bytes": tree_bytes,
        "state_bytes": len(json.dumps(state)),
        "load_state_s": resume_s,
    }


def _timed(function: Callable[[], Any]) -> tuple[float, Any]:
    began = perf_counter()
    result = function()
    return perf_counter() - began, result


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def _pss(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


MEASUREMENTS: dict[str, Callable[..., Found]] = {"listing": listing, "plans": plans, "drawn": drawn, "loader": loader}


def main() -> None:
    arguments = json.loads(sys.argv[2])
    if "scale" in arguments:
        arguments["scale"] = replace(Scale(1, 1, 1, 1), **arguments["scale"])
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
    print(json.dumps(MEASUREMENTS[sys.argv[1]](**arguments)))


if __name__ == "__main__":
    main()
