"""The sequence of an epoch's samples: every shard once, or what the order's sampling makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from streamload.order.layout import ShardCounts, ShardSequence
from streamload.order.mixing import BlockShares
from streamload.order.options import OrderOptions
from streamload.order.randomness import permutation, philox_key
from streamload.order.runs import RepeatCounts, Runs, RunSequence, SampledSequence, SampleSequence, whole_passes
from streamload.order.sampling import Mixed, Sampled, Stretched, Weighted

IntArray = NDArray[np.int64]


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
