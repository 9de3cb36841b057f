"""Build an epoch's sequence of samples: every shard once, a range of repeated passes, draws, or a sampler's list.

A run is a piece of a shard, or a shard with each sample repeated as often as it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.order.mixing import BlockShares
from streamload.order.options import OrderOptions
from streamload.order.randomness import CounterDraws, as_uniforms, permutation, philox_key
from streamload.order.sampling import Mixed, Sampled, Stretched, Weighted
from streamload.order.shard_counts import ENDLESS, UNKNOWN, ShardCounts, distinct

IntArray = NDArray[np.int64]

# Samples per precomputed sum of repeats.
_BLOCK = 32

# Samples per call of `np.add.reduceat`.
_PIECE = _BLOCK << 14

# Draws per lookup, so that the arrays stay in the CPU cache.
_ROWS_AT_ONCE = 4_096

# Shards whose counts are applied at once.
_SHARDS_PER_STEP = 4_096


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """k consecutive pieces of shards, in columns of int64[k].

    Attributes:
        shards: the shard of each run.
        firsts: the first sample of each run, numbered within its shard; with repeats, the first draw.
        lengths: the number of samples or draws of each run; unused with a `ShardCounts`.
        passes: the pass of each run, counted from the epoch's first.
    """

    shards: IntArray
    firsts: IntArray
    lengths: IntArray
    passes: IntArray


def whole_passes(counts: IntArray, start: int, size: int, order_of: Callable[[int], IntArray]) -> Runs:
    """Return the runs for a range of positions in an endless sequence of passes.

    Args:
        counts: int64[n_shards], the number of samples of each shard.
        start: the first position.
        size: the number of positions.
        order_of: returns the order of the shards in a pass.
    """
    total = int(counts.sum())
    if total == 0 or size == 0:
        empty = np.empty(0, np.int64)
        return Runs(empty, empty, empty, empty)
    first_pass, last_pass = start // total, (start + size - 1) // total
    shards = np.concatenate([order_of(number) for number in range(first_pass, last_pass + 1)])
    passes = np.repeat(np.arange(last_pass - first_pass + 1), len(counts))
    ends = np.cumsum(counts[shards])
    starts = ends - counts[shards]
    low = start - first_pass * total
    firsts = np.maximum(low - starts, 0)
    lengths = np.minimum(ends, low + size) - starts - firsts
    kept = lengths > 0
    return Runs(shards[kept], firsts[kept], lengths[kept], passes[kept])


class RepeatCounts:
    """Map draws to samples, for concatenated shards with each sample repeated as often as it is drawn.

    An instance needs only a quarter of a byte per sample besides `repeats`, which can have 10^9 entries.

    Args:
        repeats: integers or booleans, [N]: how often each sample is drawn, in the order of the listing.
        counts: int64[n_shards], the number of samples of each shard.

    Attributes:
        lengths: int64[n_shards], the number of draws of each shard.
    """

    def __init__(self, repeats: NDArray[Any], counts: IntArray) -> None:
        self._repeats = repeats.view(np.uint8) if repeats.dtype == np.bool_ else repeats
        # Summed in pieces of whole blocks, since NumPy converts its whole input first.
        pieces = (self._repeats[start : start + _PIECE] for start in range(0, len(repeats), _PIECE))
        sums = [np.add.reduceat(piece, np.arange(0, len(piece), _BLOCK), dtype=np.int64) for piece in pieces]
        self._block_edges = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sums]))
        ends = np.cumsum(counts)
        self._first_sample = ends - counts
        self._first_place = self._places_before(self._first_sample)
        self.lengths: IntArray = self._places_before(ends) - self._first_place

    def find(self, shards: IntArray, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Return each draw's sample, as its number in the shard, and how often that sample was drawn before."""
        places = self._first_place[shards] + numbers
        samples, before = np.empty_like(places), np.empty_like(places)
        for start in range(0, len(places), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            samples[part], before[part] = self._sample_at(places[part])
        return samples - self._first_sample[shards], places - before

    def _sample_at(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return each draw's sample, as its number among all shards, and the number of draws before that sample."""
        block = self._block_edges[1:].searchsorted(places, side="right")
        within = places - self._block_edges[block]
        summed = np.cumsum(self._repeats_in(block), axis=1, dtype=np.int64)
        place = np.count_nonzero(summed <= within[:, np.newaxis], axis=1)
        before = np.where(place > 0, summed[np.arange(len(place)), place - 1], 0)
        return block * _BLOCK + place, places - within + before

    def _places_before(self, samples: IntArray) -> IntArray:
        places = np.empty_like(samples)
        for start in range(0, len(samples), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            block, place = np.divmod(samples[part], _BLOCK)
            inside = np.arange(_BLOCK) < place[:, np.newaxis]
            places[part] = self._block_edges[block] + np.sum(
                self._repeats_in(block), axis=1, where=inside, dtype=np.int64
            )
        return places

    def _repeats_in(self, block: IntArray) -> NDArray[Any]:
        """Return how often each sample of k blocks is drawn, [k, _BLOCK]; undefined after the last sample."""
        if not len(self._repeats):
            return np.zeros((len(block), _BLOCK), np.uint8)
        samples = block[:, np.newaxis] * _BLOCK + np.arange(_BLOCK)
        repeats: NDArray[Any] = self._repeats[np.minimum(samples, len(self._repeats) - 1)]
        return repeats


class SampleSequence:
    """The samples of an epoch by position: concatenated runs.

    Args:
        runs: the runs to concatenate.
        key: the key of the shuffle's draws.
        repeats: how often the samples of a pass are drawn; None for once each.
        counts: the shards' counts, if each shard is one run. The sequence then covers the known counts and grows with
            them; it includes the samples found so far in the first unknown shard.

    Attributes:
        order: int64[n], the shard of each run.
        known_runs: the number of runs, from the first on, whose length is final.
        edges: int64[known_runs + 1]; run i lies at positions `edges[i]:edges[i + 1]`.
        known_end: the number of known samples, including those of an unfinished last shard.
        complete: all runs are known, so `known_end` is the number of samples in the epoch.
        has_repeats: a shard occurs more than once.
    """

    def __init__(
        self,
        runs: Runs,
        key: NDArray[np.uint64],
        *,
        repeats: RepeatCounts | None = None,
        counts: ShardCounts | None = None,
    ) -> None:
        self.order, self._firsts, self._passes = runs.shards, runs.firsts, runs.passes
        self._all_edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(runs.lengths)))
        self._draws = CounterDraws(key)
        self._repeats = repeats
        self._counts = counts
        self._runs_of: dict[int, list[int]] | None = None
        self.has_repeats = len(distinct(self.order)) < len(self.order)
        self.known_runs = 0 if counts is not None else len(self.order)
        self.extend()

    def extend(self) -> None:
        """Append the shards whose counts have become known, and the samples found in the next shard."""
        start = self.known_runs
        while self._counts is not None and start < len(self.order):
            if self._counts.values[self.order[start]] == UNKNOWN:
                self._all_edges[start + 1] = self._all_edges[start] + self._counts.least(int(self.order[start]))
                break
            values = self._counts.values[self.order[start : start + _SHARDS_PER_STEP]]
            unknown = np.flatnonzero(values == UNKNOWN)
            values = values[: unknown[0]] if len(unknown) else values
            end = start + len(values)
            self._all_edges[start + 1 : end + 1] = self._all_edges[start] + np.cumsum(values)
            start = end
        self.known_runs, self.complete = start, start == len(self.order)
        self.known_end = int(self._all_edges[min(start + 1, len(self.order))])
        self.edges = self._all_edges[: start + 1]

    def places_of(self, shard: int, /) -> list[tuple[int, int]]:
        """Return the start and end of each known run of a shard; an unfinished last run ends at `ENDLESS`."""
        if self._runs_of is None:
            self._runs_of = {}
            for run, each in enumerate(self.order.tolist()):
                self._runs_of.setdefault(each, []).append(run)
        places = []
        for run in self._runs_of.get(shard, ()):
            if run < self.known_runs:
                places.append((int(self.edges[run]), int(self.edges[run + 1])))
            elif run == self.known_runs and self.known_end > self.edges[-1]:
                places.append((int(self.edges[-1]), ENDLESS))
        return places

    def locate(self, positions: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return shards, samples in them, and a count that tells repeats of a sample apart, int64 each."""
        run = np.searchsorted(self.edges, positions, side="right") - 1
        shards, samples, before = self.order[run], positions - self.edges[run] + self._firsts[run], self._passes[run]
        if self._repeats is not None:
            samples, drawn_before = self._repeats.find(shards, samples)
            before = before + drawn_before
        return shards, samples, before

    def uniforms(self, first: int, count: int) -> NDArray[np.float64]:
        """Draw from [0, 1) for each of `count` positions from `first` on, float64[count].

        A draw depends on the pass, the shard and the number within the shard (counting every repeat), not on the
        position.
        """
        words = np.empty(count, np.uint64)
        end = first + count
        first_run, end_run = np.searchsorted(self.edges, (first, end), side="right").tolist()
        runs = slice(first_run - 1, end_run)
        columns = [column[runs].tolist() for column in (self.order, self._firsts, self._passes)]
        edges = self._all_edges[first_run - 1 : end_run + 1].tolist()
        for shard, number, pass_number, run_start, run_end in zip(*columns, edges[:-1], edges[1:], strict=True):
            start, stop = max(run_start, first), min(run_end, end)
            if start < stop:
                words[start - first : stop - first] = self._draws.words(
                    shard, number + start - run_start, stop - start, pass_number
                )
        return as_uniforms(words)


class SampledSequence(SampleSequence):
    """The samples of a sampler, in its order. Here a run only marks where the last use of its shard ends.

    Args:
        counts: int64[n_shards], the number of samples of each shard.
        numbers: int64[M], the samples, numbered across all shards in the order of the listing.
        key: unused, since nothing is shuffled.
    """

    def __init__(self, counts: IntArray, numbers: IntArray, key: NDArray[np.uint64]) -> None:
        self._numbers = numbers
        self._shard_edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        self._before: IntArray | None = None
        shards = np.searchsorted(self._shard_edges[1:], numbers, side="right")
        used, from_end = np.unique(shards[::-1], return_index=True)
        ends = len(shards) - from_end
        by_end = np.argsort(ends)
        zeros = np.zeros(len(used), np.int64)
        super().__init__(Runs(used[by_end], zeros, np.diff(ends[by_end], prepend=0), zeros), key)

    def places_of(self, _shard: int, /) -> list[tuple[int, int]]:
        """Return []: a shard's samples may occur anywhere, so its parts would be retained for the whole epoch."""
        return []

    def locate(self, positions: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return shards, samples in them, and how often each sample occurred before, int64 each."""
        if self._before is None:
            self._before = _counted_before(self._numbers)
        numbers = self._numbers[positions]
        shards = np.searchsorted(self._shard_edges[1:], numbers, side="right")
        return shards, numbers - self._shard_edges[shards], self._before[positions]


def _counted_before(numbers: IntArray) -> IntArray:
    by_number = np.argsort(numbers, kind="stable")
    ordered = numbers[by_number]
    starts = np.flatnonzero(np.concatenate((np.ones(min(1, len(ordered)), bool), ordered[1:] != ordered[:-1])))
    before = np.empty(len(numbers), np.int64)
    before[by_number] = np.arange(len(numbers)) - np.repeat(starts, np.diff(np.append(starts, len(numbers))))
    return before


def shards_in_order(options: OrderOptions, n_shards: int, number: int, purpose: str = "shards") -> IntArray:
    """Return the shards in the order of pass `number` over a dataset, int64[n_shards].

    Without sampling, a pass is an epoch.
    """
    if options.shuffle:
        return permutation(options.seed, number, n_shards, purpose)
    return np.arange(n_shards, dtype=np.int64)


def sequence_of_epoch(
    options: OrderOptions, counts: ShardCounts, epoch: int, numbers: IntArray | None = None
) -> SampleSequence:
    """Build the sequence of an epoch.

    Args:
        options: the order's options.
        counts: the shards' counts; without sampling, some can become known later.
        epoch: the epoch's number.
        numbers: int64[M], the epoch's samples, if the sampling is `Sampled`.
    """
    key = philox_key(options.seed, epoch, "window")
    match options.sampling:
        case Sampled():
            assert numbers is not None, "a sampler's numbers come with the start of the epoch"
            return SampledSequence(counts.values, numbers, key)
        case Stretched(size, selected):
            return _stretched(options, counts.values, epoch, size, selected)
        case Weighted() as sampling:
            repeats = RepeatCounts(sampling.repeats(options.seed, epoch), counts.values)
            order = shards_in_order(options, len(counts), epoch)
            order = order[repeats.lengths[order] > 0]
            zeros = np.zeros(len(order), np.int64)
            return SampleSequence(Runs(order, zeros, repeats.lengths[order], zeros), key, repeats=repeats)
        case Mixed():
            raise AssertionError("a mixture has a sequence for each dataset")
    zeros = np.zeros(len(counts), np.int64)
    runs = Runs(shards_in_order(options, len(counts), epoch), zeros, zeros, zeros)
    return SampleSequence(runs, key, counts=counts)


def dataset_sequences(
    options: OrderOptions, mixed: Mixed, counts: ShardCounts, epoch: int
) -> tuple[BlockShares, list[SampleSequence]]:
    """Build a mixture's shares and each dataset's sequence in an epoch; all counts must be known."""
    shares = BlockShares(mixed.shares, mixed.block, mixed.epoch_size or int(counts.values.sum()))
    return shares, [
        _stretched(
            options,
            counts.values,
            epoch,
            size,
            mixed.selected,
            shards=slice(*mixed.edges[dataset : dataset + 2]),
            purpose=f"shards of dataset {dataset}",
        )
        for dataset, size in enumerate(shares.sizes.tolist())
    ]


def _stretched(
    options: OrderOptions,
    counts: IntArray,
    epoch: int,
    size: int,
    selected: NDArray[np.bool_] | None,
    *,
    shards: slice = slice(0, None),
    purpose: str = "shards",
) -> SampleSequence:
    repeats = None if selected is None else RepeatCounts(selected, counts)
    lengths = (counts if repeats is None else repeats.lengths)[shards]
    order_of = partial(shards_in_order, options, len(lengths), purpose=purpose)
    runs = whole_passes(lengths, epoch * size, size, order_of)
    key = philox_key(options.seed, epoch, "window")
    return SampleSequence(replace(runs, shards=runs.shards + shards.start), key, repeats=repeats)
