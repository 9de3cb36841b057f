"""A sequence cut into lanes, each of them shuffled: the position of each output, and the shards that are finished."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from streamload.order.lanes import SlidingShuffle, lane_bounds
from streamload.order.layout import ENDLESS, distinct
from streamload.order.runs import SampleSequence


class ShardRetirement:
    """Follows how far every lane has been emitted, and names the shards that were passed.

    The lanes' bounds cut shards into parts, and so do their runs. Parts are passed in the order of their ends, so
    naming all shards costs one sort and one walk over the parts.
    """

    def __init__(self, sequence: SampleSequence, n_lanes: int) -> None:
        self._sequence = sequence
        self._named = np.zeros(int(sequence.order.max(initial=-1)) + 1, bool)
        self._passed_parts = 0
        self._many_parts = n_lanes > 1 or sequence.has_repeats
        if self._many_parts:
            self._cut(n_lanes)

    def pass_positions(self, end: int) -> list[int]:
        """Name the shards whose samples all lie at positions (in their lane) below `end`."""
        ends = self._part_ends if self._many_parts else self._sequence.edges[1:]
        first = self._passed_parts
        self._passed_parts = max(first, int(ends.searchsorted(end, side="right")))
        if self._passed_parts == first:
            return []
        if not self._many_parts:
            return self._name(self._sequence.order[first : self._passed_parts])
        shards = self._part_shards[first : self._passed_parts]
        np.subtract.at(self._parts_left, shards, 1)
        return self._name(shards[self._parts_left[shards] == 0])

    def pass_all(self) -> list[int]:
        """Name the remaining shards, in the order of the epoch."""
        return self._name(self._sequence.order)

    def _name(self, shards: NDArray[np.int64]) -> list[int]:
        fresh = list(dict.fromkeys(shards[~self._named[shards]].tolist()))
        self._named[shards] = True
        return fresh

    def _cut(self, n_lanes: int) -> None:
        """Cut the shards at the lanes' bounds; sort the parts by their ends in the lane."""
        bounds = lane_bounds(self._sequence.known_end, n_lanes)
        cuts = distinct(np.concatenate((self._sequence.edges, bounds)))
        starts, ends = cuts[:-1], cuts[1:]
        shards, _ = self._sequence.locate(starts)
        lane_starts = bounds[np.searchsorted(bounds, starts, side="right") - 1]
        ends_in_lane = ends - lane_starts
        by_end = np.argsort(ends_in_lane, kind="stable")
        self._part_ends, self._part_shards = ends_in_lane[by_end], shards[by_end]
        self._parts_left = np.bincount(shards, minlength=len(self._named))


IntArray = NDArray[np.int64]
Streams = dict[int, SlidingShuffle]


