"""What an epoch's samples lie on: every shard once, or what the order's choice makes of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.order.choice import Sampled, Stretched, Weighted
from streamload.order.layout import ShardCounts, ShardLine
from streamload.order.options import OrderOptions
from streamload.order.randomness import permutation, philox_key
from streamload.order.runs import Copies, Line, RunLine, Runs, SampledLine, whole_passes

__all__ = ["line_of_epoch", "runs_of_epoch", "shards_in_order"]

IntArray = NDArray[np.int64]


def shards_in_order(options: OrderOptions, n_shards: int, number: int) -> IntArray:
    """The shards in the order in which one pass over the dataset lays them end to end, int64[n_shards].

    Without a choice the pass is the epoch of this number.
    """
    return permutation(options.seed, number, n_shards) if options.shuffle else np.arange(n_shards, dtype=np.int64)


def line_of_epoch(options: OrderOptions, counts: ShardCounts, epoch: int, numbers: IntArray | None = None) -> Line:
    """What an epoch's positions stand for.

    Args:
        options: the order's.
        counts: of the shards; may become known later.
        epoch: which epoch.
        numbers: int64[M], the epoch's samples, where the choice is `Sampled`.
    """
    key = philox_key(options.seed, epoch, "window")
    choice = options.choice
    match choice:
        case Sampled():
            assert numbers is not None, "a sampler's numbers come with the start of the epoch"
            return SampledLine(counts, numbers)
        case Stretched() | Weighted():
            return RunLine(counts, key, lambda known: _lay(options, choice, known, epoch))
        case None:
            return ShardLine(shards_in_order(options, len(counts), epoch), counts, key)


def runs_of_epoch(options: OrderOptions, counts: IntArray, epoch: int) -> tuple[IntArray, IntArray]:
    """About how the runs of an epoch follow each other: their shards and lengths, int64[k] each.

    What is drawn by weight is taken for its mean; of a sampler's epoch nothing is known.
    """
    match options.choice:
        case Sampled():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        case Stretched():
            runs, _ = _lay(options, options.choice, counts, epoch)
            return runs.shards, runs.lengths
        case Weighted():
            order = shards_in_order(options, len(counts), epoch)
            return order, options.choice.drawn_of_shards(counts)[order]
        case None:
            order = shards_in_order(options, len(counts), epoch)
            return order, counts[order]


def _lay(
    options: OrderOptions, choice: Stretched | Weighted, counts: IntArray, epoch: int
) -> tuple[Runs, Copies | None]:
    if isinstance(choice, Stretched):
        size = choice.epoch_size
        passes = whole_passes(counts, epoch * size, size, lambda number: shards_in_order(options, len(counts), number))
        return passes, None
    copies = Copies(choice.copies(options.seed, epoch), counts)
    order = shards_in_order(options, len(counts), epoch)
    order = order[copies.lengths[order] > 0]
    nothing = np.zeros(len(order), np.int64)
    return Runs(order, nothing, copies.lengths[order], nothing), copies
