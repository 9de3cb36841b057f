"""The sequence of an epoch's samples: every shard once, runs of shards, or a sampler's list.

A run is a piece of a shard, or a shard in which every sample is repeated as often as it is drawn. Sequences of runs and
lists offer what `ShardSequence` does, and need the counts of all shards before they are built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

# Draws that are looked up together, so that what is made for them stays in the processor's cache.
_ROWS_AT_ONCE = 4_096


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Consecutive pieces of shards, int64[k] each.

    Attributes:
        shards: the shard of each.
        firsts: the number within the shard at which it begins.
        lengths: how many positions it has; above 0.
        passes: the pass it belongs to, counted from the epoch's first.
    """

    shards: IntArray
    firsts: IntArray
    lengths: IntArray
    passes: IntArray


def whole_passes(counts: IntArray, start: int, size: int, order_of: Callable[[int], IntArray]) -> Runs:
    """The runs of a stretch of an endless sequence of passes.

    Args:
        counts: int64[n_shards], the samples of each shard.
        start: where the stretch begins.
        size: its length.
        order_of: gives the order of the shards in a pass.
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
    """

    def __init__(self, repeats: NDArray[Any], counts: IntArray) -> None:
        self._repeats = repeats.view(np.uint8) if repeats.dtype == np.bool_ else repeats
        self._block_ends = np.empty(0, np.int64)
        if len(repeats):
            self._block_ends = np.cumsum(np.concatenate([_block_sums(piece) for piece in _pieces(self._repeats)]))
        ends = np.cumsum(counts)
        self._first_sample = ends - counts
        self._first_place = self._places_before(self._first_sample)
        self.lengths: IntArray = self._places_before(ends) - self._first_place
        """int64[n_shards], how many draws each shard has."""

    def find(self, shards: IntArray, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """The samples (in the shard) of some draws of shards, and how often each came before."""
        places = self._first_place[shards] + numbers
        samples, before = np.empty_like(places), np.empty_like(places)
        for start in range(0, len(places), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            samples[part], before[part] = self._sample_at(places[part])
        return samples - self._first_sample[shards], places - before

    def _sample_at(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """The samples, of all, that some draws are of, and how many draws there are of those before each."""
        block = self._block_ends.searchsorted(places, side="right")
        within = places - self._draws_before(block)
        summed = np.cumsum(self._repeats_in(block), axis=1, dtype=np.int64)
        place = np.count_nonzero(summed <= within[:, np.newaxis], axis=1)
        before = np.where(place > 0, summed[np.arange(len(place)), place - 1], 0)
        return block * _BLOCK + place, places - within + before

    def _places_before(self, samples: IntArray) -> IntArray:
        """How many draws there are of the samples before some."""
        found = np.empty_like(samples)
        for start in range(0, len(samples), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            block, place = np.divmod(samples[part], _BLOCK)
            inside = np.arange(_BLOCK) < place[:, np.newaxis]
            found[part] = self._draws_before(block) + np.sum(
                self._repeats_in(block), axis=1, where=inside, dtype=np.int64
            )
        return found

    def _draws_before(self, block: IntArray) -> IntArray:
        return np.where(block > 0, self._block_ends[block - 1], 0) if len(self._block_ends) else block

    def _repeats_in(self, block: IntArray) -> NDArray[Any]:
        """[k, _BLOCK], the draws of each sample of some blocks; behind the last sample anything."""
        if not len(self._repeats):
            return np.zeros((len(block), _BLOCK), np.uint8)
        samples = block[:, np.newaxis] * _BLOCK + np.arange(_BLOCK)
        found: NDArray[Any] = self._repeats[np.minimum(samples, len(self._repeats) - 1)]
        return found


def _pieces(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array in pieces of whole blocks: NumPy converts all that it is given to sum up."""
    return (values[start : start + _PIECE] for start in range(0, len(values), _PIECE))


def _block_sums(values: NDArray[Any]) -> IntArray:
    return np.add.reduceat(values, np.arange(0, len(values), _BLOCK), dtype=np.int64)


class RunSequence:
    """The runs of an epoch concatenated.

    Args:
        counts: of the shards.
        key: of the draws.
        build: makes the runs, when all counts are known, and how often each sample of a pass comes, where that is not
            once.
    """

    needs_all = True

    def __init__(
        self,
        counts: ShardCounts,
        key: NDArray[np.uint64],
        build: Callable[[IntArray], tuple[Runs, RepeatCounts | None]],
    ) -> None:
        self._counts = counts
        self._draws = CounterDraws(key)
        self._build = build
        self._runs: Runs | None = None
        self._repeats: RepeatCounts | None = None
        self._edges: IntArray = np.zeros(1, np.int64)
        self._by_shard: IntArray = np.empty(0, np.int64)
        self.order: IntArray = np.empty(0, np.int64)
        self.known_shards = 0
        self.known_end = 0
        self.has_repeats = False
        self.extend()

    @property
    def complete(self) -> bool:
        """Whether the runs are built."""
        return self._runs is not None

    @property
    def edges(self) -> IntArray:
        """int64[known_shards + 1], run i is `edges[i]:edges[i + 1]`."""
        return self._edges

    @property
    def whole_end(self) -> int:
        """All that is built is built whole."""
        return self.known_end

    def extend(self) -> None:
        """Build all runs, if all counts are known."""
        if self._runs is not None or not self._counts.complete:
            return
        self._runs, self._repeats = self._build(self._counts.values)
        self.order = self._runs.shards
        self._edges = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._runs.lengths)))
        self._by_shard = np.argsort(self.order, kind="stable")
        self.has_repeats = not np.diff(self.order[self._by_shard]).all()
        self.known_shards, self.known_end = len(self.order), int(self._edges[-1])

    def unknown(self, _n_shards: int, limit: int) -> list[int]:
        """The shards of unknown count, at most `limit`."""
        return [int(shard) for shard in np.flatnonzero(self._counts.values < 0)[:limit]]

    def places_of(self, shard: int) -> list[tuple[int, int]] | None:
        """Where a shard's runs lie; None before anything is built."""
        if self._runs is None:
            return None
        first, end = np.searchsorted(self.order, (shard, shard + 1), sorter=self._by_shard)
        return [(int(self._edges[run]), int(self._edges[run + 1])) for run in self._by_shard[first:end].tolist()]

    def samples_at(self, start: int, end: int) -> tuple[int, int]:
        """The samples from the one at `start` to the one before `end`, both of one run."""
        _, samples = self.locate(np.array([start, end - 1]))
        return int(samples[0]), int(samples[1]) + 1

    def locate(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """For each position the shard, and the number of the sample in the shard, int64 each."""
        run, numbers = self._find(positions)
        shards = self.order[run]
        return shards, numbers if self._repeats is None else self._repeats.find(shards, numbers)[0]

    def repeats(self, positions: IntArray) -> IntArray:
        """For each position how often its sample may have arrived before, int64."""
        run, numbers = self._find(positions)
        assert self._runs is not None
        passes = self._runs.passes[run]
        return passes if self._repeats is None else passes + self._repeats.find(self.order[run], numbers)[1]

    def uniforms(self, first: int, count: int) -> NDArray[np.float64]:
        """One draw in [0, 1) for each of the positions `first` to `first + count`, float64[count].

        A draw belongs to the pass, the shard and the number within the shard, counting every repeat.
        """
        assert self._runs is not None
        words = np.empty(count, np.uint64)
        end, at = first + count, first
        run = int(np.searchsorted(self._edges, first, side="right")) - 1
        while at < end:
            run_end = min(int(self._edges[run + 1]), end)
            number = int(self._runs.firsts[run]) + at - int(self._edges[run])
            words[at - first : run_end - first] = self._draws.words(
                int(self.order[run]), number, run_end - at, int(self._runs.passes[run])
            )
            at, run = run_end, run + 1
        return as_uniforms(words)

    def _find(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """For each position its run, and the number within the shard, counting every repeat."""
        assert self._runs is not None
        run = np.searchsorted(self._edges, positions, side="right") - 1
        return run, positions - self._edges[run] + self._runs.firsts[run]


class SampledSequence:
    """A sampler's samples, in its order. Shards come in the order of their
    last use.

    Args:
        counts: of the shards.
        numbers: int64[M], the samples, counted through all shards as they are listed.
    """

    needs_all = True
    has_repeats = False

    def __init__(self, counts: ShardCounts, numbers: IntArray) -> None:
        self._counts = counts
        self._numbers = numbers
        self._shard_ends: IntArray | None = None
        self._before: IntArray | None = None
        self.order: IntArray = np.empty(0, np.int64)
        self.edges: IntArray = np.zeros(1, np.int64)
        self.known_shards = 0
        self.known_end = 0
        self.extend()

    @property
    def complete(self) -> bool:
        """Whether all counts are known."""
        return self._shard_ends is not None

    @property
    def whole_end(self) -> int:
        """All that is built is built whole."""
        return self.known_end

    def extend(self) -> None:
        """Find the last use of each shard, if all counts are known."""
        if self._shard_ends is not None or not self._counts.complete:
            return
        self._shard_ends = np.cumsum(self._counts.values)
        shards, _ = self.locate(np.arange(len(self._numbers)))
        used, from_behind = np.unique(shards[::-1], return_index=True)
        ends = len(shards) - from_behind
        by_end = np.argsort(ends)
        self.order = used[by_end]
        self.edges = np.concatenate((np.zeros(1, np.int64), ends[by_end]))
        self.known_shards, self.known_end = len(used), len(shards)

    def unknown(self, _n_shards: int, limit: int) -> list[int]:
        """The shards of unknown count, at most `limit`."""
        return [int(shard) for shard in np.flatnonzero(self._counts.values < 0)[:limit]]

    def places_of(self, _shard: int) -> list[tuple[int, int]]:
        """None: a shard's samples may come anywhere, so keeping it might mean keeping everything."""
        return []

    def samples_at(self, start: int, end: int) -> tuple[int, int]:
        """There are no runs."""
        raise AssertionError(f"positions {start} to {end} of a sampler's order are no run")

    def locate(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """For each position the shard, and the number of the sample in the shard, int64 each."""
        assert self._shard_ends is not None
        numbers = self._numbers[positions]
        shards = np.searchsorted(self._shard_ends, numbers, side="right")
        return shards, numbers - np.concatenate((np.zeros(1, np.int64), self._shard_ends))[shards]

    def repeats(self, positions: IntArray) -> IntArray:
        """For each position how often its sample came before, int64."""
        if self._before is None:
            self._before = _counted_before(self._numbers)
        return self._before[positions]

    def uniforms(self, _first: int, count: int) -> NDArray[np.float64]:
        """Nothing is shuffled."""
        return np.zeros(count)


SampleSequence = ShardSequence | RunSequence | SampledSequence
"""The positions of an epoch, each of which holds a sample of a shard."""


def _counted_before(numbers: IntArray) -> IntArray:
    """For each number how often it occurs before, int64."""
    by_number = np.argsort(numbers, kind="stable")
    ordered = numbers[by_number]
    starts = np.flatnonzero(np.concatenate((np.ones(min(1, len(ordered)), bool), ordered[1:] != ordered[:-1])))
    before = np.empty(len(numbers), np.int64)
    before[by_number] = np.arange(len(numbers)) - np.repeat(starts, np.diff(np.append(starts, len(numbers))))
    return before


def shards_in_order(options: OrderOptions, n_shards: int, number: int) -> IntArray:
    """The shards in the order of one pass over the dataset, int64[n_shards].

    Without sampling the pass is the epoch of this number.
    """
    return permutation(options.seed, number, n_shards) if options.shuffle else np.arange(n_shards, dtype=np.int64)


def sequence_of_epoch(
    options: OrderOptions, counts: ShardCounts, epoch: int, numbers: IntArray | None = None
) -> SampleSequence:
    """The sequence of an epoch.

    Args:
        options: the order's.
        counts: of the shards; may become known later.
        epoch: which epoch.
        numbers: int64[M], the epoch's samples, where the sampling is `Sampled`.
    """
    key = philox_key(options.seed, epoch, "window")
    sampling = options.sampling
    match sampling:
        case Sampled():
            assert numbers is not None, "a sampler's numbers come with the start of the epoch"
            return SampledSequence(counts, numbers)
        case Stretched() | Weighted():
            return RunSequence(counts, key, lambda known: _build(options, sampling, known, epoch))
        case Mixed():
            raise AssertionError("a mixture has a line for each dataset")
        case None:
            return ShardSequence(shards_in_order(options, len(counts), epoch), counts, key)


def mixed_shares(mixed: Mixed, n_samples: int) -> BlockShares:
    """How many samples of each dataset an epoch of a mixture has, all of which together have `n_samples`."""
    return BlockShares(mixed.shares, mixed.block, mixed.epoch_size or n_samples)


def dataset_sequence(options: OrderOptions, mixed: Mixed, counts: ShardCounts, epoch: int, dataset: int) -> RunSequence:
    """The sequence of one dataset's samples in an epoch of a mixture; all counts must be known."""
    key = philox_key(options.seed, epoch, "window")
    size = int(mixed_shares(mixed, counts.total).sizes[dataset])
    return RunSequence(counts, key, lambda known: _build_dataset(options, mixed, known, dataset, (epoch * size, size)))


def runs_of_epoch(options: OrderOptions, counts: IntArray, epoch: int) -> list[tuple[IntArray, IntArray]]:
    """About how the runs of an epoch's sequences follow each other: for each sequence shards and lengths, int64[k]
    each.

    A mixture has a sequence for each dataset. What is drawn by weight is taken for its mean; of a sampler's epoch
    nothing is known.
    """
    sampling = options.sampling
    match sampling:
        case Sampled():
            return []
        case Stretched():
            runs, _ = _build(options, sampling, counts, epoch)
            return [(runs.shards, runs.lengths)]
        case Mixed():
            sizes = mixed_shares(sampling, int(counts.sum())).sizes.tolist()
            lines = [
                _build_dataset(options, sampling, counts, dataset, (epoch * size, size))[0]
                for dataset, size in enumerate(sizes)
            ]
            return [(runs.shards, runs.lengths) for runs in lines]
        case Weighted():
            order = shards_in_order(options, len(counts), epoch)
            return [(order, sampling.drawn_of_shards(counts)[order])]
        case None:
            order = shards_in_order(options, len(counts), epoch)
            return [(order, counts[order])]


def _build_dataset(
    options: OrderOptions, mixed: Mixed, counts: IntArray, dataset: int, stretch: tuple[int, int]
) -> tuple[Runs, RepeatCounts | None]:
    """The runs of a stretch, given by its start and size, of one dataset's passes."""
    first, end = mixed.edges[dataset], mixed.edges[dataset + 1]
    selected = _selected(mixed.selected, counts)
    lengths = counts if selected is None else selected.lengths

    def order_of(number: int) -> IntArray:
        if not options.shuffle:
            return np.arange(end - first, dtype=np.int64)
        return permutation(options.seed, number, end - first, f"shards of dataset {dataset}")

    runs = whole_passes(lengths[first:end], *stretch, order_of)
    return replace(runs, shards=runs.shards + first), selected


def _build(
    options: OrderOptions, sampling: Stretched | Weighted, counts: IntArray, epoch: int
) -> tuple[Runs, RepeatCounts | None]:
    if isinstance(sampling, Stretched):
        size, selected = sampling.epoch_size, _selected(sampling.selected, counts)
        lengths = counts if selected is None else selected.lengths
        passes = whole_passes(lengths, epoch * size, size, lambda number: shards_in_order(options, len(counts), number))
        return passes, selected
    repeats = RepeatCounts(sampling.repeats(options.seed, epoch), counts)
    order = shards_in_order(options, len(counts), epoch)
    order = order[repeats.lengths[order] > 0]
    nothing = np.zeros(len(order), np.int64)
    return Runs(order, nothing, repeats.lengths[order], nothing), repeats


def _selected(selected: NDArray[np.bool_] | None, counts: IntArray) -> RepeatCounts | None:
    """The selected samples, once each; None for all."""
    return None if selected is None else RepeatCounts(selected, counts)
