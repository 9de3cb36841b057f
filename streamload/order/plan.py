"""The plan of an epoch: one rank's rows, batch by batch, from any position of the epoch's order on.

The order is a pure function of the options, the epoch and the counts of the shards. It does not depend on the rank,
the world size or the batch size, so a position saved under one world size can be resumed under another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streamload.order.interleaving import Interleaving
from streamload.order.lanes import expected_radius
from streamload.order.layout import ShardCounts, distinct
from streamload.order.options import (
    OrderOptions,
    full_batches_and_last_rows,
)
from streamload.order.runs import sequence_of_epoch
from streamload.order.share import WHOLE, Share, slice_of_any_batch, slice_of_rank, slices_of_full_batches
from streamload.text import counted

# How many outputs of a streamed lane are final before they are requested, beyond the next batch.
_MOST_NUMBERS_AHEAD = 65_536

# Of so many batches the lanes are looked at to foresee shards; most often all batches of a rank are of the same.
_BATCHES_WITH_KNOWN_LANES = 16


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """The rows of consecutive batches of one rank.

    Attributes:
        batch_edges: int64[m + 1], the rows of batch i are `batch_edges[i]:batch_edges[i + 1]`.
        shard: int64[rows], the shard's number in the listing.
        sample: int64[rows], the sample's number in the shard.
        ends: int64[m], the position of the epoch's order (over all ranks) after each batch, which a state records.
        repeat: int64[rows], how often the sample came before in the epoch, so that two repeats of a sample have
            randomness of their own; None where every sample comes once.
    """

    batch_edges: NDArray[np.int64]
    shard: NDArray[np.int64]
    sample: NDArray[np.int64]
    ends: NDArray[np.int64]
    repeat: NDArray[np.int64] | None = None

    def halves(self) -> tuple[RowBlock, RowBlock]:
        """The first half of the batches, and the others; of at least two batches."""
        middle = len(self.ends) // 2
        row = int(self.batch_edges[middle])
        repeats = (None, None) if self.repeat is None else (self.repeat[:row], self.repeat[row:])
        first = RowBlock(
            self.batch_edges[: middle + 1], self.shard[:row], self.sample[:row], self.ends[:middle], repeats[0]
        )
        edges = self.batch_edges[middle:] - row
        return first, RowBlock(edges, self.shard[row:], self.sample[row:], self.ends[middle:], repeats[1])


class EpochPlan(Protocol):
    """What the plans of all kinds of epochs offer; `RankPlan` says what each method promises."""

    @property
    def lanes(self) -> int:
        """The number of lanes."""

    @property
    def number(self) -> int:
        """How many outputs every lane has reached, at least."""

    def shards_ahead(self) -> list[int]:
        """The shards in the order in which the plan comes to them first; perhaps not all of them."""

    def missing(self, limit: int = 8) -> list[int]:
        """The shards whose counts are needed before the next `take`."""

    def take(self, max_rows: int, /) -> RowBlock | None:
        """The next batches."""

    def finished(self) -> list[int]:
        """The shards that occur in no later block."""

    def unpassed(self, shard: int, /) -> list[tuple[int, int]]:
        """Ranges of a shard's samples that hold those of later blocks."""


