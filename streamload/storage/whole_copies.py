"""Copies of whole files, for storages that serve no parts of them: what `simplecache::` before a url asks for."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from threading import Thread

from streamload.errors import StorageError, TransientStorageError, WorkerError
from streamload.limits import COPIES_SHARE, SMALL_REQUESTS
from streamload.memory.unnamed import descriptor_limit, naming_the_limit
from streamload.storage.fsspec_errors import ReportsErrors
from streamload.storage.protocol import ShardInfo, without_secrets
from streamload.storage.retry_policy import Attempts, Retries
from streamload.text import counted

__all__ = ["CopiedBody", "UnnamedFile", "WholeCopies", "on_own_thread"]

_MOST_COPIES = 256
"""A shard is read within a shuffle window, so the oldest is hardly needed any more."""

_CHUNK_BYTES = 1 << 20
_BEAT_S = 1.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Copy = Callable[["UnnamedFile"], Awaitable[None]]


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

    A copy that breaks off is replaced, as often as requests are made again: what earlier copies had too is no progress.
    One that hangs is not replaced, and its readers give it up: requests to web servers and by s3fs have time-outs of
    their own, and on a thread another one would hang beside it.

    Args:
        known: what the storage says of the file.
        copy: copies all of it to an empty file; whatever it raises is reported as an error of a filesystem.
        copies: all of them.

    Attributes:
        known: as given.
    """

    def __init__(self, known: ShardInfo, copy: Copy, copies: WholeCopies) -> None:
        self.known = known
        self._copies = copies
        self._file: UnnamedFile | None = None
        self._tries = self._furthest_bytes = 0
        self._making = asyncio.ensure_future(self._make(copy))
        self._making.add_done_callback(_see)

    @property
    def whole(self) -> bool:
        """Whether all of the file is there."""
        return self._making.done() and not self._making.cancelled() and self._making.exception() is None

    @property
    def failed(self) -> bool:
        """Whether it never will be."""
        return self._making.done() and not self.whole

    def arrived_bytes(self) -> int:
        """How much of it is there as long as it is copied."""
        return 0 if self._file is None or self._making.done() else self._file.size_bytes()

    async def arriving(self) -> AsyncIterator[None]:
        """Whenever this copy is begun again, or any gets on, since it may wait for others; until all of it is there."""
        now = self._tries, self._copies.arrived_bytes()
        while not (await asyncio.wait([self._making], timeout=self._copies.beat_s))[0]:
            before, now = now, (self._tries, self._copies.arrived_bytes())
            if now != before:
                yield

    async def read(self, start: int, size_bytes: int) -> bytes:
        """Some of its bytes, after `arriving`.

        Raises:
            StorageError: there is no copy.
            WorkerError: too many files are open.
        """
        return await asyncio.to_thread(self._making.result().read, start, size_bytes)

    async def abandon(self) -> None:
        """Stop copying."""
        self._making.cancel()
        await asyncio.wait([self._making])

    async def _make(self, copy: Copy) -> UnnamedFile:
        async with self._copies.turns:
            self._copies.drop_oldest()
            attempts = self._copies.retries.begin(self.known.url, reached=True)
            while True:
                self._tries += 1
                try:
                    with ReportsErrors(self.known.url, passing=(WorkerError,)):
                        return await self._one_copy(copy)
                except StorageError as exc:
                    failure = exc.with_traceback(None)
                    failure.__context__ = None  # else frames keep the file
                if self.arrived_bytes() > self._furthest_bytes:
                    self._furthest_bytes = self.arrived_bytes()
                    attempts.progressed()
                self._file, wait_s = None, attempts.wait_s(failure)
                if wait_s is None:
                    raise self._given_up(attempts) if isinstance(failure, TransientStorageError) else failure
                await asyncio.sleep(wait_s)

    async def _one_copy(self, copy: Copy) -> UnnamedFile:
        try:
            file = self._file = UnnamedFile()
        except OSError as exc:
            raise self._no_file(exc) from None
        try:
            await copy(file)
        except OSError as exc:
            if exc.errno in (*_FULL, errno.EMFILE):
                raise self._no_file(exc) from None
            raise
        return file

    def _no_file(self, exc: OSError) -> BaseException:
        """The error for a file that this machine does not take; room is made for another try where it can be."""
        if exc.errno == errno.EMFILE:
            return naming_the_limit(exc)
        folder = " ".join(filter(None, ("the temporary folder", tempfile.tempdir)))  # or none that can be used
        said, kind = f"no copy of this file can be made in {folder}", StorageError
        if exc.errno in _FULL:
            said = f"{folder} has no room for a copy of this file"
            kind = TransientStorageError if self._copies.drop_oldest(self.known.bytes) else StorageError
        return kind(f"{said} ({exc.strerror or exc}); TMPDIR names another one", url=without_secrets(self.known.url))

    def _given_up(self, attempts: Attempts) -> StorageError:
        failures = attempts.failures
        return StorageError(
            f"cannot be copied: {counted(len(failures), 'copy')} in a row had no more than {self._furthest_bytes:,} of "
            f"{counted(self.known.bytes, 'byte')}, over {attempts.spent_s:.1f} s (the last: {failures[-1].message})",
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
        for start in range(self._start, self._end, _CHUNK_BYTES):
            yield await self._copy.read(start, min(_CHUNK_BYTES, self._end - start))

    async def aclose(self) -> None:
        """See `RangeBody.aclose`: others may need the copy."""


class WholeCopies:
    """The copies that one loop has made, each by whoever needs the file first.

    Args:
        retries: how copies are made again.

    Attributes:
        retries: as given.
        beat_s: how often readers look whether copies get on.
        turns: held while a copy is made.
    """

    def __init__(self, retries: Retries) -> None:
        self.retries = retries
        self.beat_s = min(_BEAT_S, retries.policy.stall_timeout_s / 4)
        self._most_whole = max(1, min(_MOST_COPIES, descriptor_limit() // COPIES_SHARE))
        self.turns = asyncio.Semaphore(min(SMALL_REQUESTS, self._most_whole))
        self._copies: dict[ShardInfo, WholeCopy] = {}

    def arrived_bytes(self) -> int:
        """How much there is of what is being copied."""
        return sum(each.arrived_bytes() for each in self._copies.values())

    def get(self, known: ShardInfo, copy: Copy) -> WholeCopy:
        """The copy of this version of a file; it is begun where there is none, or where it has failed."""
        found = self._copies.pop(known, None)
        if found is None or found.failed:
            found = WholeCopy(known, copy, self)
        self._copies[known] = found
        return found

    def drop_oldest(self, missing_bytes: int = 0) -> bool:
        """Let go of copies beyond the most that are kept, and of as many as hold so many bytes, the oldest first.

        Whoever reads one keeps it.

        Returns:
            Whether there are other copies, whose space may become free.
        """
        kept = [each for each in self._copies.values() if not each.failed]
        whole = [each for each in kept if each.whole]
        for number, each in enumerate(whole):
            if number < len(whole) - self._most_whole or missing_bytes > 0:
                del self._copies[each.known]
                missing_bytes -= each.known.bytes
        return len(kept) > 1

    async def aclose(self) -> None:
        """Stop copying, and let go of all copies."""
        copies, self._copies = list(self._copies.values()), {}
        for each in copies:
            await each.abandon()


async def on_own_thread(work: Callable[[], None]) -> None:
    """Do what may take long and cannot be interrupted, on a thread that nothing waits for, nor the program's end."""
    await asyncio.wrap_future(_begun(work))


def _begun(work: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()
    Thread(target=_run, args=(work, done), name="streamload-copy", daemon=True).start()
    return done


def _run(work: Callable[[], None], done: Future[None]) -> None:
    try:
        work()
        done.set_result(None)
    except BaseException as exc:  # noqa: BLE001
        done.set_exception(exc)
        del work, done  # else the exception, which keeps this frame, keeps the file
