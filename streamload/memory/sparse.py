"""Unnamed memory that is filled and freed in parts, in any order: a sparse file that may grow."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING

from streamload.memory.unnamed import new_memory

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
