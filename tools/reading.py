"""The table of one local shard, from its index or from its headers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from streamload.dataset.index import DatasetIndex
from streamload.dataset.scan import scan_shard
from streamload.dataset.table import ShardTable
from streamload.errors import ShardFormatError
from streamload.fetch.listing import Listing
from streamload.fetch.local_storage import storage_for

__all__ = ["scanned_table", "tables"]


def scanned_table(url: str, *, every_byte: bool = False) -> ShardTable:
    """Scan a shard strictly.

    Args:
        url: a local shard.
        every_byte: compute the members' crc32 and the labels too, for which all of it is read.

    Raises:
        StorageError: it cannot be opened.
        ShardFormatError: it is damaged.
    """
    return scan_shard(memoryview(_mapped(url)), url, crc32=every_byte, labels=every_byte)


def tables(listing: Listing) -> Iterator[ShardTable]:
    """The table of each shard of a listing: from its index where it has one, else by a scan of its headers."""
    indexes: dict[str, DatasetIndex] = {}
    for shard, folder in zip(listing.shards, listing.index_of, strict=True):
        if folder is None:
            yield scanned_table(shard.url)
        else:
            if folder not in indexes:
                indexes[folder] = DatasetIndex.load(folder)
            yield indexes[folder].table(shard.name)


def _mapped(url: str) -> mmap.mmap:
    """The whole shard. Not closed by hand: an error's traceback may still hold views of it, and goes with them."""
    descriptor = storage_for(url).open(url)
    try:
        if os.fstat(descriptor).st_size == 0:
            raise ShardFormatError("the shard is empty; fetch it again", url=url, offset=0)
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
