"""The feeder as a process of its own: it lives on one asyncio loop and ends as soon as its last trainer is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from streamload.decode.failure import Attempt, answer_failure, failure_of
from streamload.environment.affinity import share_processors_of
from streamload.environment.launch import EarlyWorkers
from streamload.environment.rendezvous import Listener
from streamload.feeder.calls import WHAT_HOLDS_UP, Calls
from streamload.feeder.messages import Answer, Call, Configure, Failed
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing, list_shards
from streamload.log_records import Logged, forward_records
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.unnamed import naming_the_limit

__all__ = ["SendDescriptors", "TrainersFeeder"]

_log = logging.getLogger("streamload")

_GRACE_S = 0.3

_ALL_COME_AFTER_S = 60.0
"""Ranks that begin their pass later are rare, or missing."""

_SHOWN_LENGTH = 40
"""Of the values that differ between loaders; a digest is longer."""


class SendDescriptors(Protocol):
    """Sends a trainer a message, with descriptors."""

    def __call__(self, message: Any, descriptors: Sequence[int] = (), *, close: bool = False) -> None:
        """`close` closes the descriptors once they are sent."""


class TrainersFeeder(Protocol):
    """What makes a trainer's batches, or has them made."""

    def handle(self, message: Any, /) -> None:
        """Take a message from the trainer."""

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""

    def leave(self) -> None:
        """The trainer is gone, and others are served."""


class Feeders(Protocol):
    """The feeders of a process's trainers."""

    @property
    def worker_pids(self) -> Sequence[int]:
        """The numbers of the processes of their workers."""

    @property
    def are_broken(self) -> bool:
        """Whether they cannot go on, so that no trainer should come any more."""

    def make(self, message: Configure, listing: Listing, send: SendDescriptors, /) -> TrainersFeeder:
        """One more, for a trainer that wants this of these shards."""

    async def aclose(self) -> None:
        """The last trainer is gone: end all that was started."""


Load = Callable[[], Callable[[EarlyWorkers, Mapping[str, DatasetIndex]], Feeders]]
"""Imports what makes the feeders, from the workers that have been started and the indexes that listing has read. It is
called while shards are being listed, which waits for a storage and so hides the import, and again for every use."""


def run(
    sock: socket.socket, trainer: int, early: EarlyWorkers, load: Load, listener: Listener | None = None
) -> NoReturn:
    """Serve trainers to the end of the last one, and end this process.

    Args:
        sock: leads to the first trainer.
        trainer: the number of its process.
        early: the workers that have been started already.
        load: see `Load`.
        listener: where other trainers of this machine come; None where there is one trainer.
    """
    asyncio.run(_serve_and_exit(sock, trainer, early, load, listener))


