"""The bytes of a compressed shard, in order, by way of its file in the disk cache, into which they are fetched."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable

from streamload.fetch.cache.cached_shard import CachedShard, CacheOffError
from streamload.fetch.parts import PART_BYTES, part_edges
from streamload.fetch.transfers import Part
from streamload.storage.download import Downloaded

__all__ = ["CachedBody"]

_PIECE_BYTES = 2 << 20


class CachedBody:
    """A remote shard from its start to its end, the next part of it in flight.

    Args:
        shard: a number for its parts that tells them from all others.
        cached: its file, which stays the caller's.
        total_bytes: its size.
        start: begins to fetch a part; `write` and then `done` or `failed` are called for it.

    Attributes:
        position: the bytes before it have been given out.
    """

    def __init__(self, shard: int, cached: CachedShard, total_bytes: int, start: Callable[[Part], None]) -> None:
        self.position = 0
        self._shard = shard
        self._cached = cached
        self._total_bytes = total_bytes
        self._start = start
        self._coming: dict[int, asyncio.Future[None]] = {}
        self._finishing: set[asyncio.Task[None]] = set()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Its bytes.

        Raises:
            CacheOffError: the cache gives and takes nothing any more.
            StorageError: they cannot be fetched.
        """
        parts = -(-self._total_bytes // PART_BYTES)
        ahead = asyncio.create_task(self._have(0))
        try:
            for number in range(parts):
                await ahead
                if number + 1 < parts:
                    ahead = asyncio.create_task(self._have(number + 1))
                end = part_edges(number, self._total_bytes)[1]
                while self.position < end:
                    yield await self._piece(end)
        finally:
            for task in (ahead, *self._finishing):
                task.cancel()
            await asyncio.gather(ahead, *self._finishing, return_exceptions=True)

    def write(self, _: Part, offset: int, data: bytes) -> None:
        """Bytes of a part have come. Raises CacheOffError: they cannot be kept."""
        self._cached.write(offset, data)

    def done(self, part: Part, _: Downloaded) -> None:
        """All of a part has come."""
        task = asyncio.create_task(self._finish(part))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, part: Part) -> None:
        try:
            self._cached.finish(part.number, await self._cached.checksum(part.number))
        except CacheOffError as error:
            self._end(part, error)
        else:
            self._end(part, None)

    def failed(self, part: Part, error: BaseException) -> None:
        """A part cannot be fetched, or not be kept."""
        self._cached.abandon(part.number)
        self._end(part, error)

    async def _have(self, number: int) -> None:
        if await self._cached.claim(number):
            coming = self._coming[number] = asyncio.get_running_loop().create_future()
            self._start(Part(self._shard, number, *part_edges(number, self._total_bytes)))
            await coming

    async def _piece(self, end: int) -> bytes:
        """The next bytes, some at least. Raises CacheOffError: they are not in the file any more."""
        size_bytes = min(_PIECE_BYTES, end - self.position)
        piece = await asyncio.to_thread(os.pread, self._cached.descriptor, size_bytes, self.position)
        if not piece or self._cached.withdrawn:
            raise CacheOffError
        self.position += len(piece)
        return piece

    def _end(self, part: Part, error: BaseException | None) -> None:
        coming = self._coming.pop(part.number)
        if coming.done():  # nobody waits for it any more
            return
        if error is None:
            coming.set_result(None)
        else:
            coming.set_exception(error)
