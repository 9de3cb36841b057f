"""Which shards a plan has done with: each is named once, when no later batch can hold a sample of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.order.lanes import lane_bounds
from streamload.order.runs import SampleSequence

__all__ = ["ShardRetirement"]


class ShardRetirement:
    """Follows how far every lane has been emitted, and names the shards that lie wholly behind.

    A shard is cut into parts by the bounds of the lanes, and where it has several runs. Parts are passed in the order
    of their ends, so naming all shards costs one sort and one walk over the parts, however often it is asked.
    """

    def __init__(self, sequence: SampleSequence, n_lanes: int) -> None:
        self._sequence = sequence
        self._named = np.zeros(int(sequence.order.max(initial=-1)) + 1, bool)
        self._passed_parts = 0
        self._many_parts = n_lanes > 1 or sequence.has_repeats
        if self._many_parts:
            self._cut(n_lanes)

    def pass_positions(self, end: int) -> list[int]:
        """Name the shards of which, in every lane, all samples lie at positions (in the lane) below `end`."""
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
        """Name every shard that was not named yet, in the order of the epoch."""
        self._passed_parts = len(self._part_ends) if self._many_parts else self._sequence.known_shards
        return self._name(self._sequence.order)

    def _name(self, shards: NDArray[np.int64]) -> list[int]:
        fresh = list(dict.fromkeys(shards[~self._named[shards]].tolist()))
        self._named[shards] = True
        return fresh

    def _cut(self, n_lanes: int) -> None:
        """Cut the shards at the lanes' bounds; the parts are sorted by where they end in their lane."""
        bounds = lane_bounds(self._sequence.known_end, n_lanes)
        cuts = np.union1d(self._sequence.edges, bounds)
        starts, ends = cuts[:-1], cuts[1:]
        shards, _ = self._sequence.locate(starts)
        lane_starts = bounds[np.searchsorted(bounds, starts, side="right") - 1]
        ends_in_lane = ends - lane_starts
        by_end = np.argsort(ends_in_lane, kind="stable")
        self._part_ends, self._part_shards = ends_in_lane[by_end], shards[by_end]
        self._parts_left = np.bincount(shards, minlength=len(self._named))
