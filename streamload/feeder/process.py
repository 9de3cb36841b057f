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
from functools import partial
from typing import Any, NoReturn, Protocol

from streamload.decode.failure import Attempt, answer_failure, failure_of
from streamload.decode.tasks import RowsDone, ScanDone
from streamload.environment.affinity import share_processors_of
from streamload.environment.launch import EarlyWorkers
from streamload.environment.rendezvous import Listener
from streamload.feeder.calls import WHAT_HOLDS_UP, Calls
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Answer, Call, Configure, Failed, Send
from streamload.feeder.pipeline import Pipeline
from streamload.feeder.shared_streams import Member, SharedStreams
from streamload.fetch.resident import ResidentShards
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing, list_shards
from streamload.log_records import Logged, forward_records, set_log_levels
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.heap import keep_freed_memory
from streamload.memory.slots import SlotPool, SlotPools
from streamload.memory.unnamed import descriptor_limit, naming_the_limit
from streamload.workers.caller_pool import CallerPool
from streamload.workers.process_pool import ProcessPool
from streamload.workers.protocol import Pool

__all__ = ["serve"]

_log = logging.getLogger("streamload")

_GRACE_S = 0.3

_ALL_COME_AFTER_S = 60.0
"""Ranks that begin their pass later are rare, or missing."""

_SHOWN_LENGTH = 40
"""Of the values that differ between loaders; a digest is longer."""


class FeederStandIn(Protocol):
    """What stands in a feeder's place in its process."""

    def handle(self, message: Any, /) -> None:
        """Take a message from the trainer."""

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""

    async def aclose(self) -> None:
        """End all that it has started."""


MakeRelay = Callable[[Configure, Listing, Send], FeederStandIn]


def run(
    sock: socket.socket,
    trainer: int,
    early: EarlyWorkers,
    listener: Listener | None = None,
    *,
    make_relay: MakeRelay | None = None,
) -> NoReturn:
    """Serve trainers to the end of the last one, and end this process.

    Args:
        sock: leads to the first trainer.
        trainer: the number of its process.
        early: the workers that have been started already.
        listener: where other trainers of this machine come; None where there is one trainer.
        make_relay: makes what stands in a feeder's place, for a trainer that wants feeders on other nodes.
    """
    asyncio.run(_serve_and_exit(sock, trainer, early, listener, make_relay))


class _Process:
    """The feeder as a process of its own.

    Attributes:
        ended: the last trainer is gone.
        calls: functions that trainers may call.
        slots: of all trainers.
        pipeline: makes their batches; None before the first of them has said how.
        make_relay: see `run`.
    """

    def __init__(self, early: EarlyWorkers, listener: Listener | None, make_relay: MakeRelay | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_exception)
        self._early = early
        self.make_relay = make_relay
        self._listener = listener
        self._trainers: list[_Trainer] = []
        self._last: _Trainer | None = None
        self._indexes: dict[str, DatasetIndex] = {}
        self._listed: dict[bytes, asyncio.Future[Listing]] = {}
        self._alike: Mapping[str, str] = {}
        self._calling: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        self.slots = SlotPools()
        self.pipeline: Pipeline | None = None
        self._pool: ProcessPool | None = None
        self._shared: SharedStreams | None = None
        _log_in_trainer(self._log)
        if listener is not None:
            self._loop.add_reader(listener.socket, self._accept)

    # -- trainers --------------------------------------------------------------------------------------------------

    def add(self, sock: socket.socket, trainer: int) -> None:
        """Serve a trainer, whose process has this number."""
        if self._listener is not None:
            workers = [worker.child.pid for worker in self._early.launched] if self._pool is None else self._pool.pids
            share_processors_of(trainer, [os.getpid(), *workers])
        self._trainers.append(_Trainer(self, sock, trainer))

    def remove(self, trainer: _Trainer) -> None:
        """A trainer is gone. With the last one this ends, unless another one is at the door."""
        self._trainers.remove(trainer)
        self._last = trainer
        if self.pipeline is not None and self.pipeline.broken is not None:
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

    def configure(self, message: Configure, listing: Listing, start_pool: Callable[..., Pool]) -> Pipeline:
        """What makes a trainer's batches: it is started for the first trainer, and is the others' too.

        Raises:
            ValueError: this trainer wants something else than the first one.
        """
        if self.pipeline is None:
            self.pipeline = Pipeline(message, start_pool, listing=listing, indexes=self._indexes)
            self._alike = message.alike
            if self.pipeline.prerequisites is not None:
                keep_freed_memory(256 << 20)
            if self._listener is not None:
                self._loop.call_later(_ALL_COME_AFTER_S, self._note_absent, message.ranks)
        _check_alike(self._alike, message.alike)
        return self.pipeline

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

    def share(self, message: Configure, pipeline: Pipeline, descriptors: int) -> SharedStreams:
        """The streams of trainers of which several get the same batches."""
        if self._shared is None:
            sharers = min(message.shared_by, message.ranks)
            self._shared = SharedStreams(
                pipeline, self.slots, descriptors=descriptors, workers=message.workers, sharers=sharers
            )
        return self._shared

    def new_pool(self, message: Configure, pipeline: Pipeline, shards: ResidentShards) -> Pool:
        """The workers."""
        self._pool = ProcessPool(
            message.workers,
            job=message.job,
            import_path=message.import_path,
            shards=shards,
            slots=self.slots,
            events=pipeline,
            ends_at_failure=message.ends_at_failure,
            log_levels=message.log_levels,
            launched=self._early.take(),
        )
        return self._pool

    async def list_shards(self, *arguments: Any) -> Listing:
        """`list_shards`, once for all trainers that want the same."""
        key = pickle.dumps(arguments)
        if key not in self._listed:
            listing = asyncio.to_thread(list_shards, *arguments, indexes_read=self._indexes)
            self._listed[key] = asyncio.ensure_future(listing)
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
        self.slots.close_all()
        if self.pipeline is None:
            self._early.end(_GRACE_S)
            return
        self.pipeline.close()
        if self.pipeline.prerequisites is not None:
            await self.pipeline.prerequisites.close()


