"""The datasets that loaders are compared on: made once, from real photographs and fixed seeds."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from streamload import ShardWriter

FOLDER = Path(".bench")

RECIPE = 2
"""Counted up when what is made here changes, so that nothing is measured on data of an earlier recipe."""


@dataclass(frozen=True)
class Workload:
    """A dataset and how it is read.

    Attributes:
        name: of the workload and its folder.
        batch_size: samples in a batch.
        fields: what is read; the first is the array or the image.
        samples: how many there are.
        make: yields the samples.
        shard_samples: samples in a shard.
        root: the folder that the workload's folder is in.
    """

    name: str
    batch_size: int
    fields: tuple[str, ...]
    samples: int
    make: Callable[[int], Iterator[dict[str, Any]]]
    shard_samples: int
    root: Path = FOLDER

    @property
    def folder(self) -> Path:
        """Where the shards are, and in folders beside them what other loaders read."""
        return self.root / f"{self.name}-{RECIPE}"

    def shards(self) -> list[str]:
        """The shards' paths; they are written first if need be."""
        if not (self.folder / ".streamload" / "index.json").exists():
            with ShardWriter(self.folder, max_count=self.shard_samples, overwrite=True) as writer:
                for sample in self.make(self.samples):
                    writer.write(sample)
        return sorted(os.fspath(path) for path in self.folder.glob("*.tar"))

    def made_once(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder `name` beside the shards, filled by `make` if it is not there; never half filled."""
        folder = self.root / f"{self.folder.name}-{name}"
        if not folder.exists():
            unfinished = folder.with_name(folder.name + "-unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            make(unfinished)
            unfinished.rename(folder)
        return folder


def workload(name: str, root: Path = FOLDER, samples: int | None = None) -> Workload:
    """The workload of that name, in `root` and with `samples` samples instead of all."""
    whole = WORKLOADS[name]
    samples = samples or whole.samples
    # A quarter at most: WebDataset needs a shard for each worker.
    return replace(whole, root=root, samples=samples, shard_samples=min(whole.shard_samples, -(-samples // 4)))


def _tiny(samples: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    for number in range(samples):
        image = generator.integers(0, 256, (28, 28), dtype=np.uint8)
        yield {"__key__": f"{number:08d}", "npy": image, "cls": number % 10}


def _tokens(samples: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    for number in range(samples):
        yield {"__key__": f"{number:08d}", "npy": generator.integers(0, 50_000, 2048, dtype=np.int32)}


def _photographs() -> list[Any]:
    """The photographs that ship with scikit-learn and scikit-image, in colour."""
    import skimage.data
    from PIL import Image
    from sklearn.datasets import load_sample_images

    arrays = [*load_sample_images().images, skimage.data.astronaut(), skimage.data.chelsea(), skimage.data.coffee()]
    return [Image.fromarray(array) for array in arrays]


def photograph_files(samples: int, width: int = 500, height: int = 375) -> Iterator[bytes]:
    """Crops of photographs, enlarged: at 500 x 375 JPEG files of about 40 to 110 kB, as ImageNet has them."""
    from PIL import Image

    generator = np.random.default_rng(0)
    photographs = _photographs()
    for number in range(samples):
        photograph = photographs[number % len(photographs)]
        columns = int(generator.integers(200, min(photograph.width, photograph.height * 4 // 3)))
        rows = columns * 3 // 4
        left = int(generator.integers(0, photograph.width - columns + 1))
        top = int(generator.integers(0, photograph.height - rows + 1))
        crop = photograph.resize((width, height), box=(left, top, left + columns, top + rows))
        noisy = np.asarray(crop, np.int16) + generator.integers(-8, 9, (height, width, 3), dtype=np.int16)
        file = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=92)
        yield file.getvalue()


def _images(samples: int) -> Iterator[dict[str, Any]]:
    for number, file in enumerate(photograph_files(samples)):
        yield {"__key__": f"{number:08d}", "jpg": file, "cls": number % 1000}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", 512, ("npy", "cls"), 60_000, _tiny, 5_000),
        Workload("tokens", 64, ("npy",), 20_000, _tokens, 2_000),
        Workload("images", 128, ("jpg", "cls"), 3_000, _images, 300),
    )
}
