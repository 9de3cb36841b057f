"""A compressed shard, decompressed part by part as room for the parts is granted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Protocol

from streamload.fetch.parts import PART_BYTES
from streamload.tar.decompression import Decompressor, decompress


class DecompressionEvents(Protocol):
    """Who takes what is decompressed. Everything is called in the loop."""

    def has(self, number: int, /) -> bool:
        """Whether a part is there already, so that no room need be granted for it."""

    def is_wanted(self, number: int, /) -> bool:
        """Whether a part that is not there is to be kept: room was granted for it, or will be."""

    def waits(self) -> None:
        """There is no room yet for the part that comes now; or it is over, and has released everything."""

    def write(self, offset: int, data: bytes, /) -> None:
        """Some bytes of the decompressed shard, in order."""

    def decompressed(self, number: int, size_bytes: int, /) -> None:
        """A part is there whole."""

    def ended(self, total_bytes: int, /) -> None:
        """The shard is decompressed to its end, and was whole."""

    def failed(self, error: Exception, /) -> None:
        """It cannot be decompressed any further."""


class DecompressedParts:
    """Decompresses one shard from its start to its end; it can only go forward, so every part needs those before it.

    What becomes of a part is decided when its first byte comes: it is written, or skipped because it is there
    already, or nobody wants it while one behind it is wanted. So a part that is wanted later is not found half written.

    Args:
        body: the compressed shard; closed when it has ended.
        decompressor: a new one.
        events: notified of what happens.
        granted: the parts for which there is room already.

    Attributes:
        next_number: the first part that has not been skipped or written whole; it is being written, or is next.
        waits_for_room: for that part.
        ended: all of it has been decompressed.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        decompressor: Decompressor,
        events: DecompressionEvents,
        granted: Iterable[int] = (),
    ) -> None:
        self.next_number = 0
        self.waits_for_room = False
        self.ended = False
        self._writes = False
        self._events = events
        self._grants = set(granted)
        self._granted = asyncio.Event()
        self._cancelled = self._closed = False
        self._task = asyncio.create_task(self._run(body, decompressor))
        self._task.add_done_callback(self._over)

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._task.done()

    def grant(self, number: int) -> None:
        """There is room for a part."""
        self._grants.add(number)
        self.waits_for_room = False  # if it was not for this one, that shows when the task has run
        self._granted.set()

    @property
    def ends(self) -> bool:
        """Whether it is stopping and still holds memory."""
        return self._cancelled and not self.over

    async def close(self) -> None:
        """Stop; no event comes any more. Idempotent."""
        self._closed = True
        self.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def cancel(self) -> None:
        """Stop soon, without waiting for it."""
        self._cancelled = True
        self._task.cancel()

    async def _run(self, body: AsyncGenerator[bytes], decompressor: Decompressor) -> None:
        async with aclosing(body):
            total_bytes = await decompress(body, decompressor, self._write)
        self.ended = True
        if total_bytes % PART_BYTES and self._writes:
            self.next_number += 1
            self._events.decompressed(total_bytes // PART_BYTES, total_bytes % PART_BYTES)
        self._events.ended(total_bytes)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Pass on what was raised, a mistake of ours too: nothing else would tell of it."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception) and not self._cancelled:
            self._events.failed(error)
        if not self._closed:
            self._events.waits()

    async def _write(self, offset: int, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            number, within = divmod(offset, PART_BYTES)
            count = min(len(view), PART_BYTES - within)
            if within == 0:
                self._writes = await self._is_to_be_written(number)
            if self._writes:
                self._events.write(offset, bytes(view[:count]) if count < len(piece) else piece)
                if within + count == PART_BYTES:
                    self.next_number = number + 1
                    self._grants.discard(number)
                    self._events.decompressed(number, PART_BYTES)
            view, offset = view[count:], offset + count

    async def _is_to_be_written(self, number: int) -> bool:
        """Wait for room for a part that comes now; False where it is skipped."""
        while number not in self._grants or self._events.has(number):
            one_behind_is_wanted = max(self._grants, default=0) > number
            if self._events.has(number) or (one_behind_is_wanted and not self._events.is_wanted(number)):
                self._grants.discard(number)
                self.next_number = number + 1
                return False
            self._granted.clear()
            self.waits_for_room = True
            self._events.waits()
            await self._granted.wait()
            self.waits_for_room = False
        return True
