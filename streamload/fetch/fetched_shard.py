"""One shard that has to be fetched: its bytes, compressed or not, and the memory or file in which parts arrive."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.parts import PART_BYTES
from streamload.fetch.transfers import Part
from streamload.memory.unnamed import new_memory
from streamload.storage.download import Downloaded, Pin
from streamload.tar.decompression import Compression, Decompressor, decompress

if TYPE_CHECKING:
    from typing_extensions import Buffer

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


_LEAST_GROWTH_BYTES = 64 << 20
_PAGE_BYTES = mmap.PAGESIZE


class SparseMemory:
    """Only what has been written takes memory. Other processes read it through a copy of the descriptor.

    Args:
        size_bytes: how large it is; None where that is not known: then it grows with what is written, and is larger
            than that.

    Attributes:
        descriptor: of the memory, this object's own.
        size_bytes: how large it is now; it never shrinks.
    """

    def __init__(self, size_bytes: int | None) -> None:
        self.size_bytes = size_bytes or _LEAST_GROWTH_BYTES
        self.descriptor = new_memory(self.size_bytes)
        self._mapped: mmap.mmap | None = None
        self._closing = Lock()

    def allocate(self, start: int, end: int) -> None:
        """Allocate the pages between two places, so that writing there only copies. Any thread may do it.

        What cannot be allocated is left to `write`, and so is its error.
        """
        if hasattr(os, "posix_fallocate"):
            with suppress(OSError), self._closing:  # else the number might be another file's by now
                os.posix_fallocate(self.descriptor, start, end - start)

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes at their place.

        Raises:
            OSError: there is no memory left.
        """
        view = memoryview(data).cast("B")
        if offset + len(view) > self.size_bytes:
            self.resize(max(offset + len(view), 2 * self.size_bytes))
        while len(view):
            written = os.pwrite(self.descriptor, view, offset)
            view, offset = view[written:], offset + written

    def resize(self, size_bytes: int) -> None:
        """Make it larger; nothing happens if it is large enough."""
        if size_bytes > self.size_bytes:
            os.ftruncate(self.descriptor, size_bytes)
            self.size_bytes = size_bytes
            self._unmap()

    def free(self, start: int, end: int) -> None:
        """Free the pages that lie wholly between two places; they read as zeros then. Linux only, else nothing happens.

        The last page of all counts as whole.
        """
        first = -(-start // _PAGE_BYTES) * _PAGE_BYTES
        behind = self.size_bytes if end >= self.size_bytes else end // _PAGE_BYTES * _PAGE_BYTES
        if behind <= first or not hasattr(mmap, "MADV_REMOVE"):
            return
        if self._mapped is None:  # the mapping's own pages are never touched, so it takes none
            self._mapped = mmap.mmap(self.descriptor, self.size_bytes)
        self._mapped.madvise(mmap.MADV_REMOVE, first, behind - first)

    def close(self) -> None:
        """Release it; whoever has a copy of the descriptor keeps what is there. Idempotent."""
        if self.descriptor >= 0:
            self._unmap()
            with self._closing:
                os.close(self.descriptor)
                self.descriptor = -1

    def _unmap(self) -> None:
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()


@dataclass(slots=True, eq=False)
class FetchedShard:
    """A shard of which parts are wanted, there, or in flight.

    Attributes:
        number: in the listing.
        url: the shard.
        pin: the version that is read.
        compression: how it is compressed; its parts are those of the decompressed shard then.
        generation: another one for every memory or file that the shard has had; workers need a new descriptor for each.
        total_bytes: its size, decompressed; None as long as it is not known.
        memory: where its parts arrive.
        file: a whole file of the disk cache, in place of memory.
        looked_up: whether the disk cache was looked up for that.
        refused: the disk cache does not take it.
        decompressing: of a compressed shard, from the first part that is fetched.
    """

    number: int
    url: str
    pin: Pin
    compression: Compression | None
    generation: int
    total_bytes: int | None
    memory: SparseMemory | None = None
    file: CacheFile | None = None
    looked_up: bool = False
    refused: bool = False
    decompressing: DecompressedParts | None = None

    @property
    def size_bytes(self) -> int:
        """How much workers may map now."""
        return self.total_bytes or self._memory().size_bytes

    @property
    def waits_for_room(self) -> bool:
        """Whether nothing of it comes before there is room for another part.

        So it is with what is in flight of a compressed shard whose decompressing was ended to begin once more.
        """
        return self.compression is not None and (self.decompressing is None or self.decompressing.waits_for_room)

    def descriptor(self) -> int:
        """A copy of the descriptor, for whoever reads; the caller closes it."""
        return os.dup(self.file.descriptor if self.file is not None else self._memory().descriptor)

    def write(self, offset: int, data: bytes) -> None:
        """Bytes have come. Raises OSError: there is no memory left."""
        self._memory().write(offset, data)

    def pages(self) -> SparseMemory | None:
        """The memory whose pages may be allocated ahead; None where its size is not known yet, or it is a file."""
        return None if self.total_bytes is None or self.file is not None else self._memory()

    def free(self, start: int, end: int) -> None:
        """Free what lies between two places, if it lies in memory."""
        if self.memory is not None:
            self.memory.free(start, end)

    def move_to(self, file: CacheFile, generation: int) -> None:
        """Read all of it from a file; whoever has a copy of the memory's descriptor may go on with that."""
        self.release(generation)
        self.file, self.looked_up = file, True

    def release(self, generation: int) -> None:
        """Let go of the memory or the file; what comes from now on comes into another one."""
        self.generation = generation
        for each in (self.memory, self.file):
            if each is not None:
                each.close()
        self.memory = self.file = None
        self.looked_up = self.refused = False

    def close(self) -> None:
        """Let go of everything."""
        if self.decompressing is not None:
            self.decompressing.cancel()
        self.release(-1)

    def _memory(self) -> SparseMemory:
        if self.memory is None:
            self.memory = SparseMemory(self.total_bytes)
        return self.memory