class Interleaving:
    """The lanes of one sequence, as one rank reads them: forward only.

    Args:
        sequence: of the epoch's samples.
        n_lanes: the number of lanes.
        radius: how far, in samples, a sample can move within its lane.

    Attributes:
        streams: the shuffled stream of each lane that was read; none without shuffle.
    """

    def __init__(self, sequence: SampleSequence, n_lanes: int, radius: int) -> None:
        self.sequence = sequence
        self._n_lanes = n_lanes
        self._radius = radius
        self.streams: Streams = {}
        self._bounds: IntArray | None = None
        self._retirement: ShardRetirement | None = None

    def refresh(self) -> bool:
        """Apply counts that have become known; return True if the sequence has become complete."""
        if self._bounds is not None:
            return False
        sequence = self.sequence
        sequence.extend()
        if sequence.complete:
            self._bounds = lane_bounds(sequence.known_end, self._n_lanes)
        if 0 in self.streams and self._n_lanes == 1:
            self.streams[0].grow(sequence.known_end, sequence.complete)
        return sequence.complete

    def finalize(self, first_number: int, number_end: int) -> int:
        """Finalize outputs of a single lane; see `SlidingShuffle.finalize`."""
        return self._stream(self.streams, 0, first_number).finalize(number_end)

    def positions(self, lanes: IntArray, numbers: IntArray) -> IntArray:
        """Return the positions of some outputs; in each lane the numbers ascend, also from call to call."""
        return self._positions(self.streams, lanes, numbers)

    def positions_apart(self, lanes: IntArray, numbers: IntArray) -> IntArray:
        """Return the positions of outputs whose numbers come in any order, by streams of their own."""
        pairs, places = np.unique(np.stack((lanes, numbers)), axis=1, return_inverse=True)
        return self._positions({}, pairs[0], pairs[1])[places.ravel()]

    def finished(self, least: int) -> list[int]:
        """Name the shards that outputs from number `least` of every lane on do not need, each once."""
        if not self.sequence.complete and (self._n_lanes > 1 or self.sequence.needs_all):
            return []
        return self._retired().pass_positions(least - self._radius)

    def shards_from(self, number: int, lanes: IntArray) -> list[int]:
        """Return the shards that outputs of some lanes from a number on may need, in order; all counts are known."""
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

    def finish_all(self) -> list[int]:
        """Name the remaining shards."""
        return self._retired().pass_all()

    def unpassed(self, shard: int, least: int, most: int) -> list[tuple[int, int]]:
        """Return ranges of a shard's samples that hold all those of later outputs, each end exclusive.

        Runs of the shard that are yet to begin are left out: their parts may be fetched again. Every lane has reached
        the number `least`, and none has passed `most`.
        """
        sequence = self.sequence
        places = sequence.places_of(shard)
        if places is None or (self._bounds is None and self._n_lanes > 1):
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
                piece = max(start, lane_start + self._passed_in(lane, least)), min(end, lane_end)
                if piece[0] < piece[1] and piece[0] - lane_start <= reached:
                    ranges.append(sequence.samples_at(*piece))
        return ranges

    def _passed_in(self, lane: int, number: int) -> int:
        """Return a position of a lane below which no output from a number on lies, as far as is known."""
        stream = self.streams.get(lane)
        return max(0, number - self._radius, 0 if stream is None else stream.least_position)

    def _retired(self) -> ShardRetirement:
        if self._retirement is None:
            self._retirement = ShardRetirement(self.sequence, self._n_lanes)
        return self._retirement

    def _stream(self, streams: Streams, lane: int, first_number: int) -> SlidingShuffle:
        """Return the lane's stream, which is made at the first use."""
        if lane not in streams:
            sequence = self.sequence
            start, end = 0, sequence.known_end
            if self._bounds is not None:
                start, end = int(self._bounds[lane]), int(self._bounds[lane + 1])

            def uniforms(first: int, count: int) -> NDArray[np.float64]:
                return sequence.uniforms(start + first, count)

            streams[lane] = SlidingShuffle(uniforms, self._radius, first_number)
            streams[lane].grow(end - start, sequence.complete)
        return streams[lane]

    def _positions(self, streams: Streams, lanes: IntArray, numbers: IntArray) -> IntArray:
        lane_starts = np.zeros(1, np.int64) if self._bounds is None else self._bounds
        if not self._radius:
            return lane_starts[lanes] + numbers
        if self._n_lanes == 1 and len(numbers):
            return self._stream(streams, 0, int(numbers[0])).take(numbers)
        if len(numbers) == 0:
            return numbers
        by_lane = np.argsort(lanes.astype(np.uint16) if self._n_lanes <= 1 << 16 else lanes, kind="stable")
        edges = np.flatnonzero(np.diff(lanes[by_lane])) + 1
        positions = np.empty(len(lanes), np.int64)
        for rows in np.split(by_lane, edges):
            lane = int(lanes[rows[0]])
            stream = self._stream(streams, lane, int(numbers[rows[0]]))
            positions[rows] = lane_starts[lane] + stream.take(numbers[rows])
        return positions
