"""Train with Accelerate, which saves and loads the loader's state with its own, also in the middle of an epoch.

    python examples/train_accelerate.py .runs/accelerate --stop-behind-step 7
    accelerate launch --num-processes 2 examples/train_accelerate.py .runs/accelerate

The loader is registered for checkpoints and not given to `prepare`: it divides the samples among the processes itself.
So batches are moved to the device by hand.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from streamload import ShardWriter, StreamLoader

SAMPLES = 40


def write_shards(folder: str) -> None:
    """A few samples in two shards: a vector `npy`, and its number `cls`."""
    with ShardWriter(os.path.join(folder, "part-%06d.tar"), max_count=SAMPLES // 2) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:06d}", "npy": np.full(4, number / SAMPLES, np.float32), "cls": number})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of this run; a run that was stopped goes on")
    parser.add_argument("--checkpoint-every", type=int, default=3, metavar="STEPS")
    parser.add_argument("--stop-behind-step", type=int, metavar="STEP")
    settings = parser.parse_args(arguments)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    shards, checkpoint = os.path.join(settings.run, "shards"), os.path.join(settings.run, "checkpoint")
    if accelerator.is_main_process and not os.path.exists(shards):
        write_shards(shards)
    accelerator.wait_for_everyone()
    batch_size = 8 // accelerator.num_processes  # so the global one stays 8 on 1, 2, 4 and 8 processes
    with StreamLoader(shards, batch_size, shuffle=True, fields=("npy", "cls"), num_workers=1) as loader:
        accelerator.register_for_checkpointing(loader)
        train(settings, accelerator, loader, checkpoint)
    accelerator.end_training()


def train(settings: argparse.Namespace, accelerator: Accelerator, loader: StreamLoader, checkpoint: str) -> None:
    """Train to the end of the third epoch, or to the step at which to stop."""
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    if os.path.exists(checkpoint):
        accelerator.load_state(checkpoint)
    while (epoch := loader.state_dict()["epoch"]) < 3:
        done = epoch * len(loader) + loader.state_dict()["position"] // (loader.batch_size * loader.world_size)
        for step, batch in enumerate(loader, start=done + 1):
            values, numbers = send_to_device(batch, accelerator.device)
            print(f"epoch {epoch} step {step} rank {loader.rank}: samples {numbers.tolist()}", flush=True)
            loss = nn.functional.mse_loss(model(values)[:, 0], numbers / SAMPLES)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if step % settings.checkpoint_every == 0:
                accelerator.save_state(checkpoint)
            if step == settings.stop_behind_step:
                return


if __name__ == "__main__":
    main()
