"""One shard that has to be fetched: the memory or file in which its parts arrive."""

from __future__ import annotations

import asyncio
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from streamload.fetch.disk_cache import CacheFile
from streamload.fetch.parts import part_edges
from streamload.memory.unnamed import new_memory, write_fully
from streamload.storage.download import Pin
from streamload.tar.decompression import Compression

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
        write_fully(self.descriptor, data, offset)

    def free(self, start: int, end: int) -> None:
        """Free the pages that lie wholly between two places, on Linux; the last page of all counts as whole."""
        first = -(-start // _PAGE_BYTES) * _PAGE_BYTES
        behind = self.size_bytes if end >= self.size_bytes else end // _PAGE_BYTES * _PAGE_BYTES
        if behind > first and hasattr(mmap, "MADV_REMOVE"):
            with mmap.mmap(self.descriptor, self.size_bytes) as mapped:
                mapped.madvise(mmap.MADV_REMOVE, first, behind - first)

    def close(self) -> None:
        """Release it, but for copies of the descriptor. Idempotent."""
        if self.descriptor < 0:
            return
        with self._closing:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True, eq=False)
class FetchedShard:
    """A shard that is, was, or will be fetched.

    Attributes:
        number: in the listing.
        pin: the version that is read.
        compression: a compressed shard is decompressed whole, and has the single part 0.
        total_bytes: its decompressed size; None until it is known.
        generation: counts its memories and files.
        memory: where its parts arrive.
        file: its file in the disk cache, in place of memory.
        lookup: the task that opens that file.
    """

    number: int
    url: str
    pin: Pin
    compression: Compression | None
    total_bytes: int | None
    generation: int = 0
    memory: SparseMemory | None = None
    file: CacheFile | None = None
    lookup: asyncio.Task[None] | None = None

    @property
    def version(self) -> tuple[int, int]:
        """The generation, and how many bytes workers may map: if one changes, they need a new descriptor."""
        return self.generation, self.total_bytes or self.ensure_memory().size_bytes

    def ensure_memory(self) -> SparseMemory:
        """Return the memory; make it if there is none."""
        if self.memory is None:
            self.memory = SparseMemory(self.total_bytes)
        return self.memory

    def free(self, part: int) -> None:
        """Free a part, if it lies in memory."""
        if self.memory is None:
            return
        if self.compression is not None:
            self.memory.free(0, self.memory.size_bytes)
        else:
            self.memory.free(*part_edges(part, self.total_bytes))

    def release(self) -> None:
        """Close the memory or the file."""
        self.generation += 1
        for each in (self.memory, self.file):
            if each is not None:
                each.close()
        self.memory = self.file = self.lookup = None
