"""Scan shards: choose them, request their parts, and record their counts."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamload.decode.failure import Attempt, error_from
from streamload.decode.tasks import ScanDone, ScanTask
from streamload.errors import StreamloadError
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.index.dataset import Dataset
from streamload.limits import SCANNED_PARTS, SCANNED_PARTS_SHARE
from streamload.workers.pool import Pool

SCANNED_TOGETHER, _SCANNED_TOGETHER_BYTES = 16, 4 << 20
"""The most shards of one task, and their bytes: some milliseconds, so that all workers share what is waiting."""

# So much of a shard whose turn has not come is scanned at once, or all of it, since a task has a cost of its own.
_ARRIVING_BYTES = 4 * PART_BYTES

# What a shard counts for that is compressed, or before the first answer has stated its size.
_GUESSED_PARTS = 4


@dataclass(slots=True)
class _Arriving:
    """A shard that is scanned while it arrives.

    Attributes:
        turn: orders the shards as they were requested; below 0 if one was put first.
        in_flight: a scan of it is in flight.
        parts: those that are requested for its scans; None before `feed` comes to it.
    """

    turn: int
    in_flight: bool = False
    parts: range | None = None


class Scans:
    """Finds the counts of shards: in an index, or by a scan.

    Local shards are scanned as a whole, small ones together, by one task. One that must be fetched is scanned piece by
    piece, one scan at a time, as the parts come that `feed` requests.

    Args:
        tables: of the shards.
        fetcher: fetches some shards.
        keeps: what was scanned is kept while there is room, since rows of it come next.

    Attributes:
        requested: the shards whose counts are requested and not known yet, or cannot be known.
        errors: why shards cannot be scanned.
        numbers: of all tasks of a pool.
        in_flight: the parts that each scan in flight holds, by its number.
    """

    def __init__(self, tables: Dataset, fetcher: Fetcher | None, *, keeps: bool) -> None:
        self._tables = tables
        self._fetcher = fetcher
        self._keeps = keeps
        self._waiting: deque[int] = deque()
        self.requested: set[int] = set()
        self._arriving: OrderedDict[int, _Arriving] = OrderedDict()
        self._turns = itertools.count()
        self._first_turns = itertools.count(-1, -1)
        self.errors: dict[int, Exception] = {}
        self.in_flight: dict[int, list[int]] = {}
        self.numbers: Iterator[int] = itertools.count()

    def request(self, shards: Iterable[int]) -> None:
        """Request the counts of some shards.

        Raises:
            DatasetIndexError: an index is damaged.
        """
        counts = self._tables.counts.values
        for shard in shards:
            if shard not in self.requested and counts[shard] < 0:
                self._tables.find(shard)  # an index may know it
                if counts[shard] >= 0:
                    continue
                self.requested.add(shard)
                if self._fetcher is not None and shard in self._fetcher.fetched:
                    self._arriving[shard] = _Arriving(next(self._turns))
                else:
                    self._waiting.append(shard)

    def put_first(self, shard: int) -> None:
        """Scan a requested shard before all others: a batch waits for it."""
        arriving = self._arriving.get(shard)
        if arriving is not None and shard != next(iter(self._arriving)):
            self._request_parts(shard, arriving, range(0))  # the next `feed` requests them for the new turn
            arriving.turn = next(self._first_turns)
            self._arriving.move_to_end(shard, last=False)

    # -- what scans need -------------------------------------------------------------------------------------------

    def feed(self) -> bool:
        """Request the parts that scans need now, those of the first shards first; they stay until they are scanned.

        Returns:
            True if a shard has failed, since a part of it cannot be fetched.
        """
        fetcher, failed = self._fetcher, False
        if fetcher is None or not self._arriving:
            return False
        # Shards that come later must not take the room of those that come first.
        left = max(1, min(SCANNED_PARTS, fetcher.window.budget_bytes // SCANNED_PARTS_SHARE // PART_BYTES))
        for shard, arriving in list(itertools.islice(self._arriving.items(), SCANNED_PARTS)):  # thousands may follow
            if left <= 0:
                break
            start, needs = self._tables.next_scan(shard)
            end, total = fetcher.arrived_from(shard, start)
            parts, missing = range(1), _GUESSED_PARTS
            if total is not None and shard not in fetcher.compressed:
                parts = range(start // PART_BYTES, -(-min(total, max(needs, end + left * PART_BYTES)) // PART_BYTES))
                missing = parts.stop - -(-end // PART_BYTES)
            left -= missing
            self._request_parts(shard, arriving, parts)
            with Attempt() as attempt:
                fetcher.window.are_present([part_key(shard, number) for number in parts])
            if attempt.error is not None and not arriving.in_flight:  # else it is met again when that scan is done
                self.fail(shard, attempt.error)
                failed = True
        return failed

    def _request_parts(self, shard: int, arriving: _Arriving, parts: range) -> None:
        """Need these parts of a shard, and no others."""
        if self._fetcher is None or arriving.parts == parts:
            return  # to notify the fetcher would wake it, and `feed`, without end
        before, arriving.parts = set(arriving.parts or ()), parts
        window = self._fetcher.window
        for key in [part_key(shard, number) for number in before.difference(parts)]:
            if self._keeps and key in window.present:
                window.keep(key, arriving.turn)
            window.withdraw(key)
        for number in set(parts).difference(before):
            window.request(part_key(shard, number), arriving.turn)
        self._fetcher.notify()

    # -- tasks -----------------------------------------------------------------------------------------------------

    def submit_next(self, pool: Pool) -> bool:
        """Submit the next scan; False if there is none, or its bytes are not resident.

        A shard that cannot be opened has failed, and the others are scanned without it.
        """
        task = self._next_whole() if self._waiting else self._next_piece()
        if task is None:
            return False
        with Attempt() as attempt:
            pool.submit(task)
        if attempt.error is None:
            return True
        if not isinstance(attempt.error, StreamloadError):
            raise attempt.error
        self._end(task.number)
        url = getattr(attempt.error, "url", None)
        unopened = [shard for shard in task.shards if self._tables.url(shard) == url] or task.shards
        self._waiting.extendleft(shard for shard in reversed(task.shards) if shard not in unopened)
        for shard in unopened:
            self.fail(shard, attempt.error)
        return True

    def _next_whole(self) -> ScanTask:
        """Return a task for the next shards to scan as a whole: several small ones, since each task has a cost."""
        shards = [self._waiting.popleft()]
        left_bytes = _SCANNED_TOGETHER_BYTES - self._tables.listing.shard(shards[0]).bytes
        while self._waiting and len(shards) < SCANNED_TOGETHER:
            left_bytes -= self._tables.listing.shard(self._waiting[0]).bytes
            if left_bytes < 0:
                break
            shards.append(self._waiting.popleft())
        task = ScanTask(next(self.numbers), tuple(shards))
        self.in_flight[task.number] = []
        return task

    def _next_piece(self) -> ScanTask | None:
        """Return a task for the first shard with enough bytes; its parts are held until the task is done."""
        for number, (shard, arriving) in enumerate(itertools.islice(self._arriving.items(), SCANNED_PARTS)):
            if self._fetcher is None or arriving.in_flight or arriving.parts is None:
                continue
            start, needs = self._tables.next_scan(shard)
            end, total = self._fetcher.arrived_from(shard, start)
            is_worth_it = number == 0 or end - start >= _ARRIVING_BYTES or total in (None, end)
            if is_worth_it and end >= (needs if total is None else min(needs, total)):
                arriving.in_flight = True
                task = ScanTask(next(self.numbers), (shard,), start, end, total)
                self.in_flight[task.number] = keys = self._fetcher.keys_between(shard, start, end)
                self._fetcher.window.hold(keys)
                return task
        return None

    def on_done(self, done: ScanDone) -> None:
        """Record the result of a scan. Raises DatasetIndexError if an index is damaged."""
        self._end(done.number)
        for found in done.found:
            shard, piece = found.shard, found.piece
            if found.failure is not None:
                self.fail(shard, error_from(found.failure))
            elif piece is None:
                self._forget(shard)
                assert found.table is not None
                self._tables.add(shard, found.table)
            else:
                if piece.needs is None or shard not in self._arriving:
                    self._forget(shard)
                else:
                    self._arriving[shard].in_flight = False
                self._tables.add_piece(shard, piece)

    def _end(self, number: int) -> None:
        held = self.in_flight.pop(number, None)
        if held and self._fetcher is not None:
            self._fetcher.window.release(held)
            self._fetcher.notify()

    def fail(self, shard: int, error: Exception) -> None:
        """Mark a shard as failed; it is not scanned again before `retry_failed`."""
        self._forget(shard)
        self.requested.add(shard)
        self.errors[shard] = error

    def retry_failed(self) -> None:
        """Forget failures, so that their shards are scanned when they are requested again."""
        self.requested -= self.errors.keys()
        self.errors.clear()

    def _forget(self, shard: int) -> None:
        self.requested.discard(shard)
        arriving = self._arriving.pop(shard, None)
        if arriving is not None:
            self._request_parts(shard, arriving, range(0))
