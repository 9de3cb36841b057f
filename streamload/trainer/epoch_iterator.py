"""Iterate over one epoch, also with `async for`: wait for batches, build them, count positions."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from threading import Event, Lock, RLock, current_thread, main_thread
from time import perf_counter
from typing import Any, Literal, Self

from streamload.decode.collate import Layout, build_batch, load_values
from streamload.decode.failure import Attempt, error_from, sample_error
from streamload.decode.tasks import OnError
from streamload.errors import LoaderClosedError, SampleError, StreamloadError
from streamload.feeder.messages import Failed, Ready, ReadyBatch
from streamload.memory.mapped import Bytes
from streamload.order.share import EpochStart
from streamload.statistics import Meter
from streamload.text import counted
from streamload.trainer.connection import Connection, FeederDiedError, second_death
from streamload.trainer.feeder_link import FeederLink, SkippedMembers

_log = logging.getLogger("streamload")
_log_of_samples = logging.getLogger("streamload.samples")

MOST_KEPT = 10_000
"""Maximum number of errors kept for left-out samples; each holds a traceback as text."""
_MAX_LOGGED = 5
# A wait is logged after this time, and then at this interval.
WAIT_LOGGED_AFTER_S, WAIT_LOGGED_EVERY_S = 10.0, 60.0
# Seconds after which a waiting pass checks again whether another thread or task has ended the pass.
_CHECK_S = 1.0


def acquire_for_thread(in_use: RLock) -> None:
    """Acquire a loader; the caller must release it. Raises RuntimeError if another thread uses it."""
    if not in_use.acquire(blocking=False):
        raise RuntimeError(
            "another thread uses this loader: a loader and its passes can be used by one thread at a time; let one "
            "thread take the batches and pass them on"
        )


@dataclass(slots=True)
class Cursor:
    """The position of a loader.

    Attributes:
        position: the position in the epoch's order, over all ranks, after the loop's last batch.
        state: "left" if the user has ended the last pass early.
        epoch_to_come: the epoch of the next pass, if the user has named one.
    """

    epoch: int = 0
    position: int = 0
    state: Literal["ready", "running", "left"] = "ready"
    epoch_to_come: int | None = None

    def next_start(self) -> tuple[int, int]:
        """Return epoch and position of the next pass."""
        if self.state == "ready" and self.epoch_to_come in (None, self.epoch):
            return self.epoch, self.position
        return (self.epoch + 1 if self.epoch_to_come is None else self.epoch_to_come), 0

    def to_save(self) -> tuple[int, int]:
        """Return the epoch and position to resume from: the current ones, unless the user has named another epoch."""
        if self.state != "running" and self.epoch_to_come is not None:
            return self.next_start()
        return self.epoch, self.position


class BatchBuilder:
    """Build the batches of a loader, and apply `on_error` to failed samples.

    Attributes:
        repeats: True to repeat the previous batch in place of one whose samples all failed.
        skipped: errors of samples that were left out or replaced, in order; the newest `MOST_KEPT`.
        n_skipped: the number of samples left out or replaced so far.
    """

    def __init__(self, on_error: OnError, *, repeats: bool) -> None:
        self._on_error = on_error
        self.repeats = repeats
        self._layouts: dict[bytes, Layout] = {}
        self.skipped: deque[SampleError] = deque(maxlen=MOST_KEPT)
        self.n_skipped = 0
        self.skipped_members = SkippedMembers()

    def check(self, batch: ReadyBatch) -> None:
        """Record the failed samples of a batch.

        Raises:
            SampleError: a sample failed, and `on_error` does not leave it out.
            ShardChangedError: a shard became shorter while it was in use.
        """
        for row in batch.failed:
            error = sample_error(row.failure, row.url, row.key)
            if self._on_error == "raise" or row.failure.fatal or not isinstance(error, SampleError):
                raise error
            self.skipped.append(error)
            self.n_skipped += 1
            if self.n_skipped <= _MAX_LOGGED:
                _log_of_samples.warning("sample left out (on_error=%r): %s", self._on_error, error)
            if self.n_skipped == _MAX_LOGGED:
                _log_of_samples.warning(
                    "errors of further samples that are left out are not logged; see loader.skipped"
                )

    def build(self, batch: ReadyBatch, memory: Bytes) -> Any:
        """Build a non-empty batch from a slot's memory."""
        assert batch.done.layout is not None
        layout = self._layouts.get(batch.done.layout)
        if layout is None:
            if len(self._layouts) > 1000:  # the shapes of batches keep changing
                self._layouts.clear()
            layout = self._layouts[batch.done.layout] = pickle.loads(batch.done.layout)
        return build_batch(layout, memory, batch.done.rows, load_values(batch.done.values, memory))


