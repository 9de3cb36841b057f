"""A compressed shard, unpacked part by part as room for the parts is granted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from streamload.errors import StreamloadError
from streamload.fetch.parts import PART_BYTES
from streamload.fetch.unpacking import Unpacker, unpack

__all__ = ["UnpackedParts", "UnpackingEvents"]


class UnpackingEvents(Protocol):
    """Who takes what is unpacked. Everything is called in the loop."""

    def has(self, number: int, /) -> bool:
        """Whether a part is there already, so that no room need be granted for it."""

    def write(self, offset: int, data: bytes, /) -> None:
        """Some bytes of the unpacked shard, in order."""

    def unpacked(self, number: int, size_bytes: int, /) -> None:
        """A part is there whole."""

    def ended(self, total_bytes: int, /) -> None:
        """The shard is unpacked to its end, and was whole."""

    def failed(self, error: Exception, /) -> None:
        """It cannot be unpacked any further."""


class UnpackedParts:
    """Unpacks one shard from its start to its end; it can only go forward, so every part needs those before it.

    Args:
        body: the compressed shard.
        unpacker: a new one.
        events: told what happens.
        granted: the parts for which there is room already.

    Attributes:
        next_number: the part that is being unpacked, or waits for room.
        ended: all of it has been unpacked.
    """

    def __init__(
        self, body: AsyncIterator[bytes], unpacker: Unpacker, events: UnpackingEvents, granted: Iterable[int] = ()
    ) -> None:
        self.next_number = 0
        self.ended = False
        self._events = events
        self._grants = set(granted)
        self._granted = asyncio.Event()
        self._task = asyncio.create_task(self._run(body, unpacker))

    def grant(self, number: int) -> None:
        """There is room for a part."""
        self._grants.add(number)
        self._granted.set()

    async def close(self) -> None:
        """Stop; no event comes any more. Twice is fine."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def cancel(self) -> None:
        """Stop soon, without waiting for it."""
        self._task.cancel()

    async def _run(self, body: AsyncIterator[bytes], unpacker: Unpacker) -> None:
        try:
            total_bytes = await unpack(body, unpacker, self._write)
        except (StreamloadError, OSError) as error:
            self._events.failed(error)
            return
        self.ended = True
        if total_bytes % PART_BYTES and not self._events.has(total_bytes // PART_BYTES):
            self._events.unpacked(total_bytes // PART_BYTES, total_bytes % PART_BYTES)
        self._events.ended(total_bytes)

    async def _write(self, offset: int, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            number, within = divmod(offset, PART_BYTES)
            self.next_number = number
            count = min(len(view), PART_BYTES - within)
            if not self._events.has(number):
                await self._room(number)
                self._events.write(offset, bytes(view[:count]) if count < len(piece) else piece)
                if within + count == PART_BYTES:
                    self._grants.discard(number)
                    self._events.unpacked(number, PART_BYTES)
            view, offset = view[count:], offset + count

    async def _room(self, number: int) -> None:
        while number not in self._grants:
            self._granted.clear()
            await self._granted.wait()
