"""Compute an embedding of each image once, as a sidecar of the shards, and train a linear probe on it.

python examples/embeddings.py --shards shards     # made first, where there are none
"""

from __future__ import annotations

import argparse
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from streamload import ShardWriter, StreamLoader, TarDataset, map_shards

CLASSES = 4
SIZE = 32
WIDTH = 64


def write_shards(folder: Path, samples: int = 400) -> None:
    """Images of which each class has a colour of its own, under noise."""
    generator = np.random.default_rng(0)
    colours = generator.integers(0, 160, (CLASSES, 3))
    with ShardWriter(folder, max_count=100) as writer:
        for number in range(samples):
            label = number % CLASSES
            pixels = colours[label] + generator.integers(0, 96, (SIZE, SIZE, 3))
            file = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
            writer.write({"__key__": f"{number:06d}", "jpg": file.getvalue(), "cls": label})


@cache
def encoder() -> torch.nn.Module:
    """A stand-in for a large pretrained model; made once in each process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, WIDTH, 8, stride=8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ).eval()


@torch.no_grad()
def embeddings(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `map_shards` calls with decoded samples of a shard; a sidecar keeps their keys."""
    images = torch.from_numpy(np.stack([sample["jpg"] for sample in samples])).permute(0, 3, 1, 2) / 255
    return [{"emb.npy": vector} for vector in encoder()(images).numpy()]


def main() -> None:
    """Make the shards and the sidecar, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, default=Path("images"))
    folder = parser.parse_args().shards
    sidecar = folder / "emb"
    if not folder.exists():
        write_shards(folder)
    if not sidecar.exists():
        map_shards(embeddings, folder, sidecar, sidecar=True, batch_size=64, decode=True, workers=1)
    probe = torch.nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.AdamW(probe.parameters(), lr=0.05)
    with StreamLoader(folder, 50, shuffle=True, fields=("emb.npy", "cls"), join=sidecar, num_workers=0) as loader:
        for _ in range(10):
            for vectors, labels in loader:
                loss = torch.nn.functional.cross_entropy(probe(vectors), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    samples = TarDataset(folder, fields=("__key__", "jpg", "emb.npy", "cls"), join=sidecar)
    right = sum(int(probe(torch.from_numpy(vector)).argmax()) == label for _, _, vector, label in samples)
    key, image, vector, _ = samples[-1]
    print(f"sample {key}: an image of {image.shape} with an embedding of {vector.shape}")
    print(f"{right} of {len(samples)} labels right")


if __name__ == "__main__":
    main()
