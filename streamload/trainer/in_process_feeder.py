"""The trainer's side of the connection to its feeder where there are no workers: an in-process feeder."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from threading import RLock
from time import monotonic
from typing import Any

from streamload.decode.tasks import Job
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Acknowledge, Answer, Call, Configure
from streamload.fetch.resident import ResidentShards
from streamload.index.listing import Listing
from streamload.memory.mapped import Bytes
from streamload.memory.slots import HeapSlots
from streamload.trainer.inbox import Inbox
from streamload.trainer.loop_thread import LoopThread
from streamload.workers.in_process import CallerPool

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
        self._inbox = inbox = Inbox()
        self._working = RLock()
        self.waited_s = 0.0
        self._loop = loop = LoopThread()
        pools: list[CallerPool] = []

        def start_pool(feeder: Feeder, shards: ResidentShards) -> CallerPool:
            pools.append(CallerPool(job=job, shards=shards, slots=slots, events=feeder))
            return pools[0]

        self._feeder = Feeder(
            configure,
            slots,
            lambda message, _: inbox.put(message),
            start_pool,
            loop.call,
            listing=listing,
            in_process=True,
        )
        self._pool = pools[0]
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end_here, self._feeder, loop, self._owner)

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or this is a fork: the thread of its loop is the parent's."""
        return not self._end.alive or os.getpid() != self._owner

    def put_back(self, messages: Iterable[Any]) -> None:
        """Have messages received again, before any other."""
        self._inbox.put_back(messages)

    def send(self, message: Any) -> None:
        """Send the feeder a message."""
        with self._working:
            self._feeder.handle(message)

    send_later = send

    def abandon(self, number: int) -> None:
        """Do nothing: it works only while a message is received, and the next epoch's start abandons this one."""

    def receive(self, timeout_s: float | None, /) -> Any:
        """The feeder's next message, after as much work as that takes; the time-out is for what has to be fetched.

        It is of all that this message waits for together. What is being done is not interrupted.
        """
        deadline_s = None if timeout_s is None else self.waited_s + timeout_s
        while (message := self._inbox.take()) is None:
            with self._working:
                if not self._inbox:  # else another thread has worked for it meanwhile
                    self._work(None if deadline_s is None else deadline_s - self.waited_s)
        return message

    def call(self, call: Call) -> Answer:
        """Answer a call, after as much work as that takes; batches that are finished meanwhile are kept."""
        self._inbox.expect(call.number)
        try:
            self.send(call)
            while (answer := self._inbox.answer(call.number)) is None:
                with self._working:
                    if self._inbox.answer(call.number) is None:
                        self._work(None)
            return answer
        finally:
            self._inbox.forget(call.number)

    def _work(self, timeout_s: float | None) -> None:
        """Do a task, or wait for what is fetched."""
        if self._pool.step():
            return
        if not self._loop.started:
            raise RuntimeError("the feeder has nothing to do and nothing to say")
        self._turn(timeout_s)

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
        return self._inbox.take()

    def fileno(self) -> None:
        """There is nothing to wait for: work is done by `receive`."""

    def request_end(self) -> None:
        """It has no process that could take its time to end."""

    def note_taken(self, batches: int, _acknowledge_after: int = 1, /) -> None:
        """Acknowledge so many batches. At once, because it costs a call only."""
        with self._working:
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
        self._inbox.clear()


def _end_here(feeder: Feeder, loop: LoopThread, owner: int) -> None:
    if os.getpid() != owner:  # a fork of it has the descriptors only: the loop and the connections are the parent's
        return
    feeder.close()
    if feeder.prerequisites is not None:
        loop.close(feeder.prerequisites.close())
