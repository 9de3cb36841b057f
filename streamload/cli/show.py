"""`streamload show`: draw some samples, as they are stored, in one picture."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import numpy as np
import typer
from numpy.typing import NDArray

import streamload
from streamload.cli.command import Fields, Index, StorageOption, Urls, Where, print_line
from streamload.decode.decoders import decoder_for
from streamload.errors import DatasetIndexError, DecodeError, without_secrets
from streamload.images import unchanged
from streamload.pack.run import UsageError
from streamload.storage.local_files import replace_file
from streamload.tar.extensions import is_image
from streamload.text import counted, printable

if TYPE_CHECKING:
    from PIL import Image, ImageFont

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP"}
# In pixels.
_CELL = 192
_MARGIN = 16
_LINE = 16
_GAP = 4

_INK = (34, 34, 34)
_PAPER = (255, 255, 255)
_COLOURS = ((225, 60, 50), (20, 140, 70), (50, 90, 220), (200, 120, 0), (150, 50, 180), (0, 140, 160))
_DARK = 32  # an image whose pixels are all below this is stretched


def show_command(
    urls: Urls,
    *,
    output: Annotated[str, typer.Option(metavar="FILE", help="The .png, .jpg or .webp to write or replace.")] = (
        "samples.png"
    ),
    samples: Annotated[int, typer.Option(help="How many samples.", min=1, max=100)] = 24,
    columns: Annotated[int, typer.Option(help="How many side by side.", min=1, max=100)] = 6,
    seed: Annotated[int | None, typer.Option(help="Choose samples at random, by this seed.", min=0)] = None,
    fields: Fields = None,
    where: Where = None,
    index: Index = None,
    storage_option: StorageOption = None,
) -> None:
    """Draw samples side by side, each with its images, boxes, class and text, in a picture.

    Boxes of a JSON field lie over the first image: {"boxes": rows of left, top, right and bottom, "labels": ...} or
    COCO's list with "bbox". Dark images, such as masks, and those of more than 8 bits are stretched to the full range.

    Examples:
      streamload show shards/train
      streamload show shards/train --output cats.png --where 'label == 0' --seed 1
      streamload show s3://bucket/train --output boxes.webp --samples 8 --columns 4 --fields jpg,json
    """
    kind = _FORMATS.get(os.path.splitext(output)[1])
    if kind is None:
        raise UsageError(f"--output {output!r} must end in .png, .jpg or .webp")
    names = None if fields is None else (*fields.split(","), "__key__", "__url__")
    with streamload.StreamLoader(
        urls,
        samples,
        shuffle=seed is not None,
        seed=seed or 0,
        fields=names,
        decode=False,
        collate_fn=list,
        where=where,
        index=index,
        num_workers=0,
        rank=0,
        world_size=1,
        prefetch_batches=1,
        storage_options=dict(storage_option or ()),
    ) as loader:
        batch = next(iter(loader), None)
        if not batch:
            raise UsageError("the shards hold no samples")
        try:
            classes: Sequence[str] = loader.classes or ()
        except DatasetIndexError:  # classes.json is damaged, or folders have different classes
            classes = ()
    if names is not None:
        stored = [name.removesuffix("?") for name in names]
        batch = [dict(zip(stored, sample, strict=True)) for sample in batch]
    from PIL import Image

    count = counted(len(batch), "sample")
    choice = f"the first {count}" if seed is None else f"{count} at random by seed {seed}"
    cells = [_cell(sample, classes) for sample in batch]
    columns = min(columns, len(cells))
    top, width, height = 2 * _MARGIN + _LINE * 2, _CELL + _MARGIN, max(cell.height for cell in cells) + _MARGIN
    sheet = Image.new("RGB", (_MARGIN + columns * width, top - (-len(cells) // columns) * height), _PAPER)
    _write(sheet, _MARGIN, _MARGIN, [f"{without_secrets(urls[0])}{' and others' if len(urls) > 1 else ''}", choice])
    for number, cell in enumerate(cells):
        sheet.paste(cell, (_MARGIN + number % columns * width, top + number // columns * height))
    replace_file(output, lambda file: sheet.save(file, format=kind), durable=False)
    print_line(f"{output}: {choice}, {sheet.width} x {sheet.height} pixels")


def _write(picture: Image.Image, x: int, y: int, lines: Sequence[str]) -> None:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((x, y + _LINE * number), printable(line), fill=_INK, font=_font())


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    from PIL import ImageFont

    try:
        return ImageFont.truetype("DejaVuSans.ttf", 11)
    except OSError:
        return ImageFont.load_default(12)  # lacks accents


def _cell(sample: Mapping[str, Any], classes: Sequence[str]) -> Image.Image:
    """Draw the images of a sample, then its key and other fields as text."""
    from PIL import Image

    images: list[Image.Image] = []
    boxes: list[tuple[Sequence[float], str]] = []
    texts = [sample["__key__"]]
    for name, data in sorted(sample.items(), key=lambda item: item[0].count(".")):
        if name.startswith("__") or data is None:
            continue
        try:
            try:
                value = decoder_for(name)(memoryview(data))
            except ValueError:
                if not is_image(name):
                    raise
                value = unchanged(data)  # more than 8 bits; a damaged image fails here too
            image = _as_image(value)
            own_boxes = [] if image is not None else _boxes(value)
        except (ValueError, TypeError, ImportError) as error:
            raise DecodeError(
                f"field {name!r} cannot be decoded: {error}; choose other fields with --fields",
                url=sample["__url__"],
                key=sample["__key__"],
            ) from error
        if image is not None:
            images.append(image)
            continue
        boxes += own_boxes
        texts.append(f"{name}: {counted(len(own_boxes), 'box') if own_boxes else _text(name, value, classes)}")
    pictures = [_drawn(image, () if number else boxes) for number, image in enumerate(images)]
    lines = [line for text in texts for line in textwrap.wrap(text, _CELL // 7, max_lines=4, placeholder="...")]
    cell = Image.new("RGB", (_CELL, sum(each.height + _GAP for each in pictures) + _LINE * len(lines)), _PAPER)
    y = 0
    for picture in pictures:
        cell.paste(picture, ((_CELL - picture.width) // 2, y))
        y += picture.height + _GAP
    _write(cell, 0, y, lines)
    return cell


def _as_image(value: Any) -> Image.Image | None:
    """Return an array as an RGB image, stretched if it is dark or not uint8; None if it is not an image."""
    from PIL import Image

    if not isinstance(value, np.ndarray) or value.dtype.kind not in "uif" or min(value.shape[:2], default=0) <= 3:
        return None
    if value.shape[2:] not in ((), (1,), (3,)) or value.ndim < 2:
        return None
    pixels: NDArray[Any] = value
    if pixels.dtype != np.uint8 or pixels.max() < _DARK:
        stretched = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        stretched -= stretched.min()
        pixels = (stretched * (255 / (stretched.max() or 1))).astype(np.uint8)
    return Image.fromarray(pixels.squeeze()).convert("RGB")


def _drawn(image: Image.Image, boxes: Sequence[tuple[Sequence[float], str]]) -> Image.Image:
    """Scale an image to its cell, and draw its boxes."""
    from PIL import ImageDraw

    scale = _CELL / max(image.size)
    drawn = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    draw = ImageDraw.Draw(drawn)
    for edges, label in boxes:
        left, top, right, bottom = (edge * scale for edge in edges)
        colour = _COLOURS[crc32(label.encode()) % len(_COLOURS)]
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=2)
        draw.text((left + 3, top + 2), printable(label), fill=colour, font=_font())
    return drawn


def _boxes(value: Any) -> list[tuple[Sequence[float], str]]:
    """Return the boxes (left, top, right, bottom in pixels) and labels of a JSON value."""
    if isinstance(value, Mapping) and "boxes" in value:
        rows = np.array([row[:4] for row in value["boxes"]], np.float64).reshape(-1, 4)
        labels = value.get("labels", [""] * len(rows))
    elif isinstance(value, list) and all(isinstance(each, Mapping) and "bbox" in each for each in value):
        rows = np.array([each["bbox"] for each in value], np.float64).reshape(-1, 4)
        rows[:, 2:] += rows[:, :2]
        labels = [each.get("category_id", "") for each in value]
    else:
        return []
    return [(row, str(label)) for row, label in zip(rows.tolist(), labels, strict=True)]


def _text(name: str, value: Any, classes: Sequence[str]) -> str:
    if name.rpartition(".")[2] == "cls" and isinstance(value, int) and 0 <= value < len(classes):
        return f"{value} {classes[value]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}" if value.size > 8 else str(value.tolist())
    if isinstance(value, bytes):
        return counted(len(value), "byte")
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
