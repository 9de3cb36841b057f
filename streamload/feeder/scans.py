"""Scans: which shards must be scanned, the parts that this needs, and what the scans find."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from streamload.decode.failure import Attempt, error_from
from streamload.decode.tasks import ScanDone, ScannedShard, ScanTask
from streamload.errors import StreamloadError
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.window import raise_first
from streamload.index.dataset import Dataset
from streamload.limits import DECOMPRESSED_AT_ONCE, SCANNED_PARTS, SCANNED_PARTS_SHARE
from streamload.workers.pool import Pool

SCANNED_TOGETHER, _SCANNED_TOGETHER_BYTES = 16, 4 << 20
"""The most shards of one task, and their bytes: some milliseconds, so that all workers share what is waiting."""

# So much of a shard whose turn has not come is scanned at once, or all of it, since a task has a cost of its own.
_ARRIVING_BYTES = 4 * PART_BYTES

# Of a shard, before the first answer has stated a size.
_FIRST_GUESS_PARTS = 4


@dataclass(slots=True)
class _Arriving:
    """A shard that is scanned while it arrives.

    Attributes:
        turn: orders the shards as they were requested; below 0 if one was put first.
        end: the end of the resident bytes, without a gap from the next scan's start on.
        total: the shard's size, if known.
        in_flight: a scan of it is in flight.
        requested: the parts that were requested for its scans, and for which turn.
        looked: what the requested parts depended on, and how many of them were missing.
    """

    turn: int
    end: int = 0
    total: int | None = None
    in_flight: bool = False
    requested: tuple[int, range] = (0, range(0))
    looked: tuple[tuple[int | None, ...], int] = ((), 0)


class Scans:
    """Finds the counts of shards: in an index, or by a scan.

    Local shards are scanned as a whole, small ones together, by one task. One that must be fetched is scanned piece by
    piece, one scan at a time, as the parts come that `feed` requests.

    `numbers` are those of all tasks of a pool.
    """

    def __init__(self, tables: Dataset, *, fetcher: Fetcher | None = None) -> None:
        self._tables = tables
        self._fetcher = fetcher
        self._waiting: deque[int] = deque()
        self._requested: set[int] = set()
        self._arriving: OrderedDict[int, _Arriving] = OrderedDict()
        self._fed: set[int] = set()  # those that `feed` has come to
        self._turns = itertools.count()
        self._first_turns = itertools.count(-1, -1)
        self._started: dict[int, list[int]] = {}  # the parts that each scan in flight holds
        self._errors: dict[int, Exception] = {}
        self._usual_parts = _FIRST_GUESS_PARTS
        self.numbers: Iterator[int] = itertools.count()

    @property
    def in_flight(self) -> bool:
        """Whether a scan is in flight."""
        return bool(self._started)

    @property
    def outstanding(self) -> int:
        """The number of requested shards whose counts are not known yet."""
        return len(self._requested)

    def request(self, shards: Iterable[int]) -> None:
        """Request the counts of some shards.

        Raises:
            DatasetIndexError: an index is damaged.
        """
        counts = self._tables.counts.values
        for shard in shards:
            if shard in self._requested:
                continue
            if counts[shard] < 0:
                self._tables.find(shard)  # an index may know it
            if counts[shard] >= 0:
                continue
            self._requested.add(shard)
            if self._fetcher is not None and shard in self._fetcher.fetched:
                self._arriving[shard] = _Arriving(next(self._turns))
            else:
                self._waiting.append(shard)

    def put_first(self, shard: int) -> None:
        """Scan a requested shard before all others: a batch waits for it."""
        arriving = self._arriving.get(shard)
        if arriving is not None and arriving.turn >= 0 and not self._is_first(shard):
            arriving.turn = next(self._first_turns)
            self._arriving.move_to_end(shard, last=False)

    def arriving(self, most: int) -> list[tuple[int, int]]:
        """Return the first shards that are scanned while they arrive, each with its turn."""
        return [(shard, each.turn) for shard, each in itertools.islice(self._arriving.items(), most)]

    # -- what scans need -------------------------------------------------------------------------------------------

    def feed(self) -> bool:
        """Request the parts that scans need now, those of the first shards first, and look at what has come.

        Returns:
            True if a shard has failed, since a part of it cannot be fetched.
        """
        if self._fetcher is None or not self._arriving:
            return False
        # Shards that come later must not take the room of those that come first.
        most_bytes = self._fetcher.window.budget_bytes // SCANNED_PARTS_SHARE
        left = max(1, min(SCANNED_PARTS, most_bytes // PART_BYTES))
        decompressed = max(1, min(DECOMPRESSED_AT_ONCE, most_bytes // (2 * PART_BYTES)))
        first = next(iter(self._arriving))  # whose first answer may be about to state its size
        first_is_unknown = first not in self._fetcher.compressed and self._fetcher.state_of(first).total_bytes is None
        looked_at: set[int] = set()
        for shard in list(itertools.islice(self._arriving, SCANNED_PARTS)):  # thousands may follow
            if left <= 0 or decompressed <= 0:
                break
            looked_at.add(shard)
            left -= self._look(shard, left, first_is_unknown=first_is_unknown)
            decompressed -= shard in self._fetcher.compressed
        for shard in sorted(self._fed - looked_at):
            looked_at.add(shard)
            self._look(shard, 0, first_is_unknown=first_is_unknown)
        return not looked_at <= self._arriving.keys()

    def _look(self, shard: int, most: int, *, first_is_unknown: bool) -> int:
        """Look at what has come of a shard, and request at most so many parts more; return how many are missing."""
        arriving = self._arriving[shard]
        self._fed.add(shard)
        with Attempt() as attempt:
            return self._request_next(shard, arriving, most, first_is_unknown=first_is_unknown)
        if attempt.error is not None and not arriving.in_flight:  # else it is met again when that scan is done
            self.fail(shard, attempt.error)
        return 0

    def _request_next(self, shard: int, arriving: _Arriving, most: int, *, first_is_unknown: bool) -> int:
        """Request the parts from the next scan's start on, as `_look`; raise why one of them cannot be fetched.

        While the size of the first shard is unknown, only one part of each shard is requested, so that the rest of the
        first one finds connections free. Parts are needed until they have been scanned.
        """
        assert self._fetcher is not None
        start, window = self._tables.next_scan(shard)[0], self._fetcher.window
        size_bytes = self._fetcher.state_of(shard).total_bytes
        depends_on = arriving.turn, start, size_bytes, window.changes[shard], first_is_unknown
        if arriving.looked[0] == depends_on:
            return arriving.looked[1]
        arriving.end, arriving.total = end, total = self._fetcher.arrived_from(shard, start)
        if most <= 0:
            return 0
        if shard in self._fetcher.compressed:
            self._request_parts(shard, arriving, range(1))
            window.are_present([part_key(shard, 0)])
            n_missing = 1
        else:
            first = start // PART_BYTES
            missing = max(first, -(-end // PART_BYTES))
            behind = missing + 1 if total is None else max(missing, min(missing + most, -(-total // PART_BYTES)))
            n_missing = behind - missing
            if first_is_unknown:
                behind = min(behind, missing + 1)
            self._request_parts(shard, arriving, range(min(first, behind), behind))
            window.are_present([part_key(shard, number) for number in range(missing, behind)])
            if total is None:  # the answer states it, and the rest comes before later shards
                n_missing = self._usual_parts
            else:
                self._usual_parts = max(1, -(-total // PART_BYTES))
        if n_missing < most:  # else not all of them have been requested
            arriving.looked = depends_on, n_missing
        return n_missing

    def _request_parts(self, shard: int, arriving: _Arriving, parts: range) -> None:
        """Need these parts of a shard, and no others."""
        assert self._fetcher is not None
        turn, before = arriving.requested
        if (turn, before) == (arriving.turn, parts):
            return  # to notify the fetcher would wake it, and `feed`, without end
        arriving.requested = arriving.turn, parts
        window = self._fetcher.window
        for number in set(before).difference(parts):
            window.withdraw(part_key(shard, number))
        for number in parts if turn != arriving.turn else set(parts).difference(before):
            window.request(part_key(shard, number), arriving.turn)
        self._fetcher.notify()

    # -- tasks -----------------------------------------------------------------------------------------------------

    def next_task(self) -> ScanTask | None:
        """Return the next scan to do; None if there is none, or its bytes are not resident."""
        if self._waiting:
            return self._start(self._next_whole())
        # Not of all that arrive: thousands may wait, of which nothing is here.
        for shard in sorted(self._fed, key=lambda shard: self._arriving[shard].turn):
            arriving = self._arriving[shard]
            start, needs = self._tables.next_scan(shard)
            end, total = arriving.end, arriving.total
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
        """Whether no other arriving shard comes before, so that the plan probably waits for this one."""
        return shard == next(iter(self._arriving))

    def submit(self, task: ScanTask, pool: Pool) -> None:
        """Submit a scan. A shard that cannot be opened has failed, and the others are scanned without it."""
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
        """Take the next shards to scan as a whole by one task: several small ones, since each task has a cost."""
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
        """Begin a scan, which holds the parts that it reads until it is done."""
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
        held = self._started.pop(number, None)
        if held and self._fetcher is not None:
            self._fetcher.window.release(held)
            self._fetcher.notify()

    def _take(self, found: ScannedShard) -> None:
        if found.failure is not None:
            self.fail(found.shard, error_from(found.failure))
        elif found.piece is None:
            self._forget(found.shard)
            assert found.table is not None
            self._tables.add(found.shard, found.table)
        else:
            if found.piece.needs is None or found.shard not in self._arriving:
                self._forget(found.shard)
            else:
                self._arriving[found.shard].in_flight = False
            self._tables.add_piece(found.shard, found.piece)

    def fail(self, shard: int, error: Exception) -> None:
        """Mark a shard as failed; it matters when `check` is called for it."""
        self._forget(shard)
        self._requested.add(shard)  # it is not scanned again
        self._errors[shard] = error

    def check(self, shards: Collection[int]) -> None:
        """Raise why one of some shards cannot be scanned."""
        raise_first(self._errors, shards)

    def try_again(self) -> None:
        """Forget failures, so that their shards are scanned when they are requested again."""
        self._requested -= self._errors.keys()
        self._errors.clear()

    def _forget(self, shard: int) -> None:
        self._requested.discard(shard)
        self._fed.discard(shard)
        arriving = self._arriving.pop(shard, None)
        if arriving is not None:
            self._request_parts(shard, arriving, range(0))
