"""Copies of whole files, for storages that serve no parts of them: what `simplecache::` before a url asks for."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from io import FileIO
from types import TracebackType

from streamload.errors import StorageError
from streamload.storage.protocol import ShardInfo, without_secrets

__all__ = ["CopiedBody", "ReportsFullFolder", "WholeCopies"]

_MOST_COPIES = 256
"""Each is an open file. A shard is read within a shuffle window, so the oldest is hardly needed any more."""

_CHUNK_BYTES = 1 << 20
_BEAT_S = 1.0


class ReportsFullFolder:
    """A block in which a copy that has no room becomes a StorageError.

    Args:
        url: what is copied.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(
                f"a copy of this file has no room in the temporary folder {tempfile.gettempdir()} ({exc.strerror}); "
                "TMPDIR names another one",
                url=without_secrets(self._url),
            ) from None


class WholeCopy:
    """One file while it is copied and after; a file without a name, so that nothing is left of it after any death.

    Args:
        known: what the storage says of the file.
        copy: copies it to an open file; raises StorageError if all of it is not there then.

    Attributes:
        known: as given.
    """

    def __init__(self, known: ShardInfo, copy: Callable[[FileIO], Awaitable[None]]) -> None:
        self.known = known
        with tempfile.TemporaryFile(prefix="streamload-") as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        target = FileIO(os.dup(self._descriptor), "wb")
        self._copying = asyncio.ensure_future(copy(target))
        self._copying.add_done_callback(partial(_end, target))  # also of one that was abandoned before it began

    @property
    def failed(self) -> bool:
        """Whether it ended without all of the file."""
        return self._copying.done() and (self._copying.cancelled() or self._copying.exception() is not None)

    async def wait(self, timeout_s: float) -> bool:
        """Wait so long at most; whether all of the file is there.

        Raises:
            StorageError: it never will be.
        """
        await asyncio.wait([self._copying], timeout=timeout_s)
        if self._copying.done():
            self._copying.result()
        return self._copying.done()

    def arrived_bytes(self) -> int:
        """How much of it is there."""
        return os.fstat(self._descriptor).st_size

    async def read(self, start: int, size_bytes: int) -> bytes:
        """Some bytes of a file that is all there."""
        return await asyncio.to_thread(os.pread, self._descriptor, size_bytes, start)

    async def abandon(self) -> None:
        """Stop copying."""
        self._copying.cancel()
        await asyncio.gather(self._copying, return_exceptions=True)


def _end(target: FileIO, copying: asyncio.Future[None]) -> None:
    target.close()
    if not copying.cancelled():
        copying.exception()  # seen, even where nobody waits for the copy any more


class CopiedBody:
    """A range of a file, taken from its copy once all of that is there; see `RangeBody`."""

    def __init__(self, copy: WholeCopy, start: int, end: int) -> None:
        self.total_bytes = copy.known.bytes
        self.etag = copy.known.etag
        self._copy = copy
        self._start = start
        self._end = end

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `RangeBody.chunks`; the pieces are empty while the file is still arriving."""
        arrived_bytes = 0
        while not await self._copy.wait(_BEAT_S):
            before, arrived_bytes = arrived_bytes, self._copy.arrived_bytes()
            if arrived_bytes > before:
                yield b""
        for start in range(self._start, self._end, _CHUNK_BYTES):
            yield await self._copy.read(start, min(_CHUNK_BYTES, self._end - start))

    async def aclose(self) -> None:
        """See `RangeBody.aclose`: others may need the copy."""


class WholeCopies:
    """The copies that one loop has made, each by whoever needs the file first."""

    def __init__(self) -> None:
        self._copies: dict[str, WholeCopy] = {}

    def get(self, known: ShardInfo, copy: Callable[[FileIO], Awaitable[None]]) -> WholeCopy:
        """The copy of this version of a file; it is begun where there is none, or where it has failed."""
        found = self._copies.pop(known.url, None)
        if found is None or found.failed or found.known != known:
            found = WholeCopy(known, copy)
        self._copies[known.url] = found
        if len(self._copies) > _MOST_COPIES:
            del self._copies[next(iter(self._copies))]  # whoever reads it keeps it
        return found

    async def aclose(self) -> None:
        """Stop copying, and let go of all copies."""
        copies, self._copies = list(self._copies.values()), {}
        for each in copies:
            await each.abandon()
