"""A whole feeder as a Ray actor: what a trainer is to its feeder's process, the actor is, and sends on what it gets."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from streamload.decode.failure import Attempt, failure_of
from streamload.environment.ray_cluster import Versions
from streamload.errors import ShardNotFoundError
from streamload.feeder.messages import (
    AbandonEpoch,
    Answer,
    Call,
    Configure,
    EpochStart,
    Failed,
    Ready,
    Scanning,
    Tracing,
)
from streamload.fetch.budget import available_bytes
from streamload.index.listing import Listing
from streamload.log_records import Logged, forward_records, set_log_levels
from streamload.memory.mapped import Bytes
from streamload.remote.wire import Batches, Credit, Wire, WireListener
from streamload.schedule.epoch import ReadyBatch
from streamload.trainer.connection import FeederProcess
from streamload.trainer.scan_progress import ScanProgress

__all__ = ["FeederActor", "Greeting", "Hosting"]

_LOOK_UP_S = 0.05
_MOST_FRAME_BYTES = 8 << 20
"""Small batches go together, up to so many bytes."""


@dataclass(frozen=True)
class Greeting:
    """What an actor says of itself; no named tuple, see `Versions`.

    Attributes:
        versions: of what must be the same everywhere: trainer and actors send each other pickles.
        node: its node's address.
        address: where the actor waits for the relay: host and port.
        token: that the relay has to send there.
        free_bytes: of its node's memory.
        clock_s: its `perf_counter`, by which it dates events.
    """

    versions: Versions
    node: str
    address: tuple[str, int]
    token: bytes
    free_bytes: int
    clock_s: float


class Hosting(NamedTuple):
    """The relay wants a feeder, in the place of the one before.

    Attributes:
        configure: what to send it.
        folder: where relative paths begin, if it is there; None for where they begin in the actor.
    """

    configure: Configure
    folder: str | None


class _SentProgress(ScanProgress):
    """Sends how far scans are, instead of showing it."""

    def __init__(self, send: Callable[[Scanning], None]) -> None:
        super().__init__(shows=False)
        self._send = send

    def show(self, scanning: Scanning) -> None:
        self._send(scanning)


class FeederActor:
    """Hosts a feeder for one relay. All methods run in the actor's event loop.

    Args:
        arguments: the program's `sys.argv`, which the actor and its feeder take over.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        sys.argv[:] = arguments
        # Ray lets the numerical libraries have as many threads as the actor has processors; each worker has one.
        os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
        self._listener: WireListener | None = None

    async def greet(self) -> Greeting:
        """Wait for a relay from now on, and say where."""
        import ray.util

        node = str(ray.util.get_node_ip_address())
        self._listener = WireListener(node)
        return Greeting(
            Versions.here(), node, self._listener.address, self._listener.token, available_bytes(), perf_counter()
        )

    async def serve(self) -> None:
        """Serve the relay until it has closed its connection.

        Raises:
            FeederDiedError: the feeder's process is dead.
        """
        assert self._listener is not None, "greet comes first"
        hosted = HostedFeeder(await self._listener.accept())
        try:
            await hosted.serve()
        finally:
            hosted.close()


