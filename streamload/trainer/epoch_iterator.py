"""One pass of the loop over an epoch, also with `async for`: waits for batches, builds them, counts positions."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from threading import Event, RLock, current_thread, main_thread
from time import perf_counter
from typing import Any, Literal, NamedTuple, Self

from streamload.decode.failure import Attempt, error_from
from streamload.errors import LoaderClosedError, SampleError, StreamloadError
from streamload.feeder.messages import Failed, Ready, ReadyBatch
from streamload.memory.mapped import Bytes
from streamload.order.share import EpochStart
from streamload.statistics import Meter
from streamload.text import counted
from streamload.trainer.batch_builder import BatchBuilder
from streamload.trainer.connection import Connection, FeederDiedError, second_death
from streamload.trainer.device import Moving
from streamload.trainer.feeder_client import what_holds_up

_log = logging.getLogger("streamload")

WAIT_LOGGED_AFTER_S, WAIT_LOGGED_EVERY_S = 10.0, 60.0

# How often a pass that waits looks whether another thread has ended it.
_LOOK_UP_S = 1.0

_GRACE_S = 0.7


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

    def advance(self, position: int) -> None:
        """Record that the loop has been given all samples before a position."""
        self.position = position

    def leave(self, state: Literal["ready", "left"]) -> None:
        """Record that a pass has ended before its epoch."""
        self.state = state

    def finish_epoch(self) -> None:
        """Go on to the next epoch: all of this one was given."""
        self.epoch += 1
        self.position = 0
        self.state = "ready"
        self.finished = True

    def goes_on_at(self, epoch: int, position: int) -> bool:
        """Return True if a pass that begins there follows one that was finished: the feeder has begun it by itself."""
        return self.finished and (epoch, position) == (self.epoch, 0)


class WaitLog:
    """Logs what holds up a batch: ten seconds after it was requested, then once a minute."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._due_s = began_s + WAIT_LOGGED_AFTER_S

    def log(self, connection: Connection) -> None:
        """Log it if it is time to."""
        now_s = perf_counter()
        if now_s < self._due_s:
            return
        self._due_s = now_s + WAIT_LOGGED_EVERY_S
        with Attempt() as attempt:  # an error of the feeder is raised at its batch's turn
            why = what_holds_up(connection) or "nothing shows why"
        if attempt.error is None:
            _log.warning("no batch has come for %.0f s: %s", now_s - self._began_s, why)


class _Made(NamedTuple):
    """A batch that the loop has not been given yet: itself, or what moves it to a device."""

    batch: Any
    samples: int
    end: int


_IDLE, _IN_TURN, _FINISHED = "idle", "in turn", "finished"
"""The states of a pass that was not closed before its end."""


