"""The same loop for programs that have an event loop: `async for`, which waits without a thread of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Any, Self

from streamload.trainer.epoch_iterator import EpochIterator

_GRACE_S = 0.7

# How often a batch that is waited for is looked for where another thread would have put it.
_LOOK_UP_S = 1.0


class AsyncEpochIterator(AsyncIterator[Any]):
    """The iterator of an `async for` loop.

    Other coroutines run while it waits, and have a turn before each batch. To cancel one that waits for a batch loses
    nothing: the next `__anext__` goes on.

    Args:
        begun: a pass; what it raises is raised here too, with StopAsyncIteration at its end.
    """

    _stays_in_trainer = True

    def __init__(self, begun: EpochIterator) -> None:
        self._iterator = begun
        self._awaited = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._awaited:
            raise RuntimeError("two tasks wait for the next batch of one pass; let one task take them")
        self._awaited = True
        try:
            await asyncio.sleep(0)
            return await self._next()
        finally:
            self._awaited = False

    async def aclose(self) -> None:
        """End the pass before its end, as leaving a `for` loop does. Idempotent."""
        self._iterator.close()

    async def _next(self) -> Any:
        current = self._iterator
        receive = current.receive if current.connection.fileno() is None else current.receive_now
        try:
            while (given := current.turn(receive)) is None:
                descriptor = current.connection.fileno()
                assert descriptor is not None
                await self._message_or_end(descriptor)
        except StopIteration:  # which must not leave a coroutine
            raise StopAsyncIteration from None
        return given[0]

    async def _message_or_end(self, descriptor: int) -> None:
        """Wait until there may be a message, or the pass was closed by someone else."""
        waiting = _Readable(descriptor)
        self._iterator.on_close = waiting.stop
        try:
            came = await waiting.wait(_LOOK_UP_S)
        finally:
            self._iterator.on_close = None
        if not came:
            self._iterator.log_wait()


async def end_of_processes(ending: Sequence[int]) -> None:
    """Wait until processes end that were requested to; after a moment's grace they are killed.

    Args:
        ending: descriptors of processes, readable when these have ended. They are closed.
    """
    deadline_s = monotonic() + _GRACE_S
    try:
        for descriptor in ending:
            if not await _Readable(descriptor).wait(deadline_s - monotonic()):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # else closing would wait once more before it did
    finally:
        for descriptor in ending:
            os.close(descriptor)


class _Readable:
    """One wait of the running event loop for a descriptor, which is left alone afterwards however that ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[bool] = self._loop.create_future()
        self._reading = False

    async def wait(self, timeout_s: float) -> bool:
        """Whether it got readable, or `stop` was called, in time."""
        timer = self._loop.call_later(max(0.0, timeout_s), self._wake, False)
        self._loop.add_reader(self._descriptor, self._wake, True)
        self._reading = True
        try:
            return await self._woken
        finally:
            self._forget()
            timer.cancel()

    def stop(self) -> None:
        """Wake whoever waits, and forget the descriptor, which may be closed then."""
        self._forget()
        self._wake(True)

    def _forget(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)

    def _wake(self, came: bool) -> None:
        if not self._woken.done():
            self._woken.set_result(came)
