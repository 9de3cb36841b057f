"""Contact sheets: samples side by side, each with its key and its values, under a title."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from streamload.pictures.cell import GROUND, PAPER, TEXT_SIZE, Cell, class_colour, draw_cell
from streamload.pictures.contents import SCALED, contents_of
from streamload.pictures.lettering import INK, PALE, lettering_for
from streamload.text import counted

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

__all__ = ["MOST_SAMPLES", "draw_sheet", "sheet_title"]

_CELL_WIDTH = 192
"""In pixels; images are enlarged by whole factors, or made smaller, to this width and height at most."""
_MARGIN = 16
MOST_SAMPLES = 500

_TITLE_SIZE = 16
_GAP = 4
_COLUMNS = 6
_MOST_LEGEND = 24


def draw_sheet(
    samples: Iterable[tuple[str, Mapping[str, Any]]],
    title: str,
    *,
    classes: Sequence[str] | None = None,
    columns: int | None = None,
    cell_width: int = _CELL_WIDTH,
) -> Image:
    """Draw samples in rows, in their order.

    Args:
        samples: the key of each, or what else it is called, and its values by the names of their fields; they are
            drawn one by one, and not kept. At most `MOST_SAMPLES`.
        title: above them.
        classes: the names of the classes by label, if they are known.
        columns: how many stand side by side; 6 by default, or fewer where there are fewer.
        cell_width: of each in pixels.

    Returns:
        A PIL image, RGB.

    Raises:
        ValueError: there are to be no columns.
    """
    if columns is not None and columns < 1:
        raise ValueError(f"columns={columns!r} must be at least 1")
    cells = [draw_cell(key, contents_of(sample, classes), cell_width) for key, sample in samples]
    columns = min(columns or _COLUMNS, max(1, len(cells)))
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    width = _MARGIN + columns * (cell_width + _MARGIN)
    titles = lettering_for(title, _TITLE_SIZE).lines(width - 2 * _MARGIN, 3)
    return _Sheet(width, cell_width, titles, _legend(cells), any(cell.scaled for cell in cells)).drawn(rows)


def sheet_title(what: str, most: int, count: int) -> str:
    """The end of a title: `what, 24 of 64 samples`.

    Raises:
        ValueError: no sample is to be drawn, or more than a sheet has room for.
    """
    if not 1 <= most <= MOST_SAMPLES:
        raise ValueError(f"samples={most!r} must be from 1 to {MOST_SAMPLES}")
    return f"{what}, {'' if count <= most else f'{most:,} of '}{counted(count, 'sample')}"


def _legend(cells: Sequence[Cell]) -> list[tuple[str, int]]:
    """The classes in the masks of a sheet: the name of the mask and the number; not 0, which is not drawn."""
    found = {(name, number) for cell in cells for name, numbers in cell.classes.items() for number in numbers}
    return sorted(each for each in found if each[1])[:_MOST_LEGEND]


class _Sheet:
    """Where everything is on a sheet, and drawing it there."""

    def __init__(
        self, width: int, cell_width: int, titles: list[str], legend: list[tuple[str, int]], scaled: bool
    ) -> None:
        self._width = width
        self._cell_width = cell_width
        self._titles = titles
        self._legend = legend
        self._notes = lettering_for(SCALED, TEXT_SIZE).lines(width - 2 * _MARGIN, 3) if scaled else []

    def drawn(self, rows: Sequence[Sequence[Cell]]) -> Image:
        from PIL import Image, ImageDraw

        top = _MARGIN + len(self._titles) * _line_height(_TITLE_SIZE) + 2 * _GAP
        heights = [self._row_height(row) for row in rows]
        legend_rows = self._legend_rows()
        foot = (len(legend_rows) + len(self._notes)) * (_line_height(TEXT_SIZE) + _GAP)
        sheet = Image.new("RGB", (self._width, top + sum(heights) + foot + _MARGIN), PAPER)
        draw = ImageDraw.Draw(sheet)
        y = _MARGIN
        for line in self._titles:
            draw.text((_MARGIN, y), line, fill=INK, font=lettering_for(line, _TITLE_SIZE).font)
            y += _line_height(_TITLE_SIZE)
        y = top
        for row, height in zip(rows, heights, strict=True):
            self._draw_row(sheet, draw, row, y)
            y += height
        for entries in legend_rows:
            for x, number, text in entries:
                draw.rectangle((x, y + 2, x + 10, y + 12), fill=class_colour(number))
                draw.text((x + 16, y), text, fill=INK, font=lettering_for(text, TEXT_SIZE).font)
            y += _line_height(TEXT_SIZE) + _GAP
        for line in self._notes:
            draw.text((_MARGIN, y), line, fill=PALE, font=lettering_for(line, TEXT_SIZE).font)
            y += _line_height(TEXT_SIZE) + _GAP
        return sheet

    def _row_height(self, row: Sequence[Cell]) -> int:
        text = max(sum(_line_height(size) for _, size, _ in cell.lines) for cell in row)
        return sum(tag + height + _GAP for tag, height in _picture_heights(row)) + text + _MARGIN

    def _draw_row(self, sheet: Image, draw: ImageDraw, row: Sequence[Cell], top: int) -> None:
        heights = _picture_heights(row)
        for column, cell in enumerate(row):
            x, y = _MARGIN + column * (self._cell_width + _MARGIN), top
            for (name, picture), (tag, height) in zip(cell.pictures, heights, strict=False):
                if name:
                    lettering = lettering_for(name, TEXT_SIZE)
                    draw.text((x, y), lettering.lines(self._cell_width, 1)[0], fill=PALE, font=lettering.font)
                y += tag
                draw.rectangle((x, y, x + self._cell_width - 1, y + height - 1), fill=GROUND)
                sheet.paste(picture, (x + (self._cell_width - picture.width) // 2, y + (height - picture.height) // 2))
                y += height + _GAP
            y = top + sum(tag + height + _GAP for tag, height in heights)
            for line, size, named in cell.lines:
                font = lettering_for(line, size).font
                draw.text((x, y), line[:named], fill=PALE, font=font)
                draw.text((x + font.getlength(line[:named]), y), line[named:], fill=INK, font=font)
                y += _line_height(size)

    def _legend_rows(self) -> list[list[tuple[int, int, str]]]:
        """The legend's entries in lines: where each is, its number, and its text."""
        rows: list[list[tuple[int, int, str]]] = []
        x = self._width
        for name, number in self._legend:
            lettering = lettering_for(f"{name} {number}", TEXT_SIZE)
            width = 16 + lettering.width_of(lettering.text) + _MARGIN
            if x + width > self._width:
                rows.append([])
                x = _MARGIN
            rows[-1].append((x, number, lettering.text))
            x += width
        return rows


def _picture_heights(row: Sequence[Cell]) -> list[tuple[int, int]]:
    """Of the row's first pictures, of its second ones, and so on: the height of their names, and their own."""
    levels = [
        [found for found in pictures if found is not None] for pictures in zip_longest(*(cell.pictures for cell in row))
    ]
    return [
        (
            _line_height(TEXT_SIZE) if any(name for name, _ in pictures) else 0,
            max(picture.height for _, picture in pictures),
        )
        for pictures in levels
    ]


def _line_height(size: int) -> int:
    return lettering_for("", size).line_height
