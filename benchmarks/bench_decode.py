"""How fast is the built-in JPEG decoding with RandomResizedCrop, against Pillow, and how far do the pictures differ?

One process, one thread. Both get the same bytes and the same crops and take turns image by image: Pillow decodes and
calls `resize(box=..., reducing_gap=None)`, its exact antialiased bilinear filter; streamload does what its workers do.
Two sets of JPEG files are made of the photographs that ship with scikit-learn and scikit-image: 500 x 375, as ImageNet
has them, and 2000 x 1500, as a phone has them. Run it with

    python benchmarks/bench_decode.py
"""

from __future__ import annotations

import argparse
import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from time import process_time

import cv2
import numpy as np
from decoding import CROP
from PIL import Image
from workloads import FOLDER, photograph_files

from streamload.images import RandomResizedCrop

SETS = {"500 x 375": (500, 375, 1.0), "2000 x 1500": (2000, 1500, 0.1)}
"""Width, height, and how many of the images are made."""

Decoder = Callable[[bytes, np.random.Generator], np.ndarray]
_crop = RandomResizedCrop(CROP)


def with_streamload(file: bytes, rng: np.random.Generator) -> np.ndarray:
    """What a worker does; the generator says which crop."""
    return _crop.from_encoded(memoryview(file), rng)


def with_pillow(file: bytes, rng: np.random.Generator) -> np.ndarray:
    """The same crop by Pillow."""
    with Image.open(io.BytesIO(file)) as image:
        top, left, rows, columns = _crop.window(image.height, image.width, rng).box
        box = (left, top, left + columns, top + rows)
        resized = image.convert("RGB").resize((CROP, CROP), Image.Resampling.BILINEAR, box=box, reducing_gap=None)
    return np.asarray(resized)


def _seconds(decoder: Decoder, file: bytes, seed: int) -> float:
    rng = np.random.default_rng(seed)  # not counted: a worker has one and sets its state
    began = process_time()
    decoder(file, rng)
    return process_time() - began


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    ours, theirs: processor seconds for each round over all images.
    means, largest: absolute differences of the pixels, of 255, for each image.
    """

    ours: list[float]
    theirs: list[float]
    means: list[float]
    largest: list[float]

    def row(self, name: str, images: int) -> str:
        """A line of the table."""
        ratios = [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]
        ours, theirs = (1000 * statistics.median(seconds) / images for seconds in (self.ours, self.theirs))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        worst, furthest = self.means.index(max(self.means)), self.largest.index(max(self.largest))
        difference = f"{statistics.mean(self.means):.2f}; {self.means[worst]:.2f} on image {worst}"
        greatest = f"{self.largest[furthest]:.0f} on image {furthest}"
        return f"| {name} | {ours:.2f} | {theirs:.2f} | {spread} | {difference} | {greatest} |"


def compare(files: list[bytes], rounds: int) -> Comparison:
    """Both decode every image in every round, each time another crop; who begins changes with the image."""
    ours, theirs, means, largest = [], [], [], []
    for round_number in range(rounds + 1):
        spent: dict[Decoder, float] = {with_streamload: 0.0, with_pillow: 0.0}
        for number, file in enumerate(files):
            seed = round_number * len(files) + number
            order: list[Decoder] = [with_streamload, with_pillow] if number % 2 else [with_pillow, with_streamload]
            for decoder in order:
                spent[decoder] += _seconds(decoder, file, seed)
        if round_number:  # the first is to warm up
            ours.append(spent[with_streamload])
            theirs.append(spent[with_pillow])
    for number, file in enumerate(files):
        ours_pixels, theirs_pixels = (
            each(file, np.random.default_rng(number)) for each in (with_streamload, with_pillow)
        )
        difference = np.abs(ours_pixels.astype(int) - theirs_pixels)
        means.append(float(difference.mean()))
        largest.append(float(difference.max()))
    return Comparison(ours, theirs, means, largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="rounds over all images")
    parser.add_argument("--images", type=int, default=300, help="images of 500 x 375; of the others a tenth")
    arguments = parser.parse_args()
    cv2.setNumThreads(0)
    lines = [
        "| JPEG files | streamload, ms | Pillow, ms | Pillow / streamload | mean difference, of 255 | greatest |",
        "|---|---|---|---|---|---|",
    ]
    for name, (width, height, share) in SETS.items():
        files = list(photograph_files(max(1, round(arguments.images * share)), width, height))
        lines.append(compare(files, arguments.runs).row(f"{len(files)} of {name}", len(files)))
    names = ("Pillow", "simplejpeg", "opencv-python-headless", "numpy")
    lines += ["", "Processor time of one thread; " + ", ".join(f"{name} {version(name)}" for name in names) + "."]
    text = "\n".join(lines) + "\n"
    print(text)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "decode.md").write_text(text)


if __name__ == "__main__":
    main()
