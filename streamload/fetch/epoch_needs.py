"""What one epoch needs of fetched shards: parts are planned ahead, and held until the epoch has passed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_edges, parts_by_share, shard_and_number
from streamload.fetch.window import Turns
from streamload.index.dataset import Dataset
from streamload.limits import GUESSED_PARTS, GUESSED_PARTS_SHARE
from streamload.order.distinct import distinct
from streamload.order.plan import EpochPlan, RowBlock
from streamload.tar.table import ShardTable


@dataclass(frozen=True, slots=True, eq=False)
class _Extent:
    """Where the samples of a table lie: int64[samples] first bytes and ends, both ascending."""

    table: ShardTable
    first: NDArray[np.int64]
    end: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Passed:
    """How far an epoch had come in a shard: as long as that is so, no part of it is passed that was not."""

    table: ShardTable | None
    unpassed: list[tuple[int, int]]


class EpochNeeds:
    """Plans, uses and keeps parts for one epoch.

    Args:
        fetcher: fetches them.
        plan: the epoch's; says which samples later rows may hold.
        tables: say where samples lie.
        turns: of the rank's batches, over all its epochs.
    """

    def __init__(self, fetcher: Fetcher, plan: EpochPlan, tables: Dataset, turns: Turns | None = None) -> None:
        self._fetcher = fetcher
        self._window = fetcher.window
        self._plan = plan
        self._tables = tables
        self._extents: dict[int, _Extent] = {}
        self._passed: dict[int, _Passed] = {}
        self._held: dict[int, set[int]] = {}
        self._scans: dict[int, int] = {}
        self._kept: dict[int, set[int]] = {}
        self._guessed: list[int] = []
        self._turns = turns or Turns()
        self._planned: deque[int] = deque()
        fetcher.begin_epoch(self)

    def guess(self, block: RowBlock) -> None:
        """Fetch parts in which rows probably lie, while the tables that locate them are still being fetched.

        They are needed until `plan_batches` says where the rows lie, or the epoch is closed.
        """
        if self._guessed:
            return
        sizes, counts = np.full(len(block.shard), -1, np.int64), self._tables.counts.values[block.shard]
        for shard in distinct(block.shard).tolist():
            sizes[block.shard == shard] = self._fetcher.size_by_index(shard)
        most = min(GUESSED_PARTS, self._window.budget_bytes // (GUESSED_PARTS_SHARE * PART_BYTES))
        self._guessed = parts_by_share(block.shard, block.sample, sizes, counts)[:most]
        self._window.plan(self._guessed, self._turns.next)
        self._fetcher.notify()

    def plan_batches(self, batches: Iterable[list[int]]) -> None:
        """Have the parts fetched of batches that come after all those before."""
        guessed, self._guessed = self._guessed, []
        self._window.cancel(guessed)
        for keys in batches:
            self._planned.append(self._turns.take())
            self._window.plan(keys, self._planned[-1])
        self.advance()
        self._fetcher.notify()

    def are_present(self, keys: Collection[int]) -> bool:
        """Whether the parts of a batch are. Raises what keeps one of them from coming."""
        return self._fetcher.are_present(keys)

    def start(self, keys: Collection[int]) -> None:
        """The next batch is scheduled: it holds its parts until `finish`, and the epoch until they are passed."""
        self._planned.popleft()
        self._window.start(keys)
        for key in keys:
            shard, number = shard_and_number(key)
            if key not in self._held.get(shard, ()) and not self.is_passed(shard, number):
                self._held.setdefault(shard, set()).add(key)
                self._window.hold((key,))

    def finish(self, keys: Collection[int]) -> None:
        """A batch that was scheduled was made, or is not wanted any more."""
        self._window.release(keys)
        self._fetcher.notify()

    def cancel(self, keys: Collection[int]) -> None:
        """A batch will not be scheduled; the last one first."""
        self._turns.give_back(self._planned.pop())
        self._window.cancel(keys)

    def keep(self, shard: int, scan: int) -> None:
        """Keep what comes of a shard while there is room: rows of it are planned when that scan is done."""
        self._scans[shard] = scan

    def advance(self) -> None:
        """The plan has gone on: release what no later row needs."""
        for shard in [shard for shard in {**self._held, **self._kept} if self._has_moved(shard)]:
            passed = [key for key in self._parts_of(shard) if self.is_passed(shard, shard_and_number(key)[1])]
            self._release(shard, passed)
        for shard in [shard for shard in self._extents if not self._unpassed(shard)]:
            self._forget_unused(shard)
        self._fetcher.notify()

    def close(self) -> None:
        """Release everything but what batches hold. Idempotent."""
        self._fetcher.end_epoch(self)
        for shard in {**self._held, **self._kept}:
            self._release(shard, self._parts_of(shard))
        self._scans.clear()
        self.plan_batches(())

    def on_arrival(self, shard: int, key: int) -> None:
        """A part has come."""
        # One that was evicted and fetched once more may come when the plan is behind it, and nothing would release it.
        if shard in self._scans and not self.is_passed(shard, shard_and_number(key)[1]):
            self._kept.setdefault(shard, set()).add(key)
            self._passed.pop(shard, None)
            self._window.keep(key, self._scans[shard])

    def is_behind(self, shard: int, number: int) -> bool:
        """Whether the epoch is in the middle of a shard, and has passed a part of it."""
        return bool(self._unpassed(shard)) and self.is_passed(shard, number)

    def _parts_of(self, shard: int) -> set[int]:
        return self._held.get(shard, set()) | self._kept.get(shard, set())

    def _release(self, shard: int, keys: Iterable[int]) -> None:
        held, kept = self._held.get(shard, set()), self._kept.get(shard, set())
        for key in keys:
            if key in held:
                held.discard(key)
                self._window.release((key,))
            if key in kept:
                kept.discard(key)
                self._window.unkeep(key)
        for parts in (self._held, self._kept):
            if shard in parts and not parts[shard]:
                del parts[shard]
        self._forget_unused(shard)

    def _forget_unused(self, shard: int) -> None:
        if shard not in self._held and shard not in self._kept:
            self._extents.pop(shard, None)
            self._passed.pop(shard, None)

    def _has_moved(self, shard: int) -> bool:
        """Whether the plan has come further in a shard, or more is known of that, since the last call."""
        before = self._passed.get(shard)
        now = self._passed[shard] = _Passed(self._tables.at_hand(shard), self._unpassed(shard))
        return before is None or before.table is not now.table or before.unpassed != now.unpassed

    def is_passed(self, shard: int, number: int) -> bool:
        """Whether no row that is yet to be planned needs a part, as far as is known."""
        unpassed = self._unpassed(shard)
        table = self._tables.at_hand(shard)
        if not unpassed or table is None:
            return not unpassed
        extent = self._extents.get(shard)
        if extent is None or extent.table is not table:
            extent = self._extents[shard] = _extent(table)
        start, end = part_edges(number, None)
        if self._tables.is_growing(shard) and (not len(extent.end) or end > extent.end[-1]):
            return False
        first = int(np.searchsorted(extent.end, start, side="right"))
        behind = int(np.searchsorted(extent.first, end, side="left"))
        return not any(first < piece_end and piece_start < behind for piece_start, piece_end in unpassed)

    def _unpassed(self, shard: int) -> list[tuple[int, int]]:
        """The samples of a shard or sidecar that later rows may hold, as stretches `[start, end)`."""
        return self._tables.stretches(shard, self._plan.unpassed(self._tables.listing.owner(shard)))


def _extent(table: ShardTable) -> _Extent:
    starts = table.sample_start[:-1]
    if len(starts) == 0:
        return _Extent(table, np.empty(0, np.int64), np.empty(0, np.int64))
    ends = table.member_offset + table.member_size
    first = np.minimum.accumulate(np.minimum.reduceat(table.member_offset, starts)[::-1])[::-1]
    return _Extent(table, first, np.maximum.accumulate(np.maximum.reduceat(ends, starts)))
