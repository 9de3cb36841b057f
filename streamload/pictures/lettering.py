"""Text in pictures: a font that has its characters, lines of a given width, and escapes for what no font has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from streamload.text import printable

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

__all__ = ["INK", "PALE", "lettering_for"]

INK = (34, 34, 34)
PALE = (125, 125, 125)

_NO_CHARACTER = "\U0010fffe"
_WIDER_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc", "Arial Unicode.ttf", "Arial.ttf")
"""Fonts with more characters than Pillow's own, which has those of English; for text that needs them."""
_MOST_CHARACTERS = 2_000
_CUT = "..."


@dataclass(frozen=True, slots=True)
class Lettering:
    """A text that a font can show.

    Attributes:
        text: it, in one line; what no font has is written as escapes.
        font: at the size asked for.
        line_height: in pixels.
    """

    text: str
    font: FreeTypeFont
    line_height: int

    def width_of(self, text: str) -> int:
        """How wide a part of the text is in this font, in pixels."""
        return -int(-self.font.getlength(text) // 1)

    def lines(self, width: int, most: int) -> list[str]:
        """The text in at most so many lines, each of at most that width in pixels; "..." stands for what is left out.

        Lines end at spaces; words that are wider than a line are cut.
        """
        lines: list[str] = []
        rest = self.text
        while rest and len(lines) < most:
            fitting = self._fitting(rest, width)
            if len(fitting) == len(rest):
                return [*lines, rest]
            if len(lines) == most - 1:
                return [*lines, self._fitting(rest, width - self.width_of(_CUT)).rstrip() + _CUT]
            if rest[len(fitting)] != " " and " " in fitting.strip():
                fitting = fitting[: fitting.rindex(" ")]
            lines.append(fitting.rstrip())
            rest = rest[len(fitting) :].lstrip()
        return lines

    def lines_with_end(self, width: int, most: int) -> list[str]:
        """As `lines`, but what is left out is left out in the middle."""
        if len(found := self.lines(width, most + 1)) <= most:
            return found
        kept = sum(map(len, found[:most])) // 2 - len(_CUT)
        while kept > 1:
            shorter = replace(self, text=f"{self.text[:kept]}{_CUT}{self.text[-kept:]}")
            if len(found := shorter.lines(width, most + 1)) <= most:
                return found
            kept -= 1
        return self.lines(width, most)

    def _fitting(self, text: str, width: int) -> str:
        """As many characters from the start as fit, one at least."""
        least, most = 1, len(text)
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.width_of(text[:middle]) <= width else (least, middle - 1)
        return text[:least]


def lettering_for(text: str, size: int) -> Lettering:
    """What a text becomes in a picture, by the font that has the most of its characters.

    Args:
        text: any; line breaks become spaces, and of very long texts the beginning is taken.
        size: of the font in pixels.
    """
    line = " ".join(printable(text[:_MOST_CHARACTERS]).split())
    fonts = ["", *([] if line.isascii() else filter(_has_font, _WIDER_FONTS))]
    name = max(fonts, key=lambda font: sum(_has(font, each) for each in line))
    shown = "".join(each if _has(name, each) else each.encode("unicode_escape").decode("ascii") for each in line)
    return Lettering(shown, _font(name, size), round(size * 1.3))


@lru_cache(maxsize=64)
def _font(name: str, size: int) -> FreeTypeFont:
    from PIL import ImageFont

    if not name:
        own = ImageFont.load_default(size)
        if not isinstance(own, ImageFont.FreeTypeFont):
            raise ImportError("pictures need a Pillow that was built with FreeType, as those of PyPI are")
        return own
    return ImageFont.truetype(name, size)


@lru_cache(maxsize=64)
def _has_font(name: str) -> bool:
    try:
        _font(name, 16)
    except OSError:
        return False
    return True


@lru_cache(maxsize=4096)
def _has(name: str, character: str) -> bool:
    return character.isspace() or _glyph(name, character) != _glyph(name, _NO_CHARACTER)


def _glyph(name: str, character: str) -> bytes:
    return bytes(_font(name, 16).getmask(character))
