"""What one rank, or one feeder of it, must fetch of a bucket: read off the real plan of an epoch, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.fetch.parts import PART_BYTES
from streamload.order.plan import OrderOptions, RankPlan, ShardCounts

_ROWS_AT_ONCE = 1 << 14
_NUMBER_BITS = 32

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Reader:
    """Who reads an epoch: a rank, or one of the feeders that make its batches.

    Attributes:
        ranks: of the run.
        batch_size: of a rank.
        lanes: of the order.
        window: of the shuffle, in samples.
        feeders: of each rank; each makes an equal share of the rows of every batch, as a virtual rank.
        rank: whose batches.
        feeder: which of its feeders.
        in_turn: its feeders make whole batches in turn instead, as a `collate_fn` needs them.
    """

    ranks: int
    batch_size: int
    lanes: int
    window: int
    feeders: int = 1
    rank: int = 0
    feeder: int = 0
    in_turn: bool = False

    @property
    def rows_of_batch(self) -> int:
        """Of a batch of its own: a share of the rank's, or all of it."""
        return self.batch_size if self.in_turn else self.batch_size // self.feeders

    @property
    def turn(self) -> tuple[int, int]:
        """Its batches are those with this number, and then every so many."""
        return (self.feeder, self.feeders) if self.in_turn else (0, 1)

    def plan(self, counts: ShardCounts, *, epoch: int = 0, start: int = 0) -> RankPlan:
        """Its plan: that of rank `rank * feeders + feeder` of `ranks * feeders`; in turn, that of its rank."""
        options = OrderOptions(0, True, self.window, self.lanes, self.rows_of_batch, True, False)
        place = self.rank * self.feeders + self.feeder, self.ranks * self.feeders
        if self.in_turn:
            place = self.rank, self.ranks
        return RankPlan(options, counts, epoch, *place, start=start)


@dataclass(frozen=True)
class Traffic:
    """What the rows of a plan need.

    Attributes:
        rows: how many there are.
        shards: how many shards they are of.
        parts: how many parts of shards they lie in, each counted once.
        fetched_bytes: of these parts.
        row_bytes: of the rows themselves.
        most_held: the most parts that are needed both before and after some batch, and so are held at once.
    """

    rows: int
    shards: int
    parts: int
    fetched_bytes: int
    row_bytes: int
    most_held: int

    @property
    def times(self) -> float:
        """How many bytes are fetched for each byte that is wanted."""
        return self.fetched_bytes / self.row_bytes

    @property
    def held_bytes(self) -> int:
        """The memory for parts with which no part is fetched twice."""
        return self.most_held * PART_BYTES


def traffic(
    plan: RankPlan, samples: int, sample_bytes: int, most_rows: int | None = None, *, turn: tuple[int, int] = (0, 1)
) -> Traffic:
    """What the rest of a plan needs, or its first batches of so many rows.

    Args:
        plan: of an epoch, over shards that all have as many samples.
        samples: of a shard.
        sample_bytes: of each sample; in a shard they lie one after another.
        most_rows: the rows that are looked at, about; None for all.
        turn: the number of the first batch that counts, and how many there are from one to the next.
    """
    first_use: dict[int, int] = {}
    last_use: dict[int, int] = {}
    shards: set[int] = set()
    rows = 0
    for shard, sample in _blocks(plan, most_rows, *turn):
        shards.update(np.unique(shard).tolist())
        for reach in (0, sample_bytes - 1):  # a sample may lie in two parts
            keys = (shard << _NUMBER_BITS) | ((sample * sample_bytes + reach) // PART_BYTES)
            found, first = np.unique(keys, return_index=True)
            _, from_behind = np.unique(keys[::-1], return_index=True)
            uses = zip(found.tolist(), first.tolist(), (len(keys) - 1 - from_behind).tolist(), strict=True)
            for key, begin, end in uses:
                first_use.setdefault(key, rows + begin)
                first_use[key] = min(first_use[key], rows + begin)
                last_use[key] = max(last_use.get(key, 0), rows + end)
        rows += len(shard)
    begins, ends = np.sort(np.fromiter(first_use.values(), np.int64)), np.sort(np.fromiter(last_use.values(), np.int64))
    held = np.arange(1, len(begins) + 1) - ends.searchsorted(begins, side="left")
    starts = (np.fromiter(first_use, np.int64) & ((1 << _NUMBER_BITS) - 1)) * PART_BYTES
    fetched_bytes = int(np.minimum(PART_BYTES, samples * sample_bytes - starts).sum())
    return Traffic(rows, len(shards), len(begins), fetched_bytes, rows * sample_bytes, int(held.max(initial=0)))


def times_expected(reader: Reader, samples: int, sample_bytes: int) -> float:
    """By arithmetic: how many bytes are fetched for each wanted one, over an epoch and all readers.

    Several readers of one lane take turns: of every `turn` outputs of the lane, each has `own` in a row. The samples of
    a part leave within a window. So a reader finds some of them where its outputs and the window meet, and then
    misses a part of n samples only where none of them is among its own.

    Args:
        reader: any of them; the readers are a multiple of the lanes, or the other way round.
        samples: of the dataset.
        sample_bytes: of each.
    """
    readers = reader.ranks * reader.feeders
    of_lane = max(1.0, reader.ranks / reader.lanes) * reader.feeders if reader.in_turn else readers / reader.lanes
    edges = reader.lanes * PART_BYTES / (samples * sample_bytes)  # the part that two lanes share
    if of_lane <= 1:
        return 1.0 + edges
    own = reader.rows_of_batch * min(1.0, reader.ranks / reader.lanes)  # rows of a lane in a batch, one after another
    turn = own * of_lane
    meets = min(1.0, (reader.window + own) / turn)
    in_part = PART_BYTES / sample_bytes + 1  # and the one that lies across an edge
    finds = 1 - (1 - own / max(own, min(turn, reader.window))) ** in_part
    return of_lane * meets * finds + edges


def _blocks(plan: RankPlan, most_rows: int | None, first: int, step: int) -> Iterator[tuple[IntArray, IntArray]]:
    left, batches = most_rows, 0
    while left is None or left > 0:
        block = plan.take(_ROWS_AT_ONCE if left is None else min(left, _ROWS_AT_ONCE))
        if block is None:
            return
        numbers = np.repeat(batches + np.arange(len(block.ends)), np.diff(block.batch_edges))
        own = numbers % step == first
        batches += len(block.ends)
        left = None if left is None else left - len(block.shard)
        if own.any():
            yield block.shard[own], block.sample[own]