class _Process:
    """The feeder as a process of its own.

    Attributes:
        ended: the last trainer is gone.
    """

    def __init__(self, early: EarlyWorkers, load: Load, listener: Listener | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_exception)
        self._early = early
        self._load = load
        self._listener = listener
        self._trainers: list[_Trainer] = []
        self._last: _Trainer | None = None
        self._feeders: Feeders | None = None
        self._indexes: dict[str, DatasetIndex] = {}
        self._listed: dict[bytes, asyncio.Future[Listing]] = {}
        self._alike: Mapping[str, str] | None = None
        self._calling: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        _log_in_trainer(self._log)
        if listener is not None:
            self._loop.add_reader(listener.socket, self._accept)

    # -- trainers --------------------------------------------------------------------------------------------------

    def add(self, sock: socket.socket, trainer: int) -> None:
        """Serve a trainer, whose process has this number."""
        if self._listener is not None:
            workers = self._early.pids if self._feeders is None else self._feeders.worker_pids
            share_processors_of(trainer, [os.getpid(), *workers])
        self._trainers.append(_Trainer(self, sock, trainer))

    def remove(self, trainer: _Trainer) -> None:
        """A trainer is gone. With the last one this ends, unless another one is at the door."""
        self._trainers.remove(trainer)
        self._last = trainer
        if self._feeders is not None and self._feeders.are_broken:
            self._stop_listening()
        if not self._trainers:
            self._accept()
        if not self._trainers:
            self._stop_listening()
            self.ended.set()

    def _accept(self) -> None:
        """Serve the trainers that have come, if they are the same user's."""
        while self._listener is not None and (found := self._listener.accept()) is not None:
            sock, process = found
            self.add(sock, process)

    def _stop_listening(self) -> None:
        """Who comes from now on finds nobody, and starts another feeder."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.socket)
            self._listener.socket.close()
            self._listener = None

    def _log(self, logged: Logged) -> None:
        """Have one trainer log what is logged here: the first one of those that are left."""
        for trainer in self._trainers[:1]:
            trainer.send(logged)

    # -- work ------------------------------------------------------------------------------------------------------

    def make_feeder(self, message: Configure, listing: Listing, send: SendDescriptors) -> TrainersFeeder:
        """What makes a trainer's batches.

        Raises:
            ValueError: this trainer wants something else than the first one.
        """
        if self._feeders is None:
            self._feeders = self._load()(self._early, self._indexes)
        if self._alike is not None:
            _check_alike(self._alike, message.alike)
        feeder = self._feeders.make(message, listing, send)
        if self._alike is None:  # not before: where the first one's could not be made, another may want something else
            self._alike = message.alike
            if self._listener is not None:
                self._loop.call_later(_ALL_COME_AFTER_S, self._note_absent, message.ranks)
        return feeder

    def _note_absent(self, ranks: int) -> None:
        """Say that ranks for which there is room here have not come, while those that have are here."""
        here = len(self._trainers)
        if self._last is None and here < ranks:
            _log.warning(
                'feeders="node": %d of the %d ranks of this machine have come to this feeder, which has the workers '
                "and the memory of all of them. If the others are not just busy, make the loader on every rank, in the "
                "same order as others of its dataset; ranks in containers of their own cannot share a feeder, so leave "
                "out feeders= there",
                here,
                ranks,
            )

    async def list_shards(self, *arguments: Any) -> Listing:
        """`list_shards`, once for all trainers that want the same."""
        key = pickle.dumps(arguments)
        if key not in self._listed:
            listing = asyncio.to_thread(list_shards, *arguments, indexes_read=self._indexes)
            self._listed[key] = asyncio.ensure_future(listing)
            self._loop.call_soon(self._load)
        try:
            return await asyncio.shield(self._listed[key])
        except Exception:
            self._listed.pop(key, None)
            raise

    def begin(self, answering: Coroutine[Any, Any, None]) -> None:
        """Have something answered in the loop."""
        calling = asyncio.create_task(answering)
        self._calling.add(calling)  # the loop itself holds tasks weakly
        calling.add_done_callback(self._calling.discard)

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake of ours in a callback: without this the trainers would wait forever."""
        error = context.get("exception") or RuntimeError(context["message"])
        for trainer in list(self._trainers):
            trainer.send(Failed(failure_of(naming_the_limit(error))))

    async def close(self) -> None:
        """End everything."""
        if self._last is not None:
            await self._last.aclose()
        if self._feeders is not None:
            await self._feeders.aclose()
        self._early.end(_GRACE_S)


