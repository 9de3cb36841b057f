"""Opening files of the disk cache from a loop: on a thread, and closed again where nobody waits for it any more."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from streamload.fetch.cache.cached_shard import CachedShard
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.identify import identify
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.fetch.listing.sizes import LOOKS_AT_ONCE
from streamload.fetch.storage.storages import Storages
from streamload.fetch.transfer.download import Pin

__all__ = ["CacheOpenings"]


class CacheOpenings:
    """Opens shards in a disk cache, for a running loop, until `close`.

    The storage is asked for the versions of at most 16 shards at a time; it is not where they are known.

    Args:
        cache: the cache; None if there is none, and then no shard is in it.
        storages: asked for the version of a shard, which the cache must know.
    """

    def __init__(self, cache: DiskCache | None, storages: Storages) -> None:
        self._cache = cache
        self._storages = storages
        self._threads = ThreadPoolExecutor(LOOKS_AT_ONCE, "streamload-look")
        self._opening = asyncio.Lock()

    async def open(self, url: str, pin: Pin) -> CachedShard | None:
        """A shard's file in the cache, which the caller closes.

        Cancelling it leaves nothing open; that takes as long as the thread needs to come back, mostly no time.

        Returns:
            The file; None if there is no cache, it does not take the shard, or its version is not to be had.

        Raises:
            ShardChangedError: the storage has another version than the pinned one.
        """
        if self._cache is None or (identity := await identify(url, pin, self._storages, self._threads)) is None:
            return None
        async with self._opening:  # they would only wait for each other on as many threads
            return await self._opened(self._cache, identity)

    def close(self) -> None:
        """Wait for the requests that are under way; nothing can be opened afterwards. Twice is fine.

        It blocks, since the interpreter may be about to exit, and then no thread could wait in the loop's place.
        """
        self._threads.shutdown(cancel_futures=True)

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
