"""Map the outputs of each shuffled lane to positions of the sequence, and track which shards are finished."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from streamload.order.lanes import SlidingShuffle, lane_bounds
from streamload.order.runs import SampleSequence
from streamload.order.shard_counts import ENDLESS, UNKNOWN, distinct

IntArray = NDArray[np.int64]


class Interleaving:
    """The lanes of one sequence, as one rank reads them. Forward only.

    A sample can move at most `radius` samples within its lane.

    Attributes:
        streams: the shuffled stream of each lane read so far; empty without shuffle.
    """

    def __init__(self, sequence: SampleSequence, n_lanes: int, radius: int) -> None:
        self.sequence = sequence
        self._n_lanes = n_lanes
        self._radius = radius
        self.streams: dict[int, SlidingShuffle] = {}
        self._bounds: IntArray | None = None  # of the lanes; None until all counts are known
        self._last_uses: tuple[IntArray, IntArray] | None = None
        self._finished = 0  # the number of shards that `finished` has returned

    def refresh(self) -> None:
        """Apply counts that have become known."""
        if self._bounds is None:
            sequence = self.sequence
            sequence.extend()
            if sequence.complete:
                self._bounds = lane_bounds(sequence.known_end, self._n_lanes)
            if 0 in self.streams and self._n_lanes == 1:
                self.streams[0].grow(sequence.known_end, sequence.complete)

    def positions(self, lanes: IntArray, numbers: IntArray) -> IntArray:
        """Return the positions of outputs, each a lane and a number; a lane's numbers must ascend, across calls too."""
        lane_starts = np.zeros(1, np.int64) if self._bounds is None else self._bounds
        if not self._radius:
            return lane_starts[lanes] + numbers
        if self._n_lanes == 1 and len(numbers):
            return self.stream(0, int(numbers[0])).take(numbers)
        if len(numbers) == 0:
            return numbers
        by_lane = np.argsort(lanes.astype(np.uint16) if self._n_lanes <= 1 << 16 else lanes, kind="stable")
        edges = np.flatnonzero(np.diff(lanes[by_lane])) + 1
        positions = np.empty(len(lanes), np.int64)
        for rows in np.split(by_lane, edges):
            lane = int(lanes[rows[0]])
            stream = self.stream(lane, int(numbers[rows[0]]))
            positions[rows] = lane_starts[lane] + stream.take(numbers[rows])
        return positions

    def positions_apart(self, lanes: IntArray, numbers: IntArray) -> IntArray:
        """Return the positions of outputs in any order, without advancing `streams`."""
        pairs, places = np.unique(np.stack((lanes, numbers)), axis=1, return_inverse=True)
        separate = Interleaving(self.sequence, self._n_lanes, self._radius)
        separate.refresh()
        return separate.positions(pairs[0], pairs[1])[places.ravel()]

    def finished(self, least: int | None) -> list[int]:
        """Return newly finished shards, which no lane needs from output `least` on; for None, all the rest."""
        sequence = self.sequence
        if not sequence.complete and self._n_lanes > 1:
            return []
        ends, shards = sequence.edges[1:], sequence.order
        if self._n_lanes > 1 or sequence.has_repeats:
            ends, shards = self._last_uses = self._last_uses or self._find_last_uses()
        first, self._finished = self._finished, len(shards)
        if least is not None:
            self._finished = max(first, int(ends.searchsorted(least - self._radius, side="right")))
        return [int(shard) for shard in shards[first : self._finished]]

    def _find_last_uses(self) -> tuple[IntArray, IntArray]:
        """Return each shard's greatest end position within a lane, ascending, and the shards in that order."""
        assert self._bounds is not None
        sequence = self.sequence
        starts_and_end = distinct(np.concatenate((sequence.edges, self._bounds)))
        starts, ends = starts_and_end[:-1], starts_and_end[1:]
        shards = sequence.order[np.searchsorted(sequence.edges, starts, side="right") - 1]
        last = np.full(int(sequence.order.max(initial=-1)) + 1, UNKNOWN, np.int64)
        last[sequence.order] = 0
        np.maximum.at(last, shards, ends - self._bounds[np.searchsorted(self._bounds, starts, side="right") - 1])
        by_end = np.argsort(last, kind="stable")
        by_end = by_end[last[by_end] != UNKNOWN]
        return last[by_end], by_end

    def shards_from(self, number: int, lanes: IntArray) -> list[int]:
        """Return the shards that outputs of `lanes` can need from `number` on; all counts must be known."""
        assert self._bounds is not None, "the lanes have no bounds before all counts are known"
        sequence = self.sequence
        first = self._bounds[lanes] + max(0, number - self._radius)
        ends = self._bounds[lanes + 1]
        first_run = sequence.edges.searchsorted(first, side="right") - 1
        n_runs = np.where(first < ends, sequence.edges.searchsorted(ends, side="left") - first_run, 0)
        before = np.repeat(np.cumsum(n_runs) - n_runs, n_runs)
        runs = np.repeat(first_run, n_runs) + np.arange(len(before)) - before
        starts_in_lane = np.maximum(sequence.edges[runs], np.repeat(first, n_runs)) - np.repeat(
            self._bounds[lanes], n_runs
        )
        by_start = np.argsort(starts_in_lane, kind="stable")
        return list(dict.fromkeys(sequence.order[runs[by_start]].tolist()))

    def unpassed(self, shard: int, least: int, most: int) -> list[tuple[int, int]]:
        """Return half-open ranges of a shard's samples that cover those of later outputs.

        If shards repeat, runs not yet begun are left out: their parts can be fetched again. Every lane has reached
        output `least`, and no lane has passed output `most`.
        """
        sequence = self.sequence
        places = sequence.places_of(shard)
        if self._bounds is None and (self._n_lanes > 1 or not places):
            return [(0, ENDLESS)]
        reached = most + self._radius if sequence.has_repeats else ENDLESS
        bounds = [0, ENDLESS] if self._bounds is None or self._n_lanes == 1 else self._bounds.tolist()
        ranges = []
        for start, end in places:
            first = bisect_right(bounds, start) - 1
            for lane, (lane_start, lane_end) in enumerate(
                zip(bounds[first:], bounds[first + 1 :], strict=False), first
            ):
                if lane_start >= end:
                    break
                passed = self.streams[lane].least_position if lane in self.streams else 0
                first_left = max(start, lane_start + max(passed, least - self._radius))
                last = min(end, lane_end) - 1
                if first_left <= last and first_left - lane_start <= reached:
                    _, samples, _ = sequence.locate(np.array([first_left, last]))
                    ranges.append((int(samples[0]), int(samples[1]) + 1))
        return ranges

    def stream(self, lane: int, first_number: int) -> SlidingShuffle:
        """Return the lane's stream, creating it at the first use."""
        if lane not in self.streams:
            sequence = self.sequence
            start, end = 0, sequence.known_end
            if self._bounds is not None:
                start, end = int(self._bounds[lane]), int(self._bounds[lane + 1])

            self.streams[lane] = SlidingShuffle(
                lambda first, count: sequence.uniforms(start + first, count), self._radius, first_number
            )
            self.streams[lane].grow(end - start, sequence.complete)
        return self.streams[lane]
