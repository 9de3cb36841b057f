"""Open shards: those of which a process has a descriptor, read by ranges or mapped as a whole.

A shard that is truncated while in use kills a process that reads it through a mapping. So only workers, which can be
replaced, map shards, and only to read many rows at once: for a single field, a mapping would count all pages around it
as the process's memory.
"""

from __future__ import annotations

import os
import weakref

import numpy as np
from numpy.typing import NDArray

from streamload.decode.field_reader import ShardReader
from streamload.decode.tasks import ShardOpened
from streamload.memory.mapped import Bytes, gather, map_memory, read_fully


class OpenShards(ShardReader):
    """Open shards, by number. The descriptors are closed with this object at the latest.

    Args:
        maps: False in a process that must survive whatever happens to the files: then nothing is mapped.
    """

    def __init__(self, *, maps: bool = True) -> None:
        self._maps = maps
        self._descriptors: dict[int, int] = {}
        self._opened: dict[int, ShardOpened] = {}
        self._mapped: dict[int, Bytes] = {}
        weakref.finalize(self, _close_all, self._descriptors).atexit = False

    def add(self, opened: ShardOpened, descriptor: int) -> None:
        """Take over a shard's descriptor, replacing an earlier one."""
        before = self._descriptors.get(opened.shard)
        self._descriptors[opened.shard] = descriptor
        self._opened[opened.shard] = opened
        self._mapped.pop(opened.shard, None)
        if before is not None:
            os.close(before)

    def read_into(self, target: memoryview, shard: int, start: int) -> int:
        """Fill `target` with the bytes from `start` on; returns how many, fewer where the shard ends before.

        Raises:
            OSError: the storage cannot read them.
        """
        return read_fully(self._descriptors[shard], target, start)

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        """The bytes from `start` on, fewer where the shard ends before; held once, unless they exceed 2 GiB.

        Raises:
            OSError: the storage cannot read them.
        """
        descriptor = self._descriptors[shard]
        data = os.pread(descriptor, size_bytes, start)
        if len(data) == size_bytes:
            return data
        pieces, done = [data], len(data)
        while data and done < size_bytes:
            data = os.pread(descriptor, size_bytes - done, start + done)
            pieces.append(data)
            done += len(data)
        return b"".join(pieces)

    def read_own(self, shard: int, start: int, size_bytes: int) -> bytearray:
        """Like `read`, into memory that the caller may change.

        Raises:
            OSError: the storage cannot read them.
        """
        own = bytearray(size_bytes)
        found = self.read_into(memoryview(own), shard, start)
        return own if found == size_bytes else own[:found]

    def gather(
        self, shard: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[Bytes, NDArray[np.int64]] | None:
        """The bytes of many fields at once, and where each begins in them.

        None where one lies beyond the shard or cannot be read; reading them one by one then raises the proper error.
        """
        if not len(offsets) or offsets.min() < 0 or (sizes > self.size_bytes(shard) - offsets).any():
            return None
        try:
            if self._maps:
                return self._memory(shard), offsets
            return gather(self._descriptors[shard], offsets, sizes)
        except OSError:
            return None

    def mapped(self, shard: int) -> memoryview | None:
        """See `ShardReader.mapped`."""
        if not self._maps:
            return None
        try:
            return memoryview(self._memory(shard).data)
        except OSError:
            return None

    def descriptor(self, shard: int) -> int:
        """A shard's descriptor, still owned by this object."""
        return self._descriptors[shard]

    def _memory(self, shard: int) -> Bytes:
        """The whole shard, mapped read-only on the first call."""
        if shard not in self._mapped:
            self._mapped[shard] = map_memory(self._descriptors[shard], self._opened[shard].size_bytes, writable=False)
        return self._mapped[shard]

    def first_bytes(self, shard: int, size_bytes: int) -> Bytes:
        """The first bytes of a shard that may still be arriving, mapped read-only for this caller alone.

        Such a shard lies in memory or in a file of our own, which is never truncated.
        """
        return map_memory(self._descriptors[shard], size_bytes, writable=False)

    def url(self, shard: int) -> str:
        """Its url."""
        return self._opened[shard].url

    def size_bytes(self, shard: int) -> int:
        """Its size."""
        return self._opened[shard].size_bytes

    def drop(self, shards: tuple[int, ...]) -> None:
        """Close shards; they are unmapped when the last view of them is gone."""
        for shard in shards:
            self._mapped.pop(shard, None)
            if self._opened.pop(shard, None) is not None:
                os.close(self._descriptors.pop(shard))

    def close(self) -> None:
        """Close all of them."""
        self.drop(tuple(self._opened))


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
