"""Train with Lightning: its checkpoints hold where the loader stands, so a run goes on in the middle of an epoch.

    python examples/train_lightning.py .runs/lightning --stop-behind-step 7
    python examples/train_lightning.py .runs/lightning

Lightning saves the state of the loader, and loads it where a checkpoint was made within an epoch. Before each epoch it
tells the loader its number, so runs also go on rightly from checkpoints at an epoch's end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from streamload import ShardWriter, StreamLoader

SAMPLES = 40


class Shards(lightning.LightningDataModule):
    """The shards as Lightning wants them."""

    def __init__(self, shards: str) -> None:
        super().__init__()
        self._shards = shards

    def train_dataloader(self) -> StreamLoader:
        """Called on each rank, where its number is known."""
        return StreamLoader(self._shards, batch_size=8, shuffle=True, fields=("npy", "cls"), num_workers=1)


class Model(lightning.LightningModule):
    """Linear regression of a sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self._layer = nn.Linear(4, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Tell which samples came, and return the loss."""
        values, numbers = batch
        print(f"epoch {self.current_epoch} batch {batch_idx}: samples {numbers.tolist()}", flush=True)
        return nn.functional.mse_loss(self._layer(values)[:, 0], numbers / SAMPLES)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), 1e-3)


def write_shards(folder: str) -> None:
    """A few samples in two shards: a vector `npy`, and its number `cls`."""
    with ShardWriter(os.path.join(folder, "part-%06d.tar"), max_count=SAMPLES // 2) as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:06d}", "npy": np.full(4, number / SAMPLES, np.float32), "cls": number})


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of this run; a run that was stopped goes on")
    parser.add_argument("--checkpoint-every", type=int, default=3, metavar="STEPS", help="0 for the end of each epoch")
    parser.add_argument("--stop-behind-step", type=int, default=-1, metavar="STEP")
    settings = parser.parse_args(arguments)
    shards = os.path.join(settings.run, "shards")
    if not os.path.exists(shards):
        write_shards(shards)
    checkpoints = ModelCheckpoint(
        settings.run,
        save_last=True,
        enable_version_counter=False,
        every_n_train_steps=settings.checkpoint_every or None,
    )
    trainer = lightning.Trainer(
        max_epochs=3,
        max_steps=settings.stop_behind_step,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        callbacks=[checkpoints],
        use_distributed_sampler=False,  # the loader divides the samples among ranks itself
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), Shards(shards), ckpt_path="last")


if __name__ == "__main__":
    main()
