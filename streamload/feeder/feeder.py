"""The feeder of one rank: its epochs, its batches, and what its trainer and the pipeline say to each other.

It does not know where it runs: `send` may lead to a socket, or to the caller's own thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from streamload.decode.failure import Attempt, failure_of
from streamload.feeder.calls import COUNT_SAMPLES
from streamload.feeder.feeder_meter import FeederMeter
from streamload.feeder.messages import (
    AbandonEpoch,
    Acknowledge,
    Answer,
    Call,
    EpochStart,
    Failed,
    Ready,
    Scanning,
    Send,
    Tracing,
)
from streamload.feeder.pipeline import Pipeline
from streamload.memory.channel import MAX_DESCRIPTORS
from streamload.memory.slots import Slots
from streamload.memory.unnamed import naming_the_limit
from streamload.order.sampling import Sampled
from streamload.schedule.epoch import Epoch, Epochs, ReadyBatch
from streamload.schedule.scheduler import RowBatcher
from streamload.totals import Totals

__all__ = ["Feeder"]

_REPORTED_EVERY_S = 0.5


class Feeder:
    """Makes the plans of one trainer's epochs, and sends it the batches in order.

    Args:
        pipeline: makes them.
        slots: whose memory the batches lie in.
        send: takes messages for the trainer, with descriptors.
        workers: how many the rank wants; without any, nothing is made ahead of an epoch's start.

    Attributes:
        slots: as given.
        epochs: the rank's.
        meter: what the trainer is told of the work done for it.
        pipeline: as given.
    """

    def __init__(self, pipeline: Pipeline, slots: Slots, send: Send, *, workers: int) -> None:
        self.pipeline = pipeline
        self.slots = slots
        self._settings = pipeline.settings
        self._send = send
        self._totals = Totals()
        self._counting: int | None = None  # the number of the call that waits for all counts
        self._reported_s = 0.0
        self.epochs = Epochs(
            self._begin,
            self._send_ready,
            works_ahead=workers > 0 and not isinstance(self._settings.order.sampling, Sampled),
        )
        self.meter = FeederMeter(
            self._totals,
            pipeline.pool,
            epochs=self.epochs,
            scans=pipeline.scans,
            fetcher=pipeline.fetcher,
            ranks=pipeline.ranks,
            meters=pipeline.meters,
        )
        self._resources = pipeline.join(self, slots)

    def handle(self, message: Any) -> None:
        """Take a message from the trainer, and do what can be done now. Whatever fails is sent, not raised."""
        with self.failing():
            self._take(message)
        self.pipeline.pump()

    def _take(self, message: Any) -> None:
        match message:
            case EpochStart():
                self.pipeline.try_again()
                if (fetcher := self.pipeline.fetcher) is not None:
                    order, counts = self._settings.order, self.pipeline.tables.counts.values
                    fetcher.foresight.begin(order, counts, message.epoch, message.position)
                self.epochs.request(message)
                self.pipeline.pool.abandon_unwanted()
            case Tracing():
                self.meter.trace(on=message.on)
            case AbandonEpoch():
                self.epochs.abandon(message.number)
                self.pipeline.pool.abandon_unwanted()
            case Acknowledge():
                self.slots.note_taken(message.batches)
                self.slots.note_released(message.released)
                self.epochs.note_taken(message.batches)
            case Call() if message.function == COUNT_SAMPLES:
                self._counting = message.number
                self.pipeline.scans.request(range(len(self.pipeline.tables.counts)))

    def pump(self, most: float = math.inf) -> int:
        """Announce batches, and have at most so many tasks done; returns how many. Failures are sent."""
        with self.failing():
            return self.epochs.pump(most)
        return 0

    @property
    def counts(self) -> bool:
        """Whether the trainer waits for the counts of all shards."""
        return self._counting is not None

    def answer_count(self) -> None:
        """Answer the trainer that waits for the counts of all shards, once they are known."""
        if self._counting is None:
            return
        counts = self.pipeline.tables.counts
        with self.failing():
            self.pipeline.scans.check(range(len(counts)))
            if counts.complete:
                self._send(Answer(self._counting, tuple(counts.values.tolist())), ())
                self._counting = None

    def is_blocked(self) -> bool:
        """Whether the trainer waits for a batch, and nothing can be done of it before more bytes are resident."""
        with self.failing():
            return self.epochs.blocked and not self.epochs.trainer_is_busy
        return False

    def report_scans(self) -> None:
        """Say how far scans are, where the trainer waits for them."""
        is_awaited = self.epochs.awaited or self.counts
        if not is_awaited or monotonic() - self._reported_s < _REPORTED_EVERY_S:
            return
        self._reported_s = monotonic()
        values = self.pipeline.tables.counts.values
        self._send(Scanning(int((values >= 0).sum()), len(values)), ())

    def leave(self) -> None:
        """The trainer is gone: abandon what was made for it. The slots are closed by their owner. Idempotent."""
        with Attempt() as attempt:
            self.epochs.close()
        if attempt.error is not None:
            self.pipeline.fail(attempt.error)
        self.pipeline.leave(self, self._resources.turns)

    def close(self) -> None:
        """End the workers and close the slots, where no other rank has them. Idempotent."""
        self.pipeline.close()
        self.slots.close()

    def _begin(self, start: EpochStart, before: RowBatcher | None) -> Epoch:
        orphaned = self.pipeline.orphaned
        return Epoch(self._settings, start, self._resources, totals=self._totals, orphaned=orphaned, before=before)

    def _send_ready(self, start: EpochStart, batches: list[ReadyBatch], last: bool, acknowledge_after: int) -> None:
        """Send batches, as many with one message as its descriptors allow."""
        for first in range(0, max(1, len(batches)), MAX_DESCRIPTORS):
            end = first + MAX_DESCRIPTORS
            part = batches[first:end]
            opened = tuple(batch.slot for batch in part if self.slots.announce(batch.slot, batch.size_bytes))
            descriptors = [self.slots.descriptor(slot) for slot in opened]
            retired = tuple(self.slots.take_retired())
            self.pipeline.pool.forget_slots(retired)
            ends = last and end >= len(batches)
            ready = Ready(
                start.identity,
                tuple(part),
                opened,
                retired,
                last=ends,
                acknowledge_after=acknowledge_after,
                totals=self.meter.to_send(always=ends, in_own_process=self.pipeline.owns_process),
                skipped_members=self.pipeline.tables.skipped,
                events=self.meter.take_events(),
            )
            self._send(ready, descriptors)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Send what is raised inside to the trainer: it would wait forever."""
        with Attempt() as attempt:
            yield
        if attempt.error is not None:
            self.fail(attempt.error)

    def fail(self, error: Exception) -> None:
        """The rank cannot go on: say so, and do nothing more for it."""
        failed_for = self.epochs.newest
        if self.pipeline.ranks > 1:
            self.epochs.close()  # what it held is for the others
        else:
            self.epochs.stop()
        self._counting = None
        self._send(Failed(failure_of(naming_the_limit(error)), failed_for), ())
