"""Choose the shards to fetch, and open the shards that workers read."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from streamload.errors import ShardChangedError
from streamload.index.listing import Listing, Shard
from streamload.limits import RESIDENT_BYTES, RESIDENT_SHARDS
from streamload.storage.local_files import open_regular
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of

if TYPE_CHECKING:
    from streamload.fetch.fetcher import Fetcher


class Fetching(NamedTuple):
    """The settings of a feeder's fetches; `cache_folder` is None without a disk cache."""

    storages: Storages
    budget_bytes: int
    cache_folder: str | None
    cache_bytes: int


def is_all_local(urls: Iterable[str], storages: Storages) -> bool:
    """Return True if all URLs can be read without a server."""
    return not any(map(storages.costs_requests, urls))


def waits_for_index(listing: Listing, storages: Storages) -> bool:
    """Return True if reading an index of the listing needs a server."""
    folders = {shard.index_folder for shard in listing.numbered if shard.index_folder is not None}
    return not is_all_local(folders, storages)


def fetched_shards(listing: Listing, storages: Storages) -> frozenset[int]:
    """Return the numbers of the shards and sidecars that workers cannot open: remote and compressed ones."""
    remote = {folder: storages.costs_requests(f"{folder}/") for folder in {shard.folder for shard in listing.numbered}}
    return frozenset(
        number
        for number, shard in enumerate(listing.numbered)
        if remote[shard.folder] or (not shard.name.endswith(".tar") and compression_of(shard.url) is not None)
    )


class OpenShard(NamedTuple):
    """A shard that can be mapped for reading; the receiver closes the descriptor."""

    url: str
    size_bytes: int
    descriptor: int


class ResidentShards:
    """Open the shards of a listing, and check that they are unchanged.

    Local shards stay mapped between epochs, within limits: a new mapping costs a page fault for every 64 KiB, which
    takes longer than copying small samples.

    Args:
        shards: all shards of the listing, by number.
        fetcher: holds the shards that must be fetched; None if there are none.
        kept_bytes: maximum bytes of finished shards that stay mapped.
    """

    def __init__(
        self, shards: tuple[Shard, ...], fetcher: Fetcher | None = None, kept_bytes: int = RESIDENT_BYTES
    ) -> None:
        self._shards = shards
        self._fetcher = fetcher
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._free_bytes = kept_bytes

    def open(self, shard: int) -> OpenShard:
        """Open one shard.

        Raises:
            ShardNotFoundError: the shard is gone.
            ShardChangedError: its size or modification time differs from the listing.
            StorageError: it cannot be read.
        """
        if self._fetcher is not None and shard in self._fetcher.fetched:
            state = self._fetcher.state_of(shard)
            return OpenShard(state.url, state.version[1], os.dup((state.file or state.ensure_memory()).descriptor))
        listed = self._shards[shard]
        return OpenShard(listed.url, listed.bytes, open_listed(listed))

    def versions(self, shards: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Return for each shard a value that changes whenever workers must open the shard again."""
        versions = dict.fromkeys(shards, (0, 0))
        if self._fetcher is not None:
            fetched = versions.keys() & self._fetcher.fetched
            versions |= {shard: self._fetcher.state_of(shard).version for shard in fetched}
        return versions

    def need(self, shards: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Record that rows of shards are needed, check kept shards for changes, and return `versions`.

        Raises what `open` raises.
        """
        for shard in shards:
            if shard in self._kept:
                self._free_bytes += self._kept.pop(shard)
                os.close(self.open(shard).descriptor)
        return self.versions(shards)

    def finish(self, shards: Iterable[int]) -> list[int]:
        """Record that shards are not needed for now; return those beyond the limits, to unmap, earliest first."""
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
    """Open a local shard, check that it is still as listed, and return a read-only descriptor.

    Raises:
        ShardNotFoundError, ShardChangedError, StorageError: as for `ResidentShards.open`.
    """
    descriptor, status = open_regular(listed.url)
    if (status.st_size, status.st_mtime_ns) == (listed.bytes, listed.mtime_ns):
        return descriptor
    os.close(descriptor)
    raise ShardChangedError(
        f"the shard was changed while it was in use: it had {listed.bytes} bytes (mtime {listed.mtime_ns}), now it has "
        f"{status.st_size} ({status.st_mtime_ns}); make a new loader, and give each version its own folder",
        url=listed.url,
    )
