"""Filling files of the disk cache with the parts that have come, beside whatever else the loop does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol

from streamload.errors import StreamloadError
from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.openings import on_thread
from streamload.fetch.fetched_shard import FetchedShard

__all__ = ["SLOW_WRITE_S", "CacheFilling", "FillingEvents"]


SLOW_WRITE_S = 1.0
"""A disk that takes longer for a part of 8 MiB is not waited for."""


class FillingEvents(Protocol):
    """Who has the parts. Everything is called in the loop."""

    def in_flight(self, state: FetchedShard, /) -> set[int]:
        """The parts of a shard that are to be fetched and have not come."""

    def hold(self, state: FetchedShard, number: int, /) -> bool:
        """Keep a part until it is released, if it is there; False if it is not."""

    def release(self, state: FetchedShard, number: int, /) -> None:
        """Undo `hold`."""

    def on_disk(self, state: FetchedShard, file: CacheFile, /) -> None:
        """All of a shard is in a file, which its state owns from now on."""

    def cache_changed(self) -> None:
        """Something was written, or cannot be, so more may fit."""


@dataclass(slots=True, eq=False)
class _Filling:
    """A shard whose file is being filled.

    Attributes:
        state: the shard.
        file: its file.
        users: the jobs that were begun on the file, or will be even if the shard is closed.
        is_open: the shard has memory; if not, all that is missing has to be fetched.
    """

    state: FetchedShard
    file: CacheFile
    users: int = 0
    is_open: bool = True


@dataclass(slots=True, eq=False)
class _Job:
    """Something to write.

    Attributes:
        filling: the shard.
        part: the part; None for all that are missing, which are fetched if they are not there.
        holds: the part is kept until it is written.
    """

    filling: _Filling
    part: int | None
    holds: bool = False


class CacheFilling:
    """Writes parts to the files of their shards, on a thread, and makes files durable, on another one.

    A part that has come stays until it is written. If that takes too long, `release_parts`: what is evicted then is
    missing in the cache.

    Args:
        cache: the cache.
        events: notified of what happens.
        fetch: gives the bytes of a shard from one place to another, in pieces that lie within one part.
    """

    def __init__(
        self,
        cache: DiskCache,
        events: FillingEvents,
        fetch: Callable[[FetchedShard, int, int], AsyncGenerator[bytes]],
    ) -> None:
        self._cache = cache
        self._events = events
        self._fetch = fetch
        self._fillings: dict[FetchedShard, _Filling] = {}
        self._writing = _Worker(self._write)
        self._publishing = _Worker(self._publish)
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether there is anything to be written."""
        return self._writing.busy or self._publishing.busy

    def begin(self, state: FetchedShard, file: CacheFile) -> None:
        """Fill a file, which is owned here from now on, with what comes of a shard."""
        self._fillings[state] = _Filling(state, file)

    def arrived(self, state: FetchedShard, number: int) -> None:
        """A part has come."""
        filling = self._fillings.get(state)
        if filling is not None and number in filling.file.missing and self._events.hold(state, number):
            self._writing.add(_Job(filling, number, holds=True))

    def release_parts(self) -> None:
        """Somebody waits for room: where a part takes long to be written, no other is kept for the cache any more."""
        waited_s = self._writing.spent_s()
        if self._writing.busy and waited_s < SLOW_WRITE_S:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(SLOW_WRITE_S - waited_s, self._look_again)
            return
        for job in self._writing.jobs:
            self._release(job)

    def _look_again(self) -> None:
        self._timer = None
        self._events.cache_changed()

    def finish(self, state: FetchedShard) -> None:
        """Nothing more is needed of a shard: if half of it or more has come, the rest is fetched for later epochs."""
        filling = self._fillings.get(state)
        if filling is None or any(job.part is None for job in self._writing.jobs):
            return
        missing = filling.file.missing - self._queued(filling)
        if missing and 2 * len(missing) <= filling.file.n_parts:
            self._complete(filling)

    def complete(self, states: Iterable[FetchedShard]) -> bool:
        """Fetch what is missing of that shard of which least is, so that it takes no memory; False if there is none."""
        fillings = [self._fillings[state] for state in states if state in self._fillings]
        if fillings:
            self._complete(min(fillings, key=lambda filling: len(filling.file.missing)))
        return bool(fillings)

    def abandon(self, state: FetchedShard) -> None:
        """The memory of a shard is closed. The loop need not be running."""
        filling = self._fillings.pop(state, None)
        if filling is not None:
            filling.is_open = False
            self._close_unless_used(filling)

    async def close(self) -> None:
        """Write the shards of which all has come, without making them durable, and leave the others. Idempotent.

        What a crash of the machine leaves of such a file is found by its checksums.
        """
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        for job in [job for job in self._writing.jobs if job.part is None]:
            self._writing.jobs.remove(job)
            job.filling.users -= 1
            self._close_unless_used(job.filling)
        for filling in [*self._fillings.values()]:
            if not filling.file.missing <= self._queued(filling):
                self._give_up(filling)
        await self._writing.finish(cancel=lambda job: job.part is None)
        await self._publishing.finish()
        for filling in [*self._fillings.values()]:
            self._give_up(filling)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _complete(self, filling: _Filling) -> None:
        filling.users += 1
        self._writing.add(_Job(filling, None))

    def _queued(self, filling: _Filling) -> set[int]:
        jobs = [self._writing.in_hand, *self._writing.jobs]
        return {job.part for job in jobs if job is not None and job.filling is filling and job.part is not None}

    def _release(self, job: _Job) -> None:
        if job.holds and job.part is not None:
            job.holds = False
            self._events.release(job.filling.state, job.part)

    async def _write(self, job: _Job) -> None:
        filling = job.filling
        filling.users += job.part is not None
        missed = bool(filling.file.missing)
        try:
            with self._failing(filling):
                for part in sorted(filling.file.missing) if job.part is None else [job.part]:
                    await self._write_part(job, part)
                if missed and not filling.file.missing:
                    self._publishing.add(_Job(filling, None))
                    filling.users += 1
        finally:
            self._release(job)
            self._done(filling)

    async def _write_part(self, job: _Job, part: int) -> None:
        state, file = job.filling.state, job.filling.file
        if part not in file.missing:
            return
        if job.filling.is_open and (job.holds or self._events.hold(state, part)):
            try:
                await on_thread(partial(file.copy, part, state.descriptor()))
            finally:
                if not job.holds:
                    self._events.release(state, part)
        elif job.part is None and not (job.filling.is_open and part in self._events.in_flight(state)):
            offset, end = file.edges(part)
            async with aclosing(self._fetch(state, offset, end)) as pieces:
                async for piece in pieces:
                    await on_thread(partial(file.write, offset, piece))
                    offset += len(piece)

    async def _publish(self, job: _Job) -> None:
        filling, state = job.filling, job.filling.state
        publish = partial(self._cache.publish, filling.file, durable=not self._closing)
        try:
            with self._failing(filling):
                await on_thread(publish)
                if filling.is_open:
                    del self._fillings[state]
                    self._events.on_disk(state, filling.file)
        finally:
            self._done(filling)

    @contextmanager
    def _failing(self, filling: _Filling) -> Iterator[None]:
        try:
            yield
        except StreamloadError:
            self._give_up(filling)  # whoever needs the shard is told so
        except OSError as exc:
            self._cache.turn_off(exc)
            for each in [*self._fillings.values(), filling]:
                self._give_up(each)

    def _done(self, filling: _Filling) -> None:
        filling.users -= 1
        self._close_unless_used(filling)
        self._events.cache_changed()

    def _give_up(self, filling: _Filling) -> None:
        filling.state.refused = True
        for job in [job for job in self._writing.jobs if job.filling is filling]:
            self._writing.jobs.remove(job)
            self._release(job)
            filling.users -= job.part is None
        self.abandon(filling.state)
        self._close_unless_used(filling)

    def _close_unless_used(self, filling: _Filling) -> None:
        """Close a file that nobody fills any more; one that was published belongs to the shard's state."""
        if not filling.is_open and not filling.users:
            filling.file.close()


