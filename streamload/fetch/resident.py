"""Resident shards: the memory of a shard that workers can map now, as a descriptor; and which of them stay mapped.

A local uncompressed shard is its own file.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from streamload.errors import ShardChangedError
from streamload.fetch.listing import Shard
from streamload.fetch.local_storage import storage_for

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


_KEPT_BYTES = 256 << 20
_KEPT_SHARDS = 64


class ResidentShards:
    """Opens the shards of a listing, and makes sure that they still are what was listed.

    What an epoch has finished with stays mapped for the next one as long as it is small: mapping anew costs a page
    fault for every 64 KiB, which is more than copying small samples out of it.

    Args:
        shards: the listing's, by number.
        kept_bytes: how much of what is finished with stays mapped.
        kept_shards: in how many shards.
    """

    def __init__(
        self, shards: tuple[Shard, ...], kept_bytes: int = _KEPT_BYTES, kept_shards: int = _KEPT_SHARDS
    ) -> None:
        self._shards = shards
        self._kept_shards = kept_shards
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._free_bytes = kept_bytes

    def open(self, shard: int) -> OpenShard:
        """Open one shard.

        Raises:
            ShardNotFoundError: it is gone.
            ShardChangedError: its size or its time of modification differs from what was listed.
            StorageError: it cannot be read.
        """
        listed = self._shards[shard]
        descriptor = storage_for(listed.url).open(listed.url)
        try:
            _check(listed, os.fstat(descriptor))
        except ShardChangedError:
            os.close(descriptor)
            raise
        return OpenShard(listed.url, listed.bytes, descriptor)

    def need(self, shard: int) -> None:
        """Rows of this shard are wanted, whether it was opened before or not. One that was kept is checked again.

        Raises:
            ShardNotFoundError, ShardChangedError, StorageError: as for `open`.
        """
        kept_bytes = self._kept.pop(shard, None)
        if kept_bytes is not None:
            self._free_bytes += kept_bytes
            os.close(self.open(shard).descriptor)

    def finish(self, shards: Iterable[int]) -> list[int]:
        """No more rows of these are wanted for now. Returns which shards to unmap: those longest finished with."""
        for shard in shards:
            if shard not in self._kept:
                self._kept[shard] = self._shards[shard].bytes
                self._free_bytes -= self._shards[shard].bytes
        dropped = []
        while self._free_bytes < 0 or len(self._kept) > self._kept_shards:
            shard, kept_bytes = self._kept.popitem(last=False)
            self._free_bytes += kept_bytes
            dropped.append(shard)
        return dropped


def _check(listed: Shard, found: os.stat_result) -> None:
    if (found.st_size, found.st_mtime_ns) != (listed.bytes, listed.mtime_ns):
        raise ShardChangedError(
            "the shard was changed while it was in use: it was listed with "
            f"{listed.bytes} bytes (mtime {listed.mtime_ns}) and has {found.st_size} (mtime {found.st_mtime_ns}) "
            "now; make a new loader, and give every version of a dataset a folder of its own",
            url=listed.url,
        )
