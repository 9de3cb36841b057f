"""One shard that has to be fetched: its bytes, compressed or not, and the memory or file in which parts arrive."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock

from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.parts import PART_BYTES, part_edges
from streamload.memory.unnamed import new_memory, write_fully
from streamload.storage.download import Pin
from streamload.tar.decompression import Compression, Decompressor


class Decompression:
    """The room of a shard that is being decompressed.

    Args:
        decompressor: a new one.
        store: takes the decompressed pieces with their offsets.
        grow: called if there is no room for the next piece; returns True if it has called `add_room`.

    Attributes:
        room_bytes: how much of the decompressed shard there is room for.
        waits: for room.
        cancelled: it ends before the shard does.
        task: decompresses.
    """

    task: asyncio.Task[int]

    def __init__(
        self, decompressor: Decompressor, store: Callable[[int, bytes], None], grow: Callable[[], bool]
    ) -> None:
        self.decompressor = decompressor
        self.room_bytes = PART_BYTES
        self.waits = self.cancelled = False
        self._store = store
        self._grow = grow
        self._room = asyncio.Event()

    def add_room(self) -> None:
        """Give it room for a part more."""
        self.room_bytes += PART_BYTES
        self.waits = False
        self._room.set()

    def expected_bytes(self, compressed_bytes: int) -> int:
        """Return the decompressed size of the shard, if the rest is like what has come."""
        done = self.decompressor
        return done.decompressed_bytes * compressed_bytes // max(1, done.compressed_bytes)

    def cancel(self) -> None:
        """Stop soon, without waiting for it."""
        self.cancelled = True
        self.task.cancel()

    async def write(self, offset: int, piece: bytes) -> None:
        """Store a piece as soon as there is room for it."""
        while offset + len(piece) > self.room_bytes:
            if not self._grow():
                self._room.clear()
                self.waits = True
                await self._room.wait()
        self._store(offset, piece)


_LEAST_GROWTH_BYTES = 64 << 20
_PAGE_BYTES = mmap.PAGESIZE


class SparseMemory:
    """Memory of which only what has been written is allocated; other processes read it through a copied descriptor.

    Args:
        size_bytes: its size; None if that is not known: then it grows ahead of what is written.

    Attributes:
        descriptor: this object's own.
        size_bytes: its size now; it never shrinks.
    """

    def __init__(self, size_bytes: int | None) -> None:
        self.size_bytes = size_bytes or _LEAST_GROWTH_BYTES
        self.descriptor = new_memory(self.size_bytes)
        self._mapped: mmap.mmap | None = None
        self._closing = Lock()

    def allocate(self, start: int, end: int) -> None:
        """Allocate pages ahead, so that `write` only copies; on any thread. Errors are left to `write`."""
        if hasattr(os, "posix_fallocate"):
            with suppress(OSError), self._closing:  # the number might be another file's by now
                os.posix_fallocate(self.descriptor, start, end - start)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at their place. Raises OSError if there is no memory left."""
        if offset + len(data) > self.size_bytes:
            self.size_bytes = max(offset + len(data), 2 * self.size_bytes)
            os.ftruncate(self.descriptor, self.size_bytes)
            self._unmap()
        write_fully(self.descriptor, data, offset)

    def free(self, start: int, end: int) -> None:
        """Free the pages that lie wholly between two places, on Linux; the last page of all counts as whole."""
        first = -(-start // _PAGE_BYTES) * _PAGE_BYTES
        behind = self.size_bytes if end >= self.size_bytes else end // _PAGE_BYTES * _PAGE_BYTES
        if behind <= first or not hasattr(mmap, "MADV_REMOVE"):
            return
        if self._mapped is None:  # takes no memory, since its pages are never touched
            self._mapped = mmap.mmap(self.descriptor, self.size_bytes)
        self._mapped.madvise(mmap.MADV_REMOVE, first, behind - first)

    def close(self) -> None:
        """Release it, but for copies of the descriptor. Idempotent."""
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
    """A shard that is, was, or will be fetched.

    Attributes:
        number: in the listing.
        pin: the version that is read.
        compression: a compressed shard is decompressed whole, and has the single part 0.
        total_bytes: its size, decompressed; None until it is known.
        generation: changes with every memory or file that the shard gets; workers need a new descriptor for each.
        memory: where its parts arrive.
        file: a file of the disk cache in place of memory, whole or being filled.
        looked_up: the disk cache was asked for that.
        decompression: of a compressed shard, until it has ended.
        completing: keys of the parts that are fetched only to make the file whole.
    """

    number: int
    url: str
    pin: Pin
    compression: Compression | None
    total_bytes: int | None
    generation: int = 0
    memory: SparseMemory | None = None
    file: CacheFile | None = None
    looked_up: bool = False
    decompression: Decompression | None = None
    completing: set[int] = field(default_factory=set)

    @property
    def size_bytes(self) -> int:
        """How much workers may map now."""
        return self.total_bytes or self._memory().size_bytes

    def descriptor(self) -> int:
        """Return a copy of the descriptor, which the caller closes."""
        return os.dup(self.file.descriptor if self.file is not None else self._memory().descriptor)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes to the memory. Raises OSError if there is none left."""
        self._memory().write(offset, data)

    def pages(self) -> SparseMemory | None:
        """Return the memory whose pages may be allocated ahead; None if its size is not known, or it is a file."""
        return None if self.total_bytes is None or self.file is not None else self._memory()

    def free(self, part: int) -> None:
        """Free a part, if it lies in memory."""
        if self.memory is not None:
            whole = 0, self.memory.size_bytes
            self.memory.free(*(whole if self.compression is not None else part_edges(part, self.total_bytes)))

    def release(self) -> None:
        """Close the memory or the file; what comes from now on comes into another one."""
        self.generation += 1
        for each in (self.memory, self.file):
            if each is not None:
                each.close()
        self.memory = self.file = None
        self.looked_up = False

    def _memory(self) -> SparseMemory:
        if self.memory is None:
            self.memory = SparseMemory(self.total_bytes)
        return self.memory
