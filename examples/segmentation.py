"""Semantic segmentation: photographs with palette masks and 16-bit depth maps, cropped and flipped together.

    python examples/segmentation.py FOLDER

makes 64 pictures of a disc before a background, packs them into FOLDER, and trains a small network on random crops to
find the disc. Your own data differs in `pictures` alone: each sample is an image, a mask whose palette numbers are the
classes (255: not labelled, as in Pascal VOC), and a depth map in millimetres.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from streamload import ShardWriter, StreamLoader, images
from streamload.images import Joint, Normalize, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, ToFloat

FIELDS = ("jpg", "mask.png", "depth.png")
DECODE = {"mask.png": images.palette, "depth.png": images.unchanged}
UNLABELLED = 255
SIZE = 48


def pictures(count: int) -> Iterator[dict[str, Any]]:
    """Bright discs on dark ground, nearer than that; a ring of one pixel around each is not labelled."""
    rows, columns = np.mgrid[0:60, 0:80]
    for number in range(count):
        random = np.random.default_rng(number)
        distance = np.hypot(rows - random.integers(20, 40), columns - random.integers(20, 60))
        radius = int(random.integers(8, 18))
        disc = distance < radius
        image = np.where(disc[:, :, None], 200, 60) + random.integers(-40, 40, (60, 80, 3))
        mask = np.where(abs(distance - radius) < 0.5, UNLABELLED, disc).astype(np.uint8)
        depth = np.where(disc, 1_000, 4_000).astype(np.uint16)
        yield {
            "__key__": f"{number:06d}",
            "jpg": image.astype(np.uint8),
            "mask.png": png(mask, palette=[0, 0, 0, 128, 0, 0, *[224] * 3 * 254]),
            "depth.png": png(depth),
        }


def png(pixels: NDArray[Any], palette: list[int] | None = None) -> bytes:
    """A PNG file; with a palette its colours are for the eye, and its numbers are what counts."""
    image, file = Image.fromarray(pixels), io.BytesIO()
    if palette is not None:
        image.putpalette(palette)
    image.save(file, "PNG")
    return file.getvalue()


def loader(folder: str, *, batch_size: int = 8, num_workers: int = 1) -> StreamLoader:
    """Crops of image, mask and depth: float32[batch, 3, 48, 48], uint8[batch, 48, 48], uint16[batch, 48, 48]."""
    together = Joint(
        [
            RandomResizedCrop(SIZE + 4, scale=(0.4, 1.0)),
            RandomCrop(SIZE, padding=2),
            RandomHorizontalFlip(),
            ToFloat(),  # this and the next are for the image alone
            Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
        ],
        ("image", "mask", "mask"),
        mask_fill=UNLABELLED,
    )
    return StreamLoader(
        folder,
        batch_size,
        shuffle=True,
        fields=FIELDS,
        decode=DECODE,
        transform=together,
        num_workers=num_workers,
    )


def train(batches: StreamLoader, epochs: int) -> float:
    """Trains for some epochs; returns the share of labelled pixels of the last one that were right."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv2d(8, 2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    right = labelled = 0
    for epoch in range(epochs):
        right = labelled = 0
        for image, mask, depth in batches:
            scores = model(image)
            loss = functional.cross_entropy(scores, mask.long(), ignore_index=UNLABELLED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            known = mask != UNLABELLED
            right += int((scores.argmax(1) == mask)[known].sum())
            labelled += int(known.sum())
            metres = depth.float() / 1_000  # of the pixels that `RandomCrop` adds it is 0.255, their mask 255
            assert metres[mask == 1].numel() == 0 or metres[mask == 1].max() < metres[mask == 0].max()
        print(f"epoch {epoch}: {right / labelled:.1%} of the pixels are right")
    return right / labelled


def main(folder: str, *, num_workers: int = 1, epochs: int = 2) -> float:
    """Packs the pictures and trains on them; returns what `train` returns."""
    with ShardWriter(folder, max_count=16) as writer:
        for picture in pictures(64):
            writer.write(picture)
    with loader(folder, num_workers=num_workers) as batches:
        return train(batches, epochs)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "segmentation-shards")
