"""The epochs of one rank: the one that the trainer requested, and the next one ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from streamload.decode.failure import Attempt
from streamload.decode.tasks import RowsDone
from streamload.feeder.epoch import Epoch
from streamload.feeder.messages import ReadyBatch
from streamload.order.share import EpochStart

Begin = Callable[[EpochStart], Epoch]
SendReady = Callable[[EpochStart, list[ReadyBatch], bool, int], None]


class Epochs:
    """At most two epochs: the one that the trainer requested, and the one that it will probably request next.

    The first batches of the next epoch are made while the last ones of the current one are used, so that there is no
    gap between them. They are announced as soon as the current epoch has ended, requested or not. A trainer that
    starts elsewhere discards them; then nothing is made ahead until one epoch follows another again. A failure in the
    next epoch is met again when that epoch is requested.

    A trainer may leave its epoch, or just request another one: the old one is abandoned. The trainer still takes what
    was announced of it, the rest is not made, and no epoch is begun ahead of time.

    Args:
        begin: makes an epoch.
        send_ready: announces batches: their epoch, the batches, whether they end the requested epoch, and how many the
            trainer may take before it acknowledges.
        works_ahead: False never begins an epoch before it is requested.
    """

    def __init__(self, begin: Begin, send_ready: SendReady, *, works_ahead: bool) -> None:
        self._begin = begin
        self._send_ready = send_ready
        self._works_ahead = works_ahead
        self._in_step = True
        self._last: Epoch | None = None
        self._requested: Epoch | None = None
        self._next: Epoch | None = None
        self._next_failed = False
        self._abandoned: list[Epoch] = []  # those with tasks in flight
        self._untaken = 0
        self._acknowledge_after = 1

    @property
    def trainer_is_busy(self) -> bool:
        """Whether it has batches left, and will acknowledge some of them."""
        return self._untaken > self._acknowledge_after

    @property
    def blocked(self) -> bool:
        """Whether nothing can be done of the requested epoch before more bytes are resident; see `Epoch.blocked`."""
        return self._requested is not None and self._requested.blocked

    @property
    def awaited(self) -> bool:
        """Whether the trainer waits, as far as that is known here: it acknowledges some batches late."""
        return self._requested is not None and not self.trainer_is_busy

    @property
    def full(self) -> bool:
        """Whether the requested epoch is `Epoch.full`, or has no task left."""
        epoch = self._requested
        return epoch is not None and (epoch.exhausted or epoch.full)

    @property
    def busy(self) -> bool:
        """Whether any batch is being made; when it is done, its parts can be freed."""
        return any(epoch is not None and epoch.busy for epoch in (self._requested, self._next))

    @property
    def has_orphans(self) -> bool:
        """Whether tasks of an abandoned epoch are in flight. They hold the bytes that they read until they are done."""
        return bool(self._abandoned)

    @property
    def newest(self) -> tuple[int, int, int] | None:
        """The identity of the newest epoch in progress: nothing of an older one is announced any more."""
        newest = self._next if self._requested is None and self._next is not None else self._last
        return None if newest is None else newest.start.identity

    def request(self, start: EpochStart) -> None:
        """Start the epoch that the trainer requests, or go on with it if it was begun ahead."""
        if self._requested is not None:
            self.abandon(self._requested.start.number)
        self._in_step = self._last is None or start == _after(self._last.start)
        following, self._next, self._next_failed = self._next, None, False
        if following is not None and following.start != start:
            self._drop(following)
            following = None
        self._requested = self._last = following or self._begin(start)

    def abandon(self, number: int) -> None:
        """Abandon the epoch that was requested as this pass, if it has not ended."""
        if self._requested is not None and self._requested.start.number == number:
            self._drop(self._requested)
            self._requested = None
            self._in_step = False

    def _drop(self, epoch: Epoch) -> None:
        epoch.abandon()
        if epoch.busy:
            self._abandoned.append(epoch)

    def stop(self) -> None:
        """Forget all epochs."""
        self._requested = self._next = None

    def note_taken(self, batches: int) -> None:
        """Note that the trainer has taken so many of the announced batches."""
        self._untaken -= batches

    def waits_for(self, task: int) -> bool:
        """Whether a task in flight makes batches that are still wanted."""
        return any(epoch is not None and epoch.has_task(task) for epoch in (self._requested, self._next))

    def drop(self, task: int) -> None:
        """Forget an unwanted task that will have no result."""
        self._end_task(task, None)

    def on_done(self, done: RowsDone) -> None:
        """Take the result of a task; that of an abandoned epoch is dropped."""
        self._end_task(done.number, done)

    def _end_task(self, number: int, done: RowsDone | None) -> None:
        for epoch in (self._requested, self._next, *self._abandoned):
            if epoch is not None and epoch.has_task(number):
                epoch.end_task(number, done)
        self._abandoned = [epoch for epoch in self._abandoned if epoch.busy]

    def pump(self) -> None:
        """Announce what is ready, and schedule what can be scheduled.

        Raises:
            StreamloadError: the requested epoch cannot go on.
        """
        if self._requested is not None:
            self._announce(self._requested)
        if self._requested is not None:
            self._requested.pump()
            if self._requested.ended:  # it had no batch left
                self._announce(self._requested)
        if not self._next_failed:
            with Attempt() as attempt:
                self._pump_next()
            self._next_failed = attempt.error is not None

    def _pump_next(self) -> None:
        last = self._last
        if self._next is None and self._works_ahead and self._in_step and last is not None and last.exhausted:
            self._next = self._begin(_after(last.start))
        if self._next is not None:
            self._next.pump()
            if self._requested is None:
                self._announce(self._next)

    def _announce(self, epoch: Epoch) -> None:
        ready, acknowledge_after = epoch.take_ready()
        last = epoch is self._requested and epoch.ended
        if ready:
            self._untaken += len(ready)
            self._acknowledge_after = acknowledge_after
        if ready or last:
            self._send_ready(epoch.start, ready, last, acknowledge_after)
        if last:
            epoch.close()
            self._requested = None


def _after(start: EpochStart) -> EpochStart:
    return replace(start, epoch=start.epoch + 1, position=0, number=start.number + 1)
