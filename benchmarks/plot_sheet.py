"""Draw the sheet of samples in the documentation: `python benchmarks/plot_sheet.py FOLDER docs/sheet.png`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from streamload import ShardWriter

CLASSES = ("disc", "square")


def drawings(count: int) -> Iterator[dict[str, Any]]:
    """Discs and squares on a plain ground, with a mask of classes, boxes, and a caption."""
    for number in range(count):
        random = np.random.default_rng(number)
        image = Image.new("RGB", (160, 120), tuple(random.integers(170, 240, 3)))
        mask = Image.new("L", image.size)
        boxes, captions = [], []
        for kind in random.integers(0, 2, 1 + number % 3).tolist():
            x, y, side = (int(random.integers(*span)) for span in ((5, 100), (5, 60), (30, 55)))
            for picture, colour in ((image, tuple(random.integers(0, 160, 3))), (mask, kind + 1)):
                draw = ImageDraw.Draw(picture)
                (draw.rectangle if kind else draw.ellipse)((x, y, x + side - 1, y + side - 1), fill=colour)
            boxes.append({"bbox": [x, y, side, side], "category": CLASSES[kind]})
            captions.append(f"a {CLASSES[kind]} of {side} pixels")
        yield {
            "__key__": f"shapes/{number:03d}",
            "jpg": np.array(image),
            "mask.png": np.array(mask),
            "json": boxes,
            "txt": ", ".join(captions),
        }


def main(folder: str, picture: str) -> None:
    """Pack the drawings into a folder, and show some of them."""
    with ShardWriter(os.path.join(folder, "shapes")) as writer:
        for sample in drawings(24):
            writer.write(sample)
    show = [sys.executable, "-m", "streamload", "show", "shapes", "--output", os.path.abspath(picture)]
    subprocess.run([*show, "--samples", "8", "--columns", "4"], cwd=folder, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
