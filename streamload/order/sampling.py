"""Define epochs that differ from one plain pass: by weight, size, mixture, or a sampler's list.

A definition stays the same in all epochs. With the seed and the epoch's number it determines the epoch's samples. The
exception is a sampler's list, which is passed for each epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.order.randomness import CounterDraws, as_uniforms, philox_key

IntArray = NDArray[np.int64]
Words = Callable[[int, NDArray[np.unsignedinteger]], NDArray[np.uint64]]

# Number of samples drawn at once, so that the arrays stay in the CPU cache.
_CHUNK = 1 << 16

# Half-width of the search for a bound, in standard deviations.
_SPREAD = 8.0

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LAST_WORD = np.uint64((1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class Stretched:
    """Epoch e consists of the samples `e * epoch_size` to `(e + 1) * epoch_size` of endless passes over the dataset.

    With all samples selected, an epoch as large as the dataset is the same as without sampling.

    Attributes:
        epoch_size: samples per epoch, over all ranks.
        selected: bool[N], the samples to use, in the order of the listing; None for all.
    """

    epoch_size: int
    selected: NDArray[np.bool_] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Read a list of sample numbers, given at the start of each epoch."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Mix several datasets in fixed shares; each has its own passes, continued over epochs.

    Attributes:
        edges: the shards of dataset d are `edges[d]:edges[d + 1]` of the listing.
        shares: the datasets' shares, above 0, which sum to 1.
        block: samples per block; each block matches the shares to within one sample.
        epoch_size: samples per epoch, over all ranks; None for the sum of all datasets.
        selected: bool[N], the samples to use; None for all.
    """

    edges: tuple[int, ...]
    shares: tuple[float, ...]
    block: int
    epoch_size: int | None
    selected: NDArray[np.bool_] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """Draw samples in proportion to their weights, as exactly as possible; samples can repeat.

    The samples of a group have equal weight; a group's draws in an epoch differ from its share by less than one. Within
    a group samples are drawn in passes, each in a new order; an epoch begins as if each earlier one had made the
    group's maximum number of draws. In one epoch the draws of two samples of a group differ by at most two.

    Attributes:
        group: unsigned[N], the group of each sample, in the order of the listing.
        weight: float64[K], the weight of one sample of each group; not negative, above 0 for some group with samples.
        epoch_size: samples per epoch, over all ranks.
    """

    group: NDArray[np.unsignedinteger]
    weight: NDArray[np.float64]
    epoch_size: int

    @classmethod
    def among(
        cls, selected: NDArray[np.bool_] | None, group: NDArray[Any], weight: NDArray[np.float64], epoch_size: int
    ) -> Weighted:
        """Create weights that draw only from the selected samples, bool[N]: the others form a group of weight 0."""
        if selected is not None:
            group = np.where(selected, group.astype(np.min_scalar_type(len(weight))), len(weight))
            weight = np.append(weight, 0.0)
        return cls(group.astype(np.min_scalar_type(len(weight) - 1), copy=False), weight, epoch_size)

    def repeats(self, seed: int, epoch: int) -> NDArray[np.unsignedinteger]:
        """Return how often each sample is drawn in an epoch, [N], in the smallest dtype; the sum is `epoch_size`.

        Takes O(N) time and a few bytes per sample, more if groups are small.
        """
        size = group_sizes(self.group, len(self.weight))
        summed = np.cumsum(self.weight / self.weight.max() * size)
        summed *= self.epoch_size / summed[-1]
        summed[summed == summed[-1]] = self.epoch_size  # without rounding errors
        shift = as_uniforms(CounterDraws(philox_key(seed, epoch, "weights")).words(0, 0, 1))[0]
        drawn = np.diff(np.floor(summed + shift).astype(np.int64), prepend=0)
        max_drawn = np.ceil(np.diff(summed, prepend=0.0) * (1 - 1e-12)).astype(np.int64)  # rounding adds no draw
        start = epoch * max_drawn  # in the group's endless passes
        first_pass, first = np.divmod(start, np.maximum(size, 1))
        last_pass, end = np.divmod(start + drawn, np.maximum(size, 1))
        whole = last_pass - first_pass
        dtype = np.min_scalar_type(int(whole.max(initial=0)) + 1)
        repeats: NDArray[np.unsignedinteger] = whole.astype(dtype)[self.group]
        repeats += self._first_in(seed, last_pass, size, end)
        repeats -= self._first_in(seed, first_pass, size, first)
        return repeats

    def _first_in(
        self, seed: int, passes: NDArray[np.int64], size: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return a mask of each group's first `wanted` samples in its pass, bool[N]."""
        draws = CounterDraws(philox_key(seed, 0, "turns"))
        shifts = passes.astype(np.uint64) * _GOLDEN

        return first_of_groups(
            lambda first, group: mixed_words(draws.words(0, first, len(group)) + shifts[group]),
            self.group,
            size,
            wanted,
        )


Sampling = Stretched | Weighted | Sampled | Mixed


def group_sizes(group: NDArray[np.unsignedinteger], n_groups: int) -> IntArray:
    """Count the samples of each group, int64[n_groups]; in pieces, since NumPy would convert all of `group` at once."""
    step = max(_CHUNK, n_groups)
    sizes = np.zeros(n_groups, np.int64)
    for start in range(0, len(group), step):
        sizes += np.bincount(group[start : start + step], minlength=n_groups)
    return sizes


def first_of_groups(
    words: Words, group: NDArray[np.unsignedinteger], sizes: IntArray, wanted: IntArray, *, spread: float = _SPREAD
) -> NDArray[np.bool_]:
    """Choose the first samples of each group in the order of random words; samples with equal words keep their order.

    Words are uniform, so the last chosen word of a group is known to within a few standard deviations. Only samples in
    that range are sorted: of 10^6 samples of one group about 10^4.

    Args:
        words: returns the words of consecutive samples, given the first one's number and their groups.
        group: unsigned[N], the group of each sample.
        sizes: int64[K], the number of samples of each group.
        wanted: int64[K], the number of samples to choose from each group.
        spread: half-width of the search in standard deviations; if it is too narrow, all samples are sorted.

    Returns:
        bool[N], True for chosen samples.
    """
    low, high = _bounds(sizes, wanted, spread)
    chosen = np.empty(len(group), np.bool_)
    n_chosen = np.zeros(len(sizes), np.int64)
    open_samples, open_words = [], []
    for start in range(0, len(group), _CHUNK):
        groups = group[start : start + _CHUNK]
        drawn = words(start, groups)
        below = drawn < low[groups]
        chosen[start : start + _CHUNK] = below
        np.add.at(n_chosen, groups[below], 1)
        undecided = np.flatnonzero(~below & (drawn <= high[groups]))
        open_samples.append(start + undecided)
        open_words.append(drawn[undecided])
    samples = np.concatenate([np.empty(0, np.int64), *open_samples])
    groups, left = group[samples], wanted - n_chosen
    n_open = np.bincount(groups, minlength=len(sizes))
    if bool(((left < 0) | (left > n_open)).any()):
        return first_of_groups(words, group, sizes, wanted, spread=np.inf)
    by_turn = np.lexsort((np.concatenate([np.empty(0, np.uint64), *open_words]), groups))
    turns = np.arange(len(by_turn)) - np.repeat(np.cumsum(n_open) - n_open, n_open)
    chosen[samples[by_turn[turns < left[groups[by_turn]]]]] = True
    return chosen


def _bounds(sizes: IntArray, wanted: IntArray, spread: float) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the minimum and maximum word that each group's last chosen sample may have."""
    if not np.isfinite(spread):
        return np.zeros(len(sizes), np.uint64), np.full(len(sizes), _LAST_WORD)
    divisor = np.maximum(sizes, 1)
    share = wanted / divisor
    margin = spread * np.sqrt(share * (1 - share) / divisor) + spread**2 / divisor
    margin[(wanted == 0) | (wanted == sizes)] = 0.0
    return _word(share - margin), _word(share + margin)


def _word(share: NDArray[np.float64]) -> NDArray[np.uint64]:
    inside = np.clip(share, 0.0, 1.0 - 2.0**-53)
    return np.where(share >= 1.0, _LAST_WORD, (inside * 2.0**64).astype(np.uint64))


def mixed_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64, which decorrelates neighbouring words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
