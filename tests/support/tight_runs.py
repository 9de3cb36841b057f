"""Runs of a loader with little room: budgets, files that may be open, and batches that the loop keeps, all drawn.

As a program it does the run of a number and prints what came of it; it is one because the limit of open files holds for
a whole process, and cannot be raised again.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

from streamload import StreamLoader
from streamload.errors import StorageError

MB = 1_000_000

SHARDS: dict[str, list[list[int]]] = {
    "large": [[MB] * 20] * 4,
    "many": [[2_000] * 30] * 60,
    "mixed": [
        [(1_000, 100_000, MB if shard % 3 == 0 else 50_000)[sample % 3] for sample in range(20)] for shard in range(9)
    ],
}
"""For each dataset the lengths in bytes of the arrays in each shard."""

TOO_SMALL = ("memory_budget", "shards are needed at once")
"""What an error says where there is too little room."""


@dataclass(frozen=True, slots=True)
class TightRun:
    """What is asked of a loader, and what its loop does.

    Attributes:
        dataset: a name in `SHARDS`.
        form: how the dataset is stored.
        options: of the loader.
        most_open: how many files the process may have open; None leaves it as it is.
        epochs: how many times the loop begins.
        leaves_at: the batches after which it leaves each of these epochs; None for one that goes to its end.
        keeps: how many batches it keeps.
        rests_s: how long it takes for each.
    """

    dataset: str
    form: str
    options: dict[str, Any]
    most_open: int | None
    leaves_at: list[int | None]
    keeps: int
    rests_s: float


def draw_run(seed: int) -> TightRun:
    """The run of this number, always the same one."""
    rng = random.Random(seed)
    dataset = rng.choice(list(SHARDS))
    samples = sum(map(len, SHARDS[dataset]))
    options: dict[str, Any] = {
        "batch_size": rng.choice([1, 3, 8, 16, 50]),
        "shuffle": rng.random() < 0.8 and rng.choice([1, 10, 50, samples]),
        "num_workers": rng.choice([0, 1, 1, 2]),
        "prefetch_batches": rng.choice([1, 2, 8]),
        "memory_budget": MB * rng.choice([9, 12, 17, 20, 25, 30, 40, 60, 90]),
        "lanes": rng.choice([1, 1, 2, 4]),
        "seed": seed,
    }
    return TightRun(
        dataset=dataset,
        form=rng.choice(["indexed", "indexed", "plain", "gz"]),
        options=options,
        most_open=rng.choice([None, 256]),
        leaves_at=[rng.choice([None, None, rng.randrange(1, 20)]) for _ in range(rng.choice([1, 2, 3]))],
        keeps=rng.choice([0, 0, 1, 3, 10]),
        rests_s=rng.choice([0.0, 0.0, 0.01]) * (options["batch_size"] > 1),
    )


def outcome(run: TightRun, root: str) -> str:
    """ "all" where each epoch gave every sample once, "too small" where an error says so; else what is wrong."""
    ending = ".gz" if run.form == "gz" else ""
    shards = range(len(SHARDS[run.dataset]))
    urls = [f"{root}/{run.dataset}/{run.form}/part{shard:03d}-000000.tar{ending}" for shard in shards]
    try:
        # A wait that has no end is an error.
        with StreamLoader(urls, fields=("npy", "cls"), collate_fn=list, **run.options) as loader:
            for leaves_at in run.leaves_at:
                labels = _labels(loader, run, leaves_at)
                if leaves_at is None and sorted(labels) != list(range(sum(map(len, SHARDS[run.dataset])))):
                    return f"wrong samples: {labels}"
    except (ValueError, StorageError) as error:
        return "too small" if any(words in str(error) for words in TOO_SMALL) else repr(error)
    return "all"


def _labels(loader: StreamLoader, run: TightRun, leaves_at: int | None) -> list[int]:
    labels: list[int] = []
    kept: list[Any] = []
    for number, batch in enumerate(loader, 1):
        for array, label in batch:
            assert int(array[0]) == int(label) % 251
            labels.append(int(label))
        kept.append(batch)
        del batch, kept[: len(kept) - run.keeps]
        time.sleep(run.rests_s)
        if number == leaves_at:
            break
    return labels


def main() -> None:
    """Run what a seed draws, on a server, and print the outcome."""
    drawn = draw_run(int(sys.argv[1]))
    if drawn.most_open is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (drawn.most_open, drawn.most_open))
    print(json.dumps(outcome(drawn, sys.argv[2])))
