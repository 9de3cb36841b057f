"""A program for torchrun: one epoch of a loader, with a step in common as in training; it notes what each rank gets.

Rank r writes a line to `rank{r}.jsonl` for each step: the position behind it, and the labels of its batch.
Rank 0 replaces `state.json` after each third step. Rank 1 kills itself at a step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from streamload import StreamLoader


def main(folder: Path, shards: str, batch_size: int, window: int, killed_at_step: int) -> None:
    dist.init_process_group("gloo")
    state = folder / "state.json"
    with (
        StreamLoader(shards, batch_size, shuffle=window, fields=("cls",), num_workers=1) as loader,
        open(folder / f"rank{loader.rank}.jsonl", "w", encoding="utf-8") as log,
    ):
        for step, (labels,) in enumerate(loader, start=1):
            dist.all_reduce(torch.tensor([len(labels)]))  # a rank with another number of steps would hang or fail here
            log.write(json.dumps([loader.state_dict()["position"], labels.tolist()]) + "\n")
            log.flush()
            if loader.rank == 0 and step % 3 == 0:
                state.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
                state.with_suffix(".new").rename(state)
            if loader.rank == 1 and step == killed_at_step:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
