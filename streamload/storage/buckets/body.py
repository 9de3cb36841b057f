"""A range of an object, as obstore streams it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from streamload.errors import StorageError, TransientStorageError
from streamload.storage.buckets.in_flight import InFlight
from streamload.storage.buckets.obstore_errors import storage_error
from streamload.storage.errors import transient_error
from streamload.text import counted

__all__ = ["ObjectBody", "body_error"]

_CHUNK_BYTES = 1
"""Bodies are passed on as they come: what obstore still gathers is lost where a body breaks off."""


class ObjectBody:
    """See `RangeBody`.

    Args:
        url: of the object.
        result: obstore's answer.
        sizes: of the range and of the whole object.
        etag: of the object.
        in_flight: told of every piece that is asked for.
    """

    def __init__(self, url: str, result: Any, sizes: tuple[int, int], *, etag: str | None, in_flight: InFlight) -> None:
        self._range_bytes, self.total_bytes = sizes
        self.etag = etag
        self._url = url
        self._stream = result.stream(min_chunk_size=_CHUNK_BYTES)
        self._in_flight = in_flight

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `RangeBody.chunks`."""
        import obstore

        left, stream = self._range_bytes, self._stream
        try:
            while (chunk := await self._next(stream)) is not None:
                left -= len(chunk)
                if left < 0:
                    raise transient_error(self._url, "the server sent more bytes than its headers say")
                yield chunk
        except (obstore.exceptions.BaseError, OSError) as exc:
            raise body_error(self._url, exc) from None
        finally:
            await self.aclose()
        if left:
            raise transient_error(self._url, f"the answer ended {counted(left, 'byte')} early")

    async def _next(self, stream: Any) -> Any:
        try:
            return await self._in_flight.add(anext(stream))
        except StopAsyncIteration:
            return None

    async def aclose(self) -> None:
        """See `RangeBody.aclose`."""
        self._stream = None  # the last reference: obstore closes the connection with it


def body_error(url: str, exc: Exception) -> StorageError:
    """What broke off while it was read may be read again, whatever the reason; the next request tells a final one."""
    error = storage_error(url, exc)
    return error if isinstance(error, TransientStorageError) else transient_error(url, "the answer broke off")
