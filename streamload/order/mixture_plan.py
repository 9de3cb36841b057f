"""The plan of an epoch of several datasets: their turns; each of them is interleaved from lanes by itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.order.interleaving import Interleaving
from streamload.order.layout import ShardCounts
from streamload.order.mixing import BlockShares, MixedTurns
from streamload.order.options import OrderOptions, full_batches_and_last_rows
from streamload.order.plan import RowBlock
from streamload.order.runs import dataset_sequence, mixed_shares
from streamload.order.sampling import Mixed
from streamload.order.share import WHOLE, Share, lanes_and_numbers, slice_of_rank
from streamload.text import counted

IntArray = NDArray[np.int64]


class MixturePlan:
    """One rank's rows of one epoch of a mixture; see `RankPlan`, which has the same methods.

    Global batches follow the datasets' turns. Sorted by lane, a batch is cut into one slice for each rank. The lanes
    are those of each dataset, so a rank reads mostly lanes of its own, and some rows of its neighbours'.
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
        share: Share = WHOLE,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not one of {counted(world_size, 'rank')}, which are counted from 0")
        assert isinstance(options.sampling, Mixed)
        self._options = options
        self._mixed = options.sampling
        self._counts = counts
        self._epoch = epoch
        self._rank = rank
        self._world_size = world_size
        self._share = share
        self._global_batch = options.batch_size * world_size
        self._slice = range(rank * options.batch_size, (rank + 1) * options.batch_size)
        self._position = start
        self._batches_before = share.number
        self._interleavings: list[Interleaving] = []
        self._shares: BlockShares | None = None
        self._turns: MixedTurns | None = None
        self._full_batches_left = 0
        self._last_rows = 0
        self.missing(1)

    @property
    def lanes(self) -> int:
        """The number of lanes of each dataset."""
        return self._options.lanes

    @property
    def number(self) -> int:
        """How many outputs every lane has reached, at least, over all datasets."""
        return self._next_start // self._options.lanes

    @property
    def _next_start(self) -> int:
        """The position at which the next batch of the share starts; there may be none."""
        return self._position + self._batches_before * self._global_batch

    @property
    def lanes_read(self) -> list[int]:
        """The lanes of which this rank has made the shuffled stream so far; without shuffle there are none."""
        return sorted({lane for interleave in self._interleavings for lane in interleave.lanes_read})

    def shards_ahead(self) -> list[int]:
        """The shards in the order in which the plan comes to them first, as far as that is known."""
        places = [
            (int(start) / max(1, interleave.sequence.known_end), int(shard))
            for interleave in self._interleavings
            for shard, start in zip(
                interleave.sequence.order.tolist(), interleave.sequence.edges.tolist(), strict=False
            )
        ]
        return list(dict.fromkeys(shard for _, shard in sorted(places)))

    def missing(self, limit: int = 8) -> list[int]:
        """The shards whose counts are needed, at most `limit`: all of unknown count."""
        if self._turns is None and self._counts.complete:
            self._extend()
        return [int(shard) for shard in np.flatnonzero(self._counts.values < 0)[:limit]]

    def take(self, max_rows: int) -> RowBlock | None:
        """The next batches: as many whole ones as fit into `max_rows`, at least one; None at the end.

        Raises:
            RuntimeError: counts are missing; see `missing`.
        """
        if self.missing(1):
            raise RuntimeError("counts are missing for the next batch: set those that missing() names before take()")
        wanted = max(1, max_rows // len(self._slice))
        n_full = min(wanted, self._full_batches_left)
        with_last = self._last_rows > 0 and n_full < wanted
        if n_full == 0 and not with_last:
            return None
        return self._take_batches(n_full, with_last)

    def finished(self) -> list[int]:
        """The shards that occur in no later block of this plan, each named once; in the end all of the epoch's."""
        if self._ended:
            return [shard for interleave in self._interleavings for shard in interleave.finish_all()]
        return [
            shard
            for interleave, least in zip(self._interleavings, self._passed(0), strict=False)
            for shard in interleave.finished(least)
        ]

    def unpassed(self, shard: int) -> list[tuple[int, int]]:
        """Ranges of a shard's samples that hold those of later blocks; see `RankPlan.unpassed`."""
        if self._ended:
            return []
        if not self._interleavings:
            return [(0, 1 << 62)]
        dataset = int(np.searchsorted(self._mixed.edges, shard, side="right")) - 1
        return self._interleavings[dataset].unpassed(shard, self._passed(0)[dataset], self._passed(1)[dataset])

    @property
    def _ended(self) -> bool:
        return self._turns is not None and self._full_batches_left == 0 and self._last_rows == 0

    def _extend(self) -> None:
        options, mixed = self._options, self._mixed
        self._shares = shares = mixed_shares(mixed, self._counts.total)
        self._turns = MixedTurns(shares, mixed.block, options.seed, self._epoch)
        for dataset in range(len(mixed.shares)):
            sequence = dataset_sequence(options, mixed, self._counts, self._epoch, dataset)
            self._interleavings.append(Interleaving(sequence, options.lanes, options.radius))
            self._interleavings[-1].refresh()
        full, last_rows = full_batches_and_last_rows(
            options, int(shares.sizes.sum()), self._rank, self._world_size, self._position
        )
        self._full_batches_left, self._last_rows = self._share.batches(full, last_rows, self._batches_before)

    def _passed(self, blocks: int) -> list[int]:
        """For each dataset the number that its lanes have reached at the plan's block, or after it."""
        if self._shares is None:
            return []
        before = self._shares.before(np.array([self._next_start // self._mixed.block + blocks]))[0]
        return [int(number) for number in before // self._options.lanes + (blocks > 0)]

    def _take_batches(self, n_full: int, with_last: bool) -> RowBlock:
        assert self._shares is not None
        size, stride = self._global_batch, self._global_batch * self._share.of
        rows, ends = [], self._next_start + size + stride * np.arange(n_full, dtype=np.int64)
        if n_full:
            # With a stride the batches between are looked up too: which output comes when is known for stretches only.
            datasets, lanes, numbers = (
                column.reshape(-1, size)[:: self._share.of].ravel()
                for column in self._output_indexes(self._next_start, int(ends[-1]))
            )
            by_lane = np.argsort(lanes.reshape(n_full, size), axis=1, kind="stable")
            own = by_lane[:, self._slice.start : self._slice.stop]
            own = (own + np.arange(n_full, dtype=np.int64)[:, np.newaxis] * size).ravel()
            rows.append(self._rows(datasets[own], lanes[own], numbers[own], apart=False))
        if with_last:
            epoch_end = int(self._shares.sizes.sum())
            rows += self._last_batch(self._next_start + n_full * stride, epoch_end)
            ends = np.append(ends, epoch_end)
        shard, sample, repeat = (np.concatenate(column) for column in zip(*rows, strict=True))
        edges = np.minimum(np.arange(len(ends) + 1, dtype=np.int64) * len(self._slice), len(shard))
        self._position = int(ends[-1])
        self._batches_before = self._share.of - 1
        self._full_batches_left -= n_full
        self._last_rows = 0 if with_last else self._last_rows
        return RowBlock(edges, shard, sample, ends, repeat)

    def _last_batch(self, start: int, end: int) -> list[tuple[IntArray, IntArray, IntArray]]:
        """The rank's rows of the short batch at the end, and those that fill it up."""
        n_own = end - start
        wanted = slice_of_rank(n_own, self._rank, self._world_size, pad=self._options.pad)
        first_row, end_row = wanted.start, wanted.stop
        datasets, lanes, numbers = self._output_indexes(start, end)
        own = np.argsort(lanes, kind="stable")[first_row : min(end_row, n_own)]
        rows = [self._rows(datasets[own], lanes[own], numbers[own], apart=False)]
        wrapped = np.arange(max(first_row, n_own), max(end_row, n_own), dtype=np.int64) - n_own
        if len(wrapped):
            wrapped %= end
            datasets, lanes, numbers = self._output_indexes(0, int(wrapped.max()) + 1)
            rows.append(self._rows(datasets[wrapped], lanes[wrapped], numbers[wrapped], apart=True))
        return rows

    def _output_indexes(self, start: int, end: int) -> tuple[IntArray, IntArray, IntArray]:
        """For each position of the epoch's order the dataset, the lane in it, and the number in the lane."""
        assert self._turns is not None
        assert self._shares is not None
        datasets, turns = self._turns.at(start, end)
        lanes, numbers = np.empty(len(turns), np.int64), np.empty(len(turns), np.int64)
        for dataset, n_samples in enumerate(self._shares.sizes.tolist()):
            of_it = datasets == dataset
            lanes[of_it], numbers[of_it] = lanes_and_numbers(turns[of_it], n_samples, self._options.lanes)
        return datasets, lanes, numbers

    def _rows(
        self, datasets: IntArray, lanes: IntArray, numbers: IntArray, *, apart: bool
    ) -> tuple[IntArray, IntArray, IntArray]:
        """The shard, the sample and the repeat of some outputs."""
        found = np.zeros((3, len(datasets)), np.int64)
        for dataset, interleave in enumerate(self._interleavings):
            of_it = np.flatnonzero(datasets == dataset)
            if len(of_it):
                find = interleave.positions_apart if apart else interleave.positions
                positions = find(lanes[of_it], numbers[of_it])
                found[:2, of_it] = interleave.sequence.locate(positions)
                repeats = interleave.sequence.repeats(positions)
                found[2, of_it] = 0 if repeats is None else repeats
        return found[0], found[1], found[2]
