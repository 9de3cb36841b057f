"""Opening files of the disk cache from a loop: on a thread, and closed again where nobody waits for it any more."""

from __future__ import annotations

import asyncio

from streamload.fetch.cache.cached_shard import CachedShard
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.identify import identify
from streamload.fetch.storage.storages import Storages
from streamload.fetch.transfer.download import Pin

__all__ = ["CacheOpenings"]


class CacheOpenings:
    """Opens shards in a disk cache, for a running loop.

    Args:
        cache: the cache; None if there is none, and then no shard is in it.
        storages: asked for the version of a shard, which the cache must know.
    """

    def __init__(self, cache: DiskCache | None, storages: Storages) -> None:
        self._cache = cache
        self._storages = storages

    async def open(self, url: str, pin: Pin) -> CachedShard | None:
        """A shard's file in the cache, which the caller closes.

        Cancelling it leaves nothing open; that takes as long as the thread needs to come back, mostly no time.

        Returns:
            The file; None if there is no cache, it does not take the shard, or its version is not to be had.

        Raises:
            ShardChangedError: the storage has another version than the pinned one.
        """
        if self._cache is None or (identity := await identify(url, pin, self._storages)) is None:
            return None
        opening = asyncio.get_running_loop().run_in_executor(None, self._cache.open, identity)
        cancelled: asyncio.CancelledError | None = None
        while not opening.done():
            try:
                await asyncio.wait((opening,))
            except asyncio.CancelledError as exc:  # not passed on to the thread, which would open it for nobody
                cancelled = exc
        shard = opening.result()
        if cancelled is None:
            return shard
        if shard is not None:
            shard.close()
        raise cancelled
