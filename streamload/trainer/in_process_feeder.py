"""The trainer's side of the connection to its feeder where there are no workers: an in-process feeder."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

from streamload.decode.tasks import Job
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Acknowledge, Configure
from streamload.fetch.resident import ResidentShards
from streamload.index.listing import Listing
from streamload.memory.mapped import Bytes
from streamload.memory.slots import HeapSlots
from streamload.memory.unnamed import descriptor_limit
from streamload.order.epoch_start import EpochStart
from streamload.trainer.loop_thread import LoopThread
from streamload.workers.caller_pool import CallerPool
from streamload.workers.caller_worker import CallerWorker

__all__ = ["InProcessFeeder"]


class InProcessFeeder:
    """A feeder in the caller's own thread, which works only while its next message is received.

    It ends with this object at the latest: when it is closed or garbage-collected, or when the interpreter exits.
    Nothing may be fetched after that: an answer that comes while Python ends makes the I/O library abort the process.

    Args:
        configure: as for a process; its pickled job is not used.
        listing: the shards.
        job: the user's functions.

    Attributes:
        waited_s: see `Connection`; for what is fetched.
    """

    def __init__(self, configure: Configure, listing: Listing, job: Job) -> None:
        self._slots = slots = HeapSlots()
        self._messages: deque[Any] = deque()
        self.waited_s = 0.0
        self._loop = loop = LoopThread()
        self._worker = worker = CallerWorker(job, slots)
        pools: list[CallerPool] = []
        take = self._messages.append

        def start_pool(feeder: Feeder, shards: ResidentShards) -> CallerPool:
            limit = descriptor_limit()
            pools.append(CallerPool(worker.put, shards=shards, slots=None, events=feeder, descriptors=limit))
            return pools[0]

        self._feeder = Feeder(
            configure, slots, lambda message, _: take(message), start_pool, loop.call, listing=listing, in_process=True
        )
        self._pool = pools[0]
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end_here, self._feeder, worker, loop, self._owner)

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or this is a fork: the thread of its loop is the parent's."""
        return not self._end.alive or os.getpid() != self._owner

    def put_back(self, messages: Iterable[Any]) -> None:
        """Have messages received again, before any other."""
        self._messages.extendleft(reversed(list(messages)))

    def send(self, message: Any) -> None:
        """Send the feeder a message."""
        if isinstance(message, EpochStart):
            self._worker.pass_number = message.number
        self._feeder.handle(message)

    send_later = send

    def abandon(self, number: int) -> None:
        """Do nothing: it works only while a message is received, and the next epoch's start abandons this one."""

    def receive(self, timeout_s: float | None, /) -> Any:
        """The feeder's next message, after as much work as that takes; the time-out is for what has to be fetched.

        It is of all that this message waits for together. What is being done is not interrupted.
        """
        deadline_s = None if timeout_s is None else self.waited_s + timeout_s
        while not self._messages:
            if (done := self._worker.step()) is not None:
                self._pool.on_done(done)
                continue
            if not self._loop.started:
                raise RuntimeError("the feeder has nothing to do and nothing to say")
            self._turn(None if deadline_s is None else deadline_s - self.waited_s)
        return self._messages.popleft()

    def _turn(self, timeout_s: float | None) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise TimeoutError
        began_s = monotonic()
        try:
            self._loop.turn(timeout_s)
        finally:
            self.waited_s += monotonic() - began_s

    def receive_now(self) -> Any | None:
        """The feeder's next message, if it has been said already."""
        return self._messages.popleft() if self._messages else None

    def fileno(self) -> None:
        """There is nothing to wait for: work is done by `receive`."""

    def request_end(self) -> None:
        """It has no process that could take its time to end."""

    def taken(self, batches: int, _acknowledge_after: int = 1, /) -> None:
        """Acknowledge so many batches. At once, because it costs a call only."""
        self._feeder.handle(Acknowledge(batches, ()))

    def flush(self, *, answers: int | None = None) -> None:
        """Do nothing: every message is sent at once."""

    def lease(self, slot: int) -> Bytes:
        """The memory of a batch."""
        return self._slots.lease(slot)

    def forget(self, slots: Sequence[int]) -> None:
        """Do nothing: slots are used once."""

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._end()
        self._messages.clear()


def _end_here(feeder: Feeder, worker: CallerWorker, loop: LoopThread, owner: int) -> None:
    worker.close()
    if os.getpid() != owner:  # a fork of it has the descriptors only: the loop and the connections are the parent's
        return
    feeder.close()
    if feeder.prerequisites is not None:
        loop.close(feeder.prerequisites.close())