class RankPlan:
    """One rank's rows of one epoch from a position of the epoch's order on.

    Global batch j of the plan is `order[start + j * B : start + (j + 1) * B]`, B = batch_size * world_size. Sorted
    lane-major, it is cut into one slice for each rank. Rows that fill up a short last batch follow its own rows.

    With several lanes, or where the options have a `sampling`, all counts must be known before the first batch. With
    one lane a batch needs the counts of the shards up to where the window reaches, and `counts` may be filled in while
    the plan runs: call `missing`, set those counts, `take`. Of the first shard whose count is unknown the plan goes on
    into the samples that `counts` says it holds at least. What comes out does not depend on when the counts became
    known, nor on `max_rows`.

    Memory is O(window) for each lane that this rank reads, O(shards), and O(rows) of one `take`.

    Args:
        options: see `OrderOptions`.
        counts: the samples of each shard; the plan reads it and never changes it.
        epoch: which epoch.
        rank: the rank, below `world_size`.
        world_size: the number of ranks.
        start: how many samples of the epoch's order were delivered before.
        numbers: int64[M], the epoch's samples, where the options' sampling is `Sampled`.
        share: which of the rank's batches the plan has.

    Raises:
        ValueError: rank, world size or start make no sense, here or as soon as the number of samples is known.
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
        numbers: NDArray[np.int64] | None = None,
        share: Share = WHOLE,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not one of {counted(world_size, 'rank')}, which are counted from 0")
        if start < 0:
            raise ValueError(f"start={start} is negative; it counts the samples delivered before")
        self._options = options
        self._rank = rank
        self._world_size = world_size
        self._global_batch = options.batch_size * world_size
        self._share = share
        self._slice = range(rank * options.batch_size, (rank + 1) * options.batch_size)
        self._position = start
        self._batches_before = share.number
        self._sequence = sequence_of_epoch(options, counts, epoch, numbers)
        self._interleaving = Interleaving(self._sequence, options.lanes, options.radius)
        self._full_batches_left = 0
        self._last_rows = 0
        self._refresh()

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self._options.lanes

    @property
    def number(self) -> int:
        """How many outputs every lane has reached, at least."""
        return self._next_start // self._options.lanes

    @property
    def lanes_read(self) -> list[int]:
        """The lanes of which this rank has made the shuffled stream so far; without shuffle there are none."""
        return self._interleaving.lanes_read

    def shards_ahead(self) -> list[int]:
        """The shards in the order in which the plan comes to them first, as far as that is known.

        Once all counts are known these are the shards of the lanes that this rank's next batches are of, from where it
        stands: of 10^5 shards on 1,024 ranks about 98.
        """
        if not self._sequence.complete:
            return list(dict.fromkeys(self._sequence.order.tolist()))
        n_known = min(_BATCHES_WITH_KNOWN_LANES, self._full_batches_left)
        starts = self._next_start + np.arange(n_known, dtype=np.int64) * (self._share.of * self._global_batch)
        lanes, _ = slices_of_full_batches(starts, self._options.lanes, self._slice, self._global_batch)
        return self._interleaving.shards_from(self.number, distinct(lanes))

    def missing(self, limit: int = 8) -> list[int]:
        """The shards whose counts are needed before the next `take`, in the epoch's order, at most `limit`.

        Empty when `take` can give its next batch, and at the end. With one lane, the first shard named is needed
        for certain, given the counts known so far; how many of those that follow are named beside it is estimated
        from the mean of the known counts (none while nothing is known), and may be one or two too many.
        """
        self._refresh()
        sequence = self._sequence
        if sequence.complete:
            return []
        if self._options.lanes > 1 or sequence.needs_all:
            return sequence.unknown(len(sequence.order), limit)
        if self._batches_finalized(1):
            return []
        first_end = self._next_start + self._slice.stop
        radius = max(expected_radius(first_end, self._options.radius), self._next_start + self._global_batch)
        mean = sequence.whole_end / max(sequence.known_shards, 1)
        shard_end = max(sequence.known_end, sequence.whole_end + mean)
        n_following = -int((shard_end - radius) // mean) if mean and radius > shard_end else 0
        return sequence.unknown(1 + n_following, limit)

    def take(self, max_rows: int) -> RowBlock | None:
        """The next batches: as many whole ones as fit into `max_rows` and as the counts allow, at least one.

        A call costs some tens of microseconds, and some for each lane read, so ask for thousands of rows at a time.

        Returns:
            The rows, or None at the end of the epoch.

        Raises:
            RuntimeError: counts are missing; see `missing`.
        """
        if self.missing(1):
            raise RuntimeError("counts are missing for the next batch: set those that missing() names before take()")
        wanted = max(1, max_rows // len(self._slice))
        if self._sequence.complete:
            n_full = min(wanted, self._full_batches_left)
            with_last = self._last_rows > 0 and n_full < wanted
        else:
            n_full, with_last = self._batches_finalized(wanted), False
        if n_full == 0 and not with_last:
            return None
        return self._take_batches(n_full, with_last)

    def finished(self) -> list[int]:
        """The shards that occur in no later block of this plan, each named once; in the end all of the epoch's.

        Rows that fill up the last batch come from the start of the order and are not looked at here. A shard is
        named at most a window (in samples of a lane) later than it could be.
        """
        if self._ended:
            return self._interleaving.finish_all()
        return self._interleaving.finished(
            self.number
        )  # whatever is needed later, of any lane, has at least this number

    def unpassed(self, shard: int) -> list[tuple[int, int]]:
        """Ranges of a shard's samples that hold all those of later blocks, the end of each exclusive.

        Where the order comes to a shard several times, those that are yet to begin are left out: what they need may
        be fetched again. In a lane that this rank has begun to read, a range begins at the first sample that is yet to
        come; in any other, at most a window earlier. Rows that fill up the last batch are not looked at.
        """
        return [] if self._ended else self._interleaving.unpassed(shard, self.number, self.number)

    @property
    def _ended(self) -> bool:
        return self._sequence.complete and self._full_batches_left == 0 and self._last_rows == 0

    def _refresh(self) -> None:
        """Apply counts that have become known."""
        if self._interleaving.refresh():
            full, last_rows = full_batches_and_last_rows(
                self._options, self._sequence.known_end, self._rank, self._world_size, self._position
            )
            self._full_batches_left, self._last_rows = self._share.batches(full, last_rows, self._batches_before)

    @property
    def _next_start(self) -> int:
        """The position at which the next batch of the share starts; there may be none."""
        return self._position + self._batches_before * self._global_batch

    def _batches_finalized(self, wanted: int) -> int:
        """With one lane and counts still unknown: how many of the next batches the known counts finalize."""
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
                finalized_end = max(finalized_end, self._interleaving.finalize(first_row, wanted_end))
        return max(0, min(n_full, (finalized_end - first_end) // stride + 1))

    def _take_batches(self, n_full: int, with_last: bool) -> RowBlock:
        options, sequence = self._options, self._sequence
        stride = self._global_batch * self._share.of
        starts = self._next_start + np.arange(n_full, dtype=np.int64) * stride
        rounds_end = sequence.known_end // options.lanes * options.lanes
        n_simple = int(np.searchsorted(starts, rounds_end - self._global_batch, side="right"))
        pieces = [slices_of_full_batches(starts[:n_simple], options.lanes, self._slice, self._global_batch)]
        ends = starts + self._global_batch
        if with_last:
            start = self._next_start + n_full * stride
            starts, ends = np.append(starts, start), np.append(ends, sequence.known_end)
        wrapped_lanes = wrapped_numbers = np.empty(0, np.int64)
        for start, end in zip(starts[n_simple:].tolist(), ends[n_simple:].tolist(), strict=True):
            lanes, numbers, wrapped_lanes, wrapped_numbers = slice_of_any_batch(
                range(start, end),
                sequence.known_end,
                options.lanes,
                slice_of_rank(end - start, self._rank, self._world_size, pad=options.pad),
            )
            pieces.append((lanes, numbers))
        lanes = np.concatenate([piece[0] for piece in pieces])
        numbers = np.concatenate([piece[1] for piece in pieces])
        positions = self._interleaving.positions(lanes, numbers)
        if len(wrapped_numbers):
            positions = np.concatenate((positions, self._interleaving.positions_apart(wrapped_lanes, wrapped_numbers)))
        shard, sample = sequence.locate(positions)
        batch_edges = np.minimum(np.arange(len(ends) + 1, dtype=np.int64) * len(self._slice), len(shard))
        self._advance(n_full, with_last, int(ends[-1]))
        return RowBlock(batch_edges, shard, sample, ends, sequence.repeats(positions))

    def _advance(self, n_full: int, with_last: bool, end: int) -> None:
        self._position = end
        self._batches_before = self._share.of - 1
        if self._sequence.complete:
            self._full_batches_left -= n_full
            self._last_rows = 0 if with_last else self._last_rows
