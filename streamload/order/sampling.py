"""What an epoch holds if not every sample once: draws by weight, a stretch of passes, a mixture, or a sampler's list.

Each of these is a value that is fixed for a run. What an epoch holds follows from it, the seed and the epoch's number
alone, as everything of the order does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.order.groups import first_of_groups, group_sizes
from streamload.order.randomness import CounterDraws, as_uniforms, philox_key

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Stretched:
    """Epoch e is the samples `e * epoch_size` to `(e + 1) * epoch_size` of endless passes over the dataset.

    Where the epoch is as large as the dataset, it is one pass: with all samples selected the same as without sampling.

    Attributes:
        epoch_size: samples of an epoch, over all ranks.
        selected: bool[N], which samples take part, in the order of the listing; None for all.
    """

    epoch_size: int
    selected: NDArray[np.bool_] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Epochs are lists of numbers of samples, which come with the start of each epoch."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Several datasets, mixed in fixed shares; each has passes of its own, over all epochs.

    Attributes:
        edges: the shards of dataset d are `edges[d]:edges[d + 1]` of the listing.
        shares: of the datasets, above 0, with the sum 1.
        block: every so many samples, from an epoch's first on, the shares are exact to less than one sample.
        epoch_size: samples of an epoch, over all ranks; None for as many as all datasets have together.
        selected: bool[N], which samples take part; None for all.
    """

    edges: tuple[int, ...]
    shares: tuple[float, ...]
    block: int
    epoch_size: int | None
    selected: NDArray[np.bool_] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """Every epoch draws its samples with replacement, as exactly by weight as possible.

    Samples of equal weight form a group; several groups may have the same weight, and then each has its own share.
    How often a group is drawn in an epoch differs from its share by less than one. Within a group samples are
    drawn in passes, each in a new order, and every epoch continues where the one before stopped: so in one epoch the
    draws of two samples of a group differ by at most two, and over epochs all are drawn equally often.

    Attributes:
        group: unsigned[N], the group of each sample, in the order of the listing.
        weight: float64[K], what one sample of each group weighs; not negative, one of a group with samples above 0.
        epoch_size: samples of an epoch, over all ranks.
    """

    group: NDArray[np.unsignedinteger]
    weight: NDArray[np.float64]
    epoch_size: int

    @classmethod
    def among(
        cls, selected: NDArray[np.bool_] | None, group: NDArray[Any], weight: NDArray[np.float64], epoch_size: int
    ) -> Weighted:
        """Draws among the selected samples, bool[N], alone: the others are a group that weighs nothing."""
        if selected is not None:
            group = np.where(selected, group.astype(np.min_scalar_type(len(weight))), len(weight))
            weight = np.append(weight, 0.0)
        return cls(group.astype(np.min_scalar_type(len(weight) - 1), copy=False), weight, epoch_size)

    def shares(self) -> NDArray[np.float64]:
        """float64[K], how often each group is drawn in an epoch, on average."""
        summed = self._summed_shares(self._sizes())
        shares: NDArray[np.float64] = np.diff(summed, prepend=0.0)
        return shares

    def repeats(self, seed: int, epoch: int) -> NDArray[np.unsignedinteger]:
        """How often each sample comes in an epoch, [N], as small integers as hold it; the sum is `epoch_size`.

        Takes O(N) and a few bytes for each sample, unless groups are small.
        """
        size = self._sizes()
        start, drawn = self._stretches(seed, epoch, size)
        first_pass, first = np.divmod(start, np.maximum(size, 1))
        last_pass, end = np.divmod(start + drawn, np.maximum(size, 1))
        whole = last_pass - first_pass
        dtype = np.min_scalar_type(int(whole.max(initial=0)) + 1)
        repeats: NDArray[np.unsignedinteger] = whole.astype(dtype)[self.group]
        repeats += self._first_in(seed, last_pass, size, end)
        repeats -= self._first_in(seed, first_pass, size, first)
        return repeats

    def drawn_of_shards(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """About how many draws each shard has in an epoch, int64[n_shards]."""
        of_sample = self.shares() / np.maximum(self._sizes(), 1)
        summed = np.concatenate((np.zeros(1), np.cumsum(of_sample[self.group])))
        ends = np.cumsum(counts)
        drawn: NDArray[np.int64] = np.rint(summed[ends] - summed[ends - counts]).astype(np.int64)
        return drawn

    def _sizes(self) -> NDArray[np.int64]:
        return group_sizes(self.group, len(self.weight))

    def _summed_shares(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        summed: NDArray[np.float64] = np.cumsum(self.weight / self.weight.max() * size)
        summed *= self.epoch_size / summed[-1]
        summed[summed == summed[-1]] = self.epoch_size  # exactly
        return summed

    def _stretches(self, seed: int, epoch: int, size: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each group's endless passes: where the epoch's draws begin, and how many there are."""
        summed = self._summed_shares(size)
        shift = as_uniforms(CounterDraws(philox_key(seed, epoch, "weights")).words(0, 0, 1))[0]
        ends = np.floor(summed + shift).astype(np.int64)
        drawn = np.diff(ends, prepend=0)
        most = np.ceil(np.diff(summed, prepend=0.0) * (1 - 1e-12)).astype(np.int64)  # of whole shares, not one more
        return epoch * most, drawn

    def _first_in(
        self, seed: int, passes: NDArray[np.int64], size: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which samples are among the first of their group in some pass of it, bool[N]."""
        draws = CounterDraws(philox_key(seed, 0, "turns"))
        shifts = passes.astype(np.uint64) * _GOLDEN

        def words(first: int, group: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
            return mixed_words(draws.words(0, first, len(group)) + shifts[group])

        return first_of_groups(words, self.group, size, wanted)


Sampling = Stretched | Weighted | Sampled | Mixed


def mixed_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64, which makes neighbouring words unrelated."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
