"""Hold the memory or file into which a shard's parts are fetched."""

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


class SparseMemory:
    """Memory that is allocated only where written; other processes read it through a copied descriptor.

    Args:
        size_bytes: its size; None if unknown: it then grows ahead of writes.

    Attributes:
        descriptor: owned by this object.
        size_bytes: the current size, which never shrinks.
    """

    def __init__(self, size_bytes: int | None) -> None:
        self.size_bytes = size_bytes or _LEAST_GROWTH_BYTES
        self.descriptor = new_memory(self.size_bytes)
        self._closing = Lock()

    def allocate(self, start: int, end: int) -> None:
        """Allocate pages, so that `write` only copies; thread-safe. Errors are left to `write`."""
        if hasattr(os, "posix_fallocate"):
            with suppress(OSError), self._closing:  # the number may be reused after a close
                os.posix_fallocate(self.descriptor, start, end - start)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset. Raises OSError if memory is exhausted."""
        if offset + len(data) > self.size_bytes:
            self.size_bytes = max(offset + len(data), 2 * self.size_bytes)
            os.ftruncate(self.descriptor, self.size_bytes)
        write_fully(self.descriptor, data, offset)

    def free(self, start: int, end: int) -> None:
        """Free the pages of a range that begins at a page, and ends at one or with the memory; on Linux."""
        end = min(end, self.size_bytes)
        if end > start and hasattr(mmap, "MADV_REMOVE"):
            with mmap.mmap(self.descriptor, self.size_bytes) as mapped:
                mapped.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Close the descriptor; copies keep the memory. Idempotent."""
        if self.descriptor < 0:
            return
        with self._closing:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True, eq=False)
class FetchedShard:
    """A shard to fetch, and its state.

    Attributes:
        number: in the listing.
        pin: the version to read.
        compression: a compressed shard is decompressed as a whole, into the single part 0.
        total_bytes: its decompressed size, once known.
        generation: the number of released memories and files.
        memory: receives its parts.
        file: its file in the disk cache, instead of memory.
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
        """Return generation and mappable bytes: workers need a new descriptor if one changes."""
        return self.generation, self.total_bytes or self.ensure_memory().size_bytes

    def ensure_memory(self) -> SparseMemory:
        """Return the memory, creating it if needed."""
        if self.memory is None:
            self.memory = SparseMemory(self.total_bytes)
        return self.memory

    def free(self, part: int) -> None:
        """Free a part that lies in memory."""
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
