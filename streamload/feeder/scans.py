"""Scans: which shards must be scanned, and what the scans find."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from streamload.decode.failure import Attempt, error_from
from streamload.decode.tasks import ScanDone, ScannedShard, ScanTask
from streamload.errors import StreamloadError
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES
from streamload.fetch.window import raise_first
from streamload.index.dataset import Dataset
from streamload.workers.protocol import Pool

SCANNED_TOGETHER, _SCANNED_TOGETHER_BYTES = 16, 4 << 20
"""The most shards of one task, and their bytes: some milliseconds, so that all workers share what is waiting."""

# So much of a shard whose turn has not come is scanned at once, or all of it, since a task has a cost of its own.
_ARRIVING_BYTES = 4 * PART_BYTES


@dataclass(slots=True)
class _Arriving:
    """A shard that is scanned while it arrives.

    Attributes:
        turn: orders the shards as they were requested; below 0 where one was put first.
        available: the end of the resident bytes, counted from the next scan's start without a gap.
        total: the shard's size, where it is known.
        in_flight: a scan of it is in flight.
    """

    turn: int
    available: int = 0
    total: int | None = None
    in_flight: bool = False


class Scans:
    """Finds the counts of shards: in an index, or by a scan.

    A local shard is scanned at once and as a whole, and small ones together, by one task. One that must be fetched is
    scanned piece by piece, one scan at a time: whoever fetches it reads `wanted` and `next_bytes`, and reports what is
    `available`.

    Args:
        tables: gets what is found.
        fetcher: has the shards that are scanned while they arrive; None where there are none.

    Attributes:
        numbers: the numbers of tasks, unique within a pool.
    """

    def __init__(self, tables: Dataset, *, fetcher: Fetcher | None = None) -> None:
        self._tables = tables
        self._fetcher = fetcher
        self._waiting: deque[int] = deque()
        self._requested: set[int] = set()
        self._arriving: OrderedDict[int, _Arriving] = OrderedDict()
        self._noted_of: set[int] = set()
        self._turns = itertools.count()
        self._first_turns = itertools.count(-1, -1)
        self._started: dict[int, list[int]] = {}
        self._errors: dict[int, Exception] = {}
        self.numbers: Iterator[int] = itertools.count()

    @property
    def in_flight(self) -> bool:
        """Whether a scan is in flight."""
        return bool(self._started)

    @property
    def outstanding(self) -> int:
        """How many shards have been requested whose counts are not known yet."""
        return len(self._requested)

    def request(self, shards: Iterable[int]) -> None:
        """Request the counts of some shards.

        Raises:
            DatasetIndexError: an index is damaged.
        """
        for shard in shards:
            if shard in self._requested or self._is_known(shard):
                continue
            self._requested.add(shard)
            if self._fetcher is not None and shard in self._fetcher.fetched:
                self._arriving[shard] = _Arriving(next(self._turns))
            else:
                self._waiting.append(shard)

    def put_first(self, shard: int) -> None:
        """Scan a requested shard before all others, since a batch waits for it.

        They may have been requested by a pass that was left, or by whoever counts all samples.
        """
        arriving = self._arriving.get(shard)
        if arriving is not None and arriving.turn >= 0 and not self._is_first(shard):
            arriving.turn = next(self._first_turns)
            self._arriving.move_to_end(shard, last=False)

    def wanted(self) -> list[int]:
        """The shards whose bytes are needed for scans, in the order of their turns."""
        return list(self._arriving)

    def is_wanted(self, shard: int) -> bool:
        """Whether a shard is among them."""
        return shard in self._arriving

    def is_scanning(self, shard: int) -> bool:
        """Whether a scan of a wanted shard is in flight."""
        return self._arriving[shard].in_flight

    def turn_of(self, shard: int) -> int:
        """Orders the wanted shards: scans are done in this order."""
        return self._arriving[shard].turn

    def next_bytes(self, shard: int) -> tuple[int, int]:
        """The bytes that the next scan of a wanted shard needs at least, as start and end.

        Scans are done with everything before the start. The end may lie beyond the end of the shard.
        """
        return self._tables.next_scan(shard)

    def available(self, shard: int, end: int, total: int | None = None) -> None:
        """Report how much of a shard is resident; shards that are not wanted are ignored.

        Args:
            shard: the shard.
            end: the end of the resident bytes, without a gap from the start of `next_bytes` on. It may be less than
                before, where parts were evicted.
            total: the shard's size, where it is known.
        """
        arriving = self._arriving.get(shard)
        if arriving is None:
            return
        self._noted_of.add(shard)
        arriving.available = end
        arriving.total = total if total is not None else arriving.total

    def next_task(self) -> ScanTask | None:
        """The next scan to do; None where there is none, or its bytes are not resident."""
        if self._waiting:
            return self._start(self._next_whole())
        # Not of all wanted shards: thousands may wait, of which nothing has arrived.
        for shard in sorted(self._noted_of, key=lambda shard: self._arriving[shard].turn):
            arriving = self._arriving[shard]
            start, needs = self._tables.next_scan(shard)
            end, total = arriving.available, arriving.total
            least = needs if total is None else min(needs, total)
            if arriving.in_flight or end < least:
                continue
            assert self._fetcher is not None
            end = min(end, self._fetcher.arrived_from(shard, start)[0])  # some of it may have been evicted
            if end >= least and (end - start >= _ARRIVING_BYTES or total in (None, end) or self._is_first(shard)):
                arriving.in_flight = True
                return self._start((shard,), start, end, total)
        return None

    def _is_first(self, shard: int) -> bool:
        """Whether no other wanted shard comes before, so that the plan probably waits for this one."""
        return shard == next(iter(self._arriving))

    def submit(self, task: ScanTask, pool: Pool) -> None:
        """Have a scan done. A shard of it that cannot be opened has failed, and the others are scanned without it."""
        with Attempt() as attempt:
            pool.submit(task)
        if attempt.error is None:
            return
        if not isinstance(attempt.error, StreamloadError):
            raise attempt.error
        self._end(task.number)
        url = getattr(attempt.error, "url", None)
        unopened = [shard for shard in task.shards if self._tables.url(shard) == url] or task.shards
        self._waiting.extendleft(shard for shard in reversed(task.shards) if shard not in unopened)
        for shard in unopened:
            self.fail(shard, attempt.error)

    def _next_whole(self) -> tuple[int, ...]:
        """The next shards to scan as a whole, by one task: several small ones, since a task has a cost of its own."""
        shards = [self._waiting.popleft()]
        left_bytes = _SCANNED_TOGETHER_BYTES - self._tables.listing.shard(shards[0]).bytes
        while self._waiting and len(shards) < SCANNED_TOGETHER:
            left_bytes -= self._tables.listing.shard(self._waiting[0]).bytes
            if left_bytes < 0:
                break
            shards.append(self._waiting.popleft())
        return tuple(shards)

    def _start(
        self, shards: tuple[int, ...], start: int = 0, available: int | None = None, total: int | None = None
    ) -> ScanTask:
        """A scan, which holds the parts that it reads until it is done."""
        task = ScanTask(next(self.numbers), shards, start, available, total)
        self._started[task.number] = []
        if self._fetcher is not None and available is not None:
            self._started[task.number] = keys = self._fetcher.keys_between(shards[0], start, available)
            self._fetcher.window.hold(keys)
        return task

    def on_done(self, done: ScanDone) -> None:
        """Take the result of a scan. Raises DatasetIndexError: an index is damaged."""
        self._end(done.number)
        for found in done.found:
            self._take(found)

    def _end(self, number: int) -> None:
        """A scan is not in flight any more."""
        held = self._started.pop(number, None)
        if held and self._fetcher is not None:
            self._fetcher.window.release(held)
            self._fetcher.notify()

    def _take(self, found: ScannedShard) -> None:
        if found.failure is not None:
            self.fail(found.shard, error_from(found.failure))
            return
        if found.piece is None:
            self._forget(found.shard)
            assert found.table is not None
            self._tables.add(found.shard, found.table)
            return
        if found.piece.ended or found.shard not in self._arriving:
            self._forget(found.shard)
        else:
            self._arriving[found.shard].in_flight = False
        self._tables.add_piece(found.shard, found.piece)

    def fail(self, shard: int, error: Exception) -> None:
        """Note that a shard cannot be scanned. That is no matter before someone needs it, and checks it."""
        self._forget(shard)
        self._requested.add(shard)  # it is not scanned again
        self._errors[shard] = error

    def check(self, shards: Collection[int]) -> None:
        """Raise why one of some shards cannot be scanned."""
        raise_first(self._errors, shards)

    def try_again(self) -> None:
        """Forget what has failed, so that it is scanned when it is requested again."""
        self._requested -= self._errors.keys()
        self._errors.clear()

    def _is_known(self, shard: int) -> bool:
        """Whether a shard's count is known, or can be found without a scan."""
        counts = self._tables.counts.values
        if counts[shard] < 0:
            self._tables.find(shard)
        return bool(counts[shard] >= 0)

    def _forget(self, shard: int) -> None:
        self._requested.discard(shard)
        self._arriving.pop(shard, None)
        self._noted_of.discard(shard)
