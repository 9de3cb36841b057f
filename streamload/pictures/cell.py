"""One sample as it stands on a sheet: its pictures, and the lines of text below them."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamload.pictures.contents import Box, Contents
from streamload.pictures.lettering import INK, lettering_for

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

__all__ = ["GROUND", "PAPER", "TEXT_SIZE", "Cell", "class_colour", "draw_cell"]

PAPER = (255, 255, 255)
KEY_SIZE = 14
TEXT_SIZE = 12

GROUND = (240, 240, 240)
_CURVE = (48, 99, 142)
_UNLABELLED = 255
_UNLABELLED_COLOUR = (225, 225, 225)
_MASK_SHARE = 0.55
_SMALL = 3
_MOST_ENLARGED = 8
_GOLDEN = 0.618034
_CURVE_HEIGHT = 56
_MOST_KEY_LINES = 2
_MOST_VALUE_LINES = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """A sample, drawn.

    Attributes:
        pictures: at most as wide as the cell, one above the other, each with its name; empty where there is one alone.
        lines: the text below them; each with the size of its font, and how many characters of it are a field's name.
        classes: the numbers in its masks, by the names of these.
        scaled: as `Contents.scaled`.
    """

    pictures: list[tuple[str, Image]]
    lines: list[tuple[str, int, int]]
    classes: dict[str, list[int]]
    scaled: bool


def draw_cell(key: str, contents: Contents, width: int) -> Cell:
    """Draw a sample.

    Args:
        key: it is the first line.
        contents: of the sample.
        width: of the cell in pixels; also the greatest height of an image.
    """
    pictures = []
    for number, (name, image) in enumerate(contents.images.items()):
        pictures.append((name, _drawn(image, contents if number == 0 else Contents(), width)))
    pictures += [(name, _draw_curve(curve, width)) for name, curve in contents.curves.items()]
    if len(pictures) == 1 and contents.images:
        pictures = [("", pictures[0][1])]
    classes = {name: np.unique(mask).tolist() for name, mask in contents.masks.items()}
    return Cell(pictures, list(_lines(key, contents.lines, width)), classes, contents.scaled)


def class_colour(number: int) -> tuple[int, int, int]:
    """The colour of a class in masks and boxes; neighbouring numbers have unlike ones."""
    if number == _UNLABELLED:
        return _UNLABELLED_COLOUR
    red, green, blue = colorsys.hsv_to_rgb((number * _GOLDEN + 0.4) % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def _lines(key: str, values: Iterable[tuple[str, str]], width: int) -> Iterator[tuple[str, int, int]]:
    for line in lettering_for(key, KEY_SIZE).lines_with_end(width, _MOST_KEY_LINES):
        yield line, KEY_SIZE, 0
    for name, text in values:
        lettering = lettering_for(f"{name}: {text}", TEXT_SIZE)
        for number, line in enumerate(lettering.lines(width, _MOST_VALUE_LINES)):
            yield line, TEXT_SIZE, (len(name) + 1 if number == 0 else 0)


def _drawn(image: NDArray[np.uint8], contents: Contents, width: int) -> Image:
    """An image at its size on the sheet, with its masks and boxes."""
    from PIL import Image, ImageDraw

    height_px, width_px = image.shape[:2]
    scale = min(width / width_px, width / height_px)
    if scale >= _SMALL:  # each pixel can be seen
        scale = min(int(scale), _MOST_ENLARGED)
    size = max(1, round(width_px * scale)), max(1, round(height_px * scale))
    resampling = Image.Resampling.NEAREST if scale >= _SMALL else Image.Resampling.LANCZOS
    shown = Image.fromarray(image).resize(size, resampling, reducing_gap=3.0)
    for mask in contents.masks.values():
        shown = _with_mask(shown, mask)
    draw = ImageDraw.Draw(shown)
    frames = [(_frame(box, scale, size), _colour(box, number), box.label) for number, box in enumerate(contents.boxes)]
    inside = [(frame, colour, label) for frame, colour, label in frames if frame is not None]
    for frame, colour, _ in inside:
        draw.rectangle(frame, outline=colour, width=2)
    for frame, colour, label in inside:  # above all frames
        _draw_label(draw, frame, colour, label, size)
    return shown


def _with_mask(shown: Image, mask: NDArray[Any]) -> Image:
    from PIL import Image

    numbers, place = np.unique(mask, return_inverse=True)
    colours = np.array([class_colour(int(number)) for number in numbers], np.uint8)
    shares = np.where(numbers == 0, 0, round(255 * _MASK_SHARE)).astype(np.uint8)
    place = place.reshape(mask.shape)
    layer, share = Image.fromarray(colours[place]), Image.fromarray(shares[place])
    nearest = Image.Resampling.NEAREST
    return Image.composite(layer.resize(shown.size, nearest), shown, share.resize(shown.size, nearest))


def _frame(box: Box, scale: float, size: Sequence[int]) -> tuple[int, int, int, int] | None:
    """The first and the last column and row of a box, as far as it lies in the image."""
    left, top, right, bottom = (edge * scale for edge in box.edges)
    left, top = max(0, round(left)), max(0, round(top))
    right, bottom = min(size[0], round(right)) - 1, min(size[1], round(bottom)) - 1
    return (left, top, right, bottom) if right >= left and bottom >= top else None


def _colour(box: Box, number: int) -> tuple[int, int, int]:
    """The colour of a box's class; of a name the same in every run; without a class another one for each box."""
    if box.label.isdecimal():
        return class_colour(int(box.label))
    named = sum((place + 1) * ord(letter) for place, letter in enumerate(box.label)) % _UNLABELLED
    return class_colour(named or number + 1)


