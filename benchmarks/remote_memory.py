"""One run of streamload within a memory budget: the most that its processes took, as the last line, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from remote_bucket import FIELD
from shared_memory import MemoryWatch, TreeMemory, tree_memory

from streamload import StreamLoader

BATCH_SIZE = 128
WORKERS = 2
SETTLING_S = 2.0
"""Between the constructor and the first batch, for all processes to have imported what they need."""


@dataclass(frozen=True)
class Question:
    """What is read.

    Attributes:
        urls: the shards.
        budget_bytes: for everything.
        sleep_s: how long the consumer sleeps, once, a tenth into the epoch.
        batches: of the epoch.
    """

    urls: Sequence[str]
    budget_bytes: int
    sleep_s: float
    batches: int

    def argument(self) -> str:
        """For the command line of this program."""
        return json.dumps(asdict(self))


def measure(question: Question) -> dict[str, float]:
    """Read an epoch; the peak without what the same processes held before the first batch, in bytes."""
    torch.zeros(1).sum()  # what the first tensor brings in is no part of the loader
    own = os.getpid()
    values = 0
    with StreamLoader(
        question.urls,
        BATCH_SIZE,
        shuffle=True,
        fields=(FIELD,),
        decode=False,
        transform={FIELD: len},
        num_workers=WORKERS,
        memory_budget=question.budget_bytes,
    ) as loader:
        time.sleep(SETTLING_S)
        tree_memory(own)  # once for what this itself takes
        before = tree_memory(own)
        began_s = time.monotonic()
        with MemoryWatch(own) as watch:
            for number, (sizes,) in enumerate(loader):
                values += int(sizes.sum())
                if number == question.batches // 10:
                    time.sleep(question.sleep_s)
        seconds = time.monotonic() - began_s - question.sleep_s
    return {
        "before_bytes": before.total,
        "peak_bytes": watch.peak.total,
        "more_bytes": watch.peak.total - before.total,
        "files_bytes": watch.peak.files,
        **_growth(before, watch.peak),
        "samples": watch.samples,
        "seconds": seconds,
        "values": values,
    }


def _growth(before: TreeMemory, peak: TreeMemory) -> dict[str, float]:
    """How much more each kind of process held at the peak, memory files apart."""
    (trainer, feeder, *workers) = [size - before.private.get(pid, 0) for pid, size in peak.private.items()]
    return {"trainer_bytes": trainer, "feeder_bytes": feeder, "workers_bytes": sum(workers)}


def main() -> None:
    question = Question(**json.loads(sys.argv[1]))
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(question)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
