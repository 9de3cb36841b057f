"""The epoch that is in flight and the one after it, which is begun as soon as there is no more work to schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from streamload.decode.failure import Attempt
from streamload.decode.tasks import RowsDone
from streamload.order.epoch_start import EpochStart
from streamload.schedule.epoch import Epoch, ReadyBatch
from streamload.schedule.scheduler import RowBatcher

__all__ = ["Epochs"]

Begin = Callable[[EpochStart, RowBatcher | None], Epoch]
Deliver = Callable[[EpochStart, list[ReadyBatch], bool, int], None]


class Epochs:
    """At most two epochs: the one that the trainer has asked for, and the one that it will probably ask for next.

    The first batches of the next one are made while the last ones of the other are used, so there is no gap between
    them. They are announced as soon as the other has ended, asked for or not; a trainer that begins somewhere else lets
    them go, and then nothing is made ahead until it goes on from one epoch to the next again. What fails in the next
    epoch takes effect when that is asked for, unless it is forgiven before.

    A trainer may leave the epoch that it has asked for, or just ask for another one: then that is abandoned. What was
    announced of it the trainer still takes; the rest is made by nobody, and no other one is begun unasked.

    Args:
        begin: makes an epoch, given the batcher of the one before.
        deliver: announces batches: which epoch's, the batches, whether that was all of the epoch that was asked for,
            and how many may be taken before that is told.
        works_ahead: False never begins an epoch that was not asked for.
    """

    def __init__(self, begin: Begin, deliver: Deliver, *, works_ahead: bool) -> None:
        self._begin = begin
        self._deliver = deliver
        self._works_ahead = works_ahead
        self._in_step = True
        self._last: Epoch | None = None
        self._asked: Epoch | None = None
        self._next: Epoch | None = None
        self._next_error: Exception | None = None
        self._untaken: deque[tuple[RowBatcher, int]] = deque()

    @property
    def only_next_works(self) -> bool:
        """Whether whatever is done now is done for an epoch that was not asked for."""
        return self._next is not None and (self._asked is None or self._asked.exhausted)

    @property
    def waits(self) -> bool:
        """Whether the epoch that was asked for can only go on when something more has come near."""
        return self._asked is not None and self._asked.idle and not self._asked.ended

    @property
    def busy(self) -> bool:
        """Whether any batch is being made; when it is, what it was made of may make room."""
        return any(epoch is not None and epoch.busy for epoch in (self._asked, self._next))

    @property
    def newest(self) -> tuple[int, int, int] | None:
        """The identity of the newest epoch that anything is done for: nothing is announced of an older one."""
        newest = self._next if self._asked is None and self._next is not None else self._last
        return None if newest is None else newest.start.identity

    def ask(self, start: EpochStart) -> None:
        """The trainer wants this one.

        Raises:
            StreamloadError: what was done of it already has failed.
        """
        if self._asked is not None:
            self.abandon(self._asked.start.number)
        self._in_step = self._last is None or start == _after(self._last.start)
        following, error = self._next, self._next_error
        self._next = self._next_error = None
        if following is not None and following.start != start:
            following.abandon()
            following = None
        before = None if self._last is None else self._last.batcher
        self._asked = self._last = following or self._begin(start, before)
        if following is not None and error is not None:
            raise error

    def abandon(self, number: int) -> None:
        """The trainer does not want the rest of the epoch that it asked for as this pass, if that has not ended."""
        if self._asked is not None and self._asked.start.number == number:
            self._asked.abandon()
            self._asked = None
            self._in_step = False

    def stop(self) -> None:
        """Forget all of them."""
        self._asked = self._next = self._next_error = None

    def fail_next(self, error: Exception) -> None:
        """Something has failed that was done for the next epoch."""
        self._next_error = error

    def forgive(self, errors: Iterable[Exception]) -> None:
        """What these were met for is tried again; if the next epoch has failed with one of them, it goes on."""
        if any(error is self._next_error for error in errors):
            self._next_error = None

    def taken(self, batches: int) -> None:
        """The trainer has taken so many of the batches that were announced."""
        while batches:
            batcher, announced = self._untaken.popleft()
            count = min(batches, announced)
            batcher.taken(count)
            batches -= count
            if count < announced:
                self._untaken.appendleft((batcher, announced - count))

    def waits_for(self, task: int) -> bool:
        """Whether a task is being done for batches that are wanted."""
        return any(epoch is not None and epoch.waits_for(task) for epoch in (self._asked, self._next))

    def drop(self, task: int) -> None:
        """A task is not in flight any more, and has no answer: nobody waits for it."""
        for epoch in (self._asked, self._next):
            if epoch is not None:
                epoch.drop(task)

    def on_done(self, done: RowsDone) -> None:
        """A task has come back. That of an epoch that was abandoned is dropped."""
        for epoch in (self._asked, self._next):
            if epoch is not None and epoch.takes(done):
                return

    def pump(self) -> None:
        """Announce what is ready, and schedule what can be scheduled.

        Raises:
            StreamloadError: the epoch that was asked for cannot go on.
        """
        if self._asked is not None:
            self._announce(self._asked)
        if self._asked is not None:
            if self._asked.must_wrap and self._next is not None:  # or the next one might leave it no room
                self._next.abandon()
                self._next = self._next_error = None
            self._asked.pump()
            if self._asked.ended:  # it had no batch that was still to come
                self._announce(self._asked)
        if self._next_error is None:
            with Attempt() as attempt:
                self._pump_next()
            self._next_error = attempt.error

    def _pump_next(self) -> None:
        last = self._last
        if self._next is None and self._works_ahead and self._in_step and last is not None and last.exhausted:
            self._next = self._begin(_after(last.start), last.batcher)
        if self._next is not None:
            self._next.pump()
            if self._asked is None:
                self._announce(self._next)

    def _announce(self, epoch: Epoch) -> None:
        ready, acknowledge_after = epoch.take_ready()
        last = epoch is self._asked and epoch.ended
        if ready:
            self._untaken.append((epoch.batcher, len(ready)))
        if ready or last:
            self._deliver(epoch.start, ready, last, acknowledge_after)
        if last:
            epoch.close()
            self._asked = None


def _after(start: EpochStart) -> EpochStart:
    return replace(start, epoch=start.epoch + 1, position=0, number=start.number + 1)
