"""Resident shards: descriptors that workers map, and which shards stay mapped."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from streamload.errors import ShardChangedError
from streamload.index.listing import Shard
from streamload.limits import RESIDENT_BYTES, RESIDENT_SHARDS
from streamload.storage.local_files import open_regular

if TYPE_CHECKING:
    from streamload.fetch.fetcher import Fetcher


class OpenShard(NamedTuple):
    """A shard that can be mapped; its receiver closes the descriptor, which is read-only."""

    url: str
    size_bytes: int
    descriptor: int


class ResidentShards:
    """Opens the shards of a listing, and checks that they are unchanged.

    Small local shards that an epoch has finished with stay mapped for the next one: mapping anew costs a page fault for
    every 64 KiB, which is more than copying small samples.

    Args:
        shards: the listing's, by number.
        fetcher: has the shards that cannot be opened here; None if there are none.
        kept_bytes: how much of what is finished with stays mapped.
    """

    def __init__(
        self,
        shards: tuple[Shard, ...],
        fetcher: Fetcher | None = None,
        kept_bytes: int = RESIDENT_BYTES,
    ) -> None:
        self._shards = shards
        self._fetcher = fetcher
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._free_bytes = kept_bytes

    def open(self, shard: int) -> OpenShard:
        """Open one shard.

        Raises:
            ShardNotFoundError: it is gone.
            ShardChangedError: its size or its time of modification differs from what was listed.
            StorageError: it cannot be read.
        """
        if self._fetcher is not None and shard in self._fetcher.fetched:
            state = self._fetcher.state_of(shard)
            return OpenShard(state.url, state.version[1], state.descriptor())
        listed = self._shards[shard]
        return OpenShard(listed.url, listed.bytes, open_listed(listed))

    def versions(self, shards: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Return for each shard a value that changes whenever it must be opened once more."""
        versions = dict.fromkeys(shards, (0, 0))
        if self._fetcher is not None:
            fetched = versions.keys() & self._fetcher.fetched
            versions |= {shard: self._fetcher.state_of(shard).version for shard in fetched}
        return versions

    def need(self, shards: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Record that rows of shards are needed; check those again that were kept. Return `versions`.

        Raises what `open` raises.
        """
        for shard in shards:
            if shard in self._kept:
                self._free_bytes += self._kept.pop(shard)
                os.close(self.open(shard).descriptor)
        return self.versions(shards)

    def finish(self, shards: Iterable[int]) -> list[int]:
        """Keep shards that are not needed for now; returns which shards to unmap, those longest finished with."""
        fetched = () if self._fetcher is None else self._fetcher.fetched
        for shard in shards:
            if shard not in self._kept and shard not in fetched:
                self._kept[shard] = self._shards[shard].bytes
                self._free_bytes -= self._shards[shard].bytes
        dropped = []
        while self._free_bytes < 0 or len(self._kept) > RESIDENT_SHARDS:
            shard, kept_bytes = self._kept.popitem(last=False)
            self._free_bytes += kept_bytes
            dropped.append(shard)
        return dropped


def open_listed(listed: Shard) -> int:
    """Open a local shard, which must be what was listed, and return its read-only descriptor.

    Raises:
        ShardNotFoundError, ShardChangedError, StorageError: as for `ResidentShards.open`.
    """
    descriptor, found = open_regular(listed.url)
    if (found.st_size, found.st_mtime_ns) == (listed.bytes, listed.mtime_ns):
        return descriptor
    os.close(descriptor)
    raise ShardChangedError(
        "the shard was changed while it was in use: it was listed with "
        f"{listed.bytes} bytes (mtime {listed.mtime_ns}) and has {found.st_size} (mtime {found.st_mtime_ns}) "
        "now; make a new loader, and give every version of a dataset a folder of its own",
        url=listed.url,
    )
