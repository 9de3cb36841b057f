"""The sequence of an epoch's samples: every shard once, runs of shards, or a sampler's list.

A run is a piece of a shard, or a shard in which every sample is repeated as often as it is drawn. Sequences of runs and
lists have the methods of `ShardSequence`, and need the counts of all shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.order.layout import ShardCounts, ShardSequence
from streamload.order.mixing import BlockShares
from streamload.order.options import OrderOptions
from streamload.order.randomness import CounterDraws, as_uniforms, permutation, philox_key
from streamload.order.sampling import Mixed, Sampled, Stretched, Weighted

IntArray = NDArray[np.int64]

# Samples whose draws are summed up together.
_BLOCK = 32

_PIECE = _BLOCK << 14

# Draws that are looked up together, so that their arrays stay in the processor's cache.
_ROWS_AT_ONCE = 4_096


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Consecutive pieces of shards, int64[k] each.

    Attributes:
        shards: the shard of each.
        firsts: the number within the shard at which it begins.
        lengths: the number of its positions; above 0.
        passes: the pass that it belongs to, counted from the epoch's first.
    """

    shards: IntArray
    firsts: IntArray
    lengths: IntArray
    passes: IntArray


def whole_passes(counts: IntArray, start: int, size: int, order_of: Callable[[int], IntArray]) -> Runs:
    """Return the runs of a stretch of an endless sequence of passes.

    Args:
        counts: int64[n_shards], the samples of each shard.
        start: the first position of the stretch.
        size: its length.
        order_of: returns the order of the shards in a pass.
    """
    total = int(counts.sum())
    if total == 0 or size == 0:
        nothing = np.empty(0, np.int64)
        return Runs(nothing, nothing, nothing, nothing)
    first_pass, last_pass = start // total, (start + size - 1) // total
    shards = np.concatenate([order_of(number) for number in range(first_pass, last_pass + 1)])
    passes = np.repeat(np.arange(last_pass - first_pass + 1), len(counts))
    ends = np.cumsum(counts[shards])
    starts = ends - counts[shards]
    low = start - first_pass * total
    firsts = np.maximum(low - starts, 0)
    lengths = np.minimum(ends, low + size) - starts - firsts
    some = lengths > 0
    return Runs(shards[some], firsts[some], lengths[some], passes[some])


