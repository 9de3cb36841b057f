"""What one epoch needs of fetched shards: parts are requested ahead, and kept as long as the epoch may use them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_edges, parts_by_share, shard_and_number
from streamload.index.tables import Tables
from streamload.limits import GUESSED_PARTS, GUESSED_PARTS_SHARE
from streamload.order.plan import EpochPlan, RowBlock
from streamload.tar.table import ShardTable

__all__ = ["EpochParts"]


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


class EpochParts:
    """Wants, uses and keeps parts for one epoch.

    Args:
        fetcher: fetches them.
        plan: the epoch's; says which samples later rows may hold.
        tables: say where samples lie.
    """

    def __init__(self, fetcher: Fetcher, plan: EpochPlan, tables: Tables) -> None:
        self._fetcher = fetcher
        self._plan = plan
        self._tables = tables
        self._unpassed: dict[int, set[int]] = {}
        self._extents: dict[int, _Extent] = {}
        self._keeping: set[int] = set()
        self._kept: dict[int, set[int]] = {}
        self._passed: dict[int, _Passed] = {}
        self._guessed: list[int] = []
        self._stop_listening: Callable[[], None] | None = fetcher.on_arrival(self._on_arrival)

    def guess(self, block: RowBlock) -> None:
        """Fetch parts in which rows probably lie, while the tables that locate them are still being fetched.

        They are held until `located` says that it is known now.
        """
        if self._guessed:
            return
        sizes, counts = np.full(len(block.shard), -1, np.int64), self._tables.counts.values[block.shard]
        for shard in np.unique(block.shard).tolist():
            sizes[block.shard == shard] = self._fetcher.size_by_index(shard)
        ledger = self._fetcher.ledger
        most = min(GUESSED_PARTS, ledger.budget_bytes // (GUESSED_PARTS_SHARE * PART_BYTES))
        self._guessed = parts_by_share(block.shard, block.sample, sizes, counts)[:most]
        ledger.hold(self._guessed)
        self._fetcher.want(self._guessed)

    def located(self) -> None:
        """What was guessed is known now, or not wanted any more."""
        guessed, self._guessed = self._guessed, []
        self._fetcher.ledger.release(guessed)

    def want(self, keys: list[int]) -> None:
        """Have parts fetched for a batch that comes after all those before."""
        self._fetcher.ledger.reserve(keys)
        self._fetcher.want(keys)

    def there(self, keys: Collection[int]) -> bool:
        """Whether the parts of a batch are there. Raises what keeps one of them from coming."""
        return self._fetcher.there(keys)

    def use(self, keys: Collection[int]) -> None:
        """The next batch is scheduled: it holds its parts until it is `done`, and the epoch until they are passed."""
        self._fetcher.ledger.use(keys)
        for key in keys:
            shard, number = shard_and_number(key)
            if key not in self._unpassed.get(shard, ()) and not self._is_passed(shard, number):
                self._unpassed.setdefault(shard, set()).add(key)
                self._fetcher.ledger.hold((key,))

    def done(self, keys: Collection[int]) -> None:
        """A batch that was scheduled was made, or is not wanted any more."""
        self._fetcher.ledger.release(keys)
        self._fetcher.freed()

    def cancel(self, keys: Collection[int]) -> None:
        """A batch will not be scheduled; the last one first."""
        self._fetcher.ledger.cancel(keys)

    def keep(self, shard: int) -> None:
        """What comes of this shard is kept if there is room, since rows of it will be planned when it is scanned."""
        if shard not in self._keeping:
            self._keeping.add(shard)
            self._fetcher.ledger.expect_rows(shard)

    def advance(self) -> None:
        """The plan has gone on: release what no later row needs."""
        for shard in [shard for shard in {**self._unpassed, **self._kept} if self._has_moved(shard)]:
            for key in [*self._unpassed.get(shard, ())]:
                if self._is_passed(shard, shard_and_number(key)[1]):
                    self._let_go(shard, key)
            for key in [*self._kept.get(shard, ())]:
                if self._is_passed(shard, shard_and_number(key)[1]):
                    self._unkeep(shard, key)
        for shard in [shard for shard in self._extents if not self._plan.unpassed(shard)]:
            self._forget_unused(shard)
        self._fetcher.freed()

    def close(self) -> None:
        """Let go of everything but what batches hold. Idempotent."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        for shard in list(self._unpassed):
            for key in list(self._unpassed[shard]):
                self._let_go(shard, key)
        for shard in list(self._kept):
            for key in list(self._kept[shard]):
                self._unkeep(shard, key)
        self.located()
        for shard in self._keeping:
            self._fetcher.ledger.expect_no_rows(shard)
        self._keeping.clear()
        self._fetcher.freed()

    def _on_arrival(self, shard: int, key: int) -> None:
        # A part that went and was fetched once more may come when the plan is behind it, and no step of that let it go.
        if shard in self._keeping and not self._is_passed(shard, shard_and_number(key)[1]):
            self._kept.setdefault(shard, set()).add(key)
            self._passed.pop(shard, None)
            self._fetcher.ledger.keep(key)

    def _unkeep(self, shard: int, key: int) -> None:
        self._kept[shard].discard(key)
        if not self._kept[shard]:
            del self._kept[shard]
            self._forget_unused(shard)
        self._fetcher.ledger.unkeep(key)

    def _let_go(self, shard: int, key: int) -> None:
        self._unpassed[shard].discard(key)
        if not self._unpassed[shard]:
            del self._unpassed[shard]
            self._forget_unused(shard)
        self._fetcher.ledger.release((key,))

    def _forget_unused(self, shard: int) -> None:
        if shard not in self._unpassed and shard not in self._kept:
            self._extents.pop(shard, None)
            self._passed.pop(shard, None)

    def _has_moved(self, shard: int) -> bool:
        """Whether the plan has come further in a shard, or more is known of that, since the last call."""
        before = self._passed.get(shard)
        now = self._passed[shard] = _Passed(self._tables.at_hand(shard), self._plan.unpassed(shard))
        return before is None or before.table is not now.table or before.unpassed != now.unpassed

    def _is_passed(self, shard: int, number: int) -> bool:
        """Whether no row that is yet to be planned needs a part, as far as is known."""
        unpassed = self._plan.unpassed(shard)
        table = self._tables.at_hand(shard)
        if not unpassed or table is None:
            return not unpassed
        extent = self._extents.get(shard)
        if extent is None or extent.table is not table:
            extent = self._extents[shard] = _extent(table)
        start, end = part_edges(number, None)
        growing = self._tables.counts.values[shard] < 0
        if growing and (not len(extent.end) or end > extent.end[-1]):
            return False
        first = int(np.searchsorted(extent.end, start, side="right"))
        behind = int(np.searchsorted(extent.first, end, side="left"))
        return not any(first < piece_end and piece_start < behind for piece_start, piece_end in unpassed)


def _extent(table: ShardTable) -> _Extent:
    starts = table.sample_start[:-1]
    if len(starts) == 0:
        return _Extent(table, np.empty(0, np.int64), np.empty(0, np.int64))
    ends = table.member_offset + table.member_size
    first = np.minimum.accumulate(np.minimum.reduceat(table.member_offset, starts)[::-1])[::-1]
    return _Extent(table, first, np.maximum.accumulate(np.maximum.reduceat(ends, starts)))
