"""One pass of the loop over an epoch, also with `async for`: waits for batches, builds them, counts positions."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event, Lock, RLock, current_thread, main_thread
from time import perf_counter
from typing import Any, Literal, Self

from streamload.decode.failure import Attempt, error_from
from streamload.errors import LoaderClosedError, SampleError, StreamloadError
from streamload.feeder.messages import Failed, Ready, ReadyBatch
from streamload.memory.mapped import Bytes
from streamload.order.share import EpochStart
from streamload.statistics import Meter
from streamload.text import counted
from streamload.trainer.batch_builder import BatchBuilder
from streamload.trainer.connection import Connection, FeederDiedError, second_death
from streamload.trainer.feeder_link import FeederLink

_log = logging.getLogger("streamload")

WAIT_LOGGED_AFTER_S, WAIT_LOGGED_EVERY_S = 10.0, 60.0

# How often a pass that waits looks whether another thread or task has ended it.
_LOOK_UP_S = 1.0


@contextmanager
def one_thread(in_use: RLock) -> Iterator[None]:
    """Hold a loader for a block. Raises RuntimeError if another thread holds it."""
    if not in_use.acquire(blocking=False):
        raise RuntimeError(
            "another thread uses this loader: a loader, and each pass over it, is for one thread at a time. Let one "
            "thread take the batches and hand them on"
        )
    try:
        yield
    finally:
        in_use.release()


@dataclass(slots=True)
class Cursor:
    """The position of a loader, which its pass moves on.

    Attributes:
        epoch: the epoch.
        position: samples of its order that the loop has been given, over all ranks.
        state: "ready" to begin or go on from here; "running"; or "left" by the user before the end.
        epoch_to_come: the epoch of the next pass, if the user has named one.
        finished: the epoch before this one was given to its end by this loader.
    """

    epoch: int = 0
    position: int = 0
    state: Literal["ready", "running", "left"] = "ready"
    epoch_to_come: int | None = None
    finished: bool = False

    def next_start(self) -> tuple[int, int]:
        """Return the epoch and the position at which the next pass begins."""
        if self.state == "ready" and self.epoch_to_come in (None, self.epoch):
            return self.epoch, self.position
        return (self.epoch + 1 if self.epoch_to_come is None else self.epoch_to_come), 0

    def to_save(self) -> tuple[int, int]:
        """Return where to resume: here, unless the user has named another epoch since a pass."""
        if self.state != "running" and self.epoch_to_come is not None:
            return self.next_start()
        return self.epoch, self.position


@dataclass(slots=True)
class _Times:
    """When a pass gave the last batch, when the next was requested, and when to log that it has not come."""

    gave_s: float | None = None
    requested_s: float = 0.0
    log_due_s: float = 0.0


_CLOSED = "it was closed"
_FINISHED = ""
"""The pass has been given to its end."""


class EpochIterator(Iterator[Any], AsyncIterator[Any]):
    """The iterator of a loop. If it is dropped or closed before its end, the feeder gives up its epoch.

    Loops that count steps never request more than the last batch, so a pass that has given that one is at its end, too.

    Attributes:
        connection: to the feeder.
    """

    _stays_in_trainer = True

    def __init__(
        self,
        start: EpochStart,
        connection: Connection,
        link: FeederLink,
        batch_builder: BatchBuilder,
        cursor: Cursor,
        *,
        meter: Meter,
        on_nothing: Callable[[EpochStart], None],
        in_use: RLock,
        move: Callable[[Any], Callable[[], Any]] | None = None,
    ) -> None:
        self._start = start
        self.connection = connection
        self._link = link
        self._batch_builder = batch_builder
        self._cursor = cursor
        self._meter = meter
        self._move = move
        self._on_nothing = on_nothing
        self._pending: deque[ReadyBatch] = deque()
        self._all_came = False
        self._last_good: tuple[ReadyBatch, Bytes] | None = None
        self._owed: deque[int] = deque()  # the ends of batches to give next
        # The next batch, or what moves it to a device, with its samples and its end; or its error.
        self._ahead: tuple[Any, int, int] | Exception | None = None
        self._feeder_died = False  # and no batch has come since
        self._times = _Times()
        self._skipped_before = batch_builder.n_skipped
        self._turning, self._awaited = Lock(), Lock()
        self._ended: str | None = None  # `_FINISHED`, or why before that
        self._in_use = in_use
        cursor.state = "running"

    def __next__(self) -> Any:
        self.request()
        given = self.turn(self.receive)
        assert given is not None
        return given[0]

    def request(self) -> None:
        """Record that the loop requests the next batch."""
        times = self._times
        times.requested_s = perf_counter()
        times.log_due_s = times.requested_s + WAIT_LOGGED_AFTER_S
        if times.gave_s is not None and self._ended is None:
            self._meter.add_step(times.requested_s - times.gave_s)
            times.gave_s = times.requested_s

    def turn(self, receive: Callable[[], Any]) -> tuple[Any] | None:
        """Go on to the next batch, and return it in a tuple; None if `receive` returned None instead of a message.

        Raises:
            StopIteration: the epoch is over.
            LoaderClosedError: the pass was closed, or ended by another one, or with its loader.
            RuntimeError: another thread uses the loader, or this process is a fork of the one that began the pass.
            StreamloadError, TimeoutError: no batch can be given; the next pass goes on from where the loop stands.
        """
        with one_thread(self._in_use):
            if self._ended == _FINISHED:
                raise StopIteration
            self._refuse_ended()
            if self.connection.closed and self.connection.death is None:
                raise RuntimeError(
                    "this pass was begun by another process, of which this one is a fork; begin one here: iter(loader)"
                )
            try:
                with self._turning:
                    batch = self._next(receive)
            except StopIteration:
                self._finish()
                if self._times.gave_s is None:
                    self._on_nothing(self._start)
                raise
            except BaseException as error:
                if self.connection.closed and current_thread().daemon and not main_thread().is_alive():
                    Event().wait()  # for the interpreter's end, as daemon threads do in C code
                if self._ended and isinstance(error, Exception):  # by another thread: what was in use is gone
                    raise LoaderClosedError(f"this pass is over: {self._ended}") from error
                # After an error of ours the loop may go on from where it stands; Ctrl-C is a way to leave it.
                self._end_processes("it was ended by an error", "ready" if isinstance(error, Exception) else "left")
                if isinstance(error, StreamloadError):  # frames of ours tell the user nothing
                    raise error.with_traceback(None) from error.__cause__
                raise
            if batch is not None:
                self._times.gave_s = perf_counter()
                self._meter.add_wait(self._times.gave_s - self._times.requested_s)
            return batch

    def _refuse_ended(self) -> None:
        if self._ended:
            raise LoaderClosedError(f"this pass is over: {self._ended}")

    def _next(self, receive: Callable[[], Any]) -> tuple[Any] | None:
        """Return what `turn` does. A feeder that has died is replaced, but not two with no batch in between."""
        while True:
            try:
                if self.connection.death is not None:  # a call has found that; what was announced may be gone
                    raise FeederDiedError(self.connection.death)
                while (batch := self._take()) is None:
                    if self._all_came:
                        self._refuse_nothing()
                        raise StopIteration
                    if (message := receive()) is None:
                        return None
                    self._handle(message)
            except FeederDiedError as error:
                if self._feeder_died:
                    raise second_death(error) from error
                self._feeder_died = True
                self._meter.totals.add({"restarted_workers": 1})
                self._go_on_elsewhere()
            else:
                self._feeder_died = False
                return batch

    def _refuse_nothing(self) -> None:
        """Raise an error if every sample of an epoch was left out, whatever `on_error` says."""
        kept, skipped = self._batch_builder.skipped, self._batch_builder.n_skipped - self._skipped_before
        if skipped and self._times.gave_s is None:
            which, shown = ("first", kept[-skipped]) if skipped <= len(kept) else ("last", kept[-1])
            raise SampleError(f"every one of {counted(skipped, 'sample')} has failed; the {which}: {shown}") from shown

    def _go_on_elsewhere(self) -> None:
        """Request the rest of the epoch from another feeder: all that the loop has not been given is made again."""
        self._drop_ungiven()
        self._all_came = False
        self._start = replace(self._start, position=self._cursor.position)
        self.connection = self._link.begin(self._start)

    def _drop_ungiven(self) -> None:
        self._pending.clear()
        self._owed.clear()
        self._ahead = None

    def is_unused(self) -> bool:
        """Return True as long as the loop has been given no batch."""
        return self._ended is None and not self._turning.locked() and self._times.gave_s is None

    def restart(self, start: EpochStart) -> None:
        """Give another epoch, at whose beginning the cursor stands, in place of this unused one."""
        self.connection.abandon(self._start.number)
        self._start = start
        self._go_on_elsewhere()

    def receive(self) -> Any:
        """Wait for the feeder's next message, and log what holds it up if that takes long."""
        while True:
            try:
                return self.connection.receive(_LOOK_UP_S)
            except TimeoutError:
                self._refuse_ended()
                self.log_wait()

    def log_wait(self) -> None:
        """Log what holds up the batch that was requested: after ten seconds, then once a minute."""
        now_s = perf_counter()
        if now_s < self._times.log_due_s:
            return
        self._times.log_due_s = now_s + WAIT_LOGGED_EVERY_S
        with Attempt() as attempt:  # an error of the feeder is raised at its batch's turn
            why = self.connection.what_holds_up() or "nothing shows why"
        if attempt.error is None:
            _log.warning("no batch has come for %.0f s: %s", now_s - self._times.requested_s, why)

    def _handle(self, message: Any) -> None:
        match message:
            case Ready():
                self._meter.note_totals(message.totals, message.skipped_members, self.connection)
                if message.events and self._meter.events is not None:
                    self._meter.events.extend(message.events)
                if message.start == self._start.identity:
                    self._pending.extend(message.batches)
                    self._all_came = message.last
                else:  # of an epoch that was begun ahead, or abandoned, and is not the one that is wanted
                    for batch in message.batches:
                        self.connection.lease(batch.slot)
                self._batch_builder.skipped_members.look_at(message.skipped_members)
            case Failed(start=(number, _, _) as start) if (
                start != self._start.identity and number <= self._start.number
            ):  # in work that nobody wants any more, and it does no other
                self.connection.close()
                self._go_on_elsewhere()
            case Failed():
                raise error_from(message.failure)

    def _take(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if it is here; it counts as given."""
        made, self._ahead = self._ahead or self._make(), None
        if made is None:
            return None
        if isinstance(made, Exception):
            raise made
        batch, samples, end = made
        if self._move is not None:
            self._look_ahead()
            batch = batch()
        self._cursor.position = end
        self._meter.add_batch(samples)
        return (batch,)

    def _make(self) -> tuple[Any, int, int] | None:
        """Build the next batch for the loop, if it is pending.

        For a batch whose samples all failed the one before it is repeated, at the start of a pass the one after it.
        """
        builder = self._batch_builder
        while self._pending and not (self._owed and self._last_good):
            ready = self._pending.popleft()
            memory = self.connection.lease(ready.slot)  # also that of a batch left out, which frees it
            builder.check(ready)
            if ready.layout is not None or builder.repeats:
                self._owed.append(ready.end)
            else:
                self._cursor.position = ready.end
            if ready.layout is not None:
                self._last_good = ready, memory
        if not self._owed or self._last_good is None:
            return None
        (good, memory), end = self._last_good, self._owed.popleft()
        if not builder.repeats:
            self._last_good = None
        batch = builder.build(good, memory)
        return batch if self._move is None else self._move(batch), good.rows, end

    def _look_ahead(self) -> None:
        """Begin to move the batch after this one, if it is here. An error is raised at its turn.

        A batch with samples that failed is left alone: to make it may raise their errors.
        """
        with Attempt() as attempt:
            while not self._pending and not self._all_came and (message := self.connection.receive_now()) is not None:
                if not isinstance(message, Ready):
                    self.connection.messages.appendleft(message)
                    return
                self._handle(message)
            if self._pending and not self._pending[0].failed and self._pending[0].layout is not None:
                self._ahead = self._make()
        if attempt.error is not None:
            self._ahead = attempt.error

    def close(self) -> None:
        """End the pass before its end, as leaving the loop does, for `contextlib.closing`. Idempotent."""
        self.end(_CLOSED)
        if self._ended == _CLOSED and not self._turning.locked() and not self._awaited.locked():
            self._ended = _FINISHED  # as a generator's, its loop ends

    def end(self, why: str) -> None:
        """End the pass where it stands, without waiting for a sample: for another one, or because it was dropped.

        The feeder abandons the rest of the epoch, and its processes stay, unless a batch of this pass is being waited
        for, in another thread or further up in this one.
        """
        if self._ended is not None:
            return
        if not self._in_use.acquire(blocking=False):
            self._end_processes(why)
            return
        try:
            if self._turning.locked() or self.connection.closed:  # the latter in a fork, or when the interpreter ends
                self._end_processes(why)
            elif self._times.gave_s is not None and self._cursor.position >= self._link.last_position(self._start):
                self._finish()
            else:
                untaken, all_came = tuple(self._pending), self._all_came
                self._stop(why)
                if untaken:  # the next pass releases them: this may run in the middle of anything
                    ready = Ready(self._start.identity, untaken, (), (), last=False, acknowledge_after=1)
                    self.connection.messages.appendleft(ready)
                if untaken or not all_came:
                    self.connection.abandon(self._start.number)
        finally:
            self._in_use.release()

    def _end_processes(self, why: str, state: Literal["ready", "left"] = "left") -> None:
        """End the pass before its end, and the feeder's processes with it."""
        if self._ended is None:
            self._stop(why, state)
            self.connection.close()

    def _stop(self, why: str, state: Literal["ready", "left"] = "left") -> None:
        """End the pass before its end. An epoch of which nothing was given is still to begin."""
        self._ended = why
        self._cursor.state = "ready" if self._times.gave_s is None else state
        self._drop_ungiven()
        self._last_good = None

    def _finish(self) -> None:
        """End the pass at its end, and go on to the next epoch."""
        self._ended = _FINISHED
        self._last_good = None
        cursor = self._cursor
        cursor.epoch, cursor.position, cursor.state, cursor.finished = cursor.epoch + 1, 0, "ready", True

    def __del__(self) -> None:
        self.end("it was dropped")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next batch. Other coroutines run while it waits, and have a turn before.

        If the wait is cancelled, nothing is lost: the next call goes on.
        """
        if not self._awaited.acquire(blocking=False):
            raise RuntimeError("two tasks wait for the next batch of one pass; let one task take them")
        try:
            await asyncio.sleep(0)
            self.request()
            while (given := self.turn(self._receive_unless_waiting)) is None:
                if not await _readable(self.connection, _LOOK_UP_S):
                    self.log_wait()
            return given[0]
        except StopIteration:  # which must not leave a coroutine
            raise StopAsyncIteration from None
        finally:
            self._awaited.release()

    def _receive_unless_waiting(self) -> Any:
        connection = self.connection
        return self.receive() if connection.fileno() is None else connection.receive_now()

    async def aclose(self) -> None:
        """End the pass before its end, as leaving a loop does. Idempotent."""
        self.close()


async def _readable(connection: Connection, timeout_s: float) -> bool:
    """Wait until something comes from a feeder, also its end. Return False if nothing does in time."""
    number = connection.fileno()
    assert number is not None
    descriptor, loop, readable = (
        os.dup(number),
        asyncio.get_running_loop(),
        asyncio.Event(),
    )  # it may be closed meanwhile
    loop.add_reader(descriptor, readable.set)
    try:
        async with asyncio.timeout(timeout_s):
            await readable.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return True