class _Trainer:
    """One trainer, as its feeder's process knows it.

    Args:
        process: serves it.
        sock: leads to it.
        number: of its process.
    """

    def __init__(self, process: _Process, sock: socket.socket, number: int) -> None:
        self._process = process
        self._feeder: Feeder | Member | FeederStandIn | None = None
        self._caller: CallerPool | None = None
        self._slots: SlotPool | None = None
        self._found: Listing | None = None
        self._gone = False
        self._calls = Calls(self._list)
        self._channel = AsyncChannel(sock, self._on_message, self._on_lost)
        self._pidfd = self._watch(number)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send it a message."""
        self._channel.send(message, descriptors)

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
        elif isinstance(message, RowsDone | ScanDone):
            if self._caller is not None:
                self._caller.on_done(message)
        elif self._feeder is not None:
            self._feeder.handle(message)

    def _configure(self, message: Configure) -> None:
        listing = message.listing or self._found
        assert listing is not None, "it has listed none"
        if self._process.make_relay is not None:
            set_log_levels(message.log_levels)
            self._feeder = self._process.make_relay(message, listing, self.send)
            return
        pipeline = self._process.configure(message, listing, partial(self._start_pool, message))
        descriptors = message.descriptors or (descriptor_limit() // message.ranks if message.ranks > 1 else 0)
        if message.ranks > 1 and message.shared_by > 1:
            self._feeder = self._process.share(message, pipeline, descriptors).join(self.send)
            return
        self._slots = self._process.slots.new(descriptors)
        self._feeder = Feeder(pipeline, self._slots, self.send, workers=message.workers)

    def _start_pool(self, message: Configure, pipeline: Pipeline, shards: ResidentShards) -> Pool:
        if message.workers:
            return self._process.new_pool(message, pipeline, shards)
        self._caller = CallerPool(
            partial(self._channel.send, close=True),
            shards=shards,
            slots=self._process.slots,
            events=pipeline,
            descriptors=message.descriptors,
        )
        return self._caller

    async def _explain(self, call: Call, feeder: Feeder | Member | FeederStandIn) -> None:
        knows = feeder.pipeline if isinstance(feeder, Feeder) else feeder
        self.send(Answer(call.number, await knows.what_holds_up()))

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
        if isinstance(self._feeder, Feeder | Member):
            self._feeder.leave()
        if isinstance(self._feeder, Feeder) and self._slots is not None:
            self._feeder.pipeline.pool.forget_slots(self._process.slots.close(self._slots))
        self._process.begin(self.aclose())

    async def aclose(self) -> None:
        """Close the connections that its calls have opened, and end a relay."""
        await self._calls.aclose()
        if self._feeder is not None and not isinstance(self._feeder, Feeder | Member):
            await self._feeder.aclose()


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
    sock: socket.socket,
    trainer: int,
    early: EarlyWorkers,
    listener: Listener | None = None,
    *,
    make_relay: MakeRelay | None = None,
) -> None:
    """The same until the last trainer is gone, in a running event loop of any process."""
    process = _Process(early, listener, make_relay)
    process.add(sock, trainer)
    await process.ended.wait()
    await process.close()


async def _serve_and_exit(
    sock: socket.socket,
    trainer: int,
    early: EarlyWorkers,
    listener: Listener | None,
    make_relay: MakeRelay | None,
) -> NoReturn:
    await serve(sock, trainer, early, listener, make_relay=make_relay)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # asyncio would wait for threads: they may be in the user's code, or wait for a storage that is silent