class RepeatCounts:
    """The samples of the concatenated shards as listed, each repeated as often as it is drawn.

    Beside the given array it holds a quarter of a byte for each sample: there may be 10^9.

    Args:
        repeats: whole numbers or truth values, [N]: how often each sample is drawn, in the order of the listing.
        counts: int64[n_shards], the samples of each shard.

    Attributes:
        lengths: int64[n_shards], the number of draws of each shard.
    """

    def __init__(self, repeats: NDArray[Any], counts: IntArray) -> None:
        self._repeats = repeats.view(np.uint8) if repeats.dtype == np.bool_ else repeats
        # In pieces of whole blocks: NumPy converts all that it is given to sum up.
        pieces = (self._repeats[start : start + _PIECE] for start in range(0, len(repeats), _PIECE))
        sums = [np.add.reduceat(piece, np.arange(0, len(piece), _BLOCK), dtype=np.int64) for piece in pieces]
        self._block_edges = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sums]))
        ends = np.cumsum(counts)
        self._first_sample = ends - counts
        self._first_place = self._places_before(self._first_sample)
        self.lengths: IntArray = self._places_before(ends) - self._first_place

    def find(self, shards: IntArray, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """Return the samples (in the shard) of some draws of shards, and how often each came before."""
        places = self._first_place[shards] + numbers
        samples, before = np.empty_like(places), np.empty_like(places)
        for start in range(0, len(places), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            samples[part], before[part] = self._sample_at(places[part])
        return samples - self._first_sample[shards], places - before

    def _sample_at(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """Return the samples (of all shards) of some draws, and the number of draws before each sample."""
        block = self._block_edges[1:].searchsorted(places, side="right")
        within = places - self._block_edges[block]
        summed = np.cumsum(self._repeats_in(block), axis=1, dtype=np.int64)
        place = np.count_nonzero(summed <= within[:, np.newaxis], axis=1)
        before = np.where(place > 0, summed[np.arange(len(place)), place - 1], 0)
        return block * _BLOCK + place, places - within + before

    def _places_before(self, samples: IntArray) -> IntArray:
        """Return the number of draws before some samples."""
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
        """Return the draws of each sample of some blocks, [k, _BLOCK]; anything after the last sample."""
        if not len(self._repeats):
            return np.zeros((len(block), _BLOCK), np.uint8)
        samples = block[:, np.newaxis] * _BLOCK + np.arange(_BLOCK)
        repeats: NDArray[Any] = self._repeats[np.minimum(samples, len(self._repeats) - 1)]
        return repeats


class _CountedSequence:
    """A sequence that is built at once, when the counts of all shards are known.

    Its attributes are those of `ShardSequence`, of runs; `has_repeats` if shards come several times.
    """

    needs_all = True
    has_repeats = False

    def __init__(self, counts: ShardCounts) -> None:
        self._counts = counts
        self.order: IntArray = np.empty(0, np.int64)
        self.edges: IntArray = np.zeros(1, np.int64)
        self.known_shards = self.known_end = self.whole_end = 0
        self.complete = False
        self.extend()

    def extend(self) -> None:
        """Build the sequence, if all counts are known."""
        if not self.complete and self._counts.complete:
            self._build()
            self.known_shards, self.complete = len(self.order), True
            self.known_end = self.whole_end = int(self.edges[-1])

    def unknown(self, _n_shards: int, limit: int) -> list[int]:
        """Return the shards of unknown count, at most `limit`."""
        return [int(shard) for shard in np.flatnonzero(self._counts.values < 0)[:limit]]

    def _build(self) -> None:
        raise NotImplementedError


class RunSequence(_CountedSequence):
    """The runs of an epoch concatenated.

    Args:
        counts: of the shards.
        key: of the draws.
        build: makes the runs, and the repeats of each sample of a pass if samples do not come once.
    """

    def __init__(
        self,
        counts: ShardCounts,
        key: NDArray[np.uint64],
        build: Callable[[IntArray], tuple[Runs, RepeatCounts | None]],
    ) -> None:
        self._draws = CounterDraws(key)
        self._build_runs = build
        super().__init__(counts)

    def _build(self) -> None:
        self._runs, self._repeats = self._build_runs(self._counts.values)
        self.order = self._runs.shards
        self.edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._runs.lengths)))
        self._by_shard = np.argsort(self.order, kind="stable")
        self.has_repeats = not np.diff(self.order[self._by_shard]).all()

    def places_of(self, shard: int) -> list[tuple[int, int]] | None:
        """Return where a shard's runs lie; None before anything is built."""
        if not self.complete:
            return None
        first, end = np.searchsorted(self.order, (shard, shard + 1), sorter=self._by_shard)
        return [(int(self.edges[run]), int(self.edges[run + 1])) for run in self._by_shard[first:end].tolist()]

    def samples_at(self, start: int, end: int) -> tuple[int, int]:
        """Return the samples, as start and end, that stand at positions of one run."""
        _, samples = self.locate(np.array([start, end - 1]))
        return int(samples[0]), int(samples[1]) + 1

    def locate(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the shards and the samples in them, int64 each."""
        run, numbers = self._find(positions)
        shards = self.order[run]
        return shards, numbers if self._repeats is None else self._repeats.find(shards, numbers)[0]

    def repeats(self, positions: IntArray) -> IntArray:
        """Return for each position how often its sample may have come before, int64."""
        run, numbers = self._find(positions)
        passes = self._runs.passes[run]
        return passes if self._repeats is None else passes + self._repeats.find(self.order[run], numbers)[1]

    def uniforms(self, first: int, count: int) -> NDArray[np.float64]:
        """Draw from [0, 1) for each of the positions `first` to `first + count`, float64[count].

        A draw belongs to the pass, the shard and the number within the shard, counting every repeat.
        """
        words = np.empty(count, np.uint64)
        end, at = first + count, first
        run = int(np.searchsorted(self.edges, first, side="right")) - 1
        while at < end:
            run_end = min(int(self.edges[run + 1]), end)
            number = int(self._runs.firsts[run]) + at - int(self.edges[run])
            words[at - first : run_end - first] = self._draws.words(
                int(self.order[run]), number, run_end - at, int(self._runs.passes[run])
            )
            at, run = run_end, run + 1
        return as_uniforms(words)

    def _find(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return for each position its run, and the number within the shard, counting every repeat."""
        run = np.searchsorted(self.edges, positions, side="right") - 1
        return run, positions - self.edges[run] + self._runs.firsts[run]


class SampledSequence(_CountedSequence):
    """A sampler's samples, in its order. Shards come in the order of their last use.

    Args:
        counts: of the shards.
        numbers: int64[M], the samples, counted through all shards as they are listed.
    """

    def __init__(self, counts: ShardCounts, numbers: IntArray) -> None:
        self._numbers = numbers
        self._before: IntArray | None = None
        super().__init__(counts)

    def _build(self) -> None:
        self._shard_edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._counts.values)))
        shards, _ = self.locate(np.arange(len(self._numbers)))
        used, from_end = np.unique(shards[::-1], return_index=True)
        ends = len(shards) - from_end
        by_end = np.argsort(ends)
        self.order = used[by_end]
        self.edges = np.concatenate((np.zeros(1, np.int64), ends[by_end]))

    def places_of(self, _shard: int) -> list[tuple[int, int]]:
        """Return nothing: a shard's samples may come anywhere, so keeping them might mean keeping everything."""
        return []

    def samples_at(self, start: int, end: int) -> tuple[int, int]:
        """Fail: there are no runs."""
        raise AssertionError(f"positions {start} to {end} of a sampler's order are no run")

    def locate(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return for each position the shard and the number of the sample in it, int64 each."""
        numbers = self._numbers[positions]
        shards = np.searchsorted(self._shard_edges[1:], numbers, side="right")
        return shards, numbers - self._shard_edges[shards]

    def repeats(self, positions: IntArray) -> IntArray:
        """Return for each position how often its sample came before, int64."""
        if self._before is None:
            self._before = _counted_before(self._numbers)
        return self._before[positions]

    def uniforms(self, _first: int, count: int) -> NDArray[np.float64]:
        """Return zeros: nothing is shuffled."""
        return np.zeros(count)


SampleSequence = ShardSequence | RunSequence | SampledSequence
"""The positions of an epoch, each of which holds a sample of a shard."""


def _counted_before(numbers: IntArray) -> IntArray:
    """Return for each number how often it occurs before, int64."""
    by_number = np.argsort(numbers, kind="stable")
    ordered = numbers[by_number]
    starts = np.flatnonzero(np.concatenate((np.ones(min(1, len(ordered)), bool), ordered[1:] != ordered[:-1])))
    before = np.empty(len(numbers), np.int64)
    before[by_number] = np.arange(len(numbers)) - np.repeat(starts, np.diff(np.append(starts, len(numbers))))
    return before


def shards_in_order(options: OrderOptions, n_shards: int, number: int, purpose: str = "shards") -> IntArray:
    """Return the shards in the order of one pass over a dataset, int64[n_shards].

    Without sampling the pass is the epoch of this number.
    """
    if options.shuffle:
        return permutation(options.seed, number, n_shards, purpose)
    return np.arange(n_shards, dtype=np.int64)


def sequence_of_epoch(
    options: OrderOptions, counts: ShardCounts, epoch: int, numbers: IntArray | None = None
) -> SampleSequence:
    """Make the sequence of an epoch.

    Args:
        options: the order's.
        counts: of the shards; may become known later.
        epoch: which epoch.
        numbers: int64[M], the epoch's samples, if the sampling is `Sampled`.
    """
    key = philox_key(options.seed, epoch, "window")
    sampling = options.sampling
    match sampling:
        case Sampled():
            assert numbers is not None, "a sampler's numbers come with the start of the epoch"
            return SampledSequence(counts, numbers)
        case Stretched():
            return RunSequence(counts, key, lambda known: _stretch(options, sampling, known, epoch))
        case Weighted():
            return RunSequence(counts, key, lambda known: _drawn(options, sampling, known, epoch))
        case Mixed():
            raise AssertionError("a mixture has a sequence for each dataset")
        case None:
            return ShardSequence(shards_in_order(options, len(counts), epoch), counts, key)


def mixed_shares(mixed: Mixed, n_samples: int) -> BlockShares:
    """Return how many samples of each dataset an epoch of a mixture has, whose datasets have `n_samples` together."""
    return BlockShares(mixed.shares, mixed.block, mixed.epoch_size or n_samples)


def dataset_sequence(options: OrderOptions, mixed: Mixed, counts: ShardCounts, epoch: int, dataset: int) -> RunSequence:
    """Make the sequence of one dataset's samples in an epoch of a mixture; all counts must be known."""
    key = philox_key(options.seed, epoch, "window")
    size = int(mixed_shares(mixed, counts.total).sizes[dataset])
    return RunSequence(
        counts, key, partial(_stretch_of_dataset, options, mixed, dataset=dataset, epoch=epoch, size=size)
    )


def _stretch(
    options: OrderOptions, sampling: Stretched, counts: IntArray, epoch: int
) -> tuple[Runs, RepeatCounts | None]:
    repeats = None if sampling.selected is None else RepeatCounts(sampling.selected, counts)
    lengths, size = counts if repeats is None else repeats.lengths, sampling.epoch_size
    order_of = partial(shards_in_order, options, len(lengths))
    return whole_passes(lengths, epoch * size, size, order_of), repeats


def _stretch_of_dataset(
    options: OrderOptions, mixed: Mixed, counts: IntArray, *, dataset: int, epoch: int, size: int
) -> tuple[Runs, RepeatCounts | None]:
    """Return the runs of an epoch of one dataset of a mixture, which has `size` samples of it."""
    repeats = None if mixed.selected is None else RepeatCounts(mixed.selected, counts)
    first, end = mixed.edges[dataset], mixed.edges[dataset + 1]
    lengths = (counts if repeats is None else repeats.lengths)[first:end]
    order_of = partial(shards_in_order, options, len(lengths), purpose=f"shards of dataset {dataset}")
    runs = whole_passes(lengths, epoch * size, size, order_of)
    return replace(runs, shards=runs.shards + first), repeats


def _drawn(options: OrderOptions, sampling: Weighted, counts: IntArray, epoch: int) -> tuple[Runs, RepeatCounts]:
    repeats = RepeatCounts(sampling.repeats(options.seed, epoch), counts)
    order = shards_in_order(options, len(counts), epoch)
    order = order[repeats.lengths[order] > 0]
    nothing = np.zeros(len(order), np.int64)
    return Runs(order, nothing, repeats.lengths[order], nothing), repeats
