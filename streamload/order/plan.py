"""The plan of an epoch: one rank's rows, batch by batch, from any position of the epoch's order on.

The order is a pure function of the options, the epoch and the counts of the shards. It does not depend on the rank,
the world size or the batch size, so a position saved under one world size can be resumed under another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.order.interleaving import Interleaving
from streamload.order.lanes import expected_radius
from streamload.order.layout import UNKNOWN, ShardCounts, distinct
from streamload.order.options import OrderOptions, full_batches_and_last_rows
from streamload.order.runs import sequence_of_epoch
from streamload.order.share import WHOLE, Share, slice_of_any_batch, slice_of_rank, slices_of_full_batches
from streamload.text import counted

IntArray = NDArray[np.int64]
Rows = tuple[IntArray, IntArray, IntArray | None]
"""Shard, sample and repeat of some rows; see `RowBlock`."""

# Most outputs of a streamed lane that are finalized beyond the next batch.
_MOST_NUMBERS_AHEAD = 65_536

# Batches whose lanes foresee shards; usually all batches of a rank have the same lanes.
_BATCHES_WITH_KNOWN_LANES = 16


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """The rows of consecutive batches of one rank.

    Attributes:
        batch_edges: int64[m + 1], the rows of batch i are `batch_edges[i]:batch_edges[i + 1]`.
        shard: int64[rows], the shard's number in the listing.
        sample: int64[rows], the sample's number in the shard.
        ends: int64[m], the position of the epoch's order (over all ranks) after each batch, which a state records.
        repeat: int64[rows], how often the sample came before in the epoch, so that repeats have randomness of their
            own; None if every sample comes once.
    """

    batch_edges: IntArray
    shard: IntArray
    sample: IntArray
    ends: IntArray
    repeat: IntArray | None = None

    def halves(self) -> tuple[RowBlock, RowBlock]:
        """Cut at least two batches into the first half and the others."""
        middle = len(self.ends) // 2
        row = int(self.batch_edges[middle])
        edges = self.batch_edges[: middle + 1], self.batch_edges[middle:] - row
        repeats = (None, None) if self.repeat is None else (self.repeat[:row], self.repeat[row:])
        return (
            RowBlock(edges[0], self.shard[:row], self.sample[:row], self.ends[:middle], repeats[0]),
            RowBlock(edges[1], self.shard[row:], self.sample[row:], self.ends[middle:], repeats[1]),
        )


class EpochPlan:
    """One rank's rows of one epoch, from a position of the epoch's order on: the base of the plans.

    Args:
        options: see `OrderOptions`.
        counts: the samples of each shard; read, never changed.
        epoch, rank, world_size: of the rows.
        start: samples of the epoch's order that were delivered before.
        numbers: int64[M], the epoch's samples, if the options' sampling is `Sampled`.
        share: the batches of the rank that the plan yields.

    Attributes:
        lanes: the number of lanes.

    Raises:
        ValueError: there is no such rank, or the start is negative.
    """

    def __init__(
        self,
        options: OrderOptions,
        counts: ShardCounts,
        epoch: int,
        rank: int,
        world_size: int,
        *,
        start: int = 0,
        numbers: IntArray | None = None,
        share: Share = WHOLE,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not one of {counted(world_size, 'rank')}, which are counted from 0")
        if start < 0:
            raise ValueError(f"start={start} is negative; it counts the samples delivered before")
        self.lanes = options.lanes
        self._options = options
        self._counts = counts
        self._epoch = epoch
        self._place = rank, world_size
        self._share = share
        self._global_batch = options.batch_size * world_size
        self._slice = range(rank * options.batch_size, (rank + 1) * options.batch_size)
        self._position = start
        self._batches_before = share.number
        self._n_samples = UNKNOWN
        self._full_batches_left = 0
        self._last_rows = 0
        self._set_up(numbers)

    @property
    def number(self) -> int:
        """The number of outputs that every lane has reached, at least."""
        return self._next_start // self.lanes

    def shards_ahead(self) -> list[int]:
        """Return the shards in the order in which the plan comes to them first, as far as that is known."""
        raise NotImplementedError

    def missing(self, limit: int = 8) -> list[int]:
        """Return the shards whose counts are needed before the next `take`, at most `limit`."""
        raise NotImplementedError

    def finished(self) -> list[int]:
        """Name the shards that no later block needs, each once; at the end all of the epoch's."""
        raise NotImplementedError

    def unpassed(self, shard: int, /) -> list[tuple[int, int]]:
        """Return ranges of a shard's samples that hold those of later blocks."""
        raise NotImplementedError

    def take(self, max_rows: int, /) -> RowBlock | None:
        """Return the next batches: as many whole ones as fit into `max_rows` and as the counts allow, at least one.

        None at the end of the epoch. A call costs some tens of microseconds, and some for each lane, so request
        thousands of rows at a time.

        Raises:
            RuntimeError: counts are missing; see `missing`.
        """
        if self.missing(1):
            raise RuntimeError("counts are missing for the next batch: set those that missing() names before take()")
        wanted = max(1, max_rows // len(self._slice))
        n_full = self._batches_ready(wanted)
        with_last = self._last_rows > 0 and n_full < wanted
        if n_full == 0 and not with_last:
            return None
        stride = self._global_batch * self._share.of
        starts = self._next_start + np.arange(n_full + with_last, dtype=np.int64) * stride
        ends = starts + self._global_batch
        if with_last:
            ends[-1] = self._n_samples
        shard, sample, repeat = self._rows_between(starts, ends, n_full)
        edges = np.minimum(np.arange(len(ends) + 1, dtype=np.int64) * len(self._slice), len(shard))
        self._position = int(ends[-1])
        self._batches_before = self._share.of - 1
        self._full_batches_left -= n_full
        self._last_rows = 0 if with_last else self._last_rows
        return RowBlock(edges, shard, sample, ends, repeat)

    def _set_up(self, numbers: IntArray | None) -> None:
        raise NotImplementedError

    def _rows_between(
        self, starts: IntArray, ends: IntArray, n_full: int
    ) -> tuple[IntArray, IntArray, IntArray | None]:
        """Return the rank's rows of some global batches, of which `n_full` are whole."""
        raise NotImplementedError

    def _batches_ready(self, wanted: int) -> int:
        """Return how many of the next whole batches can be made now, at most `wanted`."""
        return min(wanted, self._full_batches_left)

    def _set_samples(self, n_samples: int) -> None:
        """Learn how many samples the epoch has; LoaderStateError if it starts outside of them."""
        self._n_samples = n_samples
        full, last_rows = full_batches_and_last_rows(self._options, n_samples, *self._place, self._position)
        self._full_batches_left, self._last_rows = self._share.batches(full, last_rows, self._batches_before)

    @property
    def _ended(self) -> bool:
        return self._n_samples != UNKNOWN and self._full_batches_left == 0 and self._last_rows == 0

    @property
    def _next_start(self) -> int:
        """The position at which the next batch of the share would start."""
        return self._position + self._batches_before * self._global_batch


class RankPlan(EpochPlan):
    """One rank's rows of one epoch of a dataset; takes the arguments of `EpochPlan`.

    Global batch j is `order[start + j * B : start + (j + 1) * B]`, B = batch_size * world_size. Sorted lane-major, it
    is cut into one slice for each rank. Rows that fill up a short last batch follow its own rows.

    With several lanes, or a `sampling`, all counts must be known before the first batch. With one lane a batch needs
    the counts of the shards up to where the window reaches, or as many of their samples: call `missing`, set those
    counts, `take`. The rows do not depend on when counts became known, nor on `max_rows`.

    Memory is O(window) for each lane that this rank reads, O(shards), and O(rows) of one `take`.
    """

    def _set_up(self, numbers: IntArray | None) -> None:
        self._sequence = sequence_of_epoch(self._options, self._counts, self._epoch, numbers)
        self.interleaving = Interleaving(self._sequence, self.lanes, self._options.radius)
        self._refresh()

    def shards_ahead(self) -> list[int]:
        """Return the shards in the order in which the plan comes to them first.

        Once all counts are known, only those in the lanes of this rank's next batches: of 10^5 shards on 1,024 ranks
        about 98.
        """
        if not self._sequence.complete:
            return list(dict.fromkeys(self._sequence.order.tolist()))
        n_known = min(_BATCHES_WITH_KNOWN_LANES, self._full_batches_left)
        starts = self._next_start + np.arange(n_known, dtype=np.int64) * (self._share.of * self._global_batch)
        lanes, _ = slices_of_full_batches(starts, self.lanes, self._slice, self._global_batch)
        return self.interleaving.shards_from(self.number, distinct(lanes))

    def missing(self, limit: int = 8) -> list[int]:
        """Return the shards whose counts are needed before the next `take`, in the epoch's order, at most `limit`.

        With one lane, the first is needed for certain. How many follow it is estimated from the mean of the known
        counts, and may be one or two too many.
        """
        self._refresh()
        sequence = self._sequence
        if sequence.complete:
            return []
        if self.lanes > 1 or sequence.needs_all:
            return sequence.unknown(len(sequence.order), limit)
        if self._batches_ready(1):
            return []
        first_end = self._next_start + self._slice.stop
        radius = max(expected_radius(first_end, self._options.radius), self._next_start + self._global_batch)
        mean = sequence.whole_end / max(sequence.known_shards, 1)
        shard_end = max(sequence.known_end, sequence.whole_end + mean)
        n_following = -int((shard_end - radius) // mean) if mean and radius > shard_end else 0
        return sequence.unknown(1 + n_following, limit)

    def finished(self) -> list[int]:
        """Name the shards that no later block needs, each once and at most a window late; at the end all shards."""
        # Whatever is needed later, of any lane, has at least this number.
        return self.interleaving.finish_all() if self._ended else self.interleaving.finished(self.number)

    def unpassed(self, shard: int, /) -> list[tuple[int, int]]:
        """Return ranges of a shard's samples that hold all those of later blocks, each end exclusive.

        Runs of the shard that are yet to begin are left out: their parts may be fetched again. In a lane that this rank
        reads, a range begins at the next sample; in any other, at most a window earlier.
        """
        return [] if self._ended else self.interleaving.unpassed(shard, self.number, self.number)

    def _refresh(self) -> None:
        """Apply counts that have become known."""
        if self.interleaving.refresh():
            self._set_samples(self._sequence.known_end)

    def _batches_ready(self, wanted: int) -> int:
        """Return how many of the next whole batches the known counts finalize, at most `wanted`."""
        if self._sequence.complete:
            return super()._batches_ready(wanted)
        known_end, stride = self._sequence.known_end, self._global_batch * self._share.of
        n_full = min(wanted, (known_end - self._next_start - self._global_batch) // stride + 1)
        if n_full <= 0:
            return 0
        first_row, first_end = self._next_start + self._slice.start, self._next_start + self._slice.stop
        finalized_end = known_end
        if self._options.radius:
            # A number that lies a window before the end of what is known is final, whatever the draws are.
            finalized_end = known_end - self._options.radius
            if finalized_end < first_end + (n_full - 1) * stride:
                most = max(_MOST_NUMBERS_AHEAD, self._global_batch)
                wanted_end = min(first_end + (n_full - 1) * stride, first_end + most)
                finalized_end = max(finalized_end, self.interleaving.finalize(first_row, wanted_end))
        return max(0, min(n_full, (finalized_end - first_end) // stride + 1))

    def _rows_between(
        self, starts: IntArray, ends: IntArray, n_full: int
    ) -> tuple[IntArray, IntArray, IntArray | None]:
        sequence = self._sequence
        rounds_end = sequence.known_end // self.lanes * self.lanes
        n_simple = int(np.searchsorted(starts[:n_full], rounds_end - self._global_batch, side="right"))
        pieces = [slices_of_full_batches(starts[:n_simple], self.lanes, self._slice, self._global_batch)]
        wrapped_lanes = wrapped_numbers = np.empty(0, np.int64)
        for start, end in zip(starts[n_simple:].tolist(), ends[n_simple:].tolist(), strict=True):
            rows = slice_of_rank(end - start, *self._place, pad=self._options.pad)
            lanes, numbers, wrapped_lanes, wrapped_numbers = slice_of_any_batch(
                range(start, end), sequence.known_end, self.lanes, rows
            )
            pieces.append((lanes, numbers))
        lanes, numbers = (np.concatenate(column) for column in zip(*pieces, strict=True))
        positions = self.interleaving.positions(lanes, numbers)
        if len(wrapped_numbers):
            positions = np.concatenate((positions, self.interleaving.positions_apart(wrapped_lanes, wrapped_numbers)))
        return *sequence.locate(positions), sequence.repeats(positions)
