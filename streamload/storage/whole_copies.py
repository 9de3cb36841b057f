"""Copies of whole files, for storages that serve no parts of them: what `simplecache::` before a url asks for."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from streamload.errors import StorageError, TransientStorageError, WorkerError
from streamload.limits import COPIES_SHARE, SMALL_REQUESTS
from streamload.memory.unnamed import descriptor_limit, naming_the_limit
from streamload.storage.errors import transient_error
from streamload.storage.fsspec_errors import ReportsErrors
from streamload.storage.protocol import ShardInfo, without_secrets
from streamload.storage.retry_policy import Retries
from streamload.text import counted

__all__ = ["CopiedBody", "UnnamedFile", "WholeCopies", "on_own_thread"]

_MOST_COPIES = 256
"""A shard is read within a shuffle window, so the oldest is hardly needed any more."""

_CHUNK_BYTES = 1 << 20
_BEAT_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UnnamedFile:
    """A temporary file without a name, so nothing is left behind, however the process ends.

    It is closed when nobody refers to it any more, so never while a thread reads or writes it.

    Attributes:
        path: what opens it once more, for as long as somebody refers to it.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile(prefix="streamload-") as file:
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.path = f"/dev/fd/{self._descriptor}"

    def size_bytes(self) -> int:
        """How much of it is there."""
        return os.fstat(self._descriptor).st_size

    def write(self, piece: bytes) -> None:
        """Append all of a piece."""
        left = memoryview(piece)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def read(self, start: int, size_bytes: int) -> bytes:
        """Some of its bytes."""
        return os.pread(self._descriptor, size_bytes, start)


class WholeCopy:
    """One file while it is copied and after.

    A copy that breaks off, or does not grow for as long as a request may stall, is replaced, as often as requests are
    made again: what earlier copies had too is no progress.

    Args:
        known: what the storage says of the file.
        copy: copies all of it to an empty file; whatever it raises is reported as an error of a filesystem.
        copies: all of them.

    Attributes:
        known: as given.
    """

    def __init__(self, known: ShardInfo, copy: Callable[[UnnamedFile], Awaitable[None]], copies: WholeCopies) -> None:
        self.known = known
        self._copy = copy
        self._copies = copies
        self._policy = copies.retries.policy
        self._beat_s = min(_BEAT_S, self._policy.stall_timeout_s / 4)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._arrived_bytes = self._furthest_bytes = 0
        self._making = asyncio.ensure_future(self._make())
        self._making.add_done_callback(_see)

    @property
    def failed(self) -> bool:
        """Whether there will be none."""
        return self._making.done() and (self._making.cancelled() or self._making.exception() is not None)

    @property
    def whole(self) -> bool:
        """Whether all of the file is there."""
        return self._making.done() and not self.failed

    async def arriving(self) -> AsyncIterator[None]:
        """Whenever this copy, or one that it may wait for, has grown, until all of it is there."""
        growths = self._copies.growths
        while not (await asyncio.wait([self._making], timeout=self._beat_s))[0]:
            if growths != self._copies.growths:
                growths = self._copies.growths
                yield

    def file(self) -> UnnamedFile:
        """The copy, after `arriving`.

        Raises:
            StorageError: there is none.
            WorkerError: too many files are open.
        """
        return self._making.result()

    async def abandon(self) -> None:
        """Stop copying."""
        self._making.cancel()
        await asyncio.wait([self._making])

    async def _make(self) -> UnnamedFile:
        async with self._copies.turns:
            self._copies.drop_oldest()
            self._attempts = self._copies.retries.begin(self.known.url, self._loop.time, reached=True)
            while True:
                try:
                    return await self._one_copy()
                except StorageError as exc:
                    failure = exc.with_traceback(None)
                    failure.__context__ = None  # else frames keep the file
                    wait_s = self._attempts.wait_s(failure)
                if wait_s is None:
                    raise self._given_up() if isinstance(failure, TransientStorageError) else failure
                await asyncio.sleep(wait_s)

    async def _one_copy(self) -> UnnamedFile:
        stall_timeout_s = self._policy.stall_timeout_s
        deadline = asyncio.timeout(stall_timeout_s)
        with ReportsErrors(self.known.url, passing=(WorkerError,)):
            file = self._new_file()
            self._arrived_bytes = 0
            try:
                async with deadline:
                    self._watch(file, deadline)
                    await self._copy(file)
                return file
            except OSError as exc:
                if deadline.expired():
                    raise transient_error(self.known.url, f"no byte for {stall_timeout_s:g} s") from None
                if exc.errno in (*_FULL, errno.EMFILE):
                    raise self._no_file(exc) from None
                raise
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                self._has_grown(file)

    def _watch(self, file: UnnamedFile, deadline: asyncio.Timeout) -> None:
        if self._has_grown(file):
            deadline.reschedule(self._loop.time() + self._policy.stall_timeout_s)
        self._timer = self._loop.call_later(self._beat_s, self._watch, file, deadline)

    def _has_grown(self, file: UnnamedFile) -> bool:
        before, self._arrived_bytes = self._arrived_bytes, file.size_bytes()
        if self._arrived_bytes <= before:
            return False
        self._copies.growths += 1
        if self._arrived_bytes > self._furthest_bytes:
            self._furthest_bytes = self._arrived_bytes
            self._attempts.progressed()
        return True

    def _new_file(self) -> UnnamedFile:
        try:
            return UnnamedFile()
        except OSError as exc:
            raise self._no_file(exc) from None

    def _no_file(self, exc: OSError) -> BaseException:
        """The error for a file that this machine does not take; room is made for another try where it can be."""
        named = naming_the_limit(exc)
        if named is not exc:
            return named
        folder = f"the temporary folder {tempfile.tempdir}"
        said, kind = f"no copy of this file can be made in {folder}", StorageError
        if exc.errno in _FULL:
            said = f"{folder} has no room for a copy of this file"
            kind = TransientStorageError if self._copies.make_room(self) else StorageError
        return kind(f"{said} ({exc.strerror}); TMPDIR names another one", url=without_secrets(self.known.url))

    def _given_up(self) -> StorageError:
        failures = self._attempts.failures
        return StorageError(
            f"cannot be copied: {counted(len(failures), 'copy')} in a row had no more than {self._furthest_bytes:,} of "
            f"{counted(self.known.bytes, 'byte')}, over {self._attempts.spent_s:.1f} s (the last: "
            f"{failures[-1].message}); check the network and the server, and run again",
            url=without_secrets(self.known.url),
        )