class EpochIterator(Iterator[Any]):
    """The iterator of a `for` loop. If it is dropped or closed before its end, the feeder gives up its epoch.

    Loops that count steps never request more than the last batch, so a pass that has given that one is at its end, too.

    Attributes:
        connection: to the feeder.
        on_close: called when the pass ends before its epoch does.
    """

    _stays_in_trainer = True

    def __init__(
        self,
        start: EpochStart,
        connection: Connection,
        batch_builder: BatchBuilder,
        cursor: Cursor,
        meter: Meter,
        *,
        begin_again: Callable[[EpochStart], Connection],
        last_position: Callable[[EpochStart], float],
        on_nothing: Callable[[EpochStart], None],
        in_use: RLock,
        move: Callable[[Any], Moving] | None = None,
    ) -> None:
        self._start = start
        self.connection = connection
        self._begin_again = begin_again
        self._batch_builder = batch_builder
        self._cursor = cursor
        self._meter = meter
        self._move = move
        self._last_position = last_position
        self._on_nothing = on_nothing
        self.on_close: Callable[[], None] | None = None
        self._pending: deque[ReadyBatch] = deque()
        self._all_came = False
        self._last_good: tuple[ReadyBatch, Bytes] | None = None
        self._owed: deque[int] = deque()  # the ends of batches to give next
        self._ahead: _Made | Exception | None = None
        self._feeder_died = False  # and no batch has come since
        self._gave_at: float | None = None
        self._skipped_before = batch_builder.n_skipped
        self._state = _IDLE  # or why it was closed
        self._in_use = in_use
        cursor.state = "running"

    def __next__(self) -> Any:
        given = self.turn(self.receive, self.request())
        assert given is not None
        return given[0]

    def request(self) -> float:
        """Record that the loop requests the next batch, and return when."""
        now_s = perf_counter()
        if self._gave_at is not None and self._state == _IDLE:
            self._meter.add_step(now_s - self._gave_at)
            self._gave_at = now_s
        return now_s

    def turn(self, receive: Callable[[], Any], requested_s: float) -> tuple[Any] | None:
        """Go on to the next batch, and return it in a tuple; None if `receive` returned None instead of a message.

        Raises:
            StopIteration: the epoch is over, or the user has closed the pass.
            LoaderClosedError: the pass was ended by another one, or with its loader.
            RuntimeError: another thread uses the loader, or this process is a fork of the one that began the pass.
            StreamloadError, TimeoutError: no batch can be given; the next pass goes on from where the loop stands.
        """
        with one_thread(self._in_use):
            if self._state == _FINISHED:
                raise StopIteration
            self._refuse_closed()
            if self.connection.closed and self.connection.death is None:
                raise RuntimeError(
                    "this pass was begun by another process, of which this one is a fork; begin one here: iter(loader)"
                )
            self._state = _IN_TURN
            try:
                batch = self._next(receive)
            except StopIteration:
                self._finish()
                if self._gave_at is None:
                    self._on_nothing(self._start)
                raise
            except BaseException as error:
                if self.connection.closed and current_thread().daemon and not main_thread().is_alive():
                    Event().wait()  # for the interpreter's end, as daemon threads do in C code
                if self._is_closed() and isinstance(error, Exception):  # by another thread: what was in use is gone
                    raise LoaderClosedError(f"this pass is over: {self._state}") from error
                # After an error of ours the loop may go on from where it stands; Ctrl-C is a way to leave it.
                self._end_processes("it was ended by an error", "ready" if isinstance(error, Exception) else "left")
                if isinstance(error, StreamloadError):  # frames of ours tell the user nothing
                    raise error.with_traceback(None) from error.__cause__
                raise
            finally:
                if self._state == _IN_TURN:
                    self._state = _IDLE
            if batch is not None:
                self._gave_at = perf_counter()
                self._meter.add_wait(self._gave_at - requested_s)
            return batch

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

    def _go_on_elsewhere(self) -> None:
        """Request the rest of the epoch from another feeder: all that the loop has not been given is made again."""
        self._drop_ungiven()
        self._all_came = False
        self._start = replace(self._start, position=self._cursor.position)
        self.connection = self._begin_again(self._start)

    def is_unused(self) -> bool:
        """Return True as long as the loop has been given no batch."""
        return self._state == _IDLE and self._gave_at is None

    def restart(self, start: EpochStart) -> None:
        """Give another epoch, at whose beginning the cursor stands, in place of this unused one."""
        self.connection.abandon(self._start.number)
        self._start = start
        self._go_on_elsewhere()

    def _drop_ungiven(self) -> None:
        self._pending.clear()
        self._owed.clear()
        self._ahead = None

    def _refuse_closed(self) -> None:
        if self._is_closed():
            raise LoaderClosedError(f"this pass is over: {self._state}")

    def _is_closed(self) -> bool:
        return self._state not in (_IDLE, _IN_TURN, _FINISHED)

    def _take(self) -> tuple[Any] | None:
        """Return the next batch, in a tuple, if it is here; it counts as given."""
        made, self._ahead = self._ahead or self._make(), None
        if made is None:
            return None
        if isinstance(made, Exception):
            raise made
        batch = made.batch
        if self._move is not None:
            self._look_ahead()
            batch = batch.give()
        self._cursor.advance(made.end)
        self._meter.add_batch(made.samples)
        return (batch,)

    def _make(self) -> _Made | None:
        """Build the next batch for the loop, if it is pending.

        For a batch whose samples all failed the one before it is repeated, at the start of a pass the one after it.
        """
        while self._pending and not (self._owed and self._last_good):
            ready = self._pending.popleft()
            self.connection.note_taken(1)
            memory = self.connection.lease(ready.slot)  # also that of a batch left out, which frees it
            self._batch_builder.check(ready)
            if ready.layout is not None or self._batch_builder.repeats:
                self._owed.append(ready.end)
            else:
                self._cursor.advance(ready.end)
            if ready.layout is not None:
                self._last_good = ready, memory
        if not self._owed or self._last_good is None:
            return None
        (good, memory), end = self._last_good, self._owed.popleft()
        if not self._batch_builder.repeats:
            self._last_good = None
        batch = self._batch_builder.build(good, memory)
        return _Made(batch if self._move is None else self._move(batch), good.rows, end)

    def _look_ahead(self) -> None:
        """Begin to move the batch after this one, if it is here. An error is raised at its turn.

        A batch with samples that failed is left alone: to make it may raise their errors.
        """
        with Attempt() as attempt:
            while not self._pending and not self._all_came and (message := self.connection.receive_now()) is not None:
                if not isinstance(message, Ready):
                    self.connection.put_back([message])
                    return
                self._handle(message)
            if self._pending and not self._pending[0].failed and self._pending[0].layout is not None:
                self._ahead = self._make()
        if attempt.error is not None:
            self._ahead = attempt.error

    def receive(self) -> Any:
        """Wait for the feeder's next message, and log what holds it up if that takes long."""
        wait = WaitLog(perf_counter())
        while True:
            try:
                return self.connection.receive(_LOOK_UP_S)
            except TimeoutError:
                pass
            self._refuse_closed()
            wait.log(self.connection)

    def receive_now(self) -> Any | None:
        """Return the feeder's next message if it is here already, else None."""
        return self.connection.receive_now()

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
                    self.connection.note_taken(len(message.batches))
                self._batch_builder.skipped_members.look_at(message.skipped_members)
            case Failed(start=(number, _, _) as start) if (
                start != self._start.identity and number <= self._start.number
            ):  # in work that nobody wants any more, and it does no other
                self.connection.close()
                self._go_on_elsewhere()
            case Failed():
                raise error_from(message.failure)

    def _refuse_nothing(self) -> None:
        """Raise an error if every sample of an epoch was left out, whatever `on_error` says."""
        kept, skipped = self._batch_builder.skipped, self._batch_builder.n_skipped - self._skipped_before
        if skipped and self._gave_at is None:
            which, shown = ("first", kept[-skipped]) if skipped <= len(kept) else ("last", kept[-1])
            raise SampleError(f"every one of {counted(skipped, 'sample')} has failed; the {which}: {shown}") from shown

    def stop(self, why: str, state: Literal["ready", "left"] = "left") -> bool:
        """End the pass before its end, without its connection; return False if it was over already.

        An epoch of which nothing was given is still to begin.
        """
        if self._state not in (_IDLE, _IN_TURN):
            return False
        self._state = why
        self._cursor.leave("ready" if self._gave_at is None else state)
        self._drop_ungiven()
        self._last_good = None
        if self.on_close is not None:
            self.on_close()
        return True

    def close(self) -> None:
        """End the pass before its end, as leaving the loop does, for `yield from` and `contextlib.closing`. Idempotent.

        Another task or thread that waits for a batch of it gets LoaderClosedError: it might take an end for the
        epoch's.
        """
        if self._state in (_IDLE, _IN_TURN):
            awaited = self.on_close is not None
            self.end("it was closed")
            if not awaited:
                self._state = _FINISHED

    def end(self, why: str) -> None:
        """End the pass where it stands, without waiting for a sample: for another one, or because it was dropped.

        The feeder abandons the rest of the epoch, and its processes stay, unless a batch of this pass is being waited
        for, in another thread or further up in this one.
        """
        if self._state not in (_IDLE, _IN_TURN):
            return
        if not self._in_use.acquire(blocking=False):
            self._end_processes(why)
            return
        try:
            if self._state == _IN_TURN:
                self._end_processes(why)
            elif self.connection.closed:  # in a fork, or when the interpreter ends: nothing is left to abandon
                self.stop(why)
            elif self._gave_at is not None and self._cursor.position >= self._last_position(self._start):
                self._finish()
                if self.on_close is not None:
                    self.on_close()
            else:
                self._abandon(why)
        finally:
            self._in_use.release()

    def _abandon(self, why: str) -> None:
        """Put back what was announced, for the next pass to release: this may run in the middle of anything."""
        untaken, all_came = tuple(self._pending), self._all_came
        self.stop(why)
        if untaken:
            self.connection.put_back([Ready(self._start.identity, untaken, (), (), last=False, acknowledge_after=1)])
        if untaken or not all_came:  # others that get the same batches may wait for them to be taken
            self.connection.abandon(self._start.number)

    def _end_processes(self, why: str, state: Literal["ready", "left"] = "left") -> None:
        """End the pass before its end, and the feeder's processes with it."""
        if self.stop(why, state):
            self.connection.close()

    def _finish(self) -> None:
        self._state = _FINISHED
        self._last_good = None
        self._cursor.finish_epoch()

    def __del__(self) -> None:
        self.end("it was dropped")


