"""Resident shards: the memory of a shard that workers can map now, as a descriptor.

A local uncompressed shard is its own file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from streamload.errors import ShardChangedError
from streamload.fetch.listing import Shard
from streamload.fetch.storage import storage_for

__all__ = ["OpenShard", "ResidentShards"]


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard that can be mapped; whoever gets it closes the descriptor.

    Attributes:
        url: the shard.
        size_bytes: how much there is to map.
        descriptor: read-only.
    """

    url: str
    size_bytes: int
    descriptor: int


class ResidentShards:
    """Opens the shards of a listing, and makes sure that they still are what was listed.

    Args:
        shards: the listing's, by number.
    """

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards

    def open(self, shard: int) -> OpenShard:
        """Open one shard.

        Raises:
            ShardNotFoundError: it is gone.
            ShardChangedError: its size or its time of modification differs from what was listed.
            StorageError: it cannot be read.
        """
        listed = self._shards[shard]
        descriptor = storage_for(listed.url).open(listed.url)
        found = os.fstat(descriptor)
        if (found.st_size, found.st_mtime_ns) != (listed.bytes, listed.mtime_ns):
            os.close(descriptor)
            raise ShardChangedError(
                "the shard was changed while it was in use: it was listed with "
                f"{listed.bytes} bytes (mtime {listed.mtime_ns}) and has {found.st_size} (mtime {found.st_mtime_ns}) "
                "now; make a new loader, and give every version of a dataset a folder of its own",
                url=listed.url,
            )
        return OpenShard(listed.url, listed.bytes, descriptor)
