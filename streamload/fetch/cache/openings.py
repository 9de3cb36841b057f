"""Opening files of the disk cache from a loop: on a thread, and closed again where nobody waits for it any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from streamload.errors import without_secrets
from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.next_use import ShardIdentity
from streamload.limits import SMALL_REQUESTS
from streamload.storage.download import Pin, download
from streamload.storage.storages import Storages

_Done = TypeVar("_Done")

_log = logging.getLogger("streamload")

# Files that are read and compared at the same time; the threads are for the disk's other work too.
_AT_ONCE = 2


class CacheOpenings:
    """Opens shards in a disk cache, for a running loop.

    The versions are requested of at most 16 shards at a time, unless they are known.

    Args:
        cache: the cache; None if there is none, and then no shard is in it.
        storages: have the version of a shard, which the cache must know.

    Attributes:
        asked: the shards whose version is being requested, the longest first.
    """

    def __init__(self, cache: DiskCache | None, storages: Storages) -> None:
        self._cache = cache
        self._storages = storages
        self.asked: dict[str, None] = {}
        self._without_version: set[str] = set()
        self._asking = asyncio.Semaphore(SMALL_REQUESTS)
        self._opening = asyncio.Semaphore(_AT_ONCE)

    async def open(self, url: str, pin: Pin, *, concurrently: bool = False) -> CacheFile | None:
        """A shard's file in the cache, whole or to be filled, which the caller closes; see `DiskCache.open`.

        Cancelling it leaves nothing open; that takes as long as the thread needs to come back, mostly no time, and no
        time where the storage is waited for.

        Returns:
            The file; None if there is no cache, or it does not take the shard. A shard is not cached if its storage
            states neither an ETag nor a date: a later run could not tell that it was rewritten.

        Raises:
            ShardChangedError: the storage has another version than the pinned one.
            StorageError: its version is not to be had, and so none of its bytes either.
        """
        cache = self._cache
        if cache is None or url in self._without_version:
            return None
        if pin.total_bytes is None or pin.etag is None:
            await self._note_version(url, pin)
        assert pin.total_bytes is not None, "every answer tells it"
        if pin.etag is None:
            if not self._without_version:
                _log.warning(
                    "%s is not kept in cache_dir, nor is any other shard of which the storage states no ETag and no "
                    "date: a rewritten one would not be noticed. To keep them, copy the shards to a local folder",
                    without_secrets(url),
                )
            self._without_version.add(url)
            return None
        identity = ShardIdentity(url, pin.etag, pin.total_bytes)
        async with self._opening:
            return await on_thread(lambda: cache.open(identity, concurrently=concurrently), _close)

    async def _note_version(self, url: str, pin: Pin) -> None:
        """Request the first byte of a shard whose version neither an index nor a listing has.

        The answer tells as much as that to a HEAD. But some urls are signed for reading only; and it is requested as
        patiently as all other bytes, and given up as soon as nobody waits for it.
        """
        self.asked[url] = None
        try:
            async with self._asking:
                await download(self._storages.for_url(url), url, 0, 1, _drop, pin=pin, retries=self._storages.retries)
        finally:
            self.asked.pop(url, None)


async def on_thread(work: Callable[[], _Done], undo: Callable[[_Done], object] = lambda _: None) -> _Done:
    """Work on a thread, to its end: where it is cancelled it waits for that too, and then undoes what was done."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait((working,))
        except asyncio.CancelledError as exc:  # not passed on to the thread, which would work for nobody
            cancelled = exc
    done = working.result()
    if cancelled is None:
        return done
    undo(done)
    raise cancelled


def _close(file: CacheFile | None) -> None:
    if file is not None:
        file.close()


def _drop(_offset: int, _piece: bytes) -> None:
    """It comes again with the rest of its part."""
