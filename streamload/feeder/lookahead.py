"""Plan the rows of an epoch ahead of their tasks, so that the parts they need are requested in time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from streamload.decode.failure import Attempt
from streamload.errors import StreamloadError
from streamload.feeder.messages import PipelineSettings
from streamload.feeder.planned import PlannedRows, locate
from streamload.feeder.scans import SCANNED_TOGETHER, Scans
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import part_edges, shard_and_number
from streamload.index.dataset import Dataset
from streamload.limits import BLOCK_ROWS, FIRST_BLOCK_ROWS, SCANNED_SHARDS
from streamload.order.plan import EpochPlan, MixturePlan, RowBlock
from streamload.order.sampling import Mixed
from streamload.order.share import EpochStart
from streamload.tar.table import ShardTable
from streamload.totals import Totals
from streamload.workers.pool import Pool


@dataclass(frozen=True, slots=True, eq=False)
class _Extent:
    """Where the samples of a table lie: int64[samples] first bytes and ends, both ascending."""

    table: ShardTable
    first: NDArray[np.int64]
    end: NDArray[np.int64]


class EpochNeeds:
    """Plans, uses and keeps parts for one epoch."""

    def __init__(self, fetcher: Fetcher, plan: EpochPlan, tables: Dataset) -> None:
        self._fetcher = fetcher
        self._window = fetcher.window
        self._plan = plan
        self._tables = tables
        self._parts: dict[int, dict[int, bool]] = {}  # by shard and key: held since a batch used it, or only kept
        self._advanced: dict[int, tuple[ShardTable | None, list[tuple[int, int]]]] = {}
        self._extents: dict[int, _Extent] = {}
        self._scans: dict[int, int] = {}
        fetcher.on_arrival.append(self.on_arrival)

    def plan_batches(self, batches: Iterable[list[int]]) -> None:
        """Fetch the parts of the batches that come next."""
        for keys in batches:
            self._window.plan(keys)
        self.advance()

    def are_present(self, keys: Collection[int]) -> bool:
        """Return True if the parts of a batch are. Raises what keeps one of them from coming."""
        return self._window.are_present(keys)

    def start(self, keys: Collection[int]) -> None:
        """Hold the parts of the next batch until it is made, and for this epoch until they are passed."""
        self._window.hold(keys)
        self._window.unplan(keys)
        for key in keys:
            shard, number = shard_and_number(key)
            if not self._parts.get(shard, {}).get(key) and not self.is_passed(shard, number):
                self._parts.setdefault(shard, {})[key] = True
                self._window.hold((key,))

    def keep(self, shard: int, scan: int) -> None:
        """Keep what comes of a shard while there is room: a scan is about to find rows of it."""
        self._scans[shard] = scan

    def advance(self) -> None:
        """Release what no later row needs, now that the plan has gone on."""
        for shard in list(self._parts):
            table, unpassed = self._tables.at_hand(shard), self._unpassed(shard)
            before = self._advanced.get(shard)
            if before is not None and before[0] is table and before[1] == unpassed:
                continue
            self._advanced[shard] = table, unpassed
            self._release(shard, [key for key in self._parts[shard] if self.is_passed(*shard_and_number(key))])
        for shard in [each for each in self._extents if each not in self._parts and not self._unpassed(each)]:
            del self._extents[shard]
        self._fetcher.notify()

    def close(self, unscheduled: Iterable[list[int]]) -> None:
        """Release everything but what batches hold. Idempotent.

        Args:
            unscheduled: the parts of the batches that were planned, and will not be scheduled.
        """
        if self.on_arrival in self._fetcher.on_arrival:
            self._fetcher.on_arrival.remove(self.on_arrival)
        for keys in unscheduled:
            self._window.unplan(keys, -1)
        for shard in list(self._parts):
            self._release(shard, list(self._parts[shard]))
        self._scans.clear()
        self.advance()

    def on_arrival(self, shard: int, key: int) -> None:
        """Keep a part that has come, if rows of its shard are yet to be planned."""
        # One that was evicted and fetched once more may come when the plan is past it, and nothing would release it.
        if shard in self._scans and not self.is_passed(*shard_and_number(key)):
            self._parts.setdefault(shard, {}).setdefault(key, False)
            self._advanced.pop(shard, None)
            self._window.keep(key, self._scans[shard])

    def _release(self, shard: int, keys: Iterable[int]) -> None:
        parts = self._parts[shard]
        for key in keys:
            if parts.pop(key):
                self._window.release((key,))
            self._window.unkeep(key)
        if not parts:
            del self._parts[shard]
            self._extents.pop(shard, None)
            self._advanced.pop(shard, None)

    def is_passed(self, shard: int, number: int) -> bool:
        """Return True if no row that is yet to be planned needs a part, as far as is known."""
        unpassed = self._unpassed(shard)
        table = self._tables.at_hand(shard)
        if not unpassed or table is None or shard in self._fetcher.compressed:
            return not unpassed
        extent = self._extents.get(shard)
        if extent is None or extent.table is not table:
            extent = self._extents[shard] = _extent(table)
        start, end = part_edges(number, None)
        if self._tables.is_growing(shard) and (not len(extent.end) or end > extent.end[-1]):
            return False
        first = int(np.searchsorted(extent.end, start, side="right"))
        after = int(np.searchsorted(extent.first, end, side="left"))
        return not any(first < piece_end and piece_start < after for piece_start, piece_end in unpassed)

    def _unpassed(self, shard: int) -> list[tuple[int, int]]:
        """Return the samples of a shard or sidecar that later rows may hold, as stretches `[start, end)`."""
        return self._tables.stretches(shard, self._plan.unpassed(self._tables.listing.owner(shard)))


def _extent(table: ShardTable) -> _Extent:
    starts = table.sample_start[:-1]
    if len(starts) == 0:
        return _Extent(table, np.empty(0, np.int64), np.empty(0, np.int64))
    ends = table.member_offset + table.member_size
    first = np.minimum.accumulate(np.minimum.reduceat(table.member_offset, starts)[::-1])[::-1]
    return _Extent(table, first, np.maximum.accumulate(np.maximum.reduceat(ends, starts)))


Source = tuple[PlannedRows, int]
"""A batch's rows: their block, and the number of the batch in it."""