def _draw_label(
    draw: ImageDraw, frame: tuple[int, int, int, int], colour: tuple[int, int, int], label: str, size: Sequence[int]
) -> None:
    """Write a class above the left corner of its box, or within it at the edge of the image."""
    lettering = lettering_for(label, TEXT_SIZE)
    lines = lettering.lines(size[0] - 4, 1)
    if not lines:
        return
    wide, high = lettering.width_of(lines[0]) + 5, lettering.line_height
    left, top = frame[:2]
    x = max(0, min(left, size[0] - wide))
    y = top - high if top >= high else min(top, max(0, size[1] - high))
    draw.rectangle((x, y, x + wide - 1, y + high - 1), fill=colour)
    draw.text((x + 3, y + 1), lines[0], fill=INK if _is_light(colour) else PAPER, font=lettering.font)


def _is_light(colour: tuple[int, int, int]) -> bool:
    """Whether dark text is easier to read on it than white."""
    return float(np.dot(colour, (0.299, 0.587, 0.114))) > 120


def _draw_curve(curve: NDArray[np.float64], width: int) -> Image:
    """The channels, one below the other: for each column of pixels a line from the least to the greatest value."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (width, _CURVE_HEIGHT * len(curve)), GROUND)
    draw = ImageDraw.Draw(picture)
    most = float(np.abs(curve).max()) or 1.0
    for number, values in enumerate(curve):
        middle, half = (number + 0.5) * _CURVE_HEIGHT, 0.46 * _CURVE_HEIGHT
        draw.line((0, middle, width, middle), fill=(215, 215, 215))
        previous = None
        for column in range(width):
            start, end = column * len(values) // width, (column + 1) * len(values) // width
            piece = values[start : max(end, start + 1)]
            low, high = middle - half * piece.max() / most, middle - half * piece.min() / most
            if previous is not None:  # no gap to the column before
                low, high = min(low, previous[1]), max(high, previous[0])
            previous = middle - half * piece.max() / most, middle - half * piece.min() / most
            draw.line((column, low, column, high), fill=_CURVE)
    return picture
