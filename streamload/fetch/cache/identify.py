"""Finding out which version of a shard there is, for the disk cache, which must know it before the first byte."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from streamload.errors import StorageError
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.fetch.storage.protocol import UNKNOWN_BYTES
from streamload.fetch.storage.storages import Storages
from streamload.fetch.transfer.download import Pin

__all__ = ["identify"]


async def identify(url: str, pin: Pin, storages: Storages, threads: Executor) -> ShardIdentity | None:
    """A shard's identity. Where neither an index nor a listing has told its size, the storage is asked for it.

    Args:
        url: the shard.
        pin: its version as far as it is known; knows more afterwards.
        storages: where it lies.
        threads: where the storage is asked.

    Returns:
        The identity; None where the storage does not say: some urls are signed for reading only.

    Raises:
        ShardChangedError: the storage has another version than the pinned one.
    """
    if pin.total_bytes is None:
        try:
            found = await asyncio.get_running_loop().run_in_executor(threads, storages.for_url(url).info, url)
        except StorageError:
            return None  # if it is not to be had at all, reading it says so
        if found.bytes != UNKNOWN_BYTES:
            pin.check(url, found.bytes, found.etag)
    return None if pin.total_bytes is None else ShardIdentity(url, pin.etag, pin.total_bytes)
