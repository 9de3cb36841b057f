"""Plan an epoch: one rank's rows, batch by batch, from any position of the epoch's order.

The order is a pure function of the epoch, the counts of the shards, and the options except for the batch size and the
treatment of a short last batch. So a position saved under one world size can be resumed under another.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.order.interleaving import Interleaving
from streamload.order.lanes import positions_to_draw
from streamload.order.mixing import BlockShares
from streamload.order.options import OrderOptions, full_batches_and_last_rows
from streamload.order.randomness import CounterDraws, philox_key
from streamload.order.runs import dataset_sequences, sequence_of_epoch
from streamload.order.sampling import Mixed
from streamload.order.shard_counts import ENDLESS, UNKNOWN, ShardCounts, distinct
from streamload.order.share import WHOLE, Share, lanes_and_numbers, slice_of_rank, slices_of_full_batches

IntArray = NDArray[np.int64]
Outputs = tuple[IntArray, IntArray, IntArray]
"""int64[rows] each: the dataset of each row, its lane in the dataset, and its number among the lane's outputs."""

# While counts are unknown, the maximum number of a lane's outputs to compute beyond the next batch.
_MOST_NUMBERS_AHEAD = 65_536

# Number of batches inspected to predict shards; usually all batches of a rank have the same lanes.
_INSPECTED_BATCHES = 16


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """The rows of consecutive batches of one rank.

    Attributes:
        batch_edges: int64[m + 1]; the rows of batch i are `batch_edges[i]:batch_edges[i + 1]`.
        shard: int64[rows], the shard's number in the listing.
        sample: int64[rows], the sample's number in the shard.
        ends: int64[m], the position in the epoch's order (over all ranks) after each batch, which a state records.
        repeat: int64[rows], distinguishes a sample's repeats in the epoch, so that each has its own randomness; None
            without a `sampling`.
    """

    batch_edges: IntArray
    shard: IntArray
    sample: IntArray
    ends: IntArray
    repeat: IntArray | None = None

    def batches(self, start: int, end: int) -> RowBlock:
        """Return the batches from `start` to `end`."""
        edges = self.batch_edges[start : end + 1]
        rows = slice(int(edges[0]), int(edges[-1]))
        repeat = None if self.repeat is None else self.repeat[rows]
        return RowBlock(edges - edges[0], self.shard[rows], self.sample[rows], self.ends[start:end], repeat)


