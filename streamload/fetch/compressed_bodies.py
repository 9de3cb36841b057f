"""Bytes in order, mostly of compressed shards, wherever they come from: the disk, the disk cache, or the storage."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial

from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.openings import CacheOpenings, on_thread
from streamload.fetch.compressed_body import COMPRESSED_BYTES_HELD, RemoteBody, local_body
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.transfers import Part
from streamload.storage.download import Downloaded
from streamload.storage.storages import Storages


class CompressedBodies:
    """Opens compressed shards for reading from their start, and takes in what is fetched for them.

    Each body that is fetched has a negative number of its own, which its parts bear as that of their shard. So what
    still comes for an earlier body of a shard is not taken for a later one's.

    Args:
        storages: where shards lie.
        cache: the disk cache, which keeps them as they are, compressed; or None.
        openings: of that.
        open_local: opens a local shard by its number; gives a descriptor.
        start: begins to fetch a part.
    """

    def __init__(
        self,
        storages: Storages,
        cache: DiskCache | None,
        openings: CacheOpenings,
        open_local: Callable[[int], int],
        start: Callable[[Part], None],
    ) -> None:
        self._storages = storages
        self._cache = cache
        self._openings = openings
        self._open_local = open_local
        self._start = start
        self._bodies: dict[int, tuple[FetchedShard, RemoteBody]] = {}
        self._numbers = itertools.count(-1, -1)

    def held_bytes(self, begun: Iterable[FetchedShard]) -> int:
        """What they take of memory.

        Args:
            begun: shards whose body has been opened; one of which nothing has been read yet is about to take its share.
        """
        fetched = {state.number for state, _ in self._bodies.values()}
        to_come = [state for state in begun if state.number not in fetched and not self._storages.is_local(state.url)]
        return (len(self._bodies) + len(to_come)) * COMPRESSED_BYTES_HELD

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
        """Bytes of a part have come."""
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
        file = await self._openings.open(state.url, state.pin)
        position = 0
        try:
            if file is not None and file.whole:
                with suppress(OSError):  # the disk cannot read it any more
                    async for piece in local_body(file.descriptor, state.pin.total_bytes):
                        yield piece
                        position += len(piece)
            if position != state.pin.total_bytes:
                async with aclosing(self.fetch(state, position)) as pieces:
                    async for piece in pieces:
                        if file is not None and file.missing and file.descriptor >= 0:
                            await self._keep(file, position, piece)
                        yield piece
                        position += len(piece)
        finally:
            if file is not None:
                file.close()

    async def fetch(self, state: FetchedShard, start: int, end: int | None = None) -> AsyncGenerator[bytes]:
        """The bytes of a remote shard as it lies there, from one place to another or to its end, a few requests ahead.

        Raises:
            StorageError: they cannot be fetched.
        """
        number = next(self._numbers)
        body = RemoteBody(number, state.pin, self._start, start, end)
        self._bodies[number] = state, body
        try:
            async with aclosing(body.chunks()) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            del self._bodies[number]

    async def _keep(self, file: CacheFile, offset: int, piece: bytes) -> None:
        """Write bytes to the disk cache, and publish the file with the last ones."""
        assert self._cache is not None
        try:
            await on_thread(partial(file.write, offset, piece))
            if not file.missing:
                await on_thread(partial(self._cache.publish, file))
        except OSError as exc:
            self._cache.turn_off(exc)
            file.close()
