"""The bytes of compressed shards, wherever they come from: the disk, the disk cache, or the storage."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from streamload.fetch.cache.cached_shard import CacheOffError
from streamload.fetch.cache.openings import CacheOpenings
from streamload.fetch.cached_body import CachedBody
from streamload.fetch.compressed_body import COMPRESSED_BYTES_HELD, RemoteBody, local_body
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.transfers import Part
from streamload.storage.download import Downloaded
from streamload.storage.storages import Storages

__all__ = ["CompressedBodies"]


class _Body(Protocol):
    def chunks(self) -> AsyncGenerator[bytes]: ...

    def write(self, part: Part, offset: int, data: bytes, /) -> None: ...

    def done(self, part: Part, done: Downloaded, /) -> None: ...

    def failed(self, part: Part, error: BaseException, /) -> None: ...


class CompressedBodies:
    """Opens compressed shards for reading from their start, and takes in what is fetched for them.

    Each body that is fetched has a negative number of its own, which its parts bear as that of their shard. So what
    still comes for an earlier body of a shard is not taken for a later one's.

    Args:
        storages: where shards lie.
        openings: of the disk cache, which keeps them as they are, compressed.
        open_local: opens a local shard by its number; gives a descriptor.
        start: begins to fetch a part.
    """

    def __init__(
        self,
        storages: Storages,
        openings: CacheOpenings,
        open_local: Callable[[int], int],
        start: Callable[[Part], None],
    ) -> None:
        self._storages = storages
        self._openings = openings
        self._open_local = open_local
        self._start = start
        self._bodies: dict[int, tuple[FetchedShard, _Body]] = {}
        self._numbers = itertools.count(-1, -1)

    @property
    def held_bytes(self) -> int:
        """What they take of memory."""
        return len(self._bodies) * COMPRESSED_BYTES_HELD

    def open(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        """The bytes of a shard.

        Raises:
            StorageError: they cannot be had.
        """
        return self._local(state) if self._storages.is_local(state.url) else self._remote(state)

    # -- what is fetched -------------------------------------------------------------------------------------------

    def shard_of(self, number: int) -> FetchedShard:
        """The shard that a body is of."""
        return self._bodies[number][0]

    def write(self, part: Part, offset: int, data: bytes) -> None:
        """Bytes of a part have come. Raises CacheOffError: they cannot be kept."""
        if part.shard in self._bodies:
            self._bodies[part.shard][1].write(part, offset, data)

    def done(self, part: Part, done: Downloaded) -> None:
        """All of a part has come."""
        if part.shard in self._bodies:
            self._bodies[part.shard][1].done(part, done)

    def failed(self, part: Part, error: BaseException) -> None:
        """A part cannot be fetched."""
        if part.shard in self._bodies:
            self._bodies[part.shard][1].failed(part, error)

    # -- bodies ----------------------------------------------------------------------------------------------------

    async def _local(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        descriptor = self._open_local(state.number)
        try:
            async for piece in local_body(descriptor):
                yield piece
        finally:
            os.close(descriptor)

    async def _remote(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        position = 0
        cached = await self._openings.open(state.url, state.pin)
        if cached is not None and state.pin.total_bytes is not None:
            number = next(self._numbers)
            body = CachedBody(number, cached, state.pin.total_bytes, self._start)
            try:
                async with aclosing(self._chunks(state, number, body)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except CacheOffError:
                position = body.position  # and on from here without it
            finally:
                cached.close()
        number = next(self._numbers)
        rest = RemoteBody(number, state.pin, self._start, position)
        async with aclosing(self._chunks(state, number, rest)) as pieces:
            async for piece in pieces:
                yield piece

    async def _chunks(self, state: FetchedShard, number: int, body: _Body) -> AsyncGenerator[bytes]:
        self._bodies[number] = state, body
        try:
            async with aclosing(body.chunks()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            del self._bodies[number]
