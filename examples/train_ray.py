"""Train with Ray Train: its checkpoints hold where the loader stands, so a run goes on with more or fewer workers.

    python examples/train_ray.py .runs/ray --ray-workers 2 --stop-behind-step 3
    python examples/train_ray.py .runs/ray --ray-workers 1

The first argument is the folder of the run, which all nodes have to see. If it holds a checkpoint, the run goes on
behind that, in the middle of an epoch too, with the same global batches as before: the batch of a worker is the global
one divided by their number. `RAY_ADDRESS` names the cluster; without one Ray starts on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from streamload import ShardWriter, StreamLoader

SAMPLES = 48


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Linear regression of a sample's number; Ray calls it on each worker, which is a rank of torch.distributed."""
    context = ray.train.get_context()
    rank, ranks = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(nn.Linear(4, 1))
    with StreamLoader(
        config["shards"],
        config["global_batch_size"] // ranks,
        shuffle=True,
        fields=("npy", "cls"),
        num_workers=config["num_workers"],
    ) as loader:
        step = restore(ray.train.get_checkpoint(), model, loader)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        while (epoch := loader.state_dict()["epoch"]) < config["epochs"]:
            for values, numbers in loader:
                loss = nn.functional.mse_loss(model(values)[:, 0], numbers / SAMPLES)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                note(config["run"], rank, ranks, {"epoch": epoch, "step": step, "samples": numbers.tolist()})
                if step % config["checkpoint_every"] == 0:
                    save(model, loader, step, rank)
                if step == config["stop_behind_step"]:
                    return


def save(model: nn.Module, loader: StreamLoader, step: int, rank: int) -> None:
    """Hand a checkpoint to Ray. Every rank's loader has the same state, so that of the first one is enough."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"model": unwrapped(model).state_dict(), "loader": loader.state_dict(), "step": step}
            torch.save(state, os.path.join(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def restore(checkpoint: ray.train.Checkpoint | None, model: nn.Module, loader: StreamLoader) -> int:
    """Go back to a checkpoint, on every rank, and return the number of steps that were done; 0 without one."""
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
    unwrapped(model).load_state_dict(state["model"])
    loader.load_state_dict(state["loader"])
    return int(state["step"])


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without DistributedDataParallel, in which Ray wraps it where there are several workers."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def note(run: str, rank: int, ranks: int, seen: dict[str, Any]) -> None:
    """Write down which samples a rank was given."""
    with open(os.path.join(run, f"rank{rank}of{ranks}.jsonl"), "a") as file:
        file.write(f"{json.dumps(seen)}\n")


def write_shards(folder: str) -> None:
    """A few samples in two shards: a vector `npy`, and its number `cls`."""
    with ShardWriter(folder, max_count=SAMPLES // 2) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:03d}", "npy": np.full(4, number, np.float32), "cls": number})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of this run")
    parser.add_argument("--ray-workers", type=int, default=2, help="how many ranks")
    parser.add_argument("--num-workers", type=int, default=0, help="processes of each rank's loader")
    parser.add_argument("--global-batch-size", type=int, default=8, help="samples in a step, over all ranks")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--stop-behind-step", type=int, help="end before the last epoch, to be gone on with")
    settings = parser.parse_args(arguments)
    run = os.path.abspath(settings.run)
    shards = os.path.join(run, "shards")
    if not os.path.exists(shards):
        write_shards(shards)
    trainer = ray.train.torch.TorchTrainer(
        train_loop_per_worker,
        train_loop_config={**vars(settings), "run": run, "shards": shards},
        scaling_config=ray.train.ScalingConfig(num_workers=settings.ray_workers),
        # A run of a name that is there already goes on behind its last checkpoint.
        run_config=ray.train.RunConfig(name="ray", storage_path=run),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