def _see(making: asyncio.Future[UnnamedFile]) -> None:
    """Where nobody waits for a copy any more, its error is none that was forgotten."""
    if not making.cancelled():
        making.exception()


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
        async for _ in self._copy.arriving():
            yield b""
        file = self._copy.file()
        for start in range(self._start, self._end, _CHUNK_BYTES):
            yield await asyncio.to_thread(file.read, start, min(_CHUNK_BYTES, self._end - start))

    async def aclose(self) -> None:
        """See `RangeBody.aclose`: others may need the copy."""


class WholeCopies:
    """The copies that one loop has made, each by whoever needs the file first.

    Args:
        retries: how copies are made again.

    Attributes:
        retries: as given.
        turns: held while a copy is made.
        growths: how often any copy was seen to have grown.
    """

    def __init__(self, retries: Retries) -> None:
        self.retries = retries
        self._most_whole = max(1, min(_MOST_COPIES, descriptor_limit() // COPIES_SHARE))
        self.turns = asyncio.Semaphore(min(SMALL_REQUESTS, self._most_whole))
        self.growths = 0
        self._copies: dict[ShardInfo, WholeCopy] = {}

    def get(self, known: ShardInfo, copy: Callable[[UnnamedFile], Awaitable[None]]) -> WholeCopy:
        """The copy of this version of a file; it is begun where there is none, or where it has failed."""
        found = self._copies.pop(known, None)
        if found is None or found.failed:
            found = WholeCopy(known, copy, self)
        self._copies[known] = found
        return found

    def drop_oldest(self) -> None:
        """Let go of copies beyond the most that are kept; whoever reads one keeps it."""
        whole = [known for known, each in self._copies.items() if each.whole]
        for known in whole[: max(0, len(whole) - self._most_whole)]:
            del self._copies[known]

    def make_room(self, copy: WholeCopy) -> bool:
        """Let go of the oldest copies, of as many as hold the bytes of this one.

        Returns:
            Whether there is room now, or may be when others are done.
        """
        others = [each for each in self._copies.values() if each is not copy and not each.failed]
        missing_bytes = copy.known.bytes
        for each in others:
            if each.whole and missing_bytes > 0:
                del self._copies[each.known]
                missing_bytes -= each.known.bytes
        return bool(others)

    async def aclose(self) -> None:
        """Stop copying, and let go of all copies."""
        copies, self._copies = list(self._copies.values()), {}
        for each in copies:
            await each.abandon()


async def on_own_thread(work: Callable[[], None]) -> None:
    """Do what may take long and cannot be interrupted, on a thread that nothing else waits for."""
    thread = ThreadPoolExecutor(1, "streamload-copy")
    try:
        await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)  # it ends with its work
