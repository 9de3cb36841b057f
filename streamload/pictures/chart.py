"""The chart of a run: its rate over time, and how long it waited for batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamload.pictures.lettering import INK, PALE, lettering_for

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

__all__ = ["Arrivals", "draw_rates"]

_WIDTH = 960
_PANEL_HEIGHT = 170
_LEFT = 84
_RIGHT = 24
_TITLE_SIZE = 15
_TEXT_SIZE = 12
_RATE = (48, 99, 142)
_WAIT = (209, 73, 91)
_GRID = (228, 228, 228)
_MOST_BARS = 200
_MOST_PASSES_NAMED = 12
_TICKS = 4


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When batches came.

    Attributes:
        times_s: of each, ascending; the first is that of the batch before the measurement, and the time 0.
        passes: the number of the pass that each belongs to.
        samples: how many the batches behind the first have together.
    """

    times_s: Sequence[float]
    passes: Sequence[int]
    samples: int


def draw_rates(arrivals: Arrivals, titles: Sequence[str]) -> Image:
    """Draw samples a second over time, each batch spread over the time since the one before; and the longest waits.

    Args:
        arrivals: of two batches at least.
        titles: the lines above the chart.

    Returns:
        A PIL image, RGB.

    Raises:
        ValueError: there are fewer batches, or they came at once.
    """
    from PIL import Image, ImageDraw

    times = np.asarray(arrivals.times_s, np.float64) - arrivals.times_s[0] if len(arrivals.times_s) else np.zeros(0)
    if len(times) < 2 or times[-1] <= 0:
        raise ValueError("a chart needs two batches at least; measure longer (--seconds, --batches)")
    edges = np.linspace(0, times[-1], min(_MOST_BARS, len(times) - 1) + 1)
    lines = [line for title in titles for line in lettering_for(title, _TITLE_SIZE).lines(_WIDTH - _LEFT - _RIGHT, 2)]
    top = 14 + len(lines) * 20
    height = top + 2 * (_PANEL_HEIGHT + 34) + 46
    picture = Image.new("RGB", (_WIDTH, height), (255, 255, 255))
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        colour, font = (INK if number == 0 else PALE), lettering_for(line, _TITLE_SIZE).font
        draw.text((_LEFT, 12 + 20 * number), line, fill=colour, font=font)
    seconds = float(times[-1])
    mean = f"{arrivals.samples / seconds:,.0f} on average"
    rates = _Panel(draw, top + 46, seconds, f"samples a second, {mean}", title_above=36)  # with the passes between
    waits = _Panel(draw, top + 80 + _PANEL_HEIGHT, seconds, "longest wait for a batch, in ms")
    _mark_passes([rates, waits], times, arrivals.passes)
    rates.draw_bars(edges, _rates(times, edges, arrivals.samples), _RATE)
    waits.draw_bars(edges, 1000 * _longest_waits(times, edges), _WAIT)
    waits.draw_seconds()
    return picture


def _rates(times: NDArray[np.float64], edges: NDArray[np.float64], samples: int) -> NDArray[np.float64]:
    """Samples a second between each two edges."""
    given = np.interp(edges, times, np.linspace(0, samples, len(times)))
    rates: NDArray[np.float64] = np.diff(given) / np.diff(edges)
    return rates


def _longest_waits(times: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of the longest wait that has touched the time between each two edges."""
    waits = np.diff(times)
    first = np.clip(np.searchsorted(times, edges[:-1], "right") - 1, 0, len(waits) - 1)
    last = np.clip(np.searchsorted(times, edges[1:], "left") - 1, 0, len(waits) - 1)
    return np.array([waits[start : max(start, end) + 1].max() for start, end in zip(first, last, strict=True)])


def _mark_passes(panels: Sequence[_Panel], times: NDArray[np.float64], passes: Sequence[int]) -> None:
    """A line where each pass but the first gives its first batch, with its number unless there are many."""
    begins = [number for number in range(1, len(passes)) if passes[number] != passes[number - 1]]
    if len(begins) > 10 * _MOST_PASSES_NAMED:
        return
    named = len(begins) <= _MOST_PASSES_NAMED
    for panel in panels:
        for number in begins:
            name = f"pass {passes[number]}" if named and panel is panels[0] else ""
            panel.draw_mark(float(times[number]), name)


class _Panel:
    """Axes over the seconds of the run."""

    def __init__(self, draw: ImageDraw, top: int, seconds: float, title: str, *, title_above: int = 20) -> None:
        self._draw = draw
        self._top, self._bottom = top, top + _PANEL_HEIGHT
        self._seconds = seconds
        self._text(_LEFT, top - title_above, title, INK)

    def draw_bars(self, edges: NDArray[np.float64], values: NDArray[np.float64], colour: tuple[int, int, int]) -> None:
        """A bar between each two edges, over lines of round numbers."""
        step = _round_step(float(values.max()) or 1.0)
        most = step * math.ceil((float(values.max()) or 1.0) / step)
        for number in range(round(most / step) + 1):
            height = self._bottom - round(_PANEL_HEIGHT * number * step / most)
            self._draw.line((_LEFT, height, _WIDTH - _RIGHT, height), fill=_GRID)
            self._text(_LEFT - 8, height - 8, f"{number * step:,.6g}", PALE, 1.0)
        for start, end, value in zip(edges, edges[1:], values, strict=False):
            left, right, y = self._x(start), self._x(end), self._bottom - _PANEL_HEIGHT * float(value) / most
            self._draw.rectangle((left, round(y), max(left, right - 1), self._bottom), fill=colour)
        self._draw.line((_LEFT, self._bottom, _WIDTH - _RIGHT, self._bottom), fill=PALE)

    def draw_mark(self, second: float, name: str) -> None:
        """A line from top to bottom, with a name above it."""
        x = self._x(second)
        self._draw.line((x, self._top - 4, x, self._bottom), fill=(150, 150, 150))
        at_the_edge = x > _WIDTH - _RIGHT - 30
        self._text(x - 3 if at_the_edge else x + 3, self._top - 20, name, PALE, 1.0 if at_the_edge else 0.0)

    def draw_seconds(self) -> None:
        """The numbers of the axis below."""
        step = _round_step(self._seconds, 10)
        for number in range(int(self._seconds / step + 1e-9) + 1):
            x = self._x(number * step)
            self._draw.line((x, self._bottom, x, self._bottom + 4), fill=PALE)
            self._text(x, self._bottom + 8, f"{number * step:,.6g}", PALE, 0.5)
        self._text(_LEFT - 14, self._bottom + 8, "seconds", PALE, 1.0)

    def _x(self, second: float) -> int:
        return _LEFT + round((_WIDTH - _LEFT - _RIGHT) * second / self._seconds)

    def _text(self, x: int, y: int, text: str, colour: tuple[int, int, int], left_of_x: float = 0.0) -> None:
        """Write a text, this part of whose width is to the left of x."""
        lettering = lettering_for(text, _TEXT_SIZE)
        x -= round(left_of_x * lettering.width_of(lettering.text))
        self._draw.text((x, y), lettering.text, fill=colour, font=lettering.font)


def _round_step(most: float, ticks: int = _TICKS) -> float:
    """1, 2 or 5 times a power of ten, so that about so many steps make up the most."""
    power = 10.0 ** math.floor(math.log10(most / ticks))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power * ticks >= most * 0.999))
