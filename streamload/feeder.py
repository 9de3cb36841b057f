"""The feeder process: makes the plan, deals out tasks to the workers, and sends batches to the trainer in order.

It is started as `python -m streamload.feeder SOCKET LAST_WORDS TRAINER`, with two descriptors and the number of the
trainer's process. It lives on one asyncio loop and ends as soon as the trainer is gone. `Feeder` itself does not
know where it runs: `send` may lead to a socket, or to the caller's own thread.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from streamload.dataset.scan_cache import ScanCache
from streamload.decode.dealing import Learned
from streamload.decode.failure import Attempt, failure_of
from streamload.decode.in_process import ThreadPool
from streamload.decode.pool import Pool, ProcessPool
from streamload.decode.scans import Scans
from streamload.decode.tasks import RowsDone, ScanDone
from streamload.fetch.resident import ResidentShards
from streamload.fetch.tables import Tables
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.memory.mapped import raise_descriptor_limit
from streamload.memory.slots import SlotPool, Slots
from streamload.messages import Configure, Counted, CountSamples, EpochEnded, EpochStart, Failed, Ready, Taken
from streamload.pipeline import Epoch, ReadyBatch
from streamload.statistics import FeederTotals

__all__ = ["Feeder", "main"]

Send = Callable[[Any, Sequence[int]], None]


class Feeder:
    """Runs epochs for one trainer.

    Args:
        configure: what to do.
        slots: whose memory the batches lie in.
        send: takes messages for the trainer, with descriptors.
        start_pool: starts the workers; gets the feeder for their events.
        shares_slots: slots have descriptors, which the trainer gets.
    """

    def __init__(
        self,
        configure: Configure,
        slots: Slots,
        send: Send,
        start_pool: Callable[[Feeder], Pool],
        *,
        shares_slots: bool = True,
    ) -> None:
        self._shares_slots = shares_slots
        self._settings = configure.settings
        self._slots = slots
        self._send = send
        self._tables = Tables(configure.listing, ScanCache(None), strict=configure.settings.strict)
        self._scans = Scans(self._tables, strict=configure.settings.strict)
        self._learned = Learned()
        self._totals = FeederTotals()
        self._announced: set[int] = set()
        self._epoch: Epoch | None = None
        self._counting = False
        self.pool = start_pool(self)

    def handle(self, message: Any) -> None:
        """Take a message from the trainer, and do what can be done now. Whatever fails is sent, not raised."""
        with self._failing():
            match message:
                case EpochStart():
                    self._epoch = self._start(message)
                case Taken():
                    self._slots.taken(message.batches)
                    self._slots.released(message.released)
                    if self._epoch is not None:
                        self._epoch.taken(message.batches)
                case CountSamples():
                    self._counting = True
                    self._scans.ask_for(range(len(self._tables.counts)))
            self._pump()

    def on_done(self, done: RowsDone | ScanDone) -> None:
        """A task has come back from the pool."""
        with self._failing():
            self._totals.add(done)
            if self._epoch is not None:
                self._epoch.on_done(done)
            elif isinstance(done, ScanDone):
                self._scans.on_done(done)
            self._pump()

    def on_room(self) -> None:
        """The pool takes tasks again."""
        with self._failing():
            self._pump()

    def on_restarted(self) -> None:
        """A worker has died and was replaced."""
        self._totals.restarted_workers += 1

    def on_broken(self, error: Exception) -> None:
        """The pool cannot go on."""
        self._fail(error)

    def close(self) -> None:
        """End the workers and close the slots. Calling it twice is fine."""
        self.pool.close()
        self._slots.close()

    def _start(self, start: EpochStart) -> Epoch:
        return Epoch(
            self._settings,
            start,
            tables=self._tables,
            scans=self._scans,
            pool=self.pool,
            slots=self._slots,
            learned=self._learned,
            totals=self._totals,
            deliver=self._deliver,
        )

    def _pump(self) -> None:
        epoch = self._epoch
        if epoch is not None:
            epoch.pump()
            if epoch.ended:
                self._epoch = None
                self._send(EpochEnded(self._totals), ())
        else:
            while self.pool.has_room() and (task := self._scans.next_task()) is not None:
                self.pool.submit(task)
        if self._counting and self._tables.counts.complete:
            self._counting = False
            self._send(Counted(tuple(self._tables.counts.values.tolist())), ())

    def _deliver(self, batches: list[ReadyBatch], tell_after: int) -> None:
        """Send batches, as many with one message as its descriptors allow."""
        for start in range(0, len(batches), MAX_DESCRIPTORS):
            part = batches[start : start + MAX_DESCRIPTORS]
            opened = tuple(dict.fromkeys(batch.slot for batch in part if batch.slot not in self._announced))
            descriptors = [self._slots.descriptor(slot) for slot in opened] if self._shares_slots else []
            self._announced.update(opened)
            for batch in part:
                self._slots.delivered(batch.slot)
            retired = tuple(self._slots.take_retired())
            self._announced.difference_update(retired)
            self.pool.forget_slots(retired)
            self._totals.skipped_members = self._tables.skipped
            self._send(Ready(tuple(part), opened, retired, tell_after, self._totals), descriptors)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Send what is raised inside to the trainer: nothing else would ever tell it."""
        with Attempt() as attempt:
            yield
        if attempt.error is not None:
            self._fail(attempt.error)

    def _fail(self, error: Exception) -> None:
        self._epoch = None
        self._counting = False
        self._send(Failed(failure_of(error)), ())