class _Worker:
    """Does jobs one after the other, in a running loop.

    Attributes:
        jobs: those that wait.
        in_hand: the one that is being done.
    """

    def __init__(self, work: Callable[[_Job], Coroutine[None, None, None]]) -> None:
        self.jobs: deque[_Job] = deque()
        self.in_hand: _Job | None = None
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._began_s = 0.0

    def spent_s(self) -> float:
        """How long the job in hand has taken so far."""
        return 0.0 if self.in_hand is None else monotonic() - self._began_s

    @property
    def busy(self) -> bool:
        return bool(self.jobs) or self.in_hand is not None

    def add(self, job: _Job) -> None:
        self.jobs.append(job)
        self._start()

    async def finish(self, cancel: Callable[[_Job], bool] = lambda _: False) -> None:
        """Wait until nothing is left to do; the job in hand may be cancelled."""
        if self.in_hand is not None and self._task is not None and cancel(self.in_hand):
            self._task.cancel()
        while self.busy:
            self._start()
            assert self._task is not None
            await asyncio.wait((self._task,))

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(_raise_mistakes)

    async def _run(self) -> None:
        while self.jobs:
            self.in_hand, self._began_s = self.jobs.popleft(), monotonic()
            try:
                await self._work(self.in_hand)
            finally:
                self.in_hand = None


def _raise_mistakes(task: asyncio.Task[None]) -> None:
    """Have the loop tell of a mistake of ours."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        raise error
