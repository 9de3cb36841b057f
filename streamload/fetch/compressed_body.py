"""The bytes of a compressed shard, in order: read from the disk, or fetched a few pieces ahead."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from streamload.fetch.transfers import Part
from streamload.storage.download import Downloaded, Pin

_PIECE_BYTES = 2 << 20
_PIECES_AHEAD = 3

COMPRESSED_BYTES_HELD = (_PIECES_AHEAD + 2) * _PIECE_BYTES
"""About how much memory a shard takes besides its parts while it is decompressed."""


async def local_body(descriptor: int, end: int | None = None) -> AsyncIterator[bytes]:
    """What is in a file, which stays the caller's, up to a place or to its end."""
    offset = 0
    while data := await asyncio.to_thread(os.pread, descriptor, _piece_bytes(offset, end), offset):
        yield data
        offset += len(data)


def _piece_bytes(offset: int, end: int | None) -> int:
    return _PIECE_BYTES if end is None else min(_PIECE_BYTES, end - offset)


class RemoteBody:
    """A remote shard from one place to another, with several requests in flight.

    Args:
        shard: a number for its parts that tells them from all others.
        pin: its version; knows the size at the latest when the first piece has come.
        start: begins to fetch a part; `write` and then `done` or `failed` are called for it.
        position: begin with this byte.
        end: the byte behind the last one; None for the shard's end.
    """

    def __init__(
        self, shard: int, pin: Pin, start: Callable[[Part], None], position: int = 0, end: int | None = None
    ) -> None:
        self._position = position
        self._shard = shard
        self._pin = pin
        self._end = end
        self._start = start
        self._pieces: dict[int, bytearray] = {}
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self._moved = asyncio.Event()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Its bytes.

        Raises:
            StorageError: they cannot be fetched.
        """
        number, begun = divmod(self._position, _PIECE_BYTES)
        while (end := self._known_end()) is None or number * _PIECE_BYTES < end:
            self._request(number)
            while number not in self._done:
                if self._error is not None:
                    raise self._error
                self._moved.clear()
                await self._moved.wait()
            self._done.discard(number)
            yield bytes(self._pieces.pop(number)[begun:])
            number, begun = number + 1, 0

    def write(self, part: Part, offset: int, data: bytes) -> None:
        """Bytes of a part have come; they may come twice."""
        piece, within = self._pieces[part.number], offset - part.start
        if within + len(data) > len(piece):
            piece.extend(bytes(within + len(data) - len(piece)))
        piece[within : within + len(data)] = data

    def done(self, part: Part, _: Downloaded) -> None:
        """All of a part has come."""
        self._done.add(part.number)
        self._moved.set()

    def failed(self, _: Part, error: BaseException) -> None:
        """A part cannot be fetched."""
        self._error = error
        self._moved.set()

    def _request(self, number: int) -> None:
        """Have this piece fetched and, once it is known how many there are, some of those behind it."""
        end = self._known_end()
        last = number if end is None else min(number + _PIECES_AHEAD, -(-end // _PIECE_BYTES) - 1)
        for each in range(number, last + 1):
            if each not in self._pieces:
                self._pieces[each] = bytearray()
                self._start(Part(self._shard, each, each * _PIECE_BYTES, (each + 1) * _PIECE_BYTES))

    def _known_end(self) -> int | None:
        return self._pin.total_bytes if self._end is None else self._end
