"""`streamload show`: one picture of some samples, as they are stored."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import numpy as np
import typer
from numpy.typing import NDArray

import streamload
from streamload.cli.arguments import Index, Json, StorageOption, Urls, Where, parse_storage_options
from streamload.decode.decoders import decoder_for, is_image
from streamload.errors import DatasetIndexError, DecodeError, without_secrets
from streamload.images import unchanged
from streamload.pack.failures import UsageError, reported_errors
from streamload.pack.output import print_document, print_line
from streamload.storage.local_files import replace_file
from streamload.text import counted, printable

if TYPE_CHECKING:
    from PIL import Image

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP"}
_CELL = 192
_MARGIN = 16
_LINE = 16
_INK = (34, 34, 34)
_PAPER = (255, 255, 255)
_COLOURS = ((225, 60, 50), (20, 140, 70), (50, 90, 220), (200, 120, 0), (150, 50, 180), (0, 140, 160))
_DARK = 32


def show_command(
    urls: Urls,
    *,
    output: Annotated[str, typer.Option(metavar="FILE", help="The picture (.png, .jpg, .webp), which is replaced.")],
    samples: Annotated[int, typer.Option(metavar="N", help="How many samples.", min=1, max=100)] = 24,
    columns: Annotated[int, typer.Option(metavar="N", help="How many side by side.", min=1, max=100)] = 6,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Choose them at random, by this seed. Default: the first ones.", min=0),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(metavar="FIELDS", help="Only these fields, such as 'jpg;png,cls,txt?'. Default: all."),
    ] = None,
    as_document: Json = False,
    where: Where = None,
    index: Index = None,
    storage_option: StorageOption = None,
) -> None:
    """Draw samples side by side, each with its images, boxes, class and text, to a picture.

    Boxes are drawn over the first image: {"boxes": rows of left, top, right and bottom, "labels": ...} or COCO's
    objects with "bbox". Dark images, such as masks, and those of more than 8 bits are stretched to the full range.

    Examples:
      streamload show shards/train --output sheet.png
      streamload show shards/train --output cats.png --where 'label == 0' --seed 1
      streamload show s3://bucket/train --output boxes.webp --samples 8 --columns 4 --fields jpg,json
    """
    with reported_errors():
        _check_output(output)
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
            storage_options=parse_storage_options(storage_option),
        ) as loader:
            batch = next(iter(loader), None)
            if not batch:
                raise UsageError("the shards hold no samples")
            try:
                classes: Sequence[str] | None = loader.classes
            except DatasetIndexError:  # several folders with different classes
                classes = None
        which = f"{'the first ' if seed is None else ''}{counted(len(batch), 'sample')}"
        which += "" if seed is None else f" at random by seed {seed}"
        place = f"{without_secrets(urls[0])}{' and others' if len(urls) > 1 else ''}"
        found = [_by_name(sample, names) for sample in batch]
        sheet = _sheet([place, which], [_cell(sample, classes) for sample in found], columns)
        options: dict[str, Any] = {"format": _FORMATS[os.path.splitext(output)[1]]}
        replace_file(output, lambda file: sheet.save(file, **options), durable=False)
        if as_document:
            size = {"width": sheet.width, "height": sheet.height}
            print_document({"picture": output, "samples": len(batch), "which": which, **size})
        else:
            print_line(f"{output}: {which}, {sheet.width} x {sheet.height} pixels")


def _check_output(output: str) -> None:
    """Raise if the picture cannot be written, before anything is read."""
    folder = os.path.dirname(os.path.abspath(output))
    if "://" in output:
        raise UsageError(f"--output {without_secrets(output)!r} is a url; name a file on a local disk")
    if os.path.splitext(output)[1] not in _FORMATS:
        raise UsageError(f"--output {output!r} must end in .png, .jpg or .webp")
    if not os.path.isdir(folder):
        raise UsageError(f"--output: there is no folder {folder!r}; make it first")


def _by_name(sample: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the bytes of a sample by field; optional fields that it lacks are left out."""
    if names is None:
        return dict(sample)
    pairs = zip((name.removesuffix("?") for name in names), sample, strict=True)
    return {name: value for name, value in pairs if value is not None}


