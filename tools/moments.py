"""Mean, deviation, extremes and histogram of numbers that come bit by bit, channel by channel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Moments"]

BINS = 256
_LEAST_EXPONENT = -1074
_INDEX_BITS = 44


@dataclass(frozen=True, slots=True)
class Moments:
    """What is known of the numbers so far; C is the number of channels.

    Means and squared deviations are merged by the formulas of Chan, Golub and LeVeque (Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances, 1979), which lose no digits where the mean is large. The bins of a
    histogram are a power of two wide and begin at multiples of that, so bins of one width are unions of narrower ones:
    histograms are merged exactly, in any order, and bytes get a bin for each value.

    Attributes:
        count: finite numbers, int64[C].
        not_finite: NaN and infinities, int64[C], which count nowhere else.
        mean: float64[C].
        squares: the sum of squared deviations from the mean, float64[C].
        least: float64[C].
        most: float64[C].
        exponent: a bin is 2**exponent wide, int64[C].
        first: the first bin begins at first * 2**exponent, int64[C].
        bins: numbers in each bin, int64[C, BINS].
    """

    count: NDArray[np.int64]
    not_finite: NDArray[np.int64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]
    least: NDArray[np.float64]
    most: NDArray[np.float64]
    exponent: NDArray[np.int64]
    first: NDArray[np.int64]
    bins: NDArray[np.int64]

    @classmethod
    def of(cls, values: NDArray[Any]) -> Self:
        """Those of an array (N, C).

        Raises:
            TypeError: it does not hold real numbers.
        """
        if values.dtype.kind not in "buif":
            raise TypeError(f"it has values of the type {values.dtype}, which are no real numbers")
        channels = [_of_bytes(each) if values.dtype == np.uint8 else _of_channel(each) for each in values.T]
        return cls._typed(zip(*channels, strict=True))

    @property
    def channels(self) -> int:
        """C."""
        return len(self.count)

    @property
    def std(self) -> NDArray[np.float64]:
        """The standard deviation of the population, float64[C]; 0 where there is no number."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def merged(self, other: Self) -> Self:
        """Those of both."""
        count = self.count + other.count
        share = other.count / np.maximum(count, 1)
        difference = other.mean - self.mean
        grids = [self._merged_bins(other, channel) for channel in range(self.channels)]
        exponent, first, bins = zip(*grids, strict=True)
        return type(self)(
            count,
            self.not_finite + other.not_finite,
            np.where(self.count > 0, self.mean + difference * share, other.mean),
            self.squares + other.squares + difference * difference * self.count * share,
            np.minimum(self.least, other.least),
            np.maximum(self.most, other.most),
            np.array(exponent),
            np.array(first),
            np.array(bins),
        )

    def _merged_bins(self, other: Self, channel: int) -> tuple[int, int, NDArray[np.int64]]:
        parts = [each for each in (self, other) if each.count[channel]]
        if not parts:
            return _LEAST_EXPONENT, 0, np.zeros(BINS, np.int64)
        exponent = max(int(each.exponent[channel]) for each in parts)
        moved = [each.filled_bins(channel, exponent) for each in parts]
        lowest, highest = min(int(each.min()) for each, _ in moved), max(int(each.max()) for each, _ in moved)
        exponent, first, wider = _grid(exponent, lowest, highest)
        bins = np.zeros(BINS, np.int64)
        for indices, counts in moved:
            np.add.at(bins, (indices >> wider) - first, counts)
        return exponent, first, bins

    def filled_bins(self, channel: int, exponent: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The bins that are not empty: their indices, as multiples of 2**exponent, and their counts."""
        filled = np.flatnonzero(self.bins[channel])
        wider = min(63, exponent - int(self.exponent[channel]))
        return (filled + self.first[channel]) >> wider, self.bins[channel][filled]

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON that keeps every bit."""
        return {name: getattr(self, name).tolist() for name in self.__slots__}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        """What `as_json` gave."""
        return cls._typed(saved[name] for name in cls.__slots__)

    @classmethod
    def _typed(cls, columns: Iterable[Any]) -> Self:
        arrays: Any = (np.array(column, dtype) for column, dtype in zip(columns, _TYPES, strict=True))
        return cls(*arrays)


_TYPES = (np.int64, np.int64, np.float64, np.float64, np.float64, np.float64, np.int64, np.int64, np.int64)


def _grid(exponent: int, lowest: int, highest: int) -> tuple[int, int, int]:
    """The narrowest bins, at least so wide, that hold both indices: exponent, first bin, and how often they double."""
    wider = 0
    while (highest >> wider) - (lowest >> wider) >= BINS:
        wider += 1
    return exponent + wider, lowest >> wider, wider


def _of_bytes(values: NDArray[np.uint8]) -> tuple[Any, ...]:
    """Of one channel of bytes: the histogram says all, and sums of whole numbers are exact."""
    if not len(values):
        return _nothing(0)
    bins = np.bincount(values, minlength=BINS)
    filled = np.flatnonzero(bins)
    mean = float(bins @ np.arange(BINS)) / len(values)
    deviations = np.arange(BINS) - mean
    least, most = int(filled[0]), int(filled[-1])
    shown = np.concatenate([bins[least:], np.zeros(least, np.int64)])
    return len(values), 0, mean, float(bins @ (deviations * deviations)), least, most, 0, least, shown


def _of_channel(values: NDArray[Any]) -> tuple[Any, ...]:
    numbers = values.astype(np.float64)
    finite = np.isfinite(numbers)
    not_finite = len(numbers) - int(finite.sum())
    if not_finite:
        numbers = numbers[finite]
    if not len(numbers):
        return _nothing(not_finite)
    mean = float(numbers.mean())
    least, most = float(numbers.min()), float(numbers.max())
    exponent = _least_exponent(least, most, whole=values.dtype.kind != "f")
    indices = np.floor(np.ldexp(numbers, -exponent)).astype(np.int64)
    exponent, first, wider = _grid(exponent, int(indices.min()), int(indices.max()))
    bins = np.bincount((indices >> wider) - first, minlength=BINS)
    return len(numbers), not_finite, mean, float(np.square(numbers - mean).sum()), least, most, exponent, first, bins


def _nothing(not_finite: int) -> tuple[Any, ...]:
    return 0, not_finite, 0.0, 0.0, math.inf, -math.inf, _LEAST_EXPONENT, 0, np.zeros(BINS, np.int64)


def _least_exponent(least: float, most: float, *, whole: bool) -> int:
    """For bins so narrow that they are merged for the range's sake alone, and so wide that an index has 63 bits."""
    largest = max(abs(least), abs(most))
    if whole or not largest:
        return 0 if whole else _LEAST_EXPONENT
    narrowest = math.frexp(largest)[1] - _INDEX_BITS
    spread = most / 2 - least / 2
    return max(narrowest, math.frexp(spread)[1] - 9) if spread else narrowest
