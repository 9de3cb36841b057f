"""Run the feeder in its own process, in one asyncio loop. The process ends as soon as the trainer is gone."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from streamload.decode.failure import Attempt, answer_failure, failure_of
from streamload.feeder.messages import WAIT_REASON, Answer, Call, Calls, Configure, Failed
from streamload.index.listing import Listing, list_shards
from streamload.log_records import Logged, forward_records
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.unnamed import with_limit_named
from streamload.workers.launch import Child, end_all

if TYPE_CHECKING:
    from streamload.feeder.feeder import Feeder

# The time for early workers to end before they are killed, if no `Feeder` has taken them over.
_GRACE_S = 0.3


def run(sock: socket.socket, trainer: int, early: list[Child]) -> NoReturn:
    """Serve the trainer until it is gone, and end this process.

    Args:
        sock: the socket to the trainer.
        trainer: the trainer's process id.
        early: the workers that were started before this process had threads.
    """

    async def serve_and_exit() -> NoReturn:
        await serve(sock, trainer, early)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # asyncio would wait for threads, which may be in user code or waiting on a silent storage

    asyncio.run(serve_and_exit())


async def serve(sock: socket.socket, trainer: int, early: list[Child]) -> None:
    """Serve the trainer until it is gone, in the running event loop."""
    process = _Process(sock, trainer, early)
    await process.ended.wait()
    await process.close()


def _load() -> type[Feeder]:
    """Import the feeder's class. Called while shards are listed, which hides the import's time."""
    from streamload.feeder.feeder import Feeder

    return Feeder


class _Process:
    def __init__(self, sock: socket.socket, trainer: int, early: list[Child]) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_exception)
        self._early = early
        self._feeder: Feeder | None = None
        self._calls = Calls(self._list_shards)
        self._answering: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()  # the trainer is gone
        self._channel = AsyncChannel(sock, self._on_message, self.ended.set)
        self._pidfd: int | None = None
        self._watch(trainer)
        self._send = self._channel.send
        _forward_log(self._send)

    def _on_message(self, message: Any, _: list[int]) -> None:
        if isinstance(message, Call) and message.function in self._calls.functions:
            self._answer(message, self._calls.call(message.function, message.arguments))
        elif isinstance(message, Call) and message.function == WAIT_REASON and self._feeder is not None:
            self._answer(message, self._feeder.wait_reason())
        elif isinstance(message, Configure):
            with Attempt() as attempt:
                self._feeder = _load()(message, self._send, self._early)
                self._early = []
            if attempt.error is not None:
                self._send(Failed(failure_of(with_limit_named(attempt.error))))
        elif self._feeder is not None:
            self._feeder.handle(message)

    def _answer(self, call: Call, returning: Coroutine[Any, Any, Any]) -> None:

        async def answer() -> None:
            with Attempt() as attempt:
                self._send(Answer(call.number, await returning))
            if attempt.error is not None:
                self._send(Answer(call.number, failure=answer_failure(attempt.error)))

        answering = asyncio.create_task(answer())
        self._answering.add(answering)  # the event loop holds only a weak reference to the task
        answering.add_done_callback(self._answering.discard)

    async def _list_shards(self, *arguments: Any) -> Listing:
        """List shards in a thread, and import the feeder meanwhile."""
        listing = asyncio.ensure_future(asyncio.to_thread(list_shards, *arguments))
        self._loop.call_soon(_load)
        return await listing

    def _watch(self, trainer: int) -> None:
        """End with the trainer, even if a process that it forked keeps the socket open. Linux only."""
        try:
            self._pidfd = os.pidfd_open(trainer)
            self._loop.add_reader(self._pidfd, self.ended.set)
        except ProcessLookupError:  # the trainer is gone already
            self.ended.set()
        except (AttributeError, OSError):  # macOS, Linux before 5.3, or a sandbox that forbids it
            pass

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an error in a callback, which is a bug: without a report the trainer would wait forever."""
        error = context.get("exception") or RuntimeError(context["message"])
        self._send(Failed(failure_of(with_limit_named(error))))

    async def close(self) -> None:
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._channel.close()
        await self._calls.aclose()
        if self._feeder is not None:
            await self._feeder.aclose()
        end_all(self._early, _GRACE_S)


def _forward_log(send: Callable[[Logged], None]) -> None:
    """Forward this process's log records to the trainer, through the running event loop."""
    loop, loops_thread = asyncio.get_running_loop(), threading.get_ident()

    def to_trainer(logged: Logged) -> None:
        if threading.get_ident() == loops_thread:
            send(logged)  # at once, so that a worker's records precede the batch that it was making
        else:
            loop.call_soon_threadsafe(send, logged)

    forward_records(to_trainer)