class _Trainer:
    """One trainer, as its feeder's process knows it.

    Args:
        process: serves it.
        sock: leads to it.
        number: of its process.
    """

    def __init__(self, process: _Process, sock: socket.socket, number: int) -> None:
        self._process = process
        self._feeder: TrainersFeeder | None = None
        self._found: Listing | None = None
        self._gone = False
        self._calls = Calls(self._list)
        self._channel = AsyncChannel(sock, self._on_message, self._on_lost)
        self._pidfd = self._watch(number)

    def send(self, message: Any, descriptors: Sequence[int] = (), *, close: bool = False) -> None:
        """See `SendDescriptors`."""
        self._channel.send(message, descriptors, close=close)

    def _on_message(self, message: Any, _: list[int]) -> None:
        if isinstance(message, Call) and message.function in self._calls.functions:
            self._process.begin(self._call(message))
        elif isinstance(message, Call) and message.function == WHAT_HOLDS_UP and self._feeder is not None:
            self._process.begin(self._explain(message, self._feeder))
        elif isinstance(message, Configure):
            with Attempt() as attempt:
                self._configure(message)
            if attempt.error is not None:
                self.send(Failed(failure_of(naming_the_limit(attempt.error))))
        elif self._feeder is not None:
            self._feeder.handle(message)

    def _configure(self, message: Configure) -> None:
        listing = message.listing or self._found
        assert listing is not None, "it has listed none"
        self._feeder = self._process.make_feeder(message, listing, self.send)

    async def _explain(self, call: Call, feeder: TrainersFeeder) -> None:
        self.send(Answer(call.number, await feeder.what_holds_up()))

    async def _call(self, call: Call) -> None:
        """Answer a call."""
        with Attempt() as attempt:
            self.send(Answer(call.number, await self._calls.call(call.function, call.arguments)))
        if attempt.error is not None:
            self.send(Answer(call.number, failure=answer_failure(attempt.error)))

    async def _list(self, *arguments: Any) -> Listing:
        """`list_shards`; what it finds is kept for `Configure`."""
        self._found = await self._process.list_shards(*arguments)
        return self._found

    def _watch(self, number: int) -> int | None:
        """Learn of its death even if a process that it forked keeps the socket open. Linux only."""
        if hasattr(os, "pidfd_open"):
            try:
                pidfd = os.pidfd_open(number)
            except ProcessLookupError:  # it is gone already
                asyncio.get_running_loop().call_soon(self._on_lost)
                return None
            except OSError:  # the kernel is older than 5.3, or it is in another container: then the socket shows it
                return None
            asyncio.get_running_loop().add_reader(pidfd, self._on_lost)
            return pidfd
        return None

    def _on_lost(self) -> None:
        """It is gone."""
        if self._gone:
            return
        self._gone = True
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._channel.close()
        self._process.remove(self)
        if self._process.ended.is_set():
            return
        if self._feeder is not None:
            self._feeder.leave()
        self._process.begin(self.aclose())

    async def aclose(self) -> None:
        """Close the connections that its calls have opened."""
        await self._calls.aclose()


def _check_alike(first: Mapping[str, str], other: Mapping[str, str]) -> None:
    """Refuse a trainer that wants other batches than the first one.

    Raises:
        ValueError: naming what differs.
    """
    differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    if differing:
        shown = ", ".join(_difference(name, first.get(name, ""), other.get(name, "")) for name in differing)
        raise ValueError(
            'feeders="node": the ranks of this machine share one feeder, so their loaders must be alike, and on this '
            f"rank something else was given than on the first one: {shown}; give all ranks the same, and make the "
            "loaders of a dataset in the same order on all of them, or leave out feeders="
        )


def _difference(name: str, first: str, other: str) -> str:
    """What differs, with both values where they can be read."""
    is_readable = first and other and max(len(first), len(other)) <= _SHOWN_LENGTH
    return f"{name} ({other}, not {first})" if is_readable else name


def _log_in_trainer(send: Callable[[Logged], None]) -> None:
    """Have `send` take what is logged in this process from now on, in the running event loop, and nobody else."""
    loop, loops_thread = asyncio.get_running_loop(), threading.get_ident()

    def to_trainer(logged: Logged) -> None:
        if threading.get_ident() == loops_thread:
            send(logged)  # now: what a worker logged comes before the batch that it was making
        else:
            loop.call_soon_threadsafe(send, logged)

    forward_records(to_trainer)


async def serve(
    sock: socket.socket, trainer: int, early: EarlyWorkers, load: Load, listener: Listener | None = None
) -> None:
    """The same until the last trainer is gone, in a running event loop of any process."""
    process = _Process(early, load, listener)
    process.add(sock, trainer)
    await process.ended.wait()
    await process.close()


async def _serve_and_exit(
    sock: socket.socket, trainer: int, early: EarlyWorkers, load: Load, listener: Listener | None
) -> NoReturn:
    await serve(sock, trainer, early, load, listener)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # asyncio would wait for threads: they may be in the user's code, or wait for a storage that is silent
