"""A program for torchrun: one epoch of a loader, with a step in common as in training; it notes what each rank gets.

Rank r of w writes a line to `rank{r}of{w}.jsonl` for each step: the position behind it, and the labels of its batch.
Rank 0 replaces `state.json` after each third step. A rank can be made to kill itself in the middle,
and samples can be made to fail.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from transforms import raise_on_bad

from streamload import StreamLoader

STEPS_PER_STATE = 3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("shards")
    parser.add_argument("options", type=json.loads)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--kill-rank", type=int)
    parser.add_argument("--kill-at-step", type=int)
    parser.add_argument("--raise-on-bad", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    batch_size = arguments.global_batch_size // dist.get_world_size()
    options = {"fields": ("cls",), "transform": {"cls": raise_on_bad} if arguments.raise_on_bad else None}
    with StreamLoader(arguments.shards, batch_size, **{"shuffle": True, **options, **arguments.options}) as loader:
        record(arguments, loader)
    dist.destroy_process_group()


def record(arguments: argparse.Namespace, loader: StreamLoader) -> None:
    state = arguments.folder / "state.json"
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    with open(arguments.folder / f"rank{loader.rank}of{loader.world_size}.jsonl", "w", encoding="utf-8") as log:
        for step, (labels,) in enumerate(loader, start=1):
            total = torch.tensor([len(labels)])
            dist.all_reduce(total)  # a rank with another number of steps than the others would hang or fail here
            log.write(json.dumps([loader.state_dict()["position"], labels.tolist()]) + "\n")
            log.flush()
            if loader.rank == 0 and step % STEPS_PER_STATE == 0:
                state.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
                state.with_suffix(".new").rename(state)
            if step == arguments.kill_at_step and loader.rank == arguments.kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