class _Process:
    """The feeder as a process of its own."""

    def __init__(self, sock: socket.socket, trainer: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_exception)
        self._trainer = trainer
        self._feeder: Feeder | None = None
        self.ended = asyncio.Event()
        self._channel = AsyncChannel(sock, self._on_message, self.ended.set)
        self._watch_trainer()

    def _on_message(self, message: Any, _: list[int]) -> None:
        if isinstance(message, Configure):
            slots = SlotPool()
            with Attempt() as attempt:
                self._feeder = Feeder(message, slots, self._send, lambda feeder: _start_pool(message, slots, feeder))
            if attempt.error is not None:
                self._send(Failed(failure_of(attempt.error)), ())
        elif self._feeder is not None:
            self._feeder.handle(message)

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A mistake of ours in a callback: without this the trainer would wait for ever."""
        error = context.get("exception") or RuntimeError(context["message"])
        self._send(Failed(failure_of(error)), ())

    def _send(self, message: Any, descriptors: Sequence[int]) -> None:
        self._channel.send(message, descriptors)

    def _watch_trainer(self) -> None:
        """Learn of the trainer's death even if a process that it forked keeps the socket open. Linux only."""
        if hasattr(os, "pidfd_open"):
            try:
                self._loop.add_reader(os.pidfd_open(self._trainer), self.ended.set)
            except OSError:  # it is gone already, or the kernel is older than 5.3: then the socket tells
                return

    def close(self) -> None:
        self._channel.close()
        if self._feeder is not None:
            self._feeder.close()


def _start_pool(configure: Configure, slots: SlotPool, feeder: Feeder) -> Pool:
    shards = ResidentShards(configure.listing.shards)
    if configure.executor == "thread":
        return ThreadPool(configure.workers, job=configure.job, shards=shards, slots=slots, events=feeder)
    return ProcessPool(
        configure.workers,
        job=configure.job,
        import_path=configure.import_path,
        shards=shards,
        slots=slots,
        events=feeder,
    )


async def _serve(sock: socket.socket, trainer: int) -> None:
    process = _Process(sock, trainer)
    await process.ended.wait()
    process.close()


def main() -> None:
    """Run a feeder on the descriptors given as arguments."""
    socket_number, words_number, trainer = map(int, sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the trainer had it blocked until here
    faulthandler.enable(file=words_number)
    raise_descriptor_limit()
    asyncio.run(_serve(socket.socket(fileno=socket_number), trainer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a thread pool may still be in the user's code


if __name__ == "__main__":
    main()
