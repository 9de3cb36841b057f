"""Scan feed: has the bytes fetched of shards that are scanned while they arrive."""

from __future__ import annotations

from streamload.decode.failure import Attempt
from streamload.feeder.scans import Scans
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.limits import DECOMPRESSED_AT_ONCE, SCANNED_PARTS, SCANNED_PARTS_SHARE

_FIRST_GUESS_PARTS = 4
"""Of a shard, before the first answer has stated a size."""


_State = tuple[int, int, int | None, int, bool]
"""Of a shard: its turn, where its next scan begins, its size, how often its parts have come or gone, and whether the
first shard comes before its rest."""


class ScanFeed:
    """Requests the parts that scans need, from where each shard's next scan begins; notifies scans of what has come.

    Args:
        scans: the shards to scan.
        fetcher: fetches the parts.
    """

    def __init__(self, scans: Scans, fetcher: Fetcher) -> None:
        self._scans = scans
        self._fetcher = fetcher
        self._requested: dict[int, tuple[int, range]] = {}
        self._looked: dict[int, tuple[_State, int]] = {}
        # Those that come later must not take the room of those that come first.
        most_bytes = fetcher.window.budget_bytes // SCANNED_PARTS_SHARE
        self._parts_ahead = max(1, min(SCANNED_PARTS, most_bytes // PART_BYTES))
        self._usual_parts = _FIRST_GUESS_PARTS
        self._first_is_unknown = False
        self._decompressed_at_once = max(1, min(DECOMPRESSED_AT_ONCE, most_bytes // (2 * PART_BYTES)))

    def pump(self) -> bool:
        """Request the parts needed now, and notify the scans of what has come.

        Returns:
            Whether a shard needs no scan any more, since a part of it cannot be fetched.
        """
        for shard in [shard for shard in self._requested if not self._scans.is_wanted(shard)]:
            self._request(shard, range(0))
        found, left, looked_at = False, self._parts_ahead, set[int]()
        decompressed = self._decompressed_at_once
        wanted = self._scans.wanted()
        self._first_is_unknown = bool(wanted) and self._is_unknown(wanted[0])
        for shard in wanted:
            if left <= 0 or decompressed <= 0:
                break  # thousands may follow, of which nothing has been requested
            looked_at.add(shard)
            failed, left = self._look(shard, left)
            found = found or failed
            decompressed -= self._fetcher.state_of(shard).compression is not None
        for shard in sorted(self._requested.keys() - looked_at):
            found = self._look(shard, 0)[0] or found
        return found

    def _look(self, shard: int, left: int) -> tuple[bool, int]:
        """Notify the scans of what has come of a shard, and request more of it.

        Returns:
            Whether the scan has failed, and how many parts may still be requested.
        """
        with Attempt() as attempt:
            return False, self._look_at(shard, left)
        assert attempt.error is not None
        if self._scans.is_scanning(shard):  # it is met again when that is done
            return False, left
        self._request(shard, range(0))
        self._scans.fail(shard, attempt.error)
        return True, left

    def _look_at(self, shard: int, left: int) -> int:
        start, window = self._scans.next_bytes(shard)[0], self._fetcher.window
        total = self._fetcher.state_of(shard).total_bytes
        state = self._scans.turn_of(shard), start, total, window.changes_of(shard), self._first_is_unknown
        before, missing = self._looked.get(shard, (None, 0))
        if state == before:
            return left - missing
        end, total = self._fetcher.arrived_from(shard, start)
        self._scans.available(shard, end, total)
        if left > 0:
            missing = self._request_from(shard, start // PART_BYTES, -(-end // PART_BYTES), total, left)
            if missing < left:  # else not all of them have been requested
                self._looked[shard] = state, missing
            left -= missing
        return left

    def _request_from(self, shard: int, first: int, missing: int, total: int | None, most: int) -> int:
        """Request the parts from the first missing one on: a single one where the end of the shard, or of the first of
        all shards, is unknown, so that the rest of that one finds connections free.

        What has come from `first` on is needed until it has been scanned.

        Returns:
            How many are missing, at most `most`. Where the end is unknown, as many as the last shard has whose size
            became known: the answer states the size, and the rest is requested before later shards.
        """
        missing = max(first, missing)
        end = missing + 1 if total is None else max(missing, min(missing + most, -(-total // PART_BYTES)))
        now = min(end, missing + 1) if self._first_is_unknown else end
        self._request(shard, range(min(first, now), now))
        requested = [part_key(shard, number) for number in range(missing, now)]
        self._fetcher.are_present(requested)  # raises why one of them cannot be fetched
        if total is not None:
            self._usual_parts = max(1, -(-total // PART_BYTES))
        return self._usual_parts if self._is_unknown(shard) else end - missing

    def _is_unknown(self, shard: int) -> bool:
        """Whether the first answer is about to state the size of a shard."""
        state = self._fetcher.state_of(shard)
        return state.total_bytes is None and state.compression is None

    def _request(self, shard: int, wanted: range) -> None:
        turn_before, before = self._requested.pop(shard, (0, range(0)))
        turn = self._scans.turn_of(shard) if wanted else turn_before
        if wanted:
            self._requested[shard] = turn, wanted
        else:
            self._looked.pop(shard, None)
        if (turn, wanted) == (turn_before, before):
            return  # to notify the fetcher would wake it, and that this feed, without end
        window = self._fetcher.window
        for number in set(before).difference(wanted):
            window.withdraw(part_key(shard, number))
        for number in wanted if turn != turn_before else set(wanted).difference(before):
            window.request(part_key(shard, number), turn)
        self._fetcher.notify()
