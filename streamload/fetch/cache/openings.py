"""Opening files of the disk cache from a loop: on a thread, and closed again where nobody waits for it any more."""

from __future__ import annotations

import asyncio

from streamload.fetch.cache.cached_shard import CachedShard
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.limits import SMALL_REQUESTS
from streamload.storage.download import Pin, download
from streamload.storage.storages import Storages

__all__ = ["CacheOpenings"]


class CacheOpenings:
    """Opens shards in a disk cache, for a running loop.

    The versions are requested of at most 16 shards at a time, unless they are known.

    Args:
        cache: the cache; None if there is none, and then no shard is in it.
        storages: have the version of a shard, which the cache must know.
    """

    def __init__(self, cache: DiskCache | None, storages: Storages) -> None:
        self._cache = cache
        self._storages = storages
        self._asking = asyncio.Semaphore(SMALL_REQUESTS)
        self._opening = asyncio.Lock()

    async def open(self, url: str, pin: Pin) -> CachedShard | None:
        """A shard's file in the cache, which the caller closes.

        Cancelling it leaves nothing open; that takes as long as the thread needs to come back, mostly no time, and no
        time where the storage is waited for.

        Returns:
            The file; None if there is no cache, or it does not take the shard.

        Raises:
            ShardChangedError: the storage has another version than the pinned one.
            StorageError: its version is not to be had, and so none of its bytes either.
        """
        if self._cache is None:
            return None
        identity = await self._identity(url, pin)
        async with self._opening:  # they would only wait for each other on as many threads
            return await self._opened(self._cache, identity)

    async def _identity(self, url: str, pin: Pin) -> ShardIdentity:
        """Which version it is. Where neither an index nor a listing has it, the shard's first byte is requested.

        The answer tells as much as that to a HEAD. But some urls are signed for reading only; and it is requested as
        patiently as all other bytes, and given up as soon as nobody waits for it.
        """
        if pin.total_bytes is None:
            async with self._asking:
                await download(self._storages.for_url(url), url, 0, 1, _drop, pin=pin, retries=self._storages.retries)
        assert pin.total_bytes is not None, "every answer tells it"
        return ShardIdentity(url, pin.etag, pin.total_bytes)

    async def _opened(self, cache: DiskCache, identity: ShardIdentity) -> CachedShard | None:
        opening = asyncio.get_running_loop().run_in_executor(None, cache.open, identity)
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


def _drop(_offset: int, _piece: bytes) -> None:
    """It comes again with the rest of its part."""