MAX_RUN_ROWS = 16_384
"""The most rows of a run of batches, and the rows of a block of the plan."""

_MOST_LOOKAHEAD_ROWS = 1 << 17
_LOCAL_SCANS_AHEAD = 4
_TABLES_AHEAD = 8
# Shards whose first parts are kept for rows that a scan will find; thousands may wait to be scanned.
_KEPT_AHEAD = 64


class Lookahead:
    """Yields the batches of a plan, each as soon as its bytes are resident.

    One block of rows at a time is planned for a local dataset. If bytes must be fetched, further blocks are planned
    while the fetcher has too few requests to be busy.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        start: EpochStart,
        *,
        tables: Dataset,
        scans: Scans,
        pool: Pool,
        totals: Totals,
        fetcher: Fetcher | None,
    ) -> None:
        self.start = start
        self._settings = settings
        self._tables = tables
        self._scans = scans
        self._pool = pool
        self._totals = totals
        self._fetcher = fetcher
        self._plan = plan = _plan(settings, tables, start)
        shard_order = plan.shards_ahead()  # in which the plan reaches them
        self._scan_order = iter(shard_order)
        self._table_order = iter(shard_order)
        self._tables_ahead: list[int] = []
        self._reached: set[int] = set()
        self._needs = None if fetcher is None else EpochNeeds(fetcher, plan, tables)
        self._blocks: deque[tuple[RowBlock, list[int]]] = deque()
        self._located: deque[tuple[PlannedRows, list[int]]] = deque()
        self._block_rows = FIRST_BLOCK_ROWS  # so that the first batch comes soon
        self._next_batch = 0
        self._finished: list[int] = []
        self._planned_all = False

    @property
    def exhausted(self) -> bool:
        """Whether every batch has been taken."""
        return self._planned_all and not self._blocks and not self._located

    @property
    def blocked(self) -> bool:
        """Whether the next batch waits for bytes, or for the count of a shard. Raises why they cannot be fetched."""
        if self._needs is None or not self._located:
            return not self._planned_all and not self._blocks and bool(self._missing())
        planned, _ = self._located[0]
        return not self._needs.are_present(planned.parts[self._next_batch])

    @property
    def in_block(self) -> bool:
        """Whether the next batch belongs to the same block as the previous one."""
        return bool(self._next_batch)

    def take(self) -> Source | None:
        """Take the next batch; None at the end, or while its bytes are not resident.

        Raises:
            StreamloadError: it cannot come; so does the next call, as long as that is so.
        """
        if not self._located or self._fetcher is not None:
            with Attempt() as attempt:
                self._look_ahead()
            if attempt.error is not None and not self._located:
                raise attempt.error  # before, it is no matter, and is met again
        if not self._located:
            return None
        (planned, finished), number = self._located[0], self._next_batch
        if self._needs is not None:
            if not self._needs.are_present(planned.parts[number]):
                return None
            self._needs.start(planned.parts[number])
        self._next_batch += 1
        if self._next_batch == planned.batches:
            self._next_batch = 0
            self._located.popleft()
            self._finish(finished)
            if self.exhausted:
                self.close()  # what is fetched from now on is for the next epoch
        return planned, number

    def close(self) -> None:
        """Cancel everything but the batches already taken."""
        self._planned_all = True
        if self._needs is not None:
            self._needs.close([parts for planned, _ in self._located for parts in planned.parts][self._next_batch :])
        self._located.clear()
        self._blocks.clear()

    def _look_ahead(self) -> None:
        started = perf_counter()
        while self._wants_more() and self._plan_block():
            pass
        while self._blocks and self._locate_block():
            pass
        if self._needs is not None and not self._tables.counts.complete and self._plan.lanes == 1:
            for shard, turn in self._scans.arriving(_KEPT_AHEAD):  # their rows come next
                self._needs.keep(shard, turn)
        self._totals["plan_s"] += perf_counter() - started

    def _wants_more(self) -> bool:
        if self._planned_all:
            return False
        if not self._located and not self._blocks:
            return True
        rows = sum(len(planned.table) for planned, _ in self._located)
        return (
            self._fetcher is not None
            and len(self._blocks) < 2
            and rows + sum(len(block.shard) for block, _ in self._blocks) < _MOST_LOOKAHEAD_ROWS
            and len(self._fetcher.window.missing.ranks) < self._fetcher.most_requests
        )

    def _plan_block(self) -> bool:
        """Plan the next block of rows; False while counts are missing, and at the end."""
        while missing := self._missing():
            self._scans.request(missing)
            if not self._located and not self._blocks:
                self._scans.check(missing[:1])  # the first is needed for certain
            if self._missing() == missing:  # none of them is in an index that was read just now
                self._scans.put_first(missing[0])
                if self._fetcher is not None:
                    self._scan_ahead()
                return False
        block = self._plan.take(self._block_rows)
        self._block_rows = min(4 * self._block_rows, MAX_RUN_ROWS if self._fetcher is None else BLOCK_ROWS)
        finished = self._plan.finished()
        if block is None:
            self._planned_all = True
            self._finish(finished)
            if self.exhausted:
                self.close()
            elif self._needs is not None:
                self._needs.advance()
            return False
        self._blocks.append((block, finished))
        self._scan_ahead()
        if self._fetcher is not None:
            self._want_tables_ahead(block)
        return True

    def _missing(self) -> list[int]:
        return self._plan.missing(SCANNED_TOGETHER * self._pool.capacity)

    def _want_tables_ahead(self, block: RowBlock) -> None:
        """Load the tables of the few shards that come next: one may be as large as a part."""
        assert self._fetcher is not None
        self._reached.update(block.shard.tolist())
        self._tables_ahead = [shard for shard in self._tables_ahead if shard not in self._reached]
        while len(self._tables_ahead) < _TABLES_AHEAD and (shard := next(self._table_order, None)) is not None:
            if shard not in self._reached:
                self._tables_ahead.append(shard)
        self._fetcher.index_tables.request(self._tables_ahead)

    def _scan_ahead(self) -> None:
        """Scan shards before the plan comes to them: as many as are fetched at once, if they are fetched."""
        most = _LOCAL_SCANS_AHEAD if self._fetcher is None else SCANNED_SHARDS
        if not self._tables.counts.complete:
            self._scans.request(itertools.islice(self._scan_order, max(0, most - self._scans.outstanding)))

    def _locate_block(self) -> bool:
        """Locate the rows of the first block; False while tables are missing.

        If one of its tables cannot be had, the block is halved, so that the batches before that still come.
        """
        with Attempt() as attempt:
            return self._locate_first()
        block, finished = self._blocks[0]
        if not isinstance(attempt.error, StreamloadError) or len(block.ends) == 1:
            assert attempt.error is not None
            raise attempt.error
        first, second = block.halves()
        self._blocks.popleft()
        self._blocks.extendleft([(second, finished), (first, [])])
        return True

    def _locate_first(self) -> bool:
        block, finished = self._blocks[0]
        fetcher, settings = self._fetcher, self._settings
        if fetcher is not None and not fetcher.index_tables.has(dict.fromkeys(block.shard.tolist())):
            return False
        planned = locate(block, self._tables, settings.fields, verify=settings.verify, fetcher=fetcher)
        self._blocks.popleft()  # only now: what has failed must fail again on the next call
        self._located.append((planned, finished))
        if self._needs is not None:
            self._needs.plan_batches(planned.parts)
        return True

    def _finish(self, shards: list[int]) -> None:
        """Release the shards that a block was the last to need, once the next block has been scheduled."""
        finished, self._finished = self._finished, shards
        if finished:
            finished = self._tables.with_sidecars(finished)
            self._pool.drop(self._pool.shards.finish(finished))
            if self._fetcher is not None:
                self._fetcher.finish(finished)


def _plan(settings: PipelineSettings, tables: Dataset, start: EpochStart) -> EpochPlan:
    plan = MixturePlan if isinstance(settings.order.sampling, Mixed) else EpochPlan
    return plan(
        settings.order,
        tables.counts,
        start.epoch,
        start.rank,
        start.world_size,
        start=start.position,
        numbers=start.numbers,
        share=start.share,
    )
