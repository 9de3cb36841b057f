"""What one epoch needs of fetched shards: parts are asked for ahead, and kept as long as the epoch may use them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.dataset.table import ShardTable
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_edges, parts_by_share, shard_and_number
from streamload.fetch.tables import Tables
from streamload.order.plan import EpochPlan, RowBlock

__all__ = ["EpochParts"]


_MOST_GUESSED = 32
_GUESSED_SHARE = 4
"""Not more than a quarter of the byte budget is spent on guesses."""


@dataclass(frozen=True, slots=True, eq=False)
class _Extent:
    """Where the samples of a table lie: int64[samples] first bytes and ends, both ascending."""

    table: ShardTable
    first: NDArray[np.int64]
    end: NDArray[np.int64]


class EpochParts:
    """Wants, uses and pins parts for one epoch.

    Args:
        fetcher: brings them.
        plan: the epoch's; says which samples later rows may hold.
        tables: say where samples lie.
    """

    def __init__(self, fetcher: Fetcher, plan: EpochPlan, tables: Tables) -> None:
        self._fetcher = fetcher
        self._plan = plan
        self._tables = tables
        self._pinned: dict[int, set[int]] = {}
        self._extents: dict[int, _Extent] = {}
        self._keeping: set[int] = set()
        self._kept: set[int] = set()
        self._guessed: list[int] = []
        self._stop_listening: Callable[[], None] | None = fetcher.on_arrival(self._on_arrival)

    def guess(self, block: RowBlock) -> None:
        """Have parts brought in which rows probably lie, while the tables that say where are on their way themselves.

        They are held until `located` says that it is known now.
        """
        if self._guessed:
            return
        sizes, counts = np.full(len(block.shard), -1, np.int64), self._tables.counts.values[block.shard]
        for shard in np.unique(block.shard).tolist():
            sizes[block.shard == shard] = self._fetcher.size_by_index(shard)
        ledger = self._fetcher.ledger
        most = min(_MOST_GUESSED, ledger.budget_bytes // (_GUESSED_SHARE * PART_BYTES))
        self._guessed = parts_by_share(block.shard, block.sample, sizes, counts)[:most]
        ledger.hold(self._guessed)
        self._fetcher.want(self._guessed)

    def located(self) -> None:
        """What was guessed is known now, or not wanted any more."""
        guessed, self._guessed = self._guessed, []
        self._fetcher.ledger.release(guessed)

    def want(self, keys: list[int]) -> None:
        """Have parts brought for a batch that comes after all those before."""
        self._fetcher.ledger.reserve(keys)
        self._fetcher.want(keys)

    def there(self, keys: Collection[int]) -> bool:
        """Whether the parts of a batch are there. Raises what keeps one of them from coming."""
        return self._fetcher.there(keys)

    def use(self, keys: Collection[int]) -> None:
        """The next batch is dealt out: it holds its parts until it is `done`, and the epoch until they are passed."""
        self._fetcher.ledger.use(keys)
        for key in keys:
            if not self._is_passed(key):
                self._pin(key)

    def done(self, keys: Collection[int]) -> None:
        """A batch that was dealt out was made, or is not wanted any more."""
        self._fetcher.ledger.release(keys)
        self._fetcher.freed()

    def cancel(self, keys: Collection[int]) -> None:
        """A batch will not be dealt out; the last one first."""
        self._fetcher.ledger.cancel(keys)

    def keep(self, shard: int) -> None:
        """What comes of this shard is kept if there is room, since rows of it will be planned when it is scanned."""
        if shard not in self._keeping:
            self._keeping.add(shard)
            self._fetcher.ledger.expect_rows(shard)

    def advance(self) -> None:
        """The plan has gone on: let go of what no later row needs."""
        self._unkeep([key for key in self._kept if self._is_passed(key)])
        for key in [key for keys in self._pinned.values() for key in keys]:
            if self._is_passed(key):
                self._unpin(key)
        self._fetcher.freed()

    def close(self) -> None:
        """Let go of everything but what batches hold. Twice is fine."""
        if self._stop_listening is not None:
            self._stop_listening()
            self._stop_listening = None
        for keys in list(self._pinned.values()):
            for key in list(keys):
                self._unpin(key)
        self._unkeep(list(self._kept))
        self.located()
        for shard in self._keeping:
            self._fetcher.ledger.expect_no_rows(shard)
        self._keeping.clear()
        self._fetcher.freed()

    def _on_arrival(self, shard: int, key: int) -> None:
        if shard in self._keeping:
            self._kept.add(key)
            self._fetcher.ledger.keep(key)

    def _unkeep(self, keys: list[int]) -> None:
        for key in keys:
            self._kept.discard(key)
            self._fetcher.ledger.unkeep(key)

    def _pin(self, key: int) -> None:
        keys = self._pinned.setdefault(shard_and_number(key)[0], set())
        if key not in keys:
            keys.add(key)
            self._fetcher.ledger.pin(key)

    def _unpin(self, key: int) -> None:
        shard = shard_and_number(key)[0]
        self._pinned[shard].discard(key)
        if not self._pinned[shard]:
            del self._pinned[shard]
            self._extents.pop(shard, None)
        self._fetcher.ledger.unpin(key)

    def _is_passed(self, key: int) -> bool:
        """Whether no row that is yet to be planned needs a part, as far as can be told."""
        shard, number = shard_and_number(key)
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