class EpochPlan:
    """One rank's rows of one epoch, from a position of the epoch's order.

    Global batch j is `order[start + j * B : start + (j + 1) * B]`, B = batch_size * world_size. Sorted lane-major, it
    is cut into one slice for each rank. Rows that pad a short last batch follow the rank's own rows.

    Example: 12 samples in two lanes (0 to 5 and 6 to 11), without shuffle, on two ranks with batch_size=3, so B = 6.

        order         0 6 1 7 2 8   3 9 4 10 5 11
        lane-major    0 1 2 6 7 8   3 4 5 9 10 11
        of rank 0     0 1 2         3 4 5
        of rank 1           6 7 8         9 10 11

    After the first batch the position is 6. One rank that resumes there with batch_size=6 gets 3 4 5 9 10 11.

    With several lanes, or a `sampling`, all counts must be known before the first batch. With one lane, a batch needs
    the counts of the shards that the window reaches, or high enough lower bounds: call `missing`, set those counts,
    then `take`. The rows depend neither on when counts became known nor on `max_rows`.

    Memory is O(window) for each lane of this rank, O(shards), and O(rows) of one `take`.

    `start` is the number of samples in the order that were delivered before. `numbers`, int64[M], are the epoch's
    samples if the sampling is `Sampled`. `share` selects the rank's batches to yield.

    Attributes:
        lanes: the number of lanes of each dataset.
        interleavings: one for each dataset; empty until the counts they need are known.
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
        self.lanes = options.lanes
        self.interleavings: list[Interleaving] = []
        self._options = options
        self._counts = counts
        self._epoch = epoch
        self._numbers = numbers
        self._place = rank, world_size
        self._share = share
        self._first_shards = options.sampling.edges[:-1] if isinstance(options.sampling, Mixed) else (0,)
        self._global_batch = options.batch_size * world_size
        self._slice = range(rank * options.batch_size, (rank + 1) * options.batch_size)
        self._position = start
        self._next_start = start + share.number * self._global_batch  # where the next batch of the share would start
        self._n_samples = UNKNOWN
        self._full_batches_left = 0
        self._last_rows = 0
        self._refresh()

    def shards_ahead(self) -> list[int]:
        """Return upcoming shards in the order of their first use.

        While counts are unknown, these are all shards of the epoch (none with a `sampling`); then those of this rank's
        next batches.
        """
        if not self.interleavings:
            return []
        sequence = self.interleavings[0].sequence
        if not sequence.complete:
            return list(dict.fromkeys(sequence.order.tolist()))
        n_batches = min(_INSPECTED_BATCHES, self._full_batches_left)
        starts = self._next_start + np.arange(n_batches, dtype=np.int64) * (self._share.n_shares * self._global_batch)
        lanes, _ = slices_of_full_batches(starts, self.lanes, self._slice, self._global_batch)
        return self.interleavings[0].shards_from(self._next_start // self.lanes, distinct(lanes))

    def missing(self, limit: int = 8) -> list[int]:
        """Return up to `limit` shards, in order, whose counts are needed before the next `take`.

        With one lane, the first is certainly needed. The number of others is estimated from the mean of the known
        counts, and can be too high or too low.
        """
        self._refresh()
        if self._n_samples != UNKNOWN:
            return []
        following = np.arange(len(self._counts))
        if self.interleavings:
            sequence = self.interleavings[0].sequence
            following = sequence.order[sequence.known_runs :]
            if self.lanes == 1:
                if self._batches_ready(1):
                    return []
                following = following[: 1 + self._shards_to_window_end()]
        return [int(shard) for shard in following[self._counts.values[following] == UNKNOWN][:limit]]

    def finished(self) -> list[int]:
        """Return shards finished since the last call, at most a window late; after the last batch, all others."""
        # For each dataset the lowest output number still to come; None if the epoch has ended.
        passed = [None] * len(self.interleavings) if self._ended else self._passed(0)
        pairs = zip(self.interleavings, passed, strict=True)
        return [shard for interleaving, least in pairs for shard in interleaving.finished(least)]

    def unpassed(self, shard: int) -> list[tuple[int, int]]:
        """Return half-open ranges that cover a shard's samples in later batches.

        If shards repeat, runs not yet begun are left out: their parts can be fetched again. In a lane that this rank
        reads, a range begins at the next sample; in any other lane, at most a window earlier.
        """
        if self._ended:
            return []
        if not self.interleavings:
            return [(0, ENDLESS)]
        dataset = bisect_right(self._first_shards, shard) - 1
        return self.interleavings[dataset].unpassed(shard, self._passed(0)[dataset], self._passed(1)[dataset])

    def take(self, max_rows: int) -> RowBlock | None:
        """Return the next batches, as many as `max_rows` and the counts allow, at least one; None at the end.

        A call costs tens of microseconds: request thousands of rows at a time.

        Raises:
            RuntimeError: counts are missing; see `missing`.
        """
        if self.missing(1):
            raise RuntimeError("counts are missing for the next batch: set those that missing() names before take()")
        max_batches = max(1, max_rows // len(self._slice))
        n_full = self._batches_ready(max_batches)
        with_last = self._last_rows > 0 and n_full < max_batches
        if n_full == 0 and not with_last:
            return None
        stride = self._global_batch * self._share.n_shares
        starts = self._next_start + np.arange(n_full + with_last, dtype=np.int64) * stride
        ends = starts + self._global_batch
        if with_last:
            ends[-1] = self._n_samples
        shard, sample, repeat = self._rows_between(starts, ends, n_full)
        edges = np.minimum(np.arange(len(ends) + 1, dtype=np.int64) * len(self._slice), len(shard))
        self._position = int(ends[-1])
        self._next_start = self._position + (self._share.n_shares - 1) * self._global_batch
        self._full_batches_left -= n_full
        self._last_rows = 0 if with_last else self._last_rows
        return RowBlock(edges, shard, sample, ends, None if self._options.sampling is None else repeat)

    def _refresh(self) -> None:
        """Apply counts that have become known.

        Raises:
            LoaderStateError: the plan starts outside the epoch.
        """
        if not self.interleavings and (self._options.sampling is None or self._counts.complete):
            self.interleavings = self._interleave()
        if self._n_samples == UNKNOWN and self.interleavings:
            for each in self.interleavings:
                each.refresh()
            if all(each.sequence.complete for each in self.interleavings):
                self._n_samples = n_samples = sum(each.sequence.known_end for each in self.interleavings)
                full, last_rows = full_batches_and_last_rows(self._options, n_samples, *self._place, self._position)
                before = (self._next_start - self._position) // self._global_batch
                self._full_batches_left, self._last_rows = self._share.batches(full, last_rows, before)

    @property
    def _ended(self) -> bool:
        return self._n_samples != UNKNOWN and self._full_batches_left == 0 and self._last_rows == 0

    def _interleave(self) -> list[Interleaving]:
        sequence = sequence_of_epoch(self._options, self._counts, self._epoch, self._numbers)
        return [Interleaving(sequence, self.lanes, self._options.radius)]

    def _passed(self, _blocks: int, /) -> list[int]:
        """Return the output number that the lanes of each dataset have reached."""
        return [self._next_start // self.lanes] * len(self.interleavings)

    def _shards_to_window_end(self) -> int:
        """Estimate how many shards the next batch needs beyond the first unknown shard."""
        sequence = self.interleavings[0].sequence
        first_end = self._next_start + self._slice.stop
        needed_end = max(positions_to_draw(first_end, self._options.radius), self._next_start + self._global_batch)
        whole_end = int(sequence.edges[-1])
        mean = whole_end / max(sequence.known_runs, 1)
        shard_end = max(sequence.known_end, whole_end + mean)
        return -int((shard_end - needed_end) // mean) if mean and needed_end > shard_end else 0

    def _batches_ready(self, max_batches: int) -> int:
        """Return how many of the next full batches the known counts finalize, at most `max_batches`."""
        if self._n_samples != UNKNOWN:
            return min(max_batches, self._full_batches_left)
        known_end = self.interleavings[0].sequence.known_end
        stride = self._global_batch * self._share.n_shares
        n_full = min(max_batches, (known_end - self._next_start - self._global_batch) // stride + 1)
        if n_full <= 0:
            return 0
        first_row, first_end = self._next_start + self._slice.start, self._next_start + self._slice.stop
        finalized_end = known_end
        if self._options.radius:
            # Outputs up to a window before the known end are final for any draws.
            finalized_end = known_end - self._options.radius
            if finalized_end < first_end + (n_full - 1) * stride:
                most = max(_MOST_NUMBERS_AHEAD, self._global_batch)
                wanted_end = min(first_end + (n_full - 1) * stride, first_end + most)
                lane = self.interleavings[0].stream(0, first_row)
                finalized_end = max(finalized_end, lane.finalize(wanted_end))
        return max(0, min(n_full, (finalized_end - first_end) // stride + 1))

    def _rows_between(self, starts: IntArray, ends: IntArray, n_full: int) -> IntArray:
        """Return shard, sample and repeat of the rank's rows in some global batches, int64[3, rows].

        The batches are at the positions `starts[i]` to `ends[i]` of the order; the first `n_full` are full.
        """
        n_simple = 0
        if len(self.interleavings) == 1:  # whole batches within the full rounds of lanes need no sorting
            rounds_end = self.interleavings[0].sequence.known_end // self.lanes * self.lanes
            n_simple = int(np.searchsorted(starts[:n_full], rounds_end - self._global_batch, side="right"))
        simple = slices_of_full_batches(starts[:n_simple], self.lanes, self._slice, self._global_batch)
        own: list[Outputs] = [(np.zeros(len(simple[0]), np.int64), *simple)]
        filling = np.empty(0, np.int64)
        for batches in (slice(n_simple, n_full), slice(n_full, len(starts))):
            if len(starts[batches]):
                n_rows = int(ends[batches][0] - starts[batches][0])
                positions = starts[batches, np.newaxis] + np.arange(n_rows, dtype=np.int64)
                outputs = self._outputs(positions.ravel())
                own_rows = slice_of_rank(n_rows, *self._place, pad=self._options.pad)
                lane_major = np.argsort(outputs[1].reshape(positions.shape), axis=1, kind="stable")
                rows = lane_major[:, own_rows.start : min(own_rows.stop, n_rows)]
                rows = (rows + np.arange(len(rows))[:, np.newaxis] * n_rows).ravel()
                own.append((outputs[0][rows], outputs[1][rows], outputs[2][rows]))
                filling = np.arange(max(own_rows.start, n_rows), max(own_rows.stop, n_rows), dtype=np.int64) - n_rows
        datasets, lanes, numbers = (np.concatenate(column) for column in zip(*own, strict=True))
        located = self._locate(datasets, lanes, numbers)
        if len(filling):
            filled = self._locate(*self._outputs(filling % self._n_samples), apart=True)
            located = np.concatenate((located, filled), axis=1)
        return located

    def _outputs(self, positions: IntArray) -> Outputs:
        """Return the outputs at positions of the epoch's order, int64[n]."""
        known_end = self.interleavings[0].sequence.known_end
        return np.zeros(len(positions), np.int64), *lanes_and_numbers(positions, known_end, self.lanes)

    def _locate(self, datasets: IntArray, lanes: IntArray, numbers: IntArray, *, apart: bool = False) -> IntArray:
        """Return shard, sample and repeat of outputs, int64[3, rows]; with `apart`, outputs can be in any order."""
        located = np.empty((3, len(datasets)), np.int64)
        for dataset, interleaving in enumerate(self.interleavings):
            rows = slice(None) if len(self.interleavings) == 1 else np.flatnonzero(datasets == dataset)
            if len(lanes[rows]):
                find = interleaving.positions_apart if apart else interleaving.positions
                located[:, rows] = interleaving.sequence.locate(find(lanes[rows], numbers[rows]))
        return located


