"""Train with the Trainer of Hugging Face's transformers, and go on in the middle of an epoch.

    python examples/train_hf_trainer.py .runs/hf_trainer --stop-behind-step 7
    python examples/train_hf_trainer.py .runs/hf_trainer

By itself, the Trainer would resume by reading all batches again that were used already. With `ignore_data_skip=True`
it does not, and a callback saves the loader's state into each checkpoint, and loads it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from streamload import ShardWriter, StreamLoader

SAMPLES = 40


class LoaderState(TrainerCallback):
    """Keeps the loader's state beside the Trainer's own, in a file of each checkpoint."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A checkpoint was written: every process has the same state, and the first one writes it."""
        if state.is_world_process_zero:
            with open(self._path(args, state), "w", encoding="utf-8") as file:
                json.dump(kwargs["train_dataloader"].state_dict(), file)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer has loaded its checkpoint, if there is one, and not yet begun its first epoch."""
        if state.global_step:
            with open(self._path(args, state), encoding="utf-8") as file:
                kwargs["train_dataloader"].load_state_dict(json.load(file))

    def _path(self, args: TrainingArguments, state: TrainerState) -> str:
        return os.path.join(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")


class ShardTrainer(Trainer):
    """A Trainer that reads shards."""

    def get_train_dataloader(self) -> StreamLoader:
        """The loader, which is not given to Accelerate: it divides the samples among the processes itself."""
        shards = os.path.join(self.args.output_dir, "shards")
        return StreamLoader(
            shards,
            self.args.per_device_train_batch_size,
            shuffle=True,
            seed=self.args.seed,
            transform=as_inputs,
            num_workers=1,
        )


def as_inputs(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample as the model's keyword arguments."""
    return {"values": sample["npy"], "labels": sample["cls"]}


class Model(nn.Module):
    """Linear regression of a sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self._layer = nn.Linear(4, 1)

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Tell which samples came, and return the loss."""
        print(f"epoch with samples {labels.tolist()}", flush=True)
        return {"loss": nn.functional.mse_loss(self._layer(values)[:, 0], labels / SAMPLES)}


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
    parser.add_argument("--stop-behind-step", type=int, default=-1, metavar="STEP")
    settings = parser.parse_args(arguments)
    if not os.path.exists(os.path.join(settings.run, "shards")):
        write_shards(os.path.join(settings.run, "shards"))
    training = TrainingArguments(
        settings.run,
        per_device_train_batch_size=8,
        num_train_epochs=3,
        max_steps=settings.stop_behind_step,
        save_steps=settings.checkpoint_every,
        ignore_data_skip=True,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    trainer = ShardTrainer(Model(), training, callbacks=[LoaderState()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(settings.run))


if __name__ == "__main__":
    main()
