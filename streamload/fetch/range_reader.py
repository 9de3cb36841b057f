"""Read a few ranges of remote shards, and their tables, for random access."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from streamload.fetch.parts import PART_BYTES
from streamload.index.dataset import Dataset
from streamload.index.listing import Listing
from streamload.limits import SMALL_REQUESTS
from streamload.storage.download import Pin, read_range
from streamload.storage.storages import Storages
from streamload.tar.scan import ShardTable

# Maximum gap to coalesce.
_GAP_BYTES = 128 << 10


class ByteRange(NamedTuple):
    """The bytes `[start, end)` of a shard."""

    shard: int
    start: int
    end: int


class RangeReader:
    """Read from a listing's shards and their indexes, with many concurrent requests."""

    def __init__(self, listing: Listing, storages: Storages) -> None:
        self._listing = listing
        self.storages = storages
        self._tables = Dataset(listing, storages)
        self._at_once = asyncio.Semaphore(SMALL_REQUESTS)
        self._pins: dict[int, Pin] = {}

    async def table(self, shard: int) -> ShardTable | None:
        """Return a shard's table; None if it is in no index. Raises what `Dataset.load` raises."""
        async with self._at_once:
            return await self._tables.load(shard)

    async def read(self, wanted: ByteRange) -> bytes:
        """Return the bytes of a range, clipped to the shard. Raises what `download` raises.

        The shard's version must be the listed one, or else the first one read.
        """
        shard, start, end = wanted
        url = self._listing.shard(shard).url
        pin = self._pins.setdefault(shard, self._listing.pin(shard))
        async with self._at_once:
            storage, retries = self.storages.for_url(url), self.storages.retries
            return await read_range(storage, url, start, end, pin=pin, retries=retries)


def joined_ranges(places: Sequence[tuple[int, int, int]]) -> list[ByteRange]:
    """Return few ranges, each at most a part long, that cover many places.

    Args:
        places: shard, start and end of each, in any order; empty ones are skipped.
    """
    joined: list[ByteRange] = []
    for shard, start, end in sorted(places):
        if start >= end:
            continue
        last = joined[-1] if joined else None
        if last is not None and last.shard == shard and start <= last.end + _GAP_BYTES:
            longer = max(last.end, end)
            if end <= last.end or longer - last.start <= PART_BYTES:
                joined[-1] = ByteRange(shard, last.start, longer)
                continue
        joined.append(ByteRange(shard, start, end))
    return joined