class MixturePlan(EpochPlan):
    """One rank's rows of one epoch of a mixture of datasets, each interleaved from its own lanes.

    A batch is sorted by lane before it is cut, so a rank reads mostly its own lanes, and some rows of its neighbours'
    lanes.
    """

    _shares: BlockShares
    _draws: CounterDraws

    def shards_ahead(self) -> list[int]:
        """Return the epoch's shards, roughly in the order of first use."""
        places = [
            (start / max(1, each.sequence.known_end), shard)
            for each in self.interleavings
            for shard, start in zip(each.sequence.order.tolist(), each.sequence.edges.tolist(), strict=False)
        ]
        return list(dict.fromkeys(shard for _, shard in sorted(places)))

    def _interleave(self) -> list[Interleaving]:
        options = self._options
        assert isinstance(options.sampling, Mixed)
        self._shares, sequences = dataset_sequences(options, options.sampling, self._counts, self._epoch)
        self._block = options.sampling.block
        self._draws = CounterDraws(philox_key(options.seed, self._epoch, "mixture"))
        return [Interleaving(sequence, self.lanes, options.radius) for sequence in sequences]

    def _passed(self, blocks: int, /) -> list[int]:
        """Return the output number that each dataset's lanes reach, `blocks` blocks after the plan's position."""
        if not self.interleavings:
            return []
        before = self._shares.before(np.array([self._next_start // self._block + blocks]))[0]
        return [int(number) for number in before // self.lanes + (blocks > 0)]

    def _outputs(self, positions: IntArray) -> Outputs:
        first = int(positions.min())  # turns are computed for contiguous ranges
        datasets, turns = self._shares.turns(self._draws, first, int(positions.max()) + 1)
        lanes, numbers = np.empty(len(turns), np.int64), np.empty(len(turns), np.int64)
        for dataset, n_samples in enumerate(self._shares.sizes.tolist()):
            own = datasets == dataset
            lanes[own], numbers[own] = lanes_and_numbers(turns[own], n_samples, self.lanes)
        at = positions - first
        return datasets[at], lanes[at], numbers[at]
