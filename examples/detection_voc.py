"""Object detection from Pascal VOC: images and their XML annotations, with the collate function of the SSD tutorials.

    python examples/detection_voc.py FOLDER

makes a small dataset as VOC lays it out (`JPEGImages/*.jpg`, `Annotations/*.xml`), packs each image with its XML file,
and goes through batches of images of one size and boxes of any number. With VOC itself `pack` is all that is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from streamload import ShardWriter, StreamLoader
from streamload.images import Joint, RandomHorizontalFlip, RandomResizedCrop, ToTensor

CLASSES = ("circle", "square")
SIZE = 64


def make_voc(folder: Path, count: int) -> None:
    """Writes images of some squares and circles, and where they are."""
    for name in ("JPEGImages", "Annotations"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        random = np.random.default_rng(number)
        height, width = 90 + number % 3 * 10, 120
        pixels = random.integers(0, 60, (height, width, 3), np.uint8)
        annotation = ElementTree.Element("annotation")
        for _ in range(number % 4):
            kind = int(random.integers(len(CLASSES)))
            left, top, side = (int(random.integers(*span)) for span in ((0, 80), (0, 50), (15, 40)))
            rows, columns = np.mgrid[0:side, 0:side]
            inside = np.hypot(rows - side / 2, columns - side / 2) < side / 2 if kind == 0 else rows >= 0
            pixels[top : top + side, left : left + side][inside] = 220
            described = ElementTree.SubElement(annotation, "object")
            ElementTree.SubElement(described, "name").text = CLASSES[kind]
            box = ElementTree.SubElement(described, "bndbox")
            for edge, value in zip(("xmin", "ymin", "xmax", "ymax"), (left, top, left + side, top + side), strict=True):
                ElementTree.SubElement(box, edge).text = str(value + (edge in ("xmin", "ymin")))  # VOC counts from 1
        Image.fromarray(pixels).save(folder / "JPEGImages" / f"{number:06d}.jpg")
        ElementTree.ElementTree(annotation).write(folder / "Annotations" / f"{number:06d}.xml")


def pack(voc: Path, shards: Path) -> None:
    """Packs each image and its annotation, both as they are, into shards."""
    with ShardWriter(shards) as writer:
        for path in sorted((voc / "Annotations").glob("*.xml")):
            image = voc / "JPEGImages" / f"{path.stem}.jpg"
            writer.write({"__key__": path.stem, "jpg": image.read_bytes(), "xml": path.read_bytes()})


def boxes_of(annotation: bytes) -> NDArray[np.float32]:
    """A decoder: float32[boxes, 5] of left, top, right, bottom, in pixels from 0, and the number of the class."""
    found = []
    tree = ElementTree.fromstring(annotation)  # noqa: S314 - one's own; for XML of others there is defusedxml
    for described in tree.iter("object"):
        left, top, right, bottom = (
            float(described.findtext(f"bndbox/{edge}", "nan")) for edge in ("xmin", "ymin", "xmax", "ymax")
        )
        found.append([left - 1, top - 1, right, bottom, CLASSES.index(described.findtext("name", ""))])
    return np.array(found, np.float32).reshape(-1, 5)


def detection_collate(batch: list[Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Images in one tensor, and a tensor of boxes for each; as it would be with torch's DataLoader."""
    targets: list[torch.Tensor] = []
    imgs = []
    for sample in batch:
        imgs.append(sample[0])
        targets.append(torch.FloatTensor(sample[1]))
    return torch.stack(imgs, 0), targets


def loader(shards: Path, *, batch_size: int = 8, num_workers: int = 1) -> StreamLoader:
    """Batches of float32[batch, 3, 64, 64] and a list of float32[boxes, 5], moved with the crops of their images."""
    return StreamLoader(
        shards,
        batch_size,
        shuffle=True,
        fields=("jpg", "xml"),
        decode={"xml": boxes_of},
        transform=Joint(
            [RandomResizedCrop(SIZE, scale=(0.5, 1.0)), RandomHorizontalFlip(), ToTensor()], ("image", "boxes")
        ),
        collate_fn=detection_collate,
        num_workers=num_workers,
    )


def main(folder: str, *, num_workers: int = 1) -> dict[str, float]:
    """Makes, packs and reads a dataset; returns how bright the boxes of each class are, and the pictures."""
    make_voc(Path(folder, "voc"), 40)
    pack(Path(folder, "voc"), Path(folder, "shards"))
    brightness: dict[str, list[float]] = {name: [] for name in (*CLASSES, "pictures")}
    with loader(Path(folder, "shards"), num_workers=num_workers) as batches:
        for images, targets in batches:
            brightness["pictures"] += images.mean(dim=(1, 2, 3)).tolist()
            for image, boxes in zip(images, targets, strict=True):
                for left, top, right, bottom, kind in boxes.tolist():
                    part = image[:, int(top) : int(bottom) + 1, int(left) : int(right) + 1]
                    brightness[CLASSES[int(kind)]].append(float(part.mean()))
    means = {name: sum(values) / len(values) for name, values in brightness.items()}
    print(", ".join(f"{name}: {mean:.2f}" for name, mean in means.items()))
    return means


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "detection")
