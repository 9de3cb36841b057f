"""The datasets that loaders are compared on: made once, from real photographs and fixed seeds."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamload import ShardWriter

FOLDER = Path(".bench")


@dataclass(frozen=True)
class Workload:
    """A dataset and how it is read.

    Attributes:
        name: of the workload and its folder.
        batch_size: samples in a batch.
        fields: what is read.
        samples: how many there are.
        make: yields the samples.
        shard_samples: samples in a shard.
    """

    name: str
    batch_size: int
    fields: tuple[str, ...]
    samples: int
    make: Callable[[int], Iterator[dict[str, Any]]]
    shard_samples: int

    def shards(self) -> list[str]:
        """The shards' paths; they are written first if need be."""
        folder = FOLDER / self.name
        if not (folder / ".streamload" / "index.json").exists():
            with ShardWriter(folder, max_count=self.shard_samples, overwrite=True) as writer:
                for sample in self.make(self.samples):
                    writer.write(sample)
        return sorted(os.fspath(path) for path in folder.glob("*.tar"))


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


def _images(samples: int) -> Iterator[dict[str, Any]]:
    """Crops of photographs, enlarged to 500 x 375: JPEG files of about 40 to 110 kB, as ImageNet has them."""
    generator = np.random.default_rng(0)
    photographs = _photographs()
    for number in range(samples):
        photograph = photographs[number % len(photographs)]
        width = int(generator.integers(200, min(photograph.width, photograph.height * 4 // 3)))
        height = width * 3 // 4
        left = int(generator.integers(0, photograph.width - width + 1))
        top = int(generator.integers(0, photograph.height - height + 1))
        crop = photograph.resize((500, 375), box=(left, top, left + width, top + height))
        noisy = np.asarray(crop, np.int16) + generator.integers(-8, 9, (375, 500, 3), dtype=np.int16)
        file = io.BytesIO()
        type(crop).save(_from_array(noisy.clip(0, 255).astype(np.uint8)), file, "JPEG", quality=85)
        yield {"__key__": f"{number:08d}", "jpg": file.getvalue(), "cls": number % 1000}


def _from_array(array: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(array)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny", 512, ("npy", "cls"), 60_000, _tiny, 5_000),
        Workload("tokens", 64, ("npy",), 20_000, _tokens, 2_000),
        Workload("images", 128, ("jpg", "cls"), 3_000, _images, 300),
    )
}
