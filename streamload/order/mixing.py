"""Interleave several datasets, with nearly exact shares per block and random access.

**Shares of a block.** In a block of B samples, dataset d gets the integer part of `B * share[d]`, and some datasets get
an extra sample. Lay the fractional parts end to end; their total length is a whole number F. The points `t, t + 1, ...,
t + F - 1`, t in [0, 1), lie in F different parts, whose datasets get the extra sample (systematic sampling). The
parts are rounded to multiples of 1/P, with a period P of at most 4,096. From block to block t advances by a fixed step
that visits all P multiples in P blocks. So every dataset gets exactly its rounded share in P blocks, and is at most a
few samples off in between.
"""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

from streamload.order.randomness import CounterDraws

IntArray = NDArray[np.int64]

_LONGEST_PERIOD = 4_096
_GOLDEN = 0.6180339887498949


class BlockShares:
    """Count the samples of each of D datasets in the blocks of an epoch, and choose the dataset at each position.

    Args:
        shares: the datasets' shares, which sum to 1.
        block: samples per block.
        epoch_size: samples per epoch; the last block may be shorter.

    Attributes:
        sizes: int64[D], the number of samples of each dataset in every epoch.
    """

    def __init__(self, shares: tuple[float, ...], block: int, epoch_size: int) -> None:
        self._block = block
        self._whole, self._period, parts = _split_by_shares(shares, block)
        step = _step(self._period)
        shifts = np.arange(self._period, dtype=np.int64) * step % self._period
        self._extra = np.zeros((self._period + 1, len(shares)), np.int64)  # of the first 0, 1, ... blocks
        self._extra[1:] = np.cumsum(_extra_samples(parts, self._period, shifts), axis=0)
        full, rest = divmod(epoch_size, block)
        whole, period, parts = _split_by_shares(shares, rest)
        self._full = full
        self._last: IntArray = whole + _extra_samples(parts, period, np.zeros(1, np.int64))[0]
        self.sizes: IntArray = self.before(np.array([full]))[0] + self._last

    def before(self, blocks: IntArray) -> IntArray:
        """Count each dataset's samples before each block, int64[len(blocks), D]; one past the last block is allowed."""
        inside = np.minimum(blocks, self._full)
        periods, rest = np.divmod(inside, self._period)
        counts: IntArray = inside[:, np.newaxis] * self._whole + periods[:, np.newaxis] * self._extra[-1]
        counts += self._extra[rest]
        counts[blocks > self._full] += self._last
        return counts

    def turns(self, draws: CounterDraws, start: int, end: int) -> tuple[IntArray, IntArray]:
        """Return the dataset of each position of `start:end`, and how many it had before in the epoch; int64 each."""
        first, last = start // self._block, (end - 1) // self._block
        before = self.before(np.arange(first, last + 2))
        datasets, numbers = [], []
        for number, counts, so_far in zip(range(first, last + 1), np.diff(before, axis=0), before[:-1], strict=True):
            words = draws.words(number, 0, int(counts.sum()))
            turns = np.repeat(np.arange(len(counts)), counts)[np.argsort(words, kind="stable")]
            datasets.append(turns)
            numbers.append(_numbered(turns, so_far))
        low = first * self._block
        return np.concatenate(datasets)[start - low : end - low], np.concatenate(numbers)[start - low : end - low]


def _numbered(turns: IntArray, first: IntArray) -> IntArray:
    by_dataset = np.argsort(turns, kind="stable")
    counts = np.bincount(turns, minlength=len(first))
    numbers = np.empty(len(turns), np.int64)
    numbers[by_dataset] = np.arange(len(turns)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return numbers


def _split_by_shares(shares: tuple[float, ...], size: int) -> tuple[IntArray, int, IntArray]:
    """Split `size` samples in proportion to shares.

    Returns:
        The integer parts; the shortest exact period, or else `_LONGEST_PERIOD`; the fractions as multiples of
        1/period.
    """
    exact = np.array(shares) * size
    whole: IntArray = np.floor(exact + 1e-9).astype(np.int64)
    fractions, total = np.maximum(exact - whole, 0.0), size - int(whole.sum())
    periods = np.arange(1, _LONGEST_PERIOD + 1)[:, np.newaxis]
    scaled = fractions * periods
    fitting = np.flatnonzero((np.abs(scaled - np.rint(scaled)) < 1e-6).all(axis=1))
    period = int(fitting[0]) + 1 if len(fitting) else _LONGEST_PERIOD
    ends = np.rint(np.cumsum(fractions) * period).astype(np.int64)
    if len(ends):
        ends[-1] = total * period
    return whole, period, np.diff(ends, prepend=0)


def _step(period: int) -> int:
    """Return a step that is coprime to the period and soon visits all of its regions.

    The step is close to the period's golden section, and step / period has small continued-fraction terms.
    """
    golden = round(period * _GOLDEN)
    candidates = [step for step in range(max(1, golden - 40), golden + 41) if gcd(step, period) == 1]
    return min(candidates, key=lambda step: (max(_continued_fraction(step, period)), abs(step - golden)))


def _continued_fraction(numerator: int, denominator: int) -> list[int]:
    terms = []
    while denominator:
        term, rest = divmod(numerator, denominator)
        terms.append(term)
        numerator, denominator = denominator, rest
    return terms


def _extra_samples(parts: IntArray, period: int, shifts: IntArray) -> IntArray:
    """Return each dataset's extra samples, 0 or 1, for each shift t in units of 1/period, int64[len(shifts), D]."""
    ends = np.cumsum(parts)
    points = (ends + shifts[:, np.newaxis]) // period
    before = np.concatenate((shifts[:, np.newaxis] // period, points[:, :-1]), axis=1)
    return points - before
