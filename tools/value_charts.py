"""The picture of what `streamload stats` has measured: a histogram of each field, and the labels' frequencies."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamload.text import counted

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["draw_values"]

_WIDTH, _PANEL = 960, 200
_LEFT, _RIGHT = 60, 24
_TITLE_SIZE, _TEXT_SIZE = 15, 12
_HEAD, _FOOT = 34, 34
_INK, _PALE, _LINE = (34, 34, 34), (125, 125, 125), (228, 228, 228)
_ONE = ((48, 99, 142),)
_THREE = ((214, 60, 60), (50, 150, 70), (60, 90, 210))
_MOST_LABELS = 40


def draw_values(found: Mapping[str, Any]) -> bytes:
    """Draw what `stats --json` holds.

    Returns:
        A PNG file.
    """
    from PIL import Image

    panels = [(name, field) for name, field in found["values"].items() if any(c["count"] for c in field["channels"])]
    labels = (found["labels"] or {}).get("counts", [])
    height = (len(panels) + bool(labels)) * (_HEAD + _PANEL + _FOOT) + 10
    picture = Image.new("RGB", (_WIDTH, height), (255, 255, 255))
    top = _HEAD
    for name, field in panels:
        _draw_histograms(picture, top, name, field)
        top += _HEAD + _PANEL + _FOOT
    if labels:
        _draw_labels(picture, top, labels)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def _draw_histograms(picture: Image, top: int, name: str, field: Mapping[str, Any]) -> None:
    """All channels over each other, in the range of all."""
    from PIL import Image, ImageChops, ImageDraw

    channels = [channel for channel in field["channels"] if channel["count"]]
    colours = _THREE if len(channels) == 3 else _ONE
    means = ", ".join(f"{channel['mean']:.4g}" for channel in channels)
    deviations = ", ".join(f"{channel['std']:.4g}" for channel in channels)
    _title(picture, top, f"{name}: {counted(field['samples'], 'sample')}")
    _write(picture, (_WIDTH - _RIGHT, top - 22), f"mean {means}   std {deviations}", anchor="ra")
    grids = [channel["histogram"] for channel in channels]
    least = min(grid["first"] for grid in grids)
    most = max(grid["first"] + grid["width"] * len(grid["counts"]) for grid in grids)
    shares = [_by_pixel(grid, least, most) for grid in grids]
    highest = max(float(share.max()) for share in shares)
    for share, colour in zip(shares, colours, strict=True):
        layer = Image.new("RGB", picture.size, (255, 255, 255))
        draw = ImageDraw.Draw(layer)
        for x, value in enumerate(share.tolist()):
            draw.line((_LEFT + x, top + _PANEL * (1 - value / highest), _LEFT + x, top + _PANEL), fill=_light(colour))
        picture.paste(ImageChops.multiply(picture, layer))
    _draw_axis(picture, top, [f"{value:.6g}" for value in np.linspace(least, most, 5)])


def _by_pixel(grid: Mapping[str, Any], least: float, most: float) -> NDArray[np.float64]:
    """The density for each column of pixels, of all numbers."""
    width = _WIDTH - _LEFT - _RIGHT
    counts = np.array(grid["counts"], np.float64)
    edges = grid["first"] + grid["width"] * np.arange(len(counts) + 1)
    below = np.concatenate([[0.0], np.cumsum(counts)])
    share: NDArray[np.float64] = np.diff(np.interp(np.linspace(least, most, width + 1), edges, below))
    return share


def _draw_labels(picture: Image, top: int, labels: Sequence[Mapping[str, int]]) -> None:
    """A bar for each label, the most frequent first."""
    from PIL import ImageDraw

    shown = labels[:_MOST_LABELS]
    more = "" if len(shown) == len(labels) else f", the {_MOST_LABELS} most frequent of {len(labels):,}"
    _title(picture, top, f"samples of each label{more}")
    most = max(label["samples"] for label in shown)
    step = (_WIDTH - _LEFT - _RIGHT) / len(shown)
    draw = ImageDraw.Draw(picture)
    for number, label in enumerate(shown):
        left, right = _LEFT + number * step, _LEFT + (number + 1) * step
        height = _PANEL * label["samples"] / most
        draw.rectangle((left + 1, top + _PANEL - height, max(left + 1, right - 2), top + _PANEL), fill=_ONE[0])
        _write(picture, ((left + right) / 2, top + _PANEL + 8), str(label["label"]))
    draw.line((_LEFT, top + _PANEL, _WIDTH - _RIGHT, top + _PANEL), fill=_PALE)
    for part in (0.5, 1.0):
        _write(picture, (_LEFT - 8, top + _PANEL * (1 - part)), f"{round(most * part):,}", anchor="rm")


def _draw_axis(picture: Image, top: int, numbers: Sequence[str]) -> None:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(picture)
    draw.line((_LEFT, top + _PANEL, _WIDTH - _RIGHT, top + _PANEL), fill=_PALE)
    for place, number in zip(np.linspace(_LEFT, _WIDTH - _RIGHT, len(numbers)), numbers, strict=True):
        draw.line((place, top + _PANEL, place, top + _PANEL + 4), fill=_PALE)
        _write(picture, (place, top + _PANEL + 8), number)


def _light(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    """The colour mixed with white, so that several can be seen through each other."""
    red, green, blue = ((value + 2 * 255) // 3 for value in colour)
    return red, green, blue


def _title(picture: Image, top: int, text: str) -> None:
    _write(picture, (_LEFT, top - 24), text, size=_TITLE_SIZE, colour=_INK, anchor="la")


def _write(
    picture: Image,
    place: tuple[float, float],
    text: str,
    *,
    size: int = _TEXT_SIZE,
    colour: tuple[int, int, int] = _PALE,
    anchor: str = "ma",
) -> None:
    from PIL import ImageDraw, ImageFont

    ImageDraw.Draw(picture).text(place, text, fill=colour, font=ImageFont.load_default(size), anchor=anchor)
