"""Checkpoints of torch.distributed.checkpoint, saved by some processes and loaded by more or fewer.

    torchrun --nproc-per-node 2 examples/checkpoint_dcp.py .runs/dcp --stop-behind-step 3
    torchrun --nproc-per-node 3 examples/checkpoint_dcp.py .runs/dcp

The first argument is the folder of the run. A loader is saved like a model, under a name in the dict that is saved. The
run goes on in the middle of the epoch with the same global batches as before, whatever the number of processes
is now: the batch of a process is the global one divided by their number.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from streamload import ShardWriter, StreamLoader

SAMPLES = 60


class Training:
    """A model and its optimizer, as torch.distributed.checkpoint saves and loads them: whatever their wrapping."""

    def __init__(self) -> None:
        self.model = DistributedDataParallel(nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """All that is saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was saved, at any number of processes."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def train(settings: argparse.Namespace, loader: StreamLoader) -> None:
    """Linear regression of a sample's number, from the checkpoint if there is one."""
    training = Training()
    if complete := complete_checkpoints(settings.run):
        dcp.load({"training": training, "loader": loader}, checkpoint_id=complete[-1])
    while (epoch := loader.state_dict()["epoch"]) < settings.epochs:
        for values, numbers in loader:
            loss = nn.functional.mse_loss(training.model(values)[:, 0], numbers / SAMPLES)
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            training.step += 1
            note(settings.run, loader, {"epoch": epoch, "step": training.step, "samples": numbers.tolist()})
            if training.step % settings.checkpoint_every == 0:
                save({"training": training, "loader": loader}, settings.run, training.step)
            if training.step == settings.stop_behind_step:
                return


def save(state: dict[str, Any], folder: str, step: int) -> None:
    """Save a checkpoint, and only then remove those before: whenever the run is killed, one is complete."""
    checkpoint = os.path.join(folder, f"checkpoint-{step:012d}")
    dcp.save(state, checkpoint_id=checkpoint)
    if dist.get_rank() == 0:
        for before in set(complete_checkpoints(folder)) - {checkpoint}:
            shutil.rmtree(before)


def complete_checkpoints(folder: str) -> list[str]:
    """The folders of those whose metadata exists, which is written when everything else has been, by their steps."""
    metadata = glob.glob(os.path.join(glob.escape(folder), "checkpoint-*", ".metadata"))
    return sorted(map(os.path.dirname, metadata))


def note(run: str, loader: StreamLoader, seen: dict[str, Any]) -> None:
    """Write down which samples a rank was given."""
    with open(os.path.join(run, f"rank{loader.rank}of{loader.world_size}.jsonl"), "a") as file:
        file.write(f"{json.dumps(seen)}\n")


def write_shards(folder: str) -> None:
    """A few samples in two shards: a vector `npy`, and its number `cls`."""
    with ShardWriter(folder, max_count=SAMPLES // 2) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:03d}", "npy": np.full(4, number, np.float32), "cls": number})


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of this run; all processes must see the same one")
    parser.add_argument("--global-batch-size", type=int, default=12, help="samples in a step, over all processes")
    parser.add_argument("--num-workers", type=int, default=0, help="processes of each rank's loader")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--stop-behind-step", type=int, help="end before the last epoch, to be gone on with")
    settings = parser.parse_args()
    dist.init_process_group("gloo")
    shards = os.path.join(settings.run, "shards")
    if dist.get_rank() == 0 and not os.path.exists(shards):
        write_shards(shards)
    dist.barrier()
    with StreamLoader(
        shards,
        settings.global_batch_size // dist.get_world_size(),
        shuffle=True,
        fields=("npy", "cls"),
        num_workers=settings.num_workers,
    ) as loader:
        train(settings, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
