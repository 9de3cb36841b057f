"""Compressed shards: their bytes, and the room that one has while it is decompressed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.parts import PART_BYTES
from streamload.fetch.transfers import Source, Transfers
from streamload.tar.decompression import Compression, Decompressor, decompress

_PIECE_BYTES = 2 << 20
_PIECES_AHEAD = 3
BESIDE_BYTES = (_PIECES_AHEAD + 2) * _PIECE_BYTES
"""About how much memory a shard takes besides its part while it is decompressed."""


class Decompression:
    """A shard that is being decompressed to its memory.

    Args:
        state: the shard.
        compression: its kind.
        grow: called if there is no room for the next piece; returns True if it has called `add_room`.

    Attributes:
        room_bytes: how much of the decompressed shard there is room for.
        waits: for room.
        cancelled: it ends before the shard does.
        task: decompresses.
    """

    task: asyncio.Task[int]

    def __init__(self, state: FetchedShard, compression: Compression, grow: Callable[[Decompression], bool]) -> None:
        self.state = state
        self.room_bytes = PART_BYTES
        self.waits = self.cancelled = False
        self._decompressor = Decompressor(compression, state.url)
        self._grow = grow
        self._room = asyncio.Event()

    async def run(self, body: AsyncIterator[bytes]) -> int:
        """Decompress the bytes of the shard, and return its decompressed size."""
        return await decompress(body, self._decompressor, self._write)

    def add_room(self) -> None:
        """Give it room for a part more."""
        self.room_bytes += PART_BYTES
        self.waits = False
        self._room.set()

    def missing_bytes(self) -> int:
        """Return how much more room the shard needs, if the rest is like what has come."""
        done = self._decompressor
        expected_bytes = done.decompressed_bytes * (self.state.pin.total_bytes or 0) // max(1, done.compressed_bytes)
        return max(PART_BYTES, expected_bytes - self.room_bytes)

    def cancel(self) -> None:
        """Stop soon, without waiting for it."""
        self.cancelled = True
        self.task.cancel()

    async def _write(self, offset: int, piece: bytes) -> None:
        """Store a piece as soon as there is room for it."""
        while offset + len(piece) > self.room_bytes:
            if not self._grow(self):
                self._room.clear()
                self.waits = True
                await self._room.wait()
        self.state.write(offset, piece)


async def read_file(descriptor: int, end: int = sys.maxsize) -> AsyncGenerator[bytes]:
    """Yield the bytes of a file, which stays the caller's, up to a place or to its end."""
    offset = 0
    while data := await asyncio.to_thread(os.pread, descriptor, min(_PIECE_BYTES, end - offset), offset):
        yield data
        offset += len(data)


async def fetch_pieces(transfers: Transfers, source: Source) -> AsyncGenerator[bytes]:
    """Fetch a remote shard from its start to its end, a few requests ahead."""
    ahead: deque[asyncio.Task[bytes]] = deque()
    start = 0
    try:
        while True:
            end = source.pin.total_bytes  # stated by the first answer
            while not ahead if end is None else len(ahead) <= _PIECES_AHEAD and start < end:
                piece_end = start + _PIECE_BYTES if end is None else min(start + _PIECE_BYTES, end)
                ahead.append(asyncio.create_task(transfers.read(source, start, piece_end)))
                start = piece_end
            if not ahead:
                return
            yield await ahead.popleft()
    finally:
        for task in ahead:
            task.cancel()
        await asyncio.gather(*ahead, return_exceptions=True)
