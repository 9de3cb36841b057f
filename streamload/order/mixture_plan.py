"""The plan of an epoch of several datasets: they take turns, and each is interleaved from lanes of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.order.interleaving import Interleaving
from streamload.order.layout import ENDLESS
from streamload.order.mixing import BlockShares, MixedTurns
from streamload.order.plan import EpochPlan
from streamload.order.runs import dataset_sequence, mixed_shares
from streamload.order.sampling import Mixed
from streamload.order.share import lanes_and_numbers, slice_of_rank

IntArray = NDArray[np.int64]


class MixturePlan(EpochPlan):
    """One rank's rows of one epoch of a mixture; takes the arguments of `EpochPlan`.

    Global batches follow the datasets' turns. Sorted by lane, a batch is cut into one slice for each rank. The lanes
    are those of each dataset, so a rank reads mostly lanes of its own, and some rows of its neighbours'.
    """

    def _set_up(self, _numbers: IntArray | None) -> None:
        assert isinstance(self._options.sampling, Mixed)
        self._mixed = self._options.sampling
        self._interleavings: list[Interleaving] = []
        self._shares: BlockShares | None = None
        self._turns: MixedTurns | None = None
        self.missing(1)

    def shards_ahead(self) -> list[int]:
        """Return the shards in the order in which the plan comes to them first, as far as that is known."""
        places = [
            (start / max(1, interleave.sequence.known_end), shard)
            for interleave in self._interleavings
            for shard, start in zip(
                interleave.sequence.order.tolist(), interleave.sequence.edges.tolist(), strict=False
            )
        ]
        return list(dict.fromkeys(shard for _, shard in sorted(places)))

    def missing(self, limit: int = 8) -> list[int]:
        """Return the shards of unknown count, at most `limit`: all counts are needed."""
        if self._turns is None and self._counts.complete:
            self._begin()
        return [int(shard) for shard in np.flatnonzero(self._counts.values < 0)[:limit]]

    def finished(self) -> list[int]:
        """Name the shards that no later block needs, each once; at the end all of the epoch's."""
        if self._ended:
            return [shard for interleave in self._interleavings for shard in interleave.finish_all()]
        passed = zip(self._interleavings, self._passed(0), strict=False)
        return [shard for interleave, least in passed for shard in interleave.finished(least)]

    def unpassed(self, shard: int, /) -> list[tuple[int, int]]:
        """Return ranges of a shard's samples that hold those of later blocks; see `RankPlan.unpassed`."""
        if self._ended:
            return []
        if not self._interleavings:
            return [(0, ENDLESS)]
        dataset = int(np.searchsorted(self._mixed.edges, shard, side="right")) - 1
        return self._interleavings[dataset].unpassed(shard, self._passed(0)[dataset], self._passed(1)[dataset])

    def _begin(self) -> None:
        """Lay out the datasets and their turns, since all counts are known."""
        options, mixed = self._options, self._mixed
        self._shares = mixed_shares(mixed, self._counts.total)
        self._turns = MixedTurns(self._shares, mixed.block, options.seed, self._epoch)
        for dataset in range(len(mixed.shares)):
            sequence = dataset_sequence(options, mixed, self._counts, self._epoch, dataset)
            self._interleavings.append(Interleaving(sequence, self.lanes, options.radius))
            self._interleavings[-1].refresh()
        self._set_samples(int(self._shares.sizes.sum()))

    def _passed(self, blocks: int) -> list[int]:
        """Return for each dataset the number that its lanes have reached at the plan's block, or some blocks later."""
        if self._shares is None:
            return []
        before = self._shares.before(np.array([self._next_start // self._mixed.block + blocks]))[0]
        return [int(number) for number in before // self.lanes + (blocks > 0)]

    def _rows_between(self, starts: IntArray, ends: IntArray, n_full: int) -> tuple[IntArray, IntArray, IntArray]:
        rows, size = [], self._global_batch
        if n_full:
            # The batches of other shares are looked up too: turns are known for stretches only.
            datasets, lanes, numbers = (
                column.reshape(-1, size)[:: self._share.of].ravel()
                for column in self._output_indexes(int(starts[0]), int(starts[n_full - 1]) + size)
            )
            by_lane = np.argsort(lanes.reshape(n_full, size), axis=1, kind="stable")
            own = by_lane[:, self._slice.start : self._slice.stop]
            own = (own + np.arange(n_full, dtype=np.int64)[:, np.newaxis] * size).ravel()
            rows.append(self._located(datasets[own], lanes[own], numbers[own]))
        if n_full < len(starts):
            rows += self._last_batch(int(starts[-1]), int(ends[-1]))
        shard, sample, repeat = (np.concatenate(column) for column in zip(*rows, strict=True))
        return shard, sample, repeat

    def _last_batch(self, start: int, end: int) -> list[tuple[IntArray, IntArray, IntArray]]:
        """Return the rank's rows of the short batch at the end, and the rows that fill it up."""
        n_own = end - start
        wanted = slice_of_rank(n_own, *self._place, pad=self._options.pad)
        datasets, lanes, numbers = self._output_indexes(start, end)
        own = np.argsort(lanes, kind="stable")[wanted.start : min(wanted.stop, n_own)]
        rows = [self._located(datasets[own], lanes[own], numbers[own])]
        wrapped = np.arange(max(wanted.start, n_own), max(wanted.stop, n_own), dtype=np.int64) - n_own
        if len(wrapped):
            wrapped %= end
            datasets, lanes, numbers = self._output_indexes(0, int(wrapped.max()) + 1)
            rows.append(self._located(datasets[wrapped], lanes[wrapped], numbers[wrapped], apart=True))
        return rows

    def _output_indexes(self, start: int, end: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return for each position of the epoch's order the dataset, the lane in it, and the number in the lane."""
        assert self._turns is not None
        assert self._shares is not None
        datasets, turns = self._turns.at(start, end)
        lanes, numbers = np.empty(len(turns), np.int64), np.empty(len(turns), np.int64)
        for dataset, n_samples in enumerate(self._shares.sizes.tolist()):
            in_dataset = datasets == dataset
            lanes[in_dataset], numbers[in_dataset] = lanes_and_numbers(turns[in_dataset], n_samples, self.lanes)
        return datasets, lanes, numbers

    def _located(
        self, datasets: IntArray, lanes: IntArray, numbers: IntArray, *, apart: bool = False
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return shard, sample and repeat of some outputs."""
        located = np.zeros((3, len(datasets)), np.int64)
        for dataset, interleave in enumerate(self._interleavings):
            rows = np.flatnonzero(datasets == dataset)
            if len(rows):
                find = interleave.positions_apart if apart else interleave.positions
                positions = find(lanes[rows], numbers[rows])
                located[:2, rows] = interleave.sequence.locate(positions)
                repeats = interleave.sequence.repeats(positions)
                located[2, rows] = 0 if repeats is None else repeats
        return located[0], located[1], located[2]
