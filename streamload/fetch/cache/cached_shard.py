"""One shard in the disk cache, open: whole, or being filled together with other processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from streamload.fetch.cache.partial_shard import PartialShard, stored_crc32, true_crc32

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["CacheDamagedError", "CacheOffError", "CachedShard", "ShardEvents"]

_SHORTEST_RETRY_S = 0.002
_LONGEST_RETRY_S = 0.05
_WAIT_S = 30.0

_Read = TypeVar("_Read")


class CacheOffError(Exception):
    """The cache cannot take any more; the shard's missing parts must go elsewhere. Never seen by a user."""


class CacheDamagedError(CacheOffError):
    """The file holds other bytes than were fetched, and was removed; all of the shard must be fetched once more."""


@dataclass(frozen=True, slots=True)
class ShardEvents:
    """What a shard tells the cache that it belongs to.

    Attributes:
        completed: all parts are present, and perhaps nobody has moved the file to its place yet.
        failed: the disk refused something.
        damaged: it holds other bytes than were fetched.
        closed: it was closed.
    """

    completed: Callable[[CachedShard], None]
    failed: Callable[[OSError], None]
    damaged: Callable[[CachedShard], None]
    closed: Callable[[CachedShard], None]


class CachedShard:
    """A shard's file, and who fetches which part of it.

    A part is `part_bytes` long, as the cache knows, but for the last. The use of a part is: `claim` it; if that
    gives True, fetch it, `write` all of its bytes, then `finish` it with its `checksum`, or `abandon` it if it could
    not be fetched. What was there already is compared with its checksum when it is first claimed.

    Whatever was finished stays readable through `descriptor` until that is closed: when another process evicts the
    file, when it moves to its final name, and when the cache turns itself off. The one exception is a disk that fails
    only as the finished file is made durable: the kernel may give other bytes later than those that it took, so the
    shard is `withdrawn` and has no parts any more. Whoever gets a copy of the
    descriptor (a worker) keeps the file from being evicted as long as the copy is open. The file is shared with other
    processes: never punch holes into it.

    Used by one thread; only `write` may be called from others, also for several parts at once.

    Args:
        descriptor: of its file.
        shard_bytes: the shard's size.
        part_bytes: that of a part.
        partial: what is being filled; None if the file was whole when it was opened.
        events: notified of what happens.
        wait_s: how long to wait for another process's part.

    Attributes:
        descriptor: read-only if the file was whole when it was opened, else for reading and writing; this object
            closes it.
    """

    def __init__(
        self,
        descriptor: int,
        shard_bytes: int,
        part_bytes: int,
        partial: PartialShard | None,
        events: ShardEvents,
        *,
        wait_s: float = _WAIT_S,
    ) -> None:
        self.descriptor = descriptor
        self.partial = partial
        """What is being filled; None if the file was whole when it was opened."""
        self._shard_bytes = shard_bytes
        self._part_bytes = part_bytes
        self._n_parts = -(-shard_bytes // part_bytes)
        self._compared: set[int] = set()
        self._events = events
        self._wait_s = wait_s
        self._claimed: set[int] = set()
        self._off = False
        self.withdrawn = False
        """Whether the disk failed only as the finished file was made durable, so that no part can be believed."""
        self._announced = False

    @property
    def complete(self) -> bool:
        """Whether all parts are present."""
        return self._holds(lambda partial: partial.complete)

    def has(self, part: int) -> bool:
        """Whether a part is present, from whichever process.

        Raises:
            IndexError: the shard has no such part.
        """
        if not 0 <= part < self._n_parts:
            raise IndexError(f"part {part} is not one of {self._n_parts}")
        return self._holds(lambda partial: partial.has(part))

    async def claim(self, part: int) -> bool:
        """Wait until the part is present, or is this caller's to fetch.

        Another process's lock is tried again every few milliseconds: a wait for it in the kernel would take a thread,
        and could not be cancelled. An owner that dies is followed at once. One that neither dies nor finishes (it
        was stopped) is waited for 30 seconds; then the part is fetched beside it, which is harmless, because both
        write the same bytes of the same version.

        Returns:
            True: fetch it, write it, and finish or abandon it. False: it is present.

        Raises:
            CacheOffError: it is not present, and the cache takes nothing any more.
            CacheDamagedError: it is present, and is not what was fetched.
            RuntimeError: the shard was closed.
        """
        retry_s = _SHORTEST_RETRY_S
        deadline = monotonic() + self._wait_s
        while not self.has(part):
            partial = self._to_fill()
            if part not in self._claimed and (self._try_claim(partial, part) or monotonic() > deadline):
                self._claimed.add(part)
                if not self.has(part):
                    return True
                self.abandon(part)
                continue
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
        if part not in self._compared:
            if not await self._is_sound(part):
                self._events.damaged(self)
                raise CacheDamagedError
            self._compared.add(part)
        self.announce()
        return False

    async def checksum(self, part: int) -> int:
        """The crc32 of a part as it lies there, found on a thread.

        Raises:
            CacheOffError: the disk refused to read it, and the cache is off from now on.
            RuntimeError: the shard was closed.
        """
        edges = self._edges(part)
        return await self._on_thread(lambda descriptor: true_crc32(descriptor, *edges))

    def write(self, offset: int, data: Buffer) -> None:
        """Write some bytes of a claimed part at their place in the shard. It may block while the disk is busy.

        Raises:
            CacheOffError: the disk refused them, and the cache is off from now on, or was before.
        """
        partial = self._to_fill()
        try:
            partial.write(offset, data)
        except OSError as exc:
            self._events.failed(exc)
            raise CacheOffError from exc

    def finish(self, part: int, crc32: int) -> None:
        """All bytes of a claimed part are written, with this checksum: show it to everyone.

        Raises:
            CacheOffError: as for `write`.
        """
        partial = self._to_fill()
        try:
            partial.set_present(part, crc32)
            self._compared.add(part)
        except OSError as exc:
            self._events.failed(exc)
            raise CacheOffError from exc
        finally:
            self.abandon(part)
        self.announce()

    def abandon(self, part: int) -> None:
        """A claimed part is not fetched after all: let others have it. Nothing happens if it is not claimed."""
        if part in self._claimed:
            self._claimed.discard(part)
            if self.partial is not None:
                self.partial.release(part)

    def turn_off(self, *, withdrawn: bool = False) -> None:
        """Take nothing any more and remove the partial file; what is present stays so, unless it is `withdrawn`.

        A complete file, of which the cache was notified, is the cache's to move or to remove. It may be called from any
        thread.
        """
        self._off = True
        self.withdrawn = self.withdrawn or withdrawn
        if self.partial is not None and not self._announced:
            self.partial.remove()

    def close(self) -> None:
        """Close the files and release what is claimed; a second time does nothing."""
        if self.descriptor < 0:
            return
        self._claimed.clear()  # their locks go with the files
        if self.partial is None:
            os.close(self.descriptor)
        else:
            self.announce()
            self.partial.close()
        self.descriptor = -1
        self._events.closed(self)

    def announce(self) -> None:
        """Tell the cache, once, if all parts are present."""
        if self.partial is not None and not self._announced and not self._off and self.complete:
            self._announced = True
            self._events.completed(self)

    async def _is_sound(self, part: int) -> bool:
        size, edges = self._shard_bytes, self._edges(part)

        def compare(descriptor: int) -> bool:
            return true_crc32(descriptor, *edges) == stored_crc32(descriptor, size, part)

        return await self._on_thread(compare)

    def _edges(self, part: int) -> tuple[int, int]:
        start = part * self._part_bytes
        return start, min(start + self._part_bytes, self._shard_bytes)

    async def _on_thread(self, read: Callable[[int], _Read]) -> _Read:
        """Read from the file on a thread, which has a descriptor of its own: this one may be closed meanwhile."""
        if self.descriptor < 0:
            raise RuntimeError("the shard was closed")
        reading = asyncio.get_running_loop().run_in_executor(None, _read_and_close, os.dup(self.descriptor), read)
        found = await asyncio.shield(reading)  # a thread that is cancelled before it begins would close nothing
        if isinstance(found, OSError):
            self._events.failed(found)
            raise CacheOffError from found
        return found

    def _holds(self, holds: Callable[[PartialShard], bool]) -> bool:
        if self.withdrawn or self.partial is None:
            return not self.withdrawn
        try:
            return holds(self.partial)
        except OSError as exc:
            self._events.failed(exc)
            return False

    def _to_fill(self) -> PartialShard:
        if self.descriptor < 0:
            raise RuntimeError("the shard was closed")
        if self._off or self.partial is None:
            raise CacheOffError
        return self.partial

    def _try_claim(self, partial: PartialShard, part: int) -> bool:
        try:
            return partial.try_claim(part)
        except OSError as exc:
            self._events.failed(exc)
            raise CacheOffError from exc


def _read_and_close(descriptor: int, read: Callable[[int], _Read]) -> _Read | OSError:
    try:
        return read(descriptor)
    except OSError as exc:
        return exc
    finally:
        os.close(descriptor)
