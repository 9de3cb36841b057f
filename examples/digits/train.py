"""Train a small network on shards of 28 x 28 images; a run that was killed goes on when it is started again.

The folder of a run holds:
    checkpoint.pt  the last checkpoint: network, optimizer, torch's generator, and where the loader stands
    steps.jsonl    one line for each step that was done: its number and a hash of its images and labels
    result.json    the accuracy after each epoch, and a hash of the trained weights
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import signal
import tarfile
import time
from dataclasses import dataclass
from typing import Any, TextIO

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from streamload import StreamLoader

SIDE = 28  # pixels
LEARNING_RATE = 5e-3
STEPS_PER_LINE = 10


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for; its help explains them."""

    data: str
    run: str
    epochs: int
    checkpoint_every: int
    batch_size: int
    num_workers: int
    seed: int
    kill_at_step: int | None


def as_input(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 (height, width, 3) of a grey image to float32 (1, height, width) in [0, 1]."""
    return image[np.newaxis, :, :, 0].astype(np.float32) / np.float32(255)


def augment(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.float32]:
    """The same digit, turned by up to 12 degrees, scaled by up to a tenth and shifted by up to 2 pixels.

    streamload passes a generator to every transform that has a parameter named `rng`. It is keyed by the seed, the
    epoch and the sample, so the same digit looks different in each epoch, and the same in each run.
    """
    center = ((SIDE - 1) / 2, (SIDE - 1) / 2)
    matrix = np.asarray(cv2.getRotationMatrix2D(center, rng.uniform(-12, 12), rng.uniform(0.9, 1.1)), np.float64)
    matrix[:, 2] += rng.uniform(-2, 2, 2)
    return as_input(np.asarray(cv2.warpAffine(image, matrix, (SIDE, SIDE)), np.uint8))


def network(classes: int) -> nn.Module:
    """Two convolutions and two linear layers: (batch, 1, 28, 28) to (batch, classes)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32 * (SIDE // 4) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


class Training:
    """One run: what is trained, what feeds it, and how far it has come.

    Args:
        settings: of the run.
        train: the loader to train on.
        val: the loader to evaluate on.
    """

    def __init__(self, settings: Settings, train: StreamLoader, val: StreamLoader) -> None:
        self._settings = settings
        self._train = train
        self._val = val
        self._val_keys = stored_keys(os.path.join(settings.data, "val"))
        with open(os.path.join(settings.data, "train", "classes.json"), encoding="utf-8") as file:
            classes = len(json.load(file)["classes"])
        torch.manual_seed(settings.seed)
        self._model = network(classes)
        self._optimizer = torch.optim.Adam(self._model.parameters(), LEARNING_RATE)
        self._step = 0
        self._epoch = 0
        self._accuracies: list[float] = []
        self._checkpoint = os.path.join(settings.run, "checkpoint.pt")

    def run(self) -> None:
        """Train from the checkpoint, or from the start where there is none, to the end."""
        self._restore()
        with open(os.path.join(self._settings.run, "steps.jsonl"), "a", encoding="utf-8") as log:
            while self._epoch < self._settings.epochs:
                self._train_epoch(log)
                self._accuracies.append(self._evaluate())
                print(f"epoch {self._epoch}: accuracy {self._accuracies[-1]:.2%} on {len(self._val_keys)} val samples")
                self._epoch += 1
        result = {"accuracies": self._accuracies, "weights_sha256": self._weights_hash()}
        with open(os.path.join(self._settings.run, "result.json"), "w", encoding="utf-8") as file:
            json.dump(result, file)

    def _train_epoch(self, log: TextIO) -> None:
        steps = len(self._train) * self._settings.epochs
        samples, since = 0, time.perf_counter()
        self._model.train()
        self._train.set_epoch(self._epoch)
        for images, labels in self._train:
            loss = nn.functional.cross_entropy(self._model(images), labels)
            self._optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, 2 * (1 - self._step / steps))
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self._step += 1
            samples += len(labels)
            log.write(json.dumps({"step": self._step, "batch_sha256": batch_hash(images, labels)}) + "\n")
            log.flush()
            if self._step % STEPS_PER_LINE == 0:
                rate = samples / (time.perf_counter() - since)
                samples, since = 0, time.perf_counter()
                where = f"epoch {self._epoch}  step {self._step:>4}/{steps}"
                print(f"{where}  loss {loss.item():.4f}  {rate:>7,.0f} samples/s", flush=True)
            if self._step % self._settings.checkpoint_every == 0:
                self._save()
            if self._step == self._settings.kill_at_step:
                os.kill(os.getpid(), signal.SIGKILL)

    def _evaluate(self) -> float:
        """The share of val samples that are classified correctly; each of them is seen exactly once."""
        correct, keys = 0, []
        self._model.eval()
        with torch.inference_mode():
            for batch in self._val:
                correct += int((self._model(batch["png"]).argmax(1) == batch["cls"]).sum())
                keys += batch["__key__"]
        if sorted(keys) != self._val_keys:
            raise RuntimeError(f"the {len(keys)} samples evaluated are not the {len(self._val_keys)} that are stored")
        return correct / len(keys)

    def _save(self) -> None:
        """Replace the checkpoint; whenever the process is killed, the old one or the new one is there, whole."""
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generator": torch.get_rng_state(),
            "loader": self._train.state_dict(),
            "step": self._step,
            "epoch": self._epoch,
            "accuracies": self._accuracies,
        }
        with open(f"{self._checkpoint}.new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{self._checkpoint}.new", self._checkpoint)

    def _restore(self) -> None:
        if not os.path.exists(self._checkpoint):
            return
        state: dict[str, Any] = torch.load(self._checkpoint, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"])
        self._train.load_state_dict(state["loader"])
        self._step, self._epoch, self._accuracies = state["step"], state["epoch"], state["accuracies"]
        print(f"going on behind step {self._step}, in epoch {self._epoch}")

    def _weights_hash(self) -> str:
        digest = hashlib.sha256()
        for weights in self._model.state_dict().values():
            digest.update(weights.numpy())
        return digest.hexdigest()


def batch_hash(images: Tensor, labels: Tensor) -> str:
    """Tells batches apart by every pixel, after augmentation, and by their order."""
    return hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()


def stored_keys(folder: str) -> list[str]:
    """The keys of all samples in the shards of a folder, sorted, read without streamload."""
    keys = []
    for shard in glob.glob(os.path.join(glob.escape(folder), "*.tar")):
        with tarfile.open(shard) as tar:
            keys += [name.removesuffix(".cls") for name in tar.getnames() if name.endswith(".cls")]
    return sorted(keys)


def parse_settings() -> Settings:
    """The settings from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="what `shardify --split train=...,val=...` wrote")
    parser.add_argument("run", help="the folder of this run; if it holds a checkpoint, the run goes on from there")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-at-step", type=int, help="send SIGKILL to this process after that step, as a proof")
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Train as the command line says."""
    settings = parse_settings()
    torch.set_num_threads(1)  # sums are added up in the same order in every run, and the workers have the other cores
    torch.use_deterministic_algorithms(True)
    os.makedirs(settings.run, exist_ok=True)
    with (
        StreamLoader(
            os.path.join(settings.data, "train"),
            batch_size=settings.batch_size,
            shuffle=True,
            fields=("png", "cls"),
            transform={"png": augment},
            drop_last=True,
            num_workers=settings.num_workers,
            seed=settings.seed,
        ) as train,
        StreamLoader(
            os.path.join(settings.data, "val"),
            batch_size=100,
            pad=False,
            transform={"png": as_input},
            num_workers=1,
        ) as val,
    ):
        Training(settings, train, val).run()
        print(f"what the loader did in this run: {train.statistics()}")


if __name__ == "__main__":
    main()
