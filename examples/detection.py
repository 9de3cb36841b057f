"""Object detection from Pascal VOC, COCO or YOLO annotations, with the collate function of the SSD tutorials.

    python examples/detection.py FOLDER

makes a small dataset in the layout of all three, packs each of them to the same samples (a `jpg`, and a `json` with
boxes in pixels and numbers of classes), and goes through batches of images of one size and boxes of any number. With
data of your own `pack` with one of `voc_sample`, `coco_sample` and `yolo_sample` is all that is needed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from streamload import StreamLoader, pack
from streamload.images import Joint, RandomHorizontalFlip, RandomResizedCrop, ToTensor

CLASSES = ("circle", "square")
SIZE = 64

Sample = dict[str, Any]
Box = tuple[int, int, int, int, int]
"""Left, top, right and bottom in pixels from 0, and the number of the class."""


def voc_sample(annotation: Path) -> Sample:
    """Of `Annotations/1.xml`, with the image in `JPEGImages/1.jpg`."""
    boxes, labels = [], []
    for described in ElementTree.parse(annotation).getroot().iter("object"):  # noqa: S314 - one's own, else defusedxml
        left, top, right, bottom = (
            float(described.findtext(f"bndbox/{edge}", "nan")) for edge in ("xmin", "ymin", "xmax", "ymax")
        )
        boxes.append([left - 1, top - 1, right, bottom])  # VOC counts from 1
        labels.append(CLASSES.index(described.findtext("name", "")))
    image = annotation.parent.parent / "JPEGImages" / f"{annotation.stem}.jpg"
    return {"__key__": annotation.stem, "jpg": image.read_bytes(), "json": {"boxes": boxes, "labels": labels}}


def coco_inputs(annotations: Path, images: Path) -> list[tuple[Path, list[list[float]], list[int]]]:
    """What `coco_sample` takes, for each image in a COCO file: its path, its boxes, and their classes from 0."""
    content = json.loads(annotations.read_bytes())
    number_of = {
        category: number for number, category in enumerate(sorted(each["id"] for each in content["categories"]))
    }
    found: dict[int, tuple[Path, list[list[float]], list[int]]] = {
        image["id"]: (images / image["file_name"], [], []) for image in content["images"]
    }
    for thing in content["annotations"]:
        left, top, width, height = thing["bbox"]
        _, boxes, labels = found[thing["image_id"]]
        boxes.append([left, top, left + width, top + height])
        labels.append(number_of[thing["category_id"]])
    return list(found.values())


def coco_sample(given: tuple[Path, list[list[float]], list[int]]) -> Sample:
    """Of an image and its annotations, as `coco_inputs` gives them."""
    image, boxes, labels = given
    return {"__key__": image.stem, "jpg": image.read_bytes(), "json": {"boxes": boxes, "labels": labels}}


def yolo_sample(image: Path) -> Sample:
    """Of `images/1.jpg`, with `labels/1.txt` if it has boxes: class, centre and size, in parts of the image."""
    annotation = image.parent.parent / "labels" / f"{image.stem}.txt"
    lines = annotation.read_text().splitlines() if annotation.exists() else []
    with Image.open(image) as opened:
        width, height = opened.size
    boxes, labels = [], []
    for line in lines:
        label, *place = line.split()
        x, y, across, down = map(float, place)
        edges = (x - across / 2) * width, (y - down / 2) * height, (x + across / 2) * width, (y + down / 2) * height
        boxes.append([round(edge, 2) for edge in edges])
        labels.append(int(label))
    return {"__key__": image.stem, "jpg": image.read_bytes(), "json": {"boxes": boxes, "labels": labels}}


def boxes_of(annotation: bytes) -> NDArray[np.float32]:
    """A decoder: float32[boxes, 5] of left, top, right, bottom, in pixels from 0, and the number of the class."""
    found = json.loads(annotation)
    rows = [[*box, label] for box, label in zip(found["boxes"], found["labels"], strict=True)]
    return np.array(rows, np.float32).reshape(-1, 5)


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
        fields=("jpg", "json"),
        decode={"json": boxes_of},
        transform=Joint(
            [RandomResizedCrop(SIZE, scale=(0.5, 1.0)), RandomHorizontalFlip(), ToTensor()], ("image", "boxes")
        ),
        collate_fn=detection_collate,
        num_workers=num_workers,
    )


def make_picture(number: int) -> tuple[NDArray[np.uint8], list[Box]]:
    """An image of some squares and circles, and where they are."""
    random = np.random.default_rng(number)
    pixels = random.integers(0, 60, (90 + number % 3 * 10, 120, 3), np.uint8)
    boxes = []
    for _ in range(number % 4):
        kind = int(random.integers(len(CLASSES)))
        left, top, side = (int(random.integers(*span)) for span in ((0, 80), (0, 50), (15, 40)))
        rows, columns = np.mgrid[0:side, 0:side]
        inside = np.hypot(rows - side / 2, columns - side / 2) < side / 2 if kind == 0 else rows >= 0
        pixels[top : top + side, left : left + side][inside] = 220
        boxes.append((left, top, left + side, top + side, kind))
    return pixels, boxes


def write_voc(boxes: Sequence[Box], path: Path) -> None:
    """`Annotations/1.xml`."""
    annotation = ElementTree.Element("annotation")
    for *edges, kind in boxes:
        described = ElementTree.SubElement(annotation, "object")
        ElementTree.SubElement(described, "name").text = CLASSES[kind]
        box = ElementTree.SubElement(described, "bndbox")
        for name, value in zip(("xmin", "ymin", "xmax", "ymax"), edges, strict=True):
            ElementTree.SubElement(box, name).text = str(value + (name in ("xmin", "ymin")))
    ElementTree.ElementTree(annotation).write(path)


def write_yolo(boxes: Sequence[Box], width: int, height: int, path: Path) -> None:
    """`labels/1.txt`; none without boxes."""
    lines = [
        f"{kind} {(left + right) / 2 / width} {(top + bottom) / 2 / height} {(right - left) / width} "
        f"{(bottom - top) / height}\n"
        for left, top, right, bottom, kind in boxes
    ]
    if lines:
        path.write_text("".join(lines))


def make_data(folder: Path, count: int) -> None:
    """Writes `voc/`, `yolo/` and `coco.json`, with the same images and boxes; COCO has the images of YOLO."""
    for name in ("voc/JPEGImages", "voc/Annotations", "yolo/images", "yolo/labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    coco: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    coco["categories"] = [{"id": 7 * (kind + 1), "name": name} for kind, name in enumerate(CLASSES)]
    for number in range(count):
        pixels, boxes = make_picture(number)
        name = f"{number:06d}"
        for place in ("voc/JPEGImages", "yolo/images"):
            Image.fromarray(pixels).save(folder / place / f"{name}.jpg")
        write_voc(boxes, folder / "voc" / "Annotations" / f"{name}.xml")
        write_yolo(boxes, pixels.shape[1], pixels.shape[0], folder / "yolo" / "labels" / f"{name}.txt")
        coco["images"].append({"id": number, "file_name": f"{name}.jpg"})
        for left, top, right, bottom, kind in boxes:
            box = [left, top, right - left, bottom - top]
            coco["annotations"].append({"image_id": number, "bbox": box, "category_id": 7 * (kind + 1)})
    (folder / "coco.json").write_text(json.dumps(coco))


def main(folder: str, *, num_workers: int = 1) -> dict[str, float]:
    """Makes, packs and reads a dataset; returns how bright the boxes of each class are, and the pictures."""
    place = Path(folder)
    make_data(place, 40)
    images = place / "yolo" / "images"
    pack(voc_sample, sorted((place / "voc" / "Annotations").glob("*.xml")), place / "from-voc", workers=1)
    pack(coco_sample, coco_inputs(place / "coco.json", images), place / "from-coco", workers=1)
    pack(yolo_sample, sorted(images.glob("*.jpg")), place / "from-yolo", workers=1)
    brightness: dict[str, list[float]] = {name: [] for name in (*CLASSES, "pictures")}
    with loader(place / "from-voc", num_workers=num_workers) as batches:
        for pictures, targets in batches:
            brightness["pictures"] += pictures.mean(dim=(1, 2, 3)).tolist()
            for picture, boxes in zip(pictures, targets, strict=True):
                for left, top, right, bottom, kind in boxes.tolist():
                    part = picture[:, int(top) : int(bottom) + 1, int(left) : int(right) + 1]
                    brightness[CLASSES[int(kind)]].append(float(part.mean()))
    means = {name: sum(values) / len(values) for name, values in brightness.items()}
    print(", ".join(f"{name}: {mean:.2f}" for name, mean in means.items()))
    return means


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "detection")
