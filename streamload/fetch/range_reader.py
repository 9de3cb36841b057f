"""Reading a few ranges of remote shards, and the tables that say where samples lie in them: for access at random."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from streamload.fetch.parts import PART_BYTES
from streamload.index.dataset import Dataset
from streamload.index.listing import Listing
from streamload.limits import SMALL_REQUESTS
from streamload.storage.download import Pin, download
from streamload.storage.storages import Storages
from streamload.tar.table import ShardTable

# So many bytes that nobody requested are fetched sooner than another request is made.
_GAP_BYTES = 128 << 10


class ByteRange(NamedTuple):
    """Some bytes of a shard, `[start, end)`."""

    shard: int
    start: int
    end: int


class RangeReader:
    """Reads from the shards of a listing, and from the indexes that know them, many requests at once.

    Args:
        listing: the shards.
        storages: where they lie.
    """

    def __init__(self, listing: Listing, storages: Storages) -> None:
        self._listing = listing
        self._storages = storages
        self._tables = Dataset(listing, storages)
        self._at_once = asyncio.Semaphore(SMALL_REQUESTS)
        self._pins: dict[int, Pin] = {}

    async def tables(self, shards: Sequence[int]) -> list[ShardTable | None]:
        """The table of each shard; None for one that no index knows.

        Raises:
            DatasetIndexError, StorageError: as `Dataset.load`.
        """
        return list(await asyncio.gather(*map(self._table, shards)))

    async def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range, cut at the shard's end; its version must be what was listed, or read first.

        Raises:
            StorageError: as `download`.
        """
        return list(await asyncio.gather(*map(self._read, ranges)))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._storages.aclose()

    async def _table(self, shard: int) -> ShardTable | None:
        async with self._at_once:
            return await self._tables.load(shard)

    async def _read(self, wanted: ByteRange) -> bytes:
        content = bytearray(wanted.end - wanted.start)
        listed = self._listing.shard(wanted.shard)
        pin = self._pins.get(wanted.shard)
        if pin is None:
            pin = self._pins[wanted.shard] = self._listing.pin(wanted.shard)

        def write(offset: int, piece: bytes) -> None:
            content[offset - wanted.start : offset - wanted.start + len(piece)] = piece

        async with self._at_once:
            storage = self._storages.for_url(listed.url)
            done = await download(
                storage, listed.url, wanted.start, wanted.end, write, pin=pin, retries=self._storages.retries
            )
        return bytes(content[: done.end - wanted.start])


def joined_ranges(places: Sequence[tuple[int, int, int]]) -> list[ByteRange]:
    """Few ranges that cover many places; neighbours are read together, in requests of about a part at most.

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
