"""The part of an archive that may be looked at: all of it, or the bytes that have come so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.tar.header import BLOCK_BYTES

__all__ = ["ArchivePart", "NotArrivedError"]

_UNBOUNDED_BYTES = 1 << 62
_BYTES_AT_ONCE = 1 << 20


class NotArrivedError(Exception):
    """Bytes are wanted that have not come yet.

    Attributes:
        needs: the end of what has to be there.
    """

    def __init__(self, needs: int) -> None:
        super().__init__(f"the bytes up to {needs} have not come yet")
        self.needs = needs


class ArchivePart:
    """Bytes `start` to `available` of an archive, by their places in the archive.

    Nothing outside of them is ever touched: it may not have come yet, or may have been freed already.

    Attributes:
        octets: uint8[available - start], the bytes.
        start: where they begin.
        available: where they end.
        total: the size of the whole archive, or None where that is not known yet.
    """

    def __init__(
        self, data: NDArray[np.uint8], start: int, available: int, total: int | None, *, first: int = 0
    ) -> None:
        """Take the bytes from `data`, which has those of the archive from `first` up to `available` at least.

        Raises:
            ValueError: the numbers make no sense: `start` is not a multiple of 512, or more bytes than `data` or the
                archive have are said to be there.
        """
        end = first + len(data)
        most = end if total is None else min(total, end)
        if start < first or start % BLOCK_BYTES or available > most:
            raise ValueError(f"bytes {start} to {available} are no part of an archive of {most} bytes")
        self.octets = data[start - first : max(start, available) - first]
        self.start = start
        self.available = available
        self.total = total

    @property
    def limit(self) -> int:
        """Where the archive ends; a number that no archive reaches where that is not known."""
        return _UNBOUNDED_BYTES if self.total is None else self.total

    @property
    def whole(self) -> bool:
        """Whether the archive's last bytes have come."""
        return self.available == self.total

    def read(self, position: int, size: int) -> bytes:
        """The `size` bytes at `position`, which lie within the archive and not before `start`.

        Raises:
            NotArrivedError: some of them have not come yet.
        """
        if position + size > self.available:
            raise NotArrivedError(position + size)
        first = position - self.start
        return self.octets[first : first + size].tobytes()

    def first_nonzero(self, position: int) -> int | None:
        """Where the block with the first byte starts that is not zero, looking from `position` on; None if all are."""
        for first in range(position - self.start, len(self.octets), _BYTES_AT_ONCE):
            found = np.flatnonzero(self.octets[first : first + _BYTES_AT_ONCE])
            if len(found):
                return self.start + (first + int(found[0])) // BLOCK_BYTES * BLOCK_BYTES
        return None
