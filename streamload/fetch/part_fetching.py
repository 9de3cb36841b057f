"""Fetching single parts, by a download or from the disk cache, and whole compressed shards."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from streamload.errors import without_secrets
from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import DiskCache, ShardIdentity
from streamload.fetch.fetched_shard import Decompression, FetchedShard
from streamload.fetch.parts import part_edges
from streamload.fetch.transfers import Source, Transfers
from streamload.limits import DECOMPRESSED_AT_ONCE, SMALL_REQUESTS
from streamload.storage.storages import Storages
from streamload.tar.decompression import Decompressor, decompress

if TYPE_CHECKING:
    from streamload.fetch.fetcher import Fetcher

_Done = TypeVar("_Done")
_log = logging.getLogger("streamload")

_PIECE_BYTES = 2 << 20
_PIECES_AHEAD = 3
# About how much memory a shard takes besides its part while it is decompressed.
_HELD_BYTES = (_PIECES_AHEAD + 2) * _PIECE_BYTES
# Parts that have come and are not written yet; more are not fetched before, which bounds what a slow disk holds up.
_MOST_UNWRITTEN = 4
# Cached files that are compared with their checksums at the same time; the threads do the disk's other work too.
_COMPARED_AT_ONCE = 2


class PartFetcher:
    """Fetches parts, in a running loop, and notifies a fetcher."""

    def __init__(
        self,
        storages: Storages,
        cache: DiskCache | None,
        fetcher: Fetcher,
        most_requests: int,
    ) -> None:
        self._storages = storages
        self._cache = cache
        self._fetcher = fetcher
        self.transfers = Transfers(fetcher.has_room, retries=storages.retries, most=most_requests)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lookups: dict[FetchedShard, asyncio.Task[CacheFile | None]] = {}
        self._without_version: set[str] = set()
        self._comparing = asyncio.Semaphore(_COMPARED_AT_ONCE)
        self._unwritten = 0
        self._decompressions: list[tuple[FetchedShard, Decompression]] = []
        self._largest_bytes = 0
        # One thread each: the kernel clears pages no faster for several, and a file's parts are written in order.
        self._allocator = ThreadPoolExecutor(1, "streamload-allocate")
        self._writer = ThreadPoolExecutor(1, "streamload-cache")

    def takes(self, state: FetchedShard) -> bool:
        """Return True if a part of a shard can be fetched now."""
        if self._is_unknown(state):
            return state in self._lookups or len(self._lookups) < SMALL_REQUESTS
        if state.compression is not None:
            return len(self._running()) < DECOMPRESSED_AT_ONCE
        if state.file is not None and state.file.whole:
            return True
        return self.transfers.room() > 0 and self._unwritten < _MOST_UNWRITTEN

    def takes_memory(self, state: FetchedShard) -> bool:
        """Return True if a part of a shard needs memory: not if it is, or may be, in the disk cache."""
        return state.file is None and not self._is_unknown(state)

    def fetch(self, state: FetchedShard, number: int) -> None:
        """Fetch a part."""
        if state.compression is not None:
            decompressor = Decompressor(state.compression, state.url)
            state.decompression = job = Decompression(decompressor, state.write, partial(self._fetcher.grow, state))
            job.task = self._start(self._decompress(state, job), partial(self._decompressed, state, job))
            self._decompressions.append((state, job))
        elif self._is_unknown(state):
            if state not in self._lookups:
                self._lookups[state] = self._start(self._open_cached(state), partial(self._looked_up, state))
        elif state.file is not None and number not in state.file.missing:
            self._fetcher.arrived(state, number, 0)
        else:
            self._download(state, number)

    def forget(self, state: FetchedShard) -> None:
        """Stop the decompression of a shard whose memory is about to be closed, and close its file.

        The loop need not be running.
        """
        if state.file is not None:
            self._writer.submit(state.file.close)  # after what is being written
            state.file = None
        if state.decompression is not None:
            state.decompression.cancel()
            state.decompression = None

    async def close(self) -> None:
        """Stop everything, and write what has come. Idempotent."""
        for _, job in self._running():
            job.cancel()
        for lookup in self._lookups.values():
            lookup.cancel()
        await self.transfers.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._writer.shutdown()
        self._allocator.shutdown(cancel_futures=True)

    def _start(
        self, work: Coroutine[Any, Any, _Done], on_end: Callable[[_Done | Exception], None]
    ) -> asyncio.Task[_Done]:
        """Begin work; `on_end` gets its result or its error, unless it is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, on_end))
        return task

    def _ended(self, on_end: Callable[[_Done | Exception], None], task: asyncio.Task[_Done]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            on_end(error if isinstance(error, Exception) else task.result())
        self._fetcher.has_room()

    def _source(self, state: FetchedShard) -> Source:
        return Source(self._storages.for_url(state.url), state.url, state.pin)

    # -- downloads -------------------------------------------------------------------------------------------------

    def _download(self, state: FetchedShard, number: int) -> None:
        """Fetch a part to the memory of its shard, or to its file in the disk cache."""
        generation, file, cache = state.generation, state.file, self._cache
        start, end = part_edges(number, state.total_bytes)
        writes: list[Future[None]] = []

        def write(offset: int, data: bytes) -> None:
            if state.generation != generation:
                return  # what came before lies in the old memory
            if state.total_bytes is None:  # the first answer of all has begun
                state.total_bytes = state.pin.total_bytes
                self._fetcher.sized()
            if file is None or cache is None:
                state.write(offset, data)
            else:
                writes.append(self._writer.submit(cache.write, file, offset, data))

        download = self.transfers.begin(self._source(state), start, end, write)
        memory = state.pages()
        allocation = None if memory is None else self._allocator.submit(memory.allocate, start, end)

        async def finish() -> int:
            try:
                size_bytes = await download - start
            finally:
                if allocation is not None and not allocation.cancel():
                    await asyncio.wrap_future(allocation)  # the pages may be freed from now on
            if file is None:
                return size_bytes
            await self._wait_for(writes)
            return 0

        def on_end(result: int | Exception) -> None:
            if state.generation != generation:
                return
            if isinstance(result, Exception):
                self._fetcher.failed(state, number, result)
            else:
                state.total_bytes = state.pin.total_bytes
                self._fetcher.arrived(state, number, result)

        self._start(finish(), on_end)

    async def _wait_for(self, writes: list[Future[None]]) -> None:
        """Wait until a part is in its file; go on without the disk cache if the disk refuses something."""
        assert self._cache is not None
        self._unwritten += 1
        try:
            for written in writes:
                await asyncio.wrap_future(written)
        except OSError as exc:
            self._cache.turn_off(exc)
            self._fetcher.disk_refused()
        finally:
            self._unwritten -= 1

    # -- the disk cache --------------------------------------------------------------------------------------------

    def _is_unknown(self, state: FetchedShard) -> bool:
        """Return True if a shard may be in the disk cache, and was not looked up."""
        return self._cache is not None and state.compression is None and not state.looked_up

    def _looked_up(self, state: FetchedShard, result: CacheFile | Exception | None) -> None:
        del self._lookups[state]
        if not isinstance(result, Exception):
            state.file, state.total_bytes, state.looked_up = result, state.pin.total_bytes, True
            if result is not None and result.whole:
                self.transfers.counts.cached_bytes += state.total_bytes or 0
        self._fetcher.looked_up(state, result if isinstance(result, Exception) else None)

    async def _open_cached(self, state: FetchedShard) -> CacheFile | None:
        """Open a shard's file in the disk cache, whole or to be filled, which the caller closes.

        None if there is no cache, or it does not take the shard. A shard is not cached if its storage states neither an
        ETag nor a date: a later run could not tell that it was rewritten.
        """
        cache, url, pin = self._cache, state.url, state.pin
        if cache is None or url in self._without_version:
            return None
        if pin.total_bytes is None or pin.etag is None:
            # By the first byte, since some urls are signed for reading only.
            await self.transfers.read(self._source(state), 0, 1)
        if pin.etag is None or pin.total_bytes is None:
            if not self._without_version:
                _log.warning(
                    "%s is not kept in cache_dir, nor is any other shard of which the storage states no ETag and no "
                    "date: a rewritten one would not be noticed. To keep them, copy the shards to a local folder",
                    without_secrets(url),
                )
            self._without_version.add(url)
            return None
        identity = ShardIdentity(url, pin.etag, pin.total_bytes)
        async with self._comparing:
            return await _on_thread(partial(cache.open, identity), _close)

    # -- compressed shards -----------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """What fetching takes besides the parts."""
        return _HELD_BYTES * len(self._running())

    @property
    def is_ending(self) -> bool:
        """Whether a cancelled decompression still holds memory; `has_room` is called when it does not."""
        return any(job.cancelled for _, job in self._running())

    def opening_bytes(self, state: FetchedShard) -> int:
        """Return what else must be free to fetch a part of a shard, so that one decompression does not stop another."""
        is_beside = state.compression is not None and bool(self._running())
        return _HELD_BYTES + self._largest_bytes if is_beside else 0

    @property
    def waiting(self) -> list[FetchedShard]:
        """The shards whose decompression waits for room."""
        return [state for state, job in self._running() if job.waits and not job.cancelled]

    def _running(self) -> list[tuple[FetchedShard, Decompression]]:
        self._decompressions = [each for each in self._decompressions if not each[1].task.done()]
        return self._decompressions

    async def _decompress(self, state: FetchedShard, job: Decompression) -> int:
        async with aclosing(self._body(state)) as body:
            return await decompress(body, job.decompressor, job.write)

    def _decompressed(self, state: FetchedShard, job: Decompression, result: int | Exception) -> None:
        if state.decompression is not job:
            return
        state.decompression = None
        if isinstance(result, Exception):
            self._fetcher.failed(state, 0, result)
        else:
            state.total_bytes = result
            self._largest_bytes = max(self._largest_bytes, result)
            self._fetcher.arrived(state, 0, result)

    async def _body(self, state: FetchedShard) -> AsyncGenerator[bytes]:
        """Yield the bytes of a compressed shard: of a remote one from the disk cache, or into it."""
        if self._storages.is_local(state.url):
            with open(self._fetcher.open_local(state.number), "rb") as local:
                async for piece in _read_file(local.fileno()):
                    yield piece
            return
        file = await self._open_cached(state)
        position = 0
        try:
            if file is not None and file.whole:
                with suppress(OSError):  # the disk cannot read it any more
                    async for piece in _read_file(file.descriptor, state.pin.total_bytes or 0):
                        yield piece
                        position += len(piece)
            if position != state.pin.total_bytes:
                async with aclosing(self._pieces(state, position)) as pieces:
                    async for piece in pieces:
                        if file is not None and file.missing and file.descriptor >= 0:
                            await self._keep(file, position, piece)
                        yield piece
                        position += len(piece)
        finally:
            _close(file)

    async def _pieces(self, state: FetchedShard, start: int) -> AsyncGenerator[bytes]:
        """Fetch the bytes of a remote shard from a place to its end, a few requests ahead."""
        ahead: deque[asyncio.Task[bytes]] = deque()
        source = self._source(state)
        try:
            while True:
                end = state.pin.total_bytes  # stated by the first answer
                while not ahead if end is None else len(ahead) <= _PIECES_AHEAD and start < end:
                    piece_end = start // _PIECE_BYTES * _PIECE_BYTES + _PIECE_BYTES
                    piece_end = piece_end if end is None else min(piece_end, end)
                    ahead.append(asyncio.create_task(self.transfers.read(source, start, piece_end)))
                    start = piece_end
                if not ahead:
                    return
                yield await ahead.popleft()
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def _keep(self, file: CacheFile, offset: int, piece: bytes) -> None:
        """Write bytes of a compressed shard to the disk cache, or go on without it."""
        assert self._cache is not None
        try:
            await _on_thread(partial(self._cache.write, file, offset, piece))
        except OSError as exc:
            self._cache.turn_off(exc)
            file.close()


async def _read_file(descriptor: int, end: int = sys.maxsize) -> AsyncIterator[bytes]:
    """Yield the bytes of a file, which stays the caller's, up to a place or to its end."""
    offset = 0
    while data := await asyncio.to_thread(os.pread, descriptor, min(_PIECE_BYTES, end - offset), offset):
        yield data
        offset += len(data)


async def _on_thread(work: Callable[[], _Done], undo: Callable[[_Done], object] = lambda _: None) -> _Done:
    """Run in a thread. On cancellation, wait for the thread and roll back."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait((working,))
        except asyncio.CancelledError as exc:  # not passed on to the thread, which would work for nobody
            cancelled = exc
    done = working.result()
    if cancelled is None:
        return done
    undo(done)
    raise cancelled


def _close(file: CacheFile | None) -> None:
    if file is not None:
        file.close()
