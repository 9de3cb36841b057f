"""Scan feed: has the bytes fetched of shards that are scanned while they arrive."""

from __future__ import annotations

from streamload.decode.failure import Attempt
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key, shard_and_number
from streamload.index.tables import Tables
from streamload.limits import DECOMPRESSED_AT_ONCE, SCANNED_PARTS, SCANNED_PARTS_SHARE
from streamload.schedule.scans import Scans

__all__ = ["ScanFeed"]


class ScanFeed:
    """Holds the parts that scans need, from where each shard's next scan begins; notifies scans of what has arrived.

    Args:
        scans: the shards to scan.
        tables: get the size and the ETag that a shard's first response states.
        fetcher: fetches the parts.
    """

    def __init__(self, scans: Scans, tables: Tables, fetcher: Fetcher) -> None:
        self._scans = scans
        self._tables = tables
        self._fetcher = fetcher
        self._held: dict[int, range] = {}
        # Those that come later must not take the room of those that come first.
        most_bytes = fetcher.ledger.budget_bytes // SCANNED_PARTS_SHARE
        self._parts_ahead = max(1, min(SCANNED_PARTS, most_bytes // PART_BYTES))
        self._decompressed_at_once = max(1, min(DECOMPRESSED_AT_ONCE, most_bytes // (2 * PART_BYTES)))

    def pump(self) -> bool:
        """Request the parts needed now, and notify the scans of what has arrived.

        Returns:
            Whether a shard needs no scan any more: its first response identified it as one scanned in an earlier run,
            or a part of it cannot be fetched.
        """
        for shard in [shard for shard in self._held if not self._scans.is_wanted(shard)]:
            self._hold(shard, range(0))
        found, left, looked_at = False, self._parts_ahead, set[int]()
        decompressed = self._decompressed_at_once
        for shard in self._scans.wanted():
            if left <= 0 or decompressed <= 0:
                break  # thousands may follow, of which nothing has been requested
            looked_at.add(shard)
            known, left = self._look(shard, left)
            found = found or known
            decompressed -= self._fetcher.state_of(shard).compression is not None
        for shard in sorted(self._held.keys() - looked_at):
            found = self._look(shard, 0)[0] or found
        return found

    def evict(self) -> bool:
        """Free parts fetched for later scans, for a part that is needed sooner. No scan may be in flight.

        The freed parts are fetched again at their turn.

        Returns:
            Whether there is room now, or will be.
        """
        fetcher = self._fetcher
        first = fetcher.ledger.next_wanted()
        # The part needed first may be for a scan itself: then only the shards after that one are evicted.
        keeps = None if first is None or fetcher.ledger.is_reserved(first) else shard_and_number(first)[0]
        for shard in [shard for shard in self._held if shard != keeps]:
            fetcher.ledger.release(part_key(shard, number) for number in self._held.pop(shard))
        fetcher.follow_slots()
        return not fetcher.stalled or fetcher.evict()

    def _look(self, shard: int, left: int) -> tuple[bool, int]:
        """Notify the scans of what has arrived of a shard, and request more of it.

        Returns:
            Whether it became known without a scan, and how many parts may still be requested.
        """
        with Attempt() as attempt:
            return self._look_at(shard, left)
        assert attempt.error is not None
        if self._scans.is_scanning(shard):  # which reads what is held; it is met again then
            return False, left
        self._hold(shard, range(0))
        self._scans.fail(shard, attempt.error)
        return True, left

    def _look_at(self, shard: int, left: int) -> tuple[bool, int]:
        start = self._scans.next_bytes(shard)[0]
        end, total = self._fetcher.arrived_from(shard, start)
        if total is not None:
            self._tables.note_version(shard, total, self._fetcher.state_of(shard).pin.etag)
        if left <= 0:  # later parts are not held, and may be freed during the scan
            end = min(end, self._held[shard].stop * PART_BYTES)
        self._scans.available(shard, end, total)
        if not self._scans.is_wanted(shard):
            self._hold(shard, range(0))
            return True, left
        if left > 0:
            left -= self._want(shard, start // PART_BYTES, -(-end // PART_BYTES), total, left)
        return False, left

    def _want(self, shard: int, first: int, come: int, total: int | None, most: int) -> int:
        """Hold the parts from `first` on, and request the missing ones: a single one where the shard's end is unknown.

        Returns:
            How many of these have not arrived; at most `most`.
        """
        behind = max(first, come) + (1 if total is None else most)
        if total is not None:
            behind = min(behind, -(-total // PART_BYTES))
        self._hold(shard, range(min(first, behind), behind))
        keys = [part_key(shard, number) for number in range(max(first, come), behind)]
        if not self._fetcher.there(keys):
            self._fetcher.want(keys)
        return len(keys)

    def _hold(self, shard: int, wanted: range) -> None:
        if wanted == self._held.get(shard, range(0)):
            return  # to report freed memory would wake the fetcher, and that this feed, without end
        held = self._held.pop(shard, range(0))
        ledger = self._fetcher.ledger
        ledger.hold(part_key(shard, number) for number in wanted)
        ledger.release(part_key(shard, number) for number in held)
        if held:
            self._fetcher.freed()
        if wanted:
            self._held[shard] = wanted
