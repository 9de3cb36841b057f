"""One shard that has to be fetched: its bytes, compressed or not, and the memory or file in which parts arrive."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.parts import PART_BYTES, part_edges
from streamload.memory.unnamed import new_memory
from streamload.storage.download import Pin
from streamload.tar.decompression import Compression, Decompressor, decompress

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Decompression:
    """Decompresses one shard from its start to its end, and waits where there is no room for more.

    Args:
        body: the compressed shard; closed when it has ended.
        decompressor: a new one.
        write: takes what is decompressed, in order, with its offset.
        grow: called where there is no room for what comes next; returns True if it has called `add_room`.
        on_end: called when nothing of it runs any more: with its size, an error, or None if it was cancelled.

    Attributes:
        room_bytes: how much of the decompressed shard there is room for.
        waits: for room.
        cancelled: it is ending, or has ended, before the shard's end.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        decompressor: Decompressor,
        write: Callable[[int, bytes], None],
        grow: Callable[[], bool],
        on_end: Callable[[int | Exception | None], None],
    ) -> None:
        self.room_bytes = PART_BYTES
        self.waits = self.cancelled = False
        self._decompressor = decompressor
        self._store = write
        self._grow = grow
        self._on_end = on_end
        self._room = asyncio.Event()
        self._task = asyncio.create_task(self._run(body))
        self._task.add_done_callback(self._ended)

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._task.done()

    def add_room(self) -> None:
        """There is room for a part more."""
        self.room_bytes += PART_BYTES
        self.waits = False
        self._room.set()

    def expected_bytes(self, compressed_bytes: int) -> int:
        """What the shard takes decompressed, if the rest of it is like what has come."""
        done = self._decompressor
        return done.decompressed_bytes * compressed_bytes // max(1, done.compressed_bytes)

    def cancel(self) -> None:
        """Stop soon, without waiting for it."""
        self.cancelled = True
        self._task.cancel()

    async def close(self) -> None:
        """Stop; `on_end` is not called any more. Idempotent."""
        self._on_end = lambda _: None
        self.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, body: AsyncGenerator[bytes]) -> int:
        async with aclosing(body):
            return await decompress(body, self._decompressor, self._write)

    def _ended(self, task: asyncio.Task[int]) -> None:
        """Pass on what was raised, a mistake of ours too: nothing else would tell of it."""
        if self.cancelled or task.cancelled():
            self._on_end(None)
        else:
            error = task.exception()
            self._on_end(error if isinstance(error, Exception) else task.result())

    async def _write(self, offset: int, piece: bytes) -> None:
        while offset + len(piece) > self.room_bytes:
            if not self._grow():
                self._room.clear()
                self.waits = True
                await self._room.wait()
        self._store(offset, piece)


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
        compression: how it is compressed; it is decompressed as a whole then, and has the single part 0.
        generation: another one for every memory or file that the shard has had; workers need a new descriptor for each.
        total_bytes: its size, decompressed; None as long as it is not known.
        memory: where its parts arrive.
        file: a file of the disk cache in place of memory, whole or being filled.
        looked_up: whether the disk cache was looked up for that.
        decompression: of a compressed shard, until it has ended.
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
    decompression: Decompression | None = None

    @property
    def size_bytes(self) -> int:
        """How much workers may map now."""
        return self.total_bytes or self._memory().size_bytes

    def descriptor(self) -> int:
        """A copy of the descriptor, for whoever reads; the caller closes it."""
        return os.dup(self.file.descriptor if self.file is not None else self._memory().descriptor)

    def write(self, offset: int, data: bytes) -> None:
        """Bytes have come. Raises OSError: there is no memory left."""
        self._memory().write(offset, data)

    def pages(self) -> SparseMemory | None:
        """The memory whose pages may be allocated ahead; None where its size is not known yet, or it is a file."""
        return None if self.total_bytes is None or self.file is not None else self._memory()

    def free(self, part: int) -> None:
        """Free a part, if it lies in memory."""
        if self.memory is not None:
            whole = 0, self.memory.size_bytes
            self.memory.free(*(whole if self.compression is not None else part_edges(part, self.total_bytes)))

    def release(self, generation: int) -> None:
        """Let go of the memory or the file; what comes from now on comes into another one."""
        self.generation = generation
        for each in (self.memory, self.file):
            if each is not None:
                each.close()
        self.memory = self.file = None
        self.looked_up = False

    def close(self) -> None:
        """Let go of everything."""
        if self.decompression is not None:
            self.decompression.cancel()
        self.release(-1)

    def _memory(self) -> SparseMemory:
        if self.memory is None:
            self.memory = SparseMemory(self.total_bytes)
        return self.memory