class AsyncEpochIterator(AsyncIterator[Any]):
    """The iterator of an `async for` loop.

    Other coroutines run while it waits, and have a turn before each batch. If a wait is cancelled, nothing is lost: the
    next `__anext__` goes on.
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
            current = self._iterator
            receive = current.receive if current.connection.fileno() is None else current.receive_now
            requested_s = current.request()
            wait = WaitLog(requested_s)
            while (given := current.turn(receive, requested_s)) is None:
                descriptor = current.connection.fileno()
                assert descriptor is not None
                if not await _readable(descriptor, _LOOK_UP_S, current):
                    wait.log(current.connection)
            return given[0]
        except StopIteration:  # which must not leave a coroutine
            raise StopAsyncIteration from None
        finally:
            self._awaited = False

    async def aclose(self) -> None:
        """End the pass before its end, as leaving a `for` loop does. Idempotent."""
        self._iterator.close()


async def end_of_process(ending: int | None) -> None:
    """Wait until a process ends that was requested to; after a moment's grace it is killed.

    Args:
        ending: a descriptor of the process, readable when it has ended, which is closed here.
    """
    if ending is None:
        return
    try:
        if not await _readable(ending, _GRACE_S):
            signal.pidfd_send_signal(ending, signal.SIGKILL)  # else closing would wait once more before it did
    finally:
        os.close(ending)


async def _readable(descriptor: int, timeout_s: float, waiting: EpochIterator | None = None) -> bool:
    """Wait until a descriptor is readable, or a pass is closed: it may be closed then. Return False if not in time."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[bool] = loop.create_future()

    def wake(came: bool) -> None:
        if not woken.done():
            loop.remove_reader(descriptor)
            woken.set_result(came)

    timer = loop.call_later(max(0.0, timeout_s), wake, False)
    loop.add_reader(descriptor, wake, True)
    if waiting is not None:
        waiting.on_close = partial(wake, True)
    try:
        return await woken
    finally:
        timer.cancel()
        if woken.cancelled():
            loop.remove_reader(descriptor)
        if waiting is not None:
            waiting.on_close = None
