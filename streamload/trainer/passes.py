"""One pass of the loop over an epoch: waits for batches, builds them, and knows how far the loop has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import RLock
from time import perf_counter
from typing import Any, Literal

from streamload.batch.device import Mover
from streamload.decode.failure import Attempt, error_from
from streamload.errors import LoaderClosedError, SampleError, StreamloadError, WorkerError
from streamload.feeder.messages import Failed, Ready, TellTaken
from streamload.feeder.pipeline import ReadyBatch
from streamload.statistics import Meter
from streamload.trainer.connection import Connection
from streamload.trainer.delivery import Delivery
from streamload.trainer.standing import Standing
from streamload.wording import counted

__all__ = ["Pass"]


@dataclass(frozen=True, slots=True)
class _Made:
    """A batch that the loop has not been given yet: itself, or what moves it to a device."""

    batch: Any
    samples: int
    end: int


class Pass(Iterator[Any]):
    """The iterator of a `for` loop. A pass that is dropped before its end takes the feeder's processes with it.

    Loops that count steps never ask for more than the last batch, so a pass that has given that one is at its end, too.

    Args:
        connection: to a feeder that has been told to start the epoch.
        delivery: builds the batches.
        standing: kept up to date for the loader.
        meter: adds up.
        last_position: tells where the standing is behind the last batch; infinite if that is not known.
        on_nothing: called when the epoch is over and this pass has given no batch.
        timeout_s: how long to wait for a batch, or None.
        in_order: the batches come in order; else there is no position, and what is begun again is begun from the start.
        mover: moves batches to a device, one ahead of the loop if it is there already; or None.

    Attributes:
        connection: the same.
        timeout_s: the same.
        on_close: called when the pass is closed before its end, and before the connection is.
    """

    def __init__(
        self,
        connection: Connection,
        delivery: Delivery,
        standing: Standing,
        meter: Meter,
        *,
        last_position: Callable[[], float],
        on_nothing: Callable[[], None],
        timeout_s: float | None,
        in_order: bool,
        mover: Mover | None = None,
    ) -> None:
        self._start = standing.epoch, standing.position
        self._in_order = in_order
        self.connection = connection
        self._delivery = delivery
        self._standing = standing
        self._meter = meter
        self._mover = mover
        self._last_position = last_position
        self._on_nothing = on_nothing
        self.timeout_s = timeout_s
        self.on_close: Callable[[], None] | None = None
        self._pending: deque[ReadyBatch] = deque()
        self._ahead: _Made | None = None
        self._error_ahead: Exception | None = None
        self._all_came = False
        self._tell_after = 1
        self._asked_at: float | None = None
        self._waited_before_s = 0.0
        self._gave_at: float | None = None
        self._batches = 0
        self._skipped_before = delivery.n_skipped
        self._why = ""
        self._over: Literal["no", "finished", "closed"] = "no"
        self._turns = RLock()
        standing.state = "running"

    def __next__(self) -> Any:
        with self._turns:  # several threads may share a pass: each batch goes to one of them
            given = self.turn(self.receive)
        assert given is not None
        return given[0]

    def turn(self, receive: Callable[[], Any]) -> tuple[Any] | None:
        """Go on to the next batch.

        Args:
            receive: gives the feeder's next message, or None: then the turn ends without a batch, and nothing is lost.

        Returns:
            The batch, in a tuple; or None where `receive` gave None.

        Raises:
            StopIteration: the epoch is over.
            LoaderClosedError: the pass was closed.
            StreamloadError, TimeoutError: no batch can be given; the next pass goes on from where the loop stands.
        """
        if self._over == "finished":
            raise StopIteration
        if self.connection.closed:
            self.stop("it was begun by another process, of which this one is a fork")
        if self._over == "closed":
            raise LoaderClosedError(f"this pass is over: {self._why}")
        asked_at = self._note_asked()
        try:
            while (batch := self._take()) is None:
                if self._all_came:
                    self._refuse_nothing()
                    raise StopIteration
                if (message := receive()) is None:
                    return None
                self._handle(message)
        except StopIteration:
            self._finish()
            if self._batches == 0:
                self._on_nothing()
            raise
        except BaseException as error:
            if self._is_closed() and isinstance(error, Exception):  # by another thread: what was in use is gone
                raise LoaderClosedError(f"this pass is over: {self._why}") from error
            # After an error of ours the loop may go on from where it stands; Ctrl-C is a way to leave it.
            self.close("it was ended by an error", state="ready" if isinstance(error, Exception) else "left")
            raise
        self._gave_at, self._asked_at = perf_counter(), None
        self._meter.gave(self._gave_at - asked_at)
        return batch

    def _is_closed(self) -> bool:
        return self._over == "closed"

    def _note_asked(self) -> float:
        if self._asked_at is None:
            self._asked_at = perf_counter()
            self._waited_before_s = self.connection.waited_s
            if self._gave_at is not None:
                self._meter.loop_worked_s += self._asked_at - self._gave_at
        return self._asked_at

    def _take(self) -> tuple[Any] | None:
        """The next batch, in a tuple, if it is here; it counts as given."""
        if self._error_ahead is not None:
            raise self._error_ahead
        if self._mover is not None:
            self._mover.settle()
        made, self._ahead = self._ahead or self._make(), None
        if made is None:
            return None
        batch = made.batch
        if self._mover is not None:
            self._look_ahead()
            batch = batch.give()
        self._note_given(made.end)
        self._meter.samples += made.samples
        self._meter.batches += 1
        self._batches += 1
        return (batch,)

    def _make(self) -> _Made | None:
        """The first of the pending batches of which something is left."""
        while self._pending:
            ready = self._pending.popleft()
            self.connection.taken(1, self._tell_after)
            built = self._delivery.build(ready, self.connection.lend)
            if built is None:
                self._note_given(ready.end)
                continue
            batch, samples = built
            return _Made(batch if self._mover is None else self._mover.begin(batch), samples, ready.end)
        return None

    def _note_given(self, end: int) -> None:
        if self._in_order:
            self._standing.position = end

    def _look_ahead(self) -> None:
        """Begin to move the batch after the one that is given now, if it is here. What fails is raised at its turn.

        A batch with samples that failed is left alone, because to build it is to judge them.
        """
        with Attempt() as attempt:
            while not self._pending and not self._all_came and (message := self.connection.receive_now()) is not None:
                if not isinstance(message, Ready):
                    self.connection.put_back([message])
                    return
                self._handle(message)
            if self._pending and not self._pending[0].failed and self._pending[0].layout is not None:
                self._ahead = self._make()
        self._error_ahead = attempt.error

    def _let_go(self, batches: tuple[ReadyBatch, ...]) -> None:
        """Give back the batches of an epoch that was begun ahead and is not the one that is wanted."""
        for batch in batches:
            self.connection.lend(batch.slot)
        self.connection.taken(len(batches))

    def receive(self) -> Any:
        """The feeder's next message; this waits for it.

        Raises:
            WorkerError: none came in time, or the feeder is dead.
        """
        try:
            return self.connection.receive(self._left_s())
        except TimeoutError as error:
            raise self.too_late() from error

    def _left_s(self) -> float | None:
        """For how long the batch that was asked for may still be waited for, however many messages come before it."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - (self.connection.waited_s - self._waited_before_s))

    def too_late(self) -> WorkerError:
        """The error for a batch that did not come in time."""
        here = self.connection.fileno() is None
        why = "the storage does not answer" if here else "a transform hangs"
        return WorkerError(f"no batch came within timeout={self.timeout_s} s; {why}, or the time is too short")

    def _handle(self, message: Any) -> None:
        match message:
            case Ready():
                self.connection.forget(message.retired)  # not sooner: batches of earlier messages may lie there
                self._meter.totals = message.totals
                if message.start == self._start:
                    self._pending.extend(message.batches)
                    self._all_came = message.last
                    self._tell_after = message.tell_after
                else:
                    self._let_go(message.batches)
                self._delivery.passed_over.look_at(message.totals.skipped_members)
            case TellTaken():
                if self._mover is not None:
                    self._mover.close()  # it is asked because nothing goes on without the memory that copies read
                self.connection.tell(answers=message.number)
            case Failed():
                raise error_from(message.failure)

    def _refuse_nothing(self) -> None:
        """An epoch without a batch because every sample of it was left out is an error, whatever `on_error` says."""
        kept, skipped = self._delivery.skipped, self._delivery.n_skipped - self._skipped_before
        if skipped and self._batches == 0:
            which, shown = ("first", kept[-skipped]) if skipped <= len(kept) else ("last", kept[-1])
            raise SampleError(f"every one of {counted(skipped, 'sample')} has failed; the {which}: {shown}") from shown

    def stop(self, why: str, state: Literal["ready", "left"] = "left") -> bool:
        """End the pass before its end, without its connection; False if it was over already.

        An epoch of which nothing was given is still to begin.
        """
        if self._over != "no":
            return False
        self._over, self._why = "closed", why
        self._standing.state = "ready" if self._gave_at is None else state
        self._pending.clear()
        self._ahead = self._error_ahead = None
        if self.on_close is not None:
            self.on_close()
        return True

    def close(self, why: str, state: Literal["ready", "left"] = "left") -> None:
        """End the pass before its end, and the feeder's processes with it. Calling it again is fine."""
        if self.stop(why, state):
            try:
                self.connection.close()
            finally:
                if self._mover is not None:
                    self._mover.close()

    def end(self, why: str) -> None:
        """End the pass, for another one or because it was dropped; the processes stay if it has given all batches."""
        if self._over == "no" and self._gave_at is not None and self._standing.position >= self._last_position():
            try:
                self._await_end()
            except StreamloadError:  # a feeder that dies now has nothing more to give for this epoch
                self.connection.close()
            self._finish()
            if self.on_close is not None:
                self.on_close()
        self.close(why)

    def _await_end(self) -> None:
        self._waited_before_s = self.connection.waited_s
        while not self._all_came and not self.connection.closed:  # as it is in a fork: what comes is the parent's
            self._handle(self.receive())
        self._refuse_nothing()

    def _finish(self) -> None:
        self._over = "finished"
        self._standing.finish_epoch()

    def __del__(self) -> None:
        self.end("it was dropped")