def _cell(sample: Mapping[str, Any], classes: Sequence[str] | None) -> Image.Image:
    """Draw one sample: its images below each other, then its key and its other fields as text.

    Raises:
        DecodeError: a field is not what its extension promises.
    """
    from PIL import Image

    images: list[Image.Image] = []
    boxes: list[tuple[Sequence[float], str]] = []
    lines = textwrap.wrap(printable(sample["__key__"]), _CELL // 7, max_lines=2, placeholder="...")
    for name, data in sorted(sample.items(), key=lambda item: item[0].count(".")):
        if name.startswith("__"):
            continue
        try:
            value = _decoded(name, data)
            found = _boxes(value)
        except (ValueError, ImportError) as error:
            raise DecodeError(
                f"field {name!r} cannot be decoded: {error}; choose other fields with --fields",
                url=sample["__url__"],
                key=sample["__key__"],
            ) from error
        if _is_picture(value):
            images.append(_as_image(value))
            continue
        boxes += found
        text = counted(len(found), "box") if found else _text(name, value, classes)
        lines += textwrap.wrap(printable(f"{name}: {text}"), _CELL // 7, max_lines=4, placeholder="...")
    pictures = [_drawn(image, boxes if image is images[0] else ()) for image in images]
    cell = Image.new("RGB", (_CELL, sum(each.height + 4 for each in pictures) + _LINE * len(lines)), _PAPER)
    y = 0
    for picture in pictures:
        cell.paste(picture, ((_CELL - picture.width) // 2, y))
        y += picture.height + 4
    _write(cell, 0, y, lines)
    return cell


def _decoded(name: str, data: bytes) -> Any:
    try:
        return decoder_for(name)(memoryview(data))
    except ValueError:
        if not is_image(name):
            raise
        return unchanged(data)  # more than 8 bits; a damaged image fails here too


def _is_picture(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "uif"
        and min(value.shape[:2], default=0) > 3
        and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3)))
    )


def _as_image(pixels: NDArray[Any]) -> Image.Image:
    """Return an RGB image; the values of dark ones, and of those that are not bytes, are stretched to 0..255."""
    from PIL import Image

    if pixels.dtype != np.uint8 or pixels.max() < _DARK:
        values = np.nan_to_num(pixels.astype(np.float64), posinf=0, neginf=0)
        values -= values.min()
        pixels = (values * (255 / (values.max() or 1))).astype(np.uint8)
    return Image.fromarray(pixels.squeeze()).convert("RGB")


def _drawn(image: Image.Image, boxes: Sequence[tuple[Sequence[float], str]]) -> Image.Image:
    """Return an image at its size on the sheet, with its boxes."""
    from PIL import ImageDraw, ImageFont

    scale = _CELL / max(image.size)
    drawn = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    draw = ImageDraw.Draw(drawn)
    for edges, label in boxes:
        left, top, right, bottom = (edge * scale for edge in edges)
        colour = _COLOURS[crc32(label.encode()) % len(_COLOURS)]
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=2)
        draw.text((left + 3, top + 2), printable(label), fill=colour, font=ImageFont.load_default(12))
    return drawn


def _boxes(value: Any) -> list[tuple[Sequence[float], str]]:
    """Return the boxes of a JSON value, each as left, top, right, bottom in pixels and a label; [] if it has none.

    Raises:
        ValueError: its boxes are not rows of four numbers.
    """
    if isinstance(value, Mapping) and "boxes" in value:
        rows = np.array(value["boxes"], np.float64)
        rows = rows.reshape(len(rows), -1)
        labels = value.get("labels", [""] * len(rows))
    else:
        value = (
            next((value[name] for name in ("annotations", "objects") if name in value), [value])
            if isinstance(value, Mapping)
            else value
        )
        if (
            not isinstance(value, list)
            or not value
            or not all(isinstance(each, Mapping) and "bbox" in each for each in value)
        ):
            return []
        rows = np.array([each["bbox"] for each in value], np.float64)
        rows[:, 2:] += rows[:, :2]
        names = ("category", "label", "name", "category_id")
        labels = [next((each[name] for name in names if name in each), "") for each in value]
    return [(row[:4].tolist(), str(label)) for row, label in zip(rows, labels, strict=True)]


def _text(name: str, value: Any, classes: Sequence[str] | None) -> str:
    if name.rpartition(".")[2] == "cls" and classes and isinstance(value, int) and 0 <= value < len(classes):
        return f"{value} {classes[value]}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}" if value.size > 8 else str(value.tolist())
    if isinstance(value, bytes):
        return counted(len(value), "byte")
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _write(picture: Image.Image, x: int, y: int, lines: Sequence[str]) -> None:
    from PIL import ImageDraw, ImageFont

    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(12)
    for number, line in enumerate(lines):
        draw.text((x, y + _LINE * number), line, fill=_INK, font=font)


def _sheet(titles: Sequence[str], cells: Sequence[Image.Image], columns: int) -> Image.Image:
    """Return the cells in rows below the titles."""
    from PIL import Image

    columns = min(columns, len(cells))
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(cell.height for cell in row) + _MARGIN for row in rows]
    width = _MARGIN + columns * (_CELL + _MARGIN)
    y = 2 * _MARGIN + _LINE * len(titles)
    sheet = Image.new("RGB", (width, y + sum(heights)), _PAPER)
    _write(sheet, _MARGIN, _MARGIN, list(map(printable, titles)))
    for row, height in zip(rows, heights, strict=True):
        for number, cell in enumerate(row):
            sheet.paste(cell, (_MARGIN + number * (_CELL + _MARGIN), y))
        y += height
    return sheet