class HostedFeeder:
    """A feeder's process, and the connection that its batches go to.

    What the feeder announces is held here until the relay has room for it. What it has made ahead of the next pass
    waits until that is requested, and is dropped if another one is.

    Args:
        wire: leads to the relay.
        forwards_logs: send what is logged in this process, too.
    """

    def __init__(self, wire: Wire, *, forwards_logs: bool = True) -> None:
        self._wire = wire
        self._feeder: FeederProcess | None = None
        self._pending: deque[tuple[Ready, ReadyBatch, Bytes]] = deque()
        self._ended: set[tuple[int, int, int]] = set()
        self._latest: Ready | None = None
        self._others: deque[Any] = deque()
        self._current: tuple[int, int, int] | None = None
        self._newest = 0  # the pass that was requested last
        self._credits = 0
        self._wake = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self._why_not_hosted: Exception | None = None
        loop = asyncio.get_running_loop()

        def send_logged(logged: Logged) -> None:
            loop.call_soon_threadsafe(self._put, logged)

        if forwards_logs:
            forward_records(send_logged)

    async def serve(self) -> None:
        """See `FeederActor.serve`."""
        tasks = [asyncio.create_task(self._receive_all()), asyncio.create_task(self._send_all())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            with Attempt() as attempt:
                for task in done:
                    task.result()
            if attempt.error is not None and not isinstance(attempt.error, EOFError | OSError):
                raise attempt.error
        finally:
            for task in (*tasks, *self._calls):
                task.cancel()
            await asyncio.gather(*tasks, *self._calls, return_exceptions=True)

    def close(self) -> None:
        """End the feeder and the connection."""
        self._wire.close()
        self._end_feeder()

    async def _receive_all(self) -> None:
        while True:
            message = await self._wire.receive(lambda _: ())
            match message:
                case Hosting():
                    self._start_feeder(message)
                case Credit():
                    self._credits += message.batches
                case EpochStart():
                    self._request(message)
                case AbandonEpoch():
                    self._abandon(message)
                case Call():
                    self._begin(message)
                case Tracing() if self._feeder is not None:
                    self._feeder.send(message)
            self._wake.set()

    def _start_feeder(self, hosting: Hosting) -> None:
        """Start a feeder, in the place of another one if there is one."""
        self._end_feeder()
        configure, folder = hosting.configure, hosting.folder
        if folder is not None and os.path.isdir(folder):
            os.chdir(folder)  # the process is this actor's alone, and the feeder's processes take it over
        set_log_levels(configure.log_levels)
        with Attempt() as attempt:
            assert configure.listing is not None
            check_paths(configure.listing, configure.fetching.storages)
            self._feeder = feeder = FeederProcess(configure.workers, None, _SentProgress(self._put))
            feeder.send(configure)
            descriptor = feeder.fileno()
            assert descriptor is not None
            asyncio.get_running_loop().add_reader(descriptor, self._take_all)
        self._why_not_hosted = attempt.error
        if attempt.error is not None:
            self._end_feeder()  # each request is answered with why

    def _end_feeder(self) -> None:
        if self._feeder is not None:
            if (descriptor := self._feeder.fileno()) is not None and descriptor >= 0:
                asyncio.get_running_loop().remove_reader(descriptor)
            self._pending.clear()
            self._ended.clear()
            self._feeder.close()
            self._feeder, self._latest, self._current = None, None, None

    def _request(self, start: EpochStart) -> None:
        self._current, self._credits, self._newest = start.identity, 0, start.number
        self._keep_only(start.identity)
        if self._feeder is not None:
            self._others = deque(each for each in self._others if not isinstance(each, Failed) or each.start is None)
            self._feeder.send(start)
        elif self._why_not_hosted is not None:
            self._put(Failed(failure_of(self._why_not_hosted)))

    def _abandon(self, message: AbandonEpoch) -> None:
        if self._current is not None and self._current[0] == message.number:
            self._current = None
        if self._feeder is not None:
            self._feeder.abandon(message.number)

    def _keep_only(self, identity: tuple[int, int, int]) -> None:
        """Drop what was announced of other passes than this one."""
        dropped = [each for each in self._pending if each[0].start != identity]
        if dropped:
            self._pending = deque(each for each in self._pending if each[0].start == identity)
            count = len(dropped)
            del dropped
            assert self._feeder is not None
            self._feeder.note_taken(count)
        self._ended &= {identity}

    def _begin(self, call: Call) -> None:
        task = asyncio.create_task(self._answer(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, call: Call) -> None:
        """Have the feeder answer a call, on a thread; what that receives beside is taken here."""
        if self._feeder is None:
            why = self._why_not_hosted or RuntimeError("no feeder is hosted")
            self._put(Answer(call.number, failure=failure_of(why)))
            return
        calling = asyncio.ensure_future(asyncio.to_thread(self._feeder.call, call))
        while not calling.done():
            await asyncio.wait({calling}, timeout=_LOOK_UP_S)
            self._take_all()
        with Attempt() as attempt:
            self._put(calling.result())
        if attempt.error is not None:
            self._put(Answer(call.number, failure=failure_of(attempt.error)))

    def _take_all(self) -> None:
        """Take in what the feeder has sent."""
        feeder = self._feeder
        if feeder is None or self._error is not None:
            return
        with Attempt() as attempt:
            while (message := feeder.receive_now()) is not None:
                self._take(feeder, message)
        if attempt.error is not None:
            self._error = attempt.error
            self._wake.set()

    def _take(self, feeder: FeederProcess, message: Any) -> None:
        if isinstance(message, Failed) and message.start not in (None, self._current):
            raise RuntimeError("the feeder has failed in work that nobody wants")  # and does no other
        if not isinstance(message, Ready):
            self._put(message)
            return
        feeder.forget(message.retired)
        leased = [(message, batch, feeder.lease(batch.slot)) for batch in message.batches]
        is_wanted = message.start == self._current or message.start[0] > self._newest
        if not is_wanted:  # it was sent before the feeder knew
            leased.clear()
            feeder.note_taken(len(message.batches))
        self._pending.extend(leased)
        if message.last and is_wanted:
            self._ended.add(message.start)
        if message.totals is not None or message.events or message.skipped_members:
            self._latest = _later(self._latest, message)
        self._wake.set()

    def _put(self, message: Any) -> None:
        self._others.append(message)
        self._wake.set()

    async def _send_all(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            await self._send_what_there_is()

    async def _send_what_there_is(self) -> None:
        while True:
            while self._others and not isinstance(self._others[0], Failed):
                await self._wire.send(self._others.popleft())
            batches = self._next_batches()
            is_end = self._current in self._ended and not self._has_pending()
            if not batches and not is_end:
                break
            feeder = self._feeder
            await self._send(batches, last=is_end)
            count = len(batches)
            del batches  # with them the slots are free
            if feeder is not None and feeder is self._feeder and count:  # else another one is hosted by now
                feeder.note_taken(count)
            if is_end:
                break
        while self._others and not self._has_pending():  # a failure takes effect behind the batches before it
            await self._wire.send(self._others.popleft())

    def _has_pending(self) -> bool:
        return bool(self._pending) and self._pending[0][0].start == self._current

    def _next_batches(self) -> list[tuple[ReadyBatch, Bytes]]:
        """The next batches of the current pass that the relay has room for, as many as go together."""
        taken: list[tuple[ReadyBatch, Bytes]] = []
        total_bytes = 0
        while self._credits and self._has_pending() and total_bytes < _MOST_FRAME_BYTES:
            _, batch, memory = self._pending.popleft()
            self._credits -= 1
            total_bytes += batch.size_bytes
            taken.append((batch, memory))
        return taken

    async def _send(self, batches: Sequence[tuple[ReadyBatch, Bytes]], *, last: bool) -> None:
        latest, self._latest = self._latest, None
        assert self._current is not None
        ready = Ready(
            self._current,
            tuple(batch for batch, _ in batches),
            (),
            (),
            last=last,
            acknowledge_after=1,
            totals=None if latest is None else latest.totals,
            skipped_members={} if latest is None else latest.skipped_members,
            events=() if latest is None else latest.events,
        )
        if last:
            self._ended.discard(self._current)
        sizes = tuple(0 if batch.layout is None else batch.size_bytes for batch, _ in batches)
        payload = [memory[:size] for (_, memory), size in zip(batches, sizes, strict=True)]
        await self._wire.send(Batches(ready, sizes), payload)


def _later(before: Ready | None, message: Ready) -> Ready:
    """The later one of two messages as far as statistics go, with the events of both."""
    if before is None:
        return message
    return message._replace(
        totals=message.totals or before.totals,
        skipped_members=message.skipped_members or before.skipped_members,
        events=before.events + message.events,
    )


def check_paths(listing: Listing, storages: Any) -> None:
    """Refuse local shards that this node does not see: one of each folder is looked for.

    Raises:
        ShardNotFoundError: it is not there.
    """
    for url in {shard.folder: shard.url for shard in listing.numbered}.values():
        if storages.is_local(url):
            path = url.removeprefix("file://")
            if not os.path.exists(path):
                raise ShardNotFoundError(
                    f"the node {platform.node()} of the Ray cluster does not see this shard, and feeders run there; "
                    "put the shards into a bucket or on a file system that all nodes mount at the same path",
                    url=url,
                )
