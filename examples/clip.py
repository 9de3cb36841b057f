"""Train on images and captions as img2dataset writes them: some lack captions, some are broken, all have scores.

python examples/clip.py --shards shards     # made first, where there are none
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from streamload import ShardWriter, StreamLoader
from streamload.images import RandomResizedCrop

CONTEXT = 24
BATCH_SIZE = 16


def write_shards(folder: Path, samples: int = 400) -> None:
    """Shards like those of img2dataset: `jpg`, `txt` where there is a caption, and `json` with what is known."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder / "%05d.tar", max_count=100) as writer:
        for number in range(samples):
            width = int(generator.integers(48, 160))
            file = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (48, width, 3), dtype=np.uint8)).save(file, "JPEG")
            content = file.getvalue() if number % 50 else b"<html>404</html>"  # what a dead link gives
            sample: dict[str, Any] = {"__key__": f"{number:09d}", "jpg": content}
            sample["json"] = {"aesthetic": float(generator.uniform(3, 8)), "width": width}
            if number % 4:
                sample["txt"] = f"picture {number} of {width} pixels"
            writer.write(sample)


def tokens_of(caption: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A stand-in for a tokenizer: bytes, padded."""
    padded = np.zeros(CONTEXT, np.int64)
    known = caption.encode()[:CONTEXT]
    padded[: len(known)] = np.frombuffer(known, np.uint8)
    return padded


def main() -> None:
    """Make the shards, index their scores, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, default=Path("clip-shards"))
    folder = parser.parse_args().shards
    if not folder.exists():
        write_shards(folder)
    # Once: scores into the index, so that samples are selected without reading them.
    index = [sys.executable, "-m", "streamload", "index", str(folder), "--columns", "json:aesthetic,json:width"]
    subprocess.run(index, check=True)
    images, texts = torch.nn.Linear(3, 8), torch.nn.Embedding(256, 8)
    optimizer = torch.optim.SGD([*images.parameters(), *texts.parameters()], lr=0.1)
    with StreamLoader(
        folder,
        BATCH_SIZE,
        shuffle=True,
        fields=("jpg", "txt"),
        where='"txt" and aesthetic > 5 and width >= 64',
        transform={"jpg": RandomResizedCrop(32), "txt": tokens_of},
        on_error="replace",  # a broken image shows when it is decoded; another sample of its batch takes its place
        drop_last=True,
    ) as loader:
        for pixels, tokens in loader:
            assert pixels.shape == (BATCH_SIZE, 32, 32, 3)
            left = images(pixels.float().mean((1, 2)) / 255)
            right = texts(tokens).mean(1)
            loss = torch.nn.functional.cross_entropy(left @ right.T, torch.arange(BATCH_SIZE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{len(loader.dataset)} pairs selected, {len(loader)} full batches, {len(loader.skipped)} broken images")


if __name__ == "__main__":
    main()
