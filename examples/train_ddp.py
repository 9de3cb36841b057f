"""Train a small network on images with DistributedDataParallel, on any number of processes, from shards anywhere.

    torchrun --nproc-per-node 2 examples/train_ddp.py .runs/ddp .demo/shards/train
    torchrun --nproc-per-node 3 examples/train_ddp.py .runs/ddp s3://bucket/train --endpoint http://127.0.0.1:9000

The first argument is the folder of the run. If it holds a checkpoint, the run goes on behind that, with the same
global batches as before, whatever the number of processes is now: the batch of a process is the global one divided by
their number. Without torchrun it trains on one process.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from streamload import StreamLoader


def as_input(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 (height, width, 3) to float32 (3, height, width) in [0, 1]."""
    return image.transpose(2, 0, 1).astype(np.float32) / np.float32(255)


def network(classes: int) -> nn.Module:
    """(batch, 3, height, width) to (batch, classes), for images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(32 * 16, classes),
    )


def join() -> torch.device:
    """Meet the other processes, and return the device of this one. A process that was started alone is a world of 1."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


def train(settings: argparse.Namespace, loader: StreamLoader, device: torch.device) -> None:
    """Train to the last epoch, from the checkpoint if there is one."""
    torch.manual_seed(settings.seed)
    model = network(settings.classes).to(device)
    parallel = DistributedDataParallel(model, [device] if device.type == "cuda" else None)
    optimizer = torch.optim.Adam(parallel.parameters(), 3e-3)
    checkpoint = os.path.join(settings.run, "checkpoint.pt")
    step = restore(checkpoint, model, optimizer, loader)
    while (epoch := loader.state_dict()["epoch"]) < settings.epochs:
        steps = samples = 0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(parallel(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, steps, samples = step + 1, steps + 1, samples + len(labels)
            if step % settings.checkpoint_every == 0 and loader.rank == 0:
                save(checkpoint, model, optimizer, loader, step)
        done = f"epoch {epoch}: {steps} steps, {samples} samples, last loss {loss.item():.4f}" if steps else "no steps"
        print(f"rank {loader.rank} of {loader.world_size}: {done}", flush=True)


def save(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, loader: StreamLoader, step: int) -> None:
    """Replace the checkpoint. Every rank's loader has the same state, so that of the one that saves is enough."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    torch.save(state | {"step": step}, f"{path}.new")
    os.replace(f"{path}.new", path)


def restore(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, loader: StreamLoader) -> int:
    """Go back to the checkpoint, on every rank, and return the number of steps that were done; 0 without one."""
    if not os.path.exists(path):
        return 0
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    if loader.rank == 0:
        print(f"going on behind step {state['step']}", flush=True)
    return int(state["step"])


def parse_settings() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of this run; all processes must see the same one")
    parser.add_argument("shards", nargs="+", help="a folder, bucket or pattern of shards with images and `cls`")
    parser.add_argument("--endpoint", help="the address of an S3 server other than Amazon's; keys come from AWS_...")
    parser.add_argument("--cache-dir", help="keep remote shards in this folder; the processes of a machine share it")
    parser.add_argument("--global-batch-size", type=int, default=96, help="samples in a step, over all processes")
    parser.add_argument("--num-workers", type=int, help="for each process; by default they divide the processors")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train as the command line says."""
    settings = parse_settings()
    device = join()
    per_rank, rest = divmod(settings.global_batch_size, dist.get_world_size())
    if rest or not per_rank:
        raise SystemExit(f"--global-batch-size {settings.global_batch_size}: not a multiple of {dist.get_world_size()}")
    os.makedirs(settings.run, exist_ok=True)
    with StreamLoader(
        settings.shards,
        per_rank,
        shuffle=True,
        fields=("png;jpg;jpeg", "cls"),
        transform={"png;jpg;jpeg": as_input},
        num_workers="auto" if settings.num_workers is None else settings.num_workers,
        seed=settings.seed,
        storage_options={"endpoint_url": settings.endpoint} if settings.endpoint else None,
        cache_dir=settings.cache_dir,
    ) as loader:
        train(settings, loader, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
