"""One shard that has to be fetched: where it comes from, and the memory or file in which its parts arrive."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from streamload.fetch.cache.cached_shard import CachedShard
from streamload.fetch.decompressed_parts import DecompressedParts
from streamload.memory.sparse import SparseMemory
from streamload.storage.download import Pin
from streamload.tar.decompression import Compression

__all__ = ["FetchedShard"]


@dataclass(slots=True, eq=False)
class FetchedShard:
    """A shard of which parts are wanted, there, or in flight.

    Attributes:
        number: in the listing.
        url: the shard.
        pin: the version that is read.
        compression: how it is compressed; its parts are those of the decompressed shard then.
        generation: another one for every memory that the shard has had; workers need a new descriptor for each.
        total_bytes: its size, decompressed; None as long as it is not known.
        memory: where its parts arrive, unless they do so in `cached`.
        cached: its file in the disk cache.
        cache_requested: whether the disk cache was looked up for a file.
        opening: held by whoever asks it, on behalf of all parts.
        decompressing: of a compressed shard, from the first part that is fetched.
    """

    number: int
    url: str
    pin: Pin
    compression: Compression | None
    generation: int
    total_bytes: int | None
    memory: SparseMemory | None = None
    cached: CachedShard | None = None
    cache_requested: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    decompressing: DecompressedParts | None = None

    @property
    def size_bytes(self) -> int:
        """How much workers may map now."""
        if self.cached is not None and self.total_bytes is not None:
            return self.total_bytes
        return self.total_bytes or self._memory().size_bytes

    @property
    def waits_for_room(self) -> bool:
        """Whether nothing of it comes before there is room for another part.

        So it is with what is in flight of a compressed shard whose decompressing was ended to begin once more.
        """
        return self.compression is not None and (self.decompressing is None or self.decompressing.waits_for_room)

    def descriptor(self) -> int:
        """A copy of the descriptor, for whoever reads; the caller closes it."""
        return os.dup(self.cached.descriptor if self.cached is not None else self._memory().descriptor)

    def write(self, offset: int, data: bytes) -> None:
        """Bytes have come.

        Raises:
            CacheOffError: the disk cache takes nothing any more.
            OSError: there is no memory left.
        """
        if self.cached is not None:
            self.cached.write(offset, data)
        else:
            self._memory().write(offset, data)

    def free(self, start: int, end: int) -> None:
        """Free what lies between two places, if it lies in memory."""
        if self.memory is not None:
            self.memory.free(start, end)

    def release(self, generation: int) -> None:
        """Let go of the memory or the file; what comes from now on comes into another one."""
        self.generation = generation
        if self.memory is not None:
            self.memory.close()
        if self.cached is not None:
            self.cached.close()
        self.memory, self.cached, self.cache_requested = None, None, False

    def close(self) -> None:
        """Let go of everything."""
        if self.decompressing is not None:
            self.decompressing.cancel()
        if self.memory is not None:
            self.memory.close()
        if self.cached is not None:
            self.cached.close()

    def _memory(self) -> SparseMemory:
        if self.memory is None:
            self.memory = SparseMemory(self.total_bytes)
        return self.memory
