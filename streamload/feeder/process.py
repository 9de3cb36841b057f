"""The feeder as a process of its own: it lives on one asyncio loop and ends as soon as the trainer is gone."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol

from streamload.decode.failure import Attempt, answer_failure, failure_of
from streamload.decode.tasks import RowsDone, ScanDone
from streamload.environment.launch import EarlyWorkers
from streamload.feeder.calls import WHAT_HOLDS_UP, Calls
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Answer, Call, Configure, Failed
from streamload.fetch.resident import ResidentShards
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing, list_shards
from streamload.log_records import Logged, forward_records
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.heap import keep_freed_memory
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import naming_the_limit
from streamload.workers.caller_pool import CallerPool
from streamload.workers.process_pool import ProcessPool
from streamload.workers.protocol import Pool

__all__ = ["serve"]

_GRACE_S = 0.3


Send = Callable[[Any, Sequence[int]], None]


class Relay(Protocol):
    """What stands in a feeder's place in its process."""

    def handle(self, message: Any, /) -> None:
        """Take a message from the trainer."""

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""

    async def aclose(self) -> None:
        """End all that it has started."""


MakeRelay = Callable[[Configure, Listing, Send], Relay]


def run(sock: socket.socket, trainer: int, early: EarlyWorkers, *, make_relay: MakeRelay | None = None) -> NoReturn:
    """Serve one trainer to the end, and end this process.

    Args:
        sock: leads to the trainer.
        trainer: the number of its process.
        early: the workers that have been started already.
        make_relay: makes what stands in a feeder's place, for a trainer that wants feeders on other nodes.
    """
    asyncio.run(_serve_and_exit(sock, trainer, early, make_relay))


class _Process:
    """The feeder as a process of its own."""

    def __init__(
        self, sock: socket.socket, trainer: int, early: EarlyWorkers, make_relay: MakeRelay | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_exception)
        self._trainer = trainer
        self._early = early
        self._make_relay = make_relay
        self._feeder: Feeder | Relay | None = None
        self._caller: CallerPool | None = None
        self._found: Listing | None = None
        self._indexes: dict[str, DatasetIndex] = {}
        self._calls = Calls(self._list)
        self._calling: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        self._channel = AsyncChannel(sock, self._on_message, self.ended.set)
        _log_in_trainer(self._channel.send)
        self._watch_trainer()

    def _on_message(self, message: Any, _: list[int]) -> None:
        if isinstance(message, Call) and message.function in self._calls.functions:
            self._begin(self._call(message))
        elif isinstance(message, Call) and message.function == WHAT_HOLDS_UP and self._feeder is not None:
            self._begin(self._explain(message, self._feeder))
        elif isinstance(message, Configure):
            with Attempt() as attempt:
                self._feeder = self._make_feeder(message)
            if attempt.error is not None:
                self._send(Failed(failure_of(naming_the_limit(attempt.error))), ())
        elif isinstance(message, RowsDone | ScanDone):
            if self._caller is not None:
                self._caller.on_done(message)
        elif self._feeder is not None:
            self._feeder.handle(message)

    def _make_feeder(self, configure: Configure) -> Feeder | Relay:
        listing = configure.listing or self._found
        assert listing is not None, "it has listed none"
        if self._make_relay is not None:
            return self._make_relay(configure, listing, self._send)
        slots = SlotPool(configure.descriptors)
        feeder = Feeder(
            configure,
            slots,
            self._send,
            lambda feeder, shards: self._start_pool(configure, slots, feeder, shards),
            listing=listing,
            indexes=self._indexes,
        )
        if feeder.prerequisites is not None:
            keep_freed_memory(256 << 20)
        return feeder

    def _begin(self, answering: Coroutine[Any, Any, None]) -> None:
        calling = asyncio.create_task(answering)
        self._calling.add(calling)  # the loop itself holds tasks weakly
        calling.add_done_callback(self._calling.discard)

    async def _explain(self, call: Call, feeder: Feeder | Relay) -> None:
        self._send(Answer(call.number, await feeder.what_holds_up()), ())

    async def _call(self, call: Call) -> None:
        """Answer a call."""
        with Attempt() as attempt:
            self._send(Answer(call.number, await self._calls.call(call.function, call.arguments)), ())
        if attempt.error is not None:
            self._send(Answer(call.number, failure=answer_failure(attempt.error)), ())

    async def _list(self, *arguments: Any) -> Listing:
        """`list_shards`; what it finds is kept for `Configure`."""
        self._found = await asyncio.to_thread(list_shards, *arguments, indexes_read=self._indexes)
        return self._found

    def _start_pool(self, configure: Configure, slots: SlotPool, feeder: Feeder, shards: ResidentShards) -> Pool:
        if not configure.workers:
            send, limit = partial(self._channel.send, close=True), configure.descriptors
            self._caller = CallerPool(send, shards=shards, slots=slots, events=feeder, descriptors=limit)
            return self._caller
        return ProcessPool(
            configure.workers,
            job=configure.job,
            import_path=configure.import_path,
            shards=shards,
            slots=slots,
            events=feeder,
            ends_at_failure=configure.ends_at_failure,
            log_levels=configure.log_levels,
            launched=self._early.launched,
        )

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake of ours in a callback: without this the trainer would wait forever."""
        error = context.get("exception") or RuntimeError(context["message"])
        self._send(Failed(failure_of(naming_the_limit(error))), ())

    def _send(self, message: Any, descriptors: Sequence[int]) -> None:
        self._channel.send(message, descriptors)

    def _watch_trainer(self) -> None:
        """Learn of the trainer's death even if a process that it forked keeps the socket open. Linux only."""
        if hasattr(os, "pidfd_open"):
            try:
                self._loop.add_reader(os.pidfd_open(self._trainer), self.ended.set)
            except ProcessLookupError:  # it is gone already
                self.ended.set()
            except OSError:  # the kernel is older than 5.3: then the socket shows it
                return

    async def close(self) -> None:
        self._channel.close()
        await self._calls.aclose()
        if self._feeder is not None:
            await self._feeder.aclose()
            return
        self._early.end(_GRACE_S)


def _log_in_trainer(send: Callable[[Logged], None]) -> None:
    """Have `send` take what is logged in this process from now on, in the running event loop, and nobody else."""
    loop, loops_thread = asyncio.get_running_loop(), threading.get_ident()

    def to_trainer(logged: Logged) -> None:
        if threading.get_ident() == loops_thread:
            send(logged)  # now: what a worker logged comes before the batch that it was making
        else:
            loop.call_soon_threadsafe(send, logged)

    forward_records(to_trainer)


async def serve(sock: socket.socket, trainer: int, early: EarlyWorkers, make_relay: MakeRelay | None = None) -> None:
    """The same until the trainer is gone, in a running event loop of any process."""
    process = _Process(sock, trainer, early, make_relay)
    await process.ended.wait()
    await process.close()


async def _serve_and_exit(
    sock: socket.socket, trainer: int, early: EarlyWorkers, make_relay: MakeRelay | None
) -> NoReturn:
    await serve(sock, trainer, early, make_relay)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # asyncio would wait for threads: they may be in the user's code, or wait for a storage that is silent