_CLOSED = "it was closed"
_FINISHED = ""
"""The value of `_ended` if the loop ends without error."""


class EpochIterator(Iterator[Any], AsyncIterator[Any]):
    """Iterate over one epoch. If the iterator is dropped or closed early, the feeder abandons the epoch.

    A pass ended after its last batch counts as finished, since step-counting loops never ask for another.
    """

    _stays_in_trainer = True
    _ended: str | None = _CLOSED  # until `__init__` is done

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
        self._last_good: tuple[ReadyBatch, Bytes] | None = None
        self._owed: deque[int] = deque()  # the end positions of the batches to return next
        # The next batch, or a function that returns it on the device, with its number of samples and end; or its error.
        self._ahead: tuple[Any, int, int] | Exception | None = None
        self._feeder_died = False  # True from a feeder's death to the next feeder's first batch
        self._returned_s: float | None = None  # when the loop got its last batch
        self._skipped_before = batch_builder.n_skipped
        self._turning = Lock()
        self._in_use = in_use
        cursor.state = "running"
        self._ended = None  # or `_FINISHED`, or why `next()` raises LoaderClosedError

    def __next__(self) -> Any:
        batch = self._turn(self._receive, perf_counter())
        assert batch is not None
        return batch[0]

    def _turn(self, receive: Callable[[], Any], requested_s: float) -> tuple[Any] | None:
        """Return the next batch in a tuple; None if `receive` returned None.

        Raises:
            StopIteration: the epoch is over.
            LoaderClosedError: the pass was ended.
            RuntimeError: another thread uses the loader, or this process was forked during the pass.
            StreamloadError: the batch cannot be delivered; the next pass continues from the loop's position.
        """
        acquire_for_thread(self._in_use)
        try:
            self._refuse_ended()
            if self._returned_s is not None and requested_s > self._returned_s:
                self._meter.add_time("step", requested_s - self._returned_s)
                self._returned_s = requested_s
            try:
                with self._turning:
                    batch = self._next(receive)
            except StopIteration:
                # Set only now, since a saved state must not depend on the time at which the counts arrive.
                link = self._link
                link.counts = link.counts or self.connection.counts
                self._finish()
                if self._returned_s is None:
                    self._on_nothing(self._start)
                raise
            except BaseException as error:
                if self.connection.closed and current_thread().daemon and not main_thread().is_alive():
                    Event().wait()  # hang until the interpreter exits, as CPython does with daemon threads
                if self._ended and isinstance(error, Exception):  # another thread has closed resources in use
                    raise LoaderClosedError(f"this pass is over: {self._ended}") from error
                # After an error the next pass continues from the loop's position; Ctrl-C leaves the pass.
                self._end_processes("it was ended by an error", "ready" if isinstance(error, Exception) else "left")
                if isinstance(error, StreamloadError):  # the library's own frames tell the user nothing
                    raise error.with_traceback(None) from error.__cause__
                raise
            if batch is not None:
                self._returned_s = perf_counter()
                self._meter.add_time("wait", self._returned_s - requested_s)
            return batch
        finally:
            self._in_use.release()

    def _refuse_ended(self) -> None:
        if self._ended == _FINISHED:
            raise StopIteration
        if self._ended:
            raise LoaderClosedError(f"this pass is over: {self._ended}")
        if self.connection.closed and self.connection.death is None:
            if self.connection.owner == os.getpid():  # closed by another thread, while this pass began
                raise LoaderClosedError("the loader was closed; make a new one")
            raise RuntimeError(
                "this pass was begun before this process was forked; begin another pass here: iter(loader)"
            )

    def _next(self, receive: Callable[[], Any]) -> tuple[Any] | None:
        """Return the next batch as `_turn` does. Replace a dead feeder, at most once between two batches."""
        while True:
            try:
                if self.connection.death is not None:  # noticed by a call; announced batches may be lost
                    raise FeederDiedError(self.connection.death)
                while (ahead := self._ahead or self._make()) is None:
                    if self.connection.batches:  # the end of the epoch
                        self._refuse_empty_epoch()
                        raise StopIteration
                    if (message := receive()) is None:
                        return None
                    self._handle(message)
            except FeederDiedError as error:
                if self._feeder_died:
                    raise second_death(error) from error
            else:
                break
            self._feeder_died = True  # not above, where a Ctrl-C would print the feeder's death too
            self._meter.totals.add({"restarted_workers": 1})
            self._request_rest()
        self._feeder_died, self._ahead = False, None
        if isinstance(ahead, Exception):
            raise ahead
        batch, samples, end = ahead
        if self._move is not None:
            self._look_ahead()
            batch = batch()
        self._cursor.position = end
        self._meter.add_batch(samples)
        return (batch,)

    def _refuse_empty_epoch(self) -> None:
        """Raise an error if every sample of the epoch was left out."""
        kept, skipped = self._batch_builder.skipped, self._batch_builder.n_skipped - self._skipped_before
        if skipped and self._returned_s is None:
            which, shown = ("first", kept[-skipped]) if skipped <= len(kept) else ("last", kept[-1])
            message = f"every one of {counted(skipped, 'sample')} has failed; the {which}: {shown}"
            raise SampleError(message) from shown.__cause__

    def _request_rest(self) -> None:
        """Request the rest of the epoch from a living feeder, except failed batches before the first good one."""
        owed = tuple(self._owed) if self._last_good is None else ()
        self._drop_pending()
        self._owed.extend(owed)
        self._start = replace(self._start, position=owed[-1] if owed else self._cursor.position)
        self.connection = self._link.begin(self._start)

    def _drop_pending(self) -> None:
        self._owed.clear()
        self._ahead = None

    def is_unused(self) -> bool:
        """Return True if the loop has received no batch, awaits none, and has not ended the pass."""
        return self._ended is None and not self._turning.locked() and self._returned_s is None

    def restart(self, start: EpochStart) -> None:
        """Iterate over another epoch instead of this unused one; the caller has set the cursor."""
        self.connection.abandon(self._start.number)
        self._start = start
        self._drop_pending()
        self._request_rest()

    def _receive(self) -> Any:
        """Wait for the feeder's next message; log the reason for a long wait."""
        since_s, log_after_s = perf_counter(), WAIT_LOGGED_AFTER_S
        while True:
            try:
                return self.connection.receive(_CHECK_S)
            except TimeoutError:
                self._refuse_ended()
                log_after_s = self._log_wait(perf_counter() - since_s, log_after_s)

    def _log_wait(self, waited_s: float, log_after_s: float) -> float:
        """Log why no batch has come if the wait exceeds `log_after_s`; return when to log again."""
        if waited_s < log_after_s:
            return log_after_s
        with Attempt() as attempt:  # an error of the feeder is raised at its batch's turn
            why = self.connection.wait_reason() or "the reason is unknown"
        if attempt.error is None:
            _log.warning("no batch has come for %.0f s: %s", waited_s, why)
        return waited_s + WAIT_LOGGED_EVERY_S

    def _handle(self, message: Any) -> None:
        if isinstance(message, Failed):
            if message.start in (None, self._start.identity) or message.start[0] > self._start.number:
                raise error_from(message.failure)
            self.connection.close()  # the feeder failed in an abandoned epoch, and has stopped
            self._request_rest()
            return
        assert isinstance(message, Ready)
        self._meter.record_totals(message.totals, message.skipped_members, self.connection)
        if message.events and self._meter.events is not None:
            self._meter.events.extend(message.events)
        self.connection.batches.extend((message.start, batch) for batch in message.batches)
        if message.last:
            self.connection.batches.append((message.start, None))
        self._batch_builder.skipped_members.inspect(message.skipped_members)

    def _make(self) -> tuple[Any, int, int] | None:
        """Build the next pending batch; return it with its number of samples and its end.

        With `repeats`, a batch whose samples all fail is replaced by the previous batch or, at the start, by the next.
        """
        builder, pending, own = self._batch_builder, self.connection.batches, self._start.identity
        while pending and pending[0] != (own, None) and not (self._owed and self._last_good):
            start, ready = pending.popleft()
            if ready is None:
                continue
            memory = self.connection.lease(ready.slot)  # even for a batch that is left out, to free the slot
            if start != own:  # the batch is of an abandoned epoch
                self.connection.flush()  # the feeder may wait for it
                continue
            builder.check(ready)
            if ready.done.layout is not None or builder.repeats:
                self._owed.append(ready.end)
            else:
                self._cursor.position = ready.end
            if ready.done.layout is not None:
                self._last_good = ready, memory
        if not self._owed or self._last_good is None:
            return None
        (good, memory), end = self._last_good, self._owed.popleft()
        if not builder.repeats:
            self._last_good = None
        batch = builder.build(good, memory)
        return batch if self._move is None else self._move(batch), good.done.rows, end

    def _look_ahead(self) -> None:
        """Start moving the next batch to the device if it has arrived. An error is raised at the batch's turn.

        A batch with failed samples is not built ahead, since that may raise their errors.
        """
        with Attempt() as attempt:
            batches = self.connection.batches
            while not batches and (message := self.connection.receive_now()) is not None:
                if not isinstance(message, Ready):
                    self.connection.messages.appendleft(message)
                    return
                self._handle(message)
            coming = batches[0][1] if batches else None
            if coming is not None and not coming.failed and coming.done.layout is not None:
                self._ahead = self._make()
        if attempt.error is not None:
            self._ahead = attempt.error

    def close(self) -> None:
        """End the pass early, as leaving the loop does. Idempotent.

        A wait for a batch raises LoaderClosedError; otherwise the loop ends without error.
        """
        self.end(_CLOSED if self._turning.locked() else _FINISHED)

    def end(self, why: str) -> None:
        """End the pass where it stands.

        The feeder abandons the epoch. Its processes end only if another thread uses the loader, or this pass awaits
        a batch.
        """
        if self._ended is not None:
            return
        is_idle = self._in_use.acquire(blocking=False)
        try:
            # The connection is closed in a fork, and when the interpreter ends.
            if not is_idle or self._turning.locked() or self.connection.closed:
                self._end_processes(why)
            elif self._returned_s is not None and self._cursor.position >= self._link.last_position(self._start):
                self._finish()
            else:
                self._stop(why)
                self.connection.abandon(self._start.number)
        finally:
            if is_idle:
                self._in_use.release()

    def _end_processes(self, why: str, state: Literal["ready", "left"] = "left") -> None:
        if self._ended is not None:
            return
        self._stop(why, state)
        self.connection.close()

    def _stop(self, why: str, state: Literal["ready", "left"] = "left") -> None:
        """End the pass early. If the loop has received no batch, the epoch has not begun."""
        self._ended = why
        self._cursor.state = "ready" if self._returned_s is None else state
        self._drop_pending()
        self._last_good = None

    def _finish(self) -> None:
        """End the pass, and advance to the next epoch."""
        self._ended = _FINISHED
        self._last_good = None
        cursor = self._cursor
        cursor.epoch, cursor.position, cursor.state = cursor.epoch + 1, 0, "ready"

    def __del__(self) -> None:
        self.end("it was dropped")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        """Return the next batch; a cancelled wait loses no batch.

        Other coroutines run first and, with workers, during the wait.
        """
        try:
            await asyncio.sleep(0)
            requested_s, log_after_s = perf_counter(), WAIT_LOGGED_AFTER_S
            while (batch := self._turn(self._receive_if_arrived, requested_s)) is None:
                if not await _readable(self.connection, _CHECK_S):
                    log_after_s = self._log_wait(perf_counter() - requested_s, log_after_s)
            return batch[0]
        except StopIteration:  # a coroutine must not raise StopIteration
            raise StopAsyncIteration from None

    def _receive_if_arrived(self) -> Any:
        connection = self.connection
        return self._receive() if connection.descriptor is None else connection.receive_now()

    async def aclose(self) -> None:
        """End the pass early. Idempotent."""
        self.close()


async def _readable(connection: Connection, timeout_s: float) -> bool:
    """Wait for a message of a feeder, or the feeder's end. Return False on a timeout."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    assert connection.descriptor is not None
    descriptor = os.dup(connection.descriptor)  # the connection may be closed meanwhile
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
