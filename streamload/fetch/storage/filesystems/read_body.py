"""A range that was read whole, where a filesystem gives no stream of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

__all__ = ["ReadBody"]

_CHUNK_BYTES = 1 << 20


class ReadBody:
    """See `RangeBody`."""

    def __init__(self, content: bytes, total_bytes: int, etag: str | None) -> None:
        self.total_bytes = total_bytes
        self.etag = etag
        self._content = content

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `RangeBody.chunks`."""
        content, self._content = self._content, b""
        for start in range(0, len(content), _CHUNK_BYTES):
            yield content[start : start + _CHUNK_BYTES]

    async def aclose(self) -> None:
        """See `RangeBody.aclose`."""
        self._content = b""
