"""Which samples come first where each group is put in a random order: by one pass over the words, without a sort."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

# Samples that are looked at together; what is made for them stays in the processor's cache.
_CHUNK = 1 << 16

# How many standard deviations lie between where a bound is expected and where it is still looked for.
_SPREAD = 8.0

IntArray = NDArray[np.int64]
Words = Callable[[int, NDArray[np.unsignedinteger]], NDArray[np.uint64]]


def group_sizes(group: NDArray[np.unsignedinteger], n_groups: int) -> IntArray:
    """The samples of each group, int64[n_groups]; in pieces, since NumPy would convert all of `group` at once."""
    step = max(_CHUNK, n_groups)
    sizes = np.zeros(n_groups, np.int64)
    for start in range(0, len(group), step):
        sizes += np.bincount(group[start : start + step], minlength=n_groups)
    return sizes


def first_of_groups(
    words: Words, group: NDArray[np.unsignedinteger], sizes: IntArray, wanted: IntArray, *, spread: float = _SPREAD
) -> NDArray[np.bool_]:
    """Which samples are among the first of their group, in the order of their words; equal words keep their order.

    Words are uniform, so the word that a group's last chosen sample has is known to within a few times the root of the
    group's size. Only samples whose words lie there are sorted. Memory is O(1) bytes for each sample, and some tens
    for each of those: all samples of small groups, and of 10^6 samples of one group about 10^4.

    Args:
        words: gives the words of the samples from a first one on, whose groups it is told.
        group: unsigned[N], the group of each sample.
        sizes: int64[K], the samples of each group.
        wanted: int64[K], how many of each group are chosen; at most its size.
        spread: how wide the search is, in standard deviations; where it was too narrow, all samples are sorted.

    Returns:
        bool[N].
    """
    low, high = _bounds(sizes, wanted, spread)
    chosen = np.empty(len(group), np.bool_)
    taken = np.zeros(len(sizes), np.int64)
    open_samples, open_words = [], []
    for start in range(0, len(group), _CHUNK):
        of = group[start : start + _CHUNK]
        drawn = words(start, of)
        below = drawn < low[of]
        chosen[start : start + _CHUNK] = below
        np.add.at(taken, of[below], 1)
        undecided = np.flatnonzero(~below & (drawn <= high[of]))
        open_samples.append(start + undecided)
        open_words.append(drawn[undecided])
    samples = np.concatenate([np.empty(0, np.int64), *open_samples])
    found = _settled(samples, np.concatenate([np.empty(0, np.uint64), *open_words]), group[samples], wanted - taken)
    if found is None:
        return first_of_groups(words, group, sizes, wanted, spread=np.inf)
    chosen[found] = True
    return chosen


def _settled(
    samples: IntArray, words: NDArray[np.uint64], group: NDArray[np.unsignedinteger], left: IntArray
) -> IntArray | None:
    """The first samples of each group, as many as are left to be chosen; None where there are not so many."""
    n_open = np.bincount(group, minlength=len(left)) if len(group) else np.zeros(len(left), np.int64)
    if bool(((left < 0) | (left > n_open)).any()):
        return None
    by_turn = np.lexsort((words, group))
    turns = np.arange(len(by_turn)) - np.repeat(np.cumsum(n_open) - n_open, n_open)
    found: IntArray = samples[by_turn[turns < left[group[by_turn]]]]
    return found


def _bounds(sizes: IntArray, wanted: IntArray, spread: float) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """For each group the least and the greatest word that its last chosen sample may have."""
    if not np.isfinite(spread):
        return np.zeros(len(sizes), np.uint64), np.full(len(sizes), _LAST_WORD)
    some = np.maximum(sizes, 1)
    share = wanted / some
    margin = spread * np.sqrt(share * (1 - share) / some) + spread**2 / some
    margin[(wanted == 0) | (wanted == sizes)] = 0.0
    return _word(share - margin), _word(share + margin)


_LAST_WORD = np.uint64((1 << 64) - 1)


def _word(share: NDArray[np.float64]) -> NDArray[np.uint64]:
    """The word below which a share of all words lie."""
    inside = np.clip(share, 0.0, 1.0 - 2.0**-53)
    return np.where(share >= 1.0, _LAST_WORD, (inside * 2.0**64).astype(np.uint64))
