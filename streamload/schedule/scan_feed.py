"""Has the bytes of shards brought that are scanned while they arrive, and says to the scans how far they have come."""

from __future__ import annotations

from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key, shard_and_number
from streamload.index.tables import Tables
from streamload.limits import SCANNED_PARTS, SCANNED_PARTS_SHARE
from streamload.schedule.scans import Scans

__all__ = ["ScanFeed"]


class ScanFeed:
    """Holds the parts that scans want, from the place where the next scan begins on.

    Args:
        scans: what is to be scanned.
        tables: told what answers say of a shard.
        fetcher: brings the bytes.
    """

    def __init__(self, scans: Scans, tables: Tables, fetcher: Fetcher) -> None:
        self._scans = scans
        self._tables = tables
        self._fetcher = fetcher
        self._held: dict[int, range] = {}
        # Those that come later must not take the room of those that come first.
        self._parts_ahead = max(
            1, min(SCANNED_PARTS, fetcher.ledger.budget_bytes // (SCANNED_PARTS_SHARE * PART_BYTES))
        )

    def pump(self) -> bool:
        """Ask for what is wanted now, and pass on what has come.

        Returns:
            Whether a shard became known without a scan: what its first answer said of it led to one of an earlier run.

        Raises:
            StreamloadError: some of it cannot be had.
        """
        for shard in [shard for shard in self._held if not self._scans.is_wanted(shard)]:
            self._hold(shard, range(0))
        found, left, looked_at = False, self._parts_ahead, set[int]()
        for shard in self._scans.wanted():
            if left <= 0:
                break  # thousands may be behind it, of which nothing has been asked for
            looked_at.add(shard)
            known, left = self._look(shard, left)
            found = found or known
        for shard in sorted(self._held.keys() - looked_at):
            found = self._look(shard, 0)[0] or found
        return found

    def evict(self) -> bool:
        """Let go of what was brought for later, for a part that is needed sooner. No scan may be in flight.

        It is brought once more in its turn.

        Returns:
            Whether there is room now, or will be.
        """
        fetcher = self._fetcher
        first = fetcher.ledger.next_wanted()
        # What is first may be wanted for a scan itself: then those of the shards behind it are evicted.
        keeps = None if first is None or fetcher.ledger.is_reserved(first) else shard_and_number(first)[0]
        for shard in [shard for shard in self._held if shard != keeps]:
            fetcher.ledger.release(part_key(shard, number) for number in self._held.pop(shard))
        fetcher.follow_slots()
        return not fetcher.stalled or fetcher.evict()

    def _look(self, shard: int, left: int) -> tuple[bool, int]:
        """Pass on what has come of a shard, and ask for more of it.

        Returns:
            Whether it became known without a scan, and how many parts may still be asked for.
        """
        start = self._scans.next_bytes(shard)[0]
        end, total = self._fetcher.arrived_from(shard, start)
        if total is not None:
            self._tables.note_version(shard, total, self._fetcher.state_of(shard).pin.etag)
        if left <= 0:  # what has come behind that is not held, and may go while it is scanned
            end = min(end, self._held[shard].stop * PART_BYTES)
        self._scans.available(shard, end, total)
        if not self._scans.is_wanted(shard):
            self._hold(shard, range(0))
            return True, left
        if left > 0:
            left -= self._want(shard, start // PART_BYTES, -(-end // PART_BYTES), total, left)
            if total is None and self._fetcher.state_of(shard).compression is not None:
                left = 0  # one at a time: its end is not known before it is decompressed
        return False, left

    def _want(self, shard: int, first: int, come: int, total: int | None, most: int) -> int:
        """Hold the parts from the first one on, and ask for those that have not come: one where the end is unknown.

        Returns:
            How many have been asked for and have not come; at most `most`.
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
            return  # nothing is let go: saying so would wake the fetcher, and it this feed again, without an end
        held = self._held.pop(shard, range(0))
        ledger = self._fetcher.ledger
        ledger.hold(part_key(shard, number) for number in wanted)
        ledger.release(part_key(shard, number) for number in held)
        if held:
            self._fetcher.freed()
        if wanted:
            self._held[shard] = wanted
