"""One pass of the loop over an epoch: waits for batches, builds them, and knows how far the loop has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from streamload.connection import Connection
from streamload.decode.failure import error_from
from streamload.delivery import Delivery
from streamload.errors import LoaderClosedError, SampleError, WorkerError
from streamload.messages import EpochEnded, Failed, Ready
from streamload.pipeline import ReadyBatch
from streamload.statistics import FeederTotals, Stage, Statistics

__all__ = ["Meter", "Pass", "Standing"]


@dataclass(slots=True)
class Standing:
    """Where the loop stands; shared by a pass and its loader.

    Attributes:
        epoch: the epoch.
        position: samples of its order that the loop has been given, over all ranks.
        state: "ready" to begin or go on from here; "running"; or "left" by the user before the end.
    """

    epoch: int = 0
    position: int = 0
    state: Literal["ready", "running", "left"] = "ready"


@dataclass(slots=True)
class Meter:
    """What the trainer's side adds up over all passes."""

    samples: int = 0
    batches: int = 0
    loop_worked_s: float = 0.0
    loop_waited_s: float = 0.0
    totals: FeederTotals = field(default_factory=FeederTotals)

    def statistics(self, skipped_samples: int) -> Statistics:
        """The figures as the user gets them."""
        totals = self.totals
        stages = {
            "plan": Stage(totals.plan_s, 0.0),
            "scan": Stage(totals.scan_s, 0.0),
            "decode": Stage(totals.decode_s, totals.workers_waited_s),
            "transform": Stage(totals.transform_s, 0.0),
            "collate": Stage(totals.collate_s, 0.0),
            "loop": Stage(self.loop_worked_s, self.loop_waited_s),
        }
        return Statistics(
            samples=self.samples,
            batches=self.batches,
            payload_bytes=totals.payload_bytes,
            stages=stages,
            skipped_members=dict(totals.skipped_members),
            skipped_samples=skipped_samples,
            restarted_workers=totals.restarted_workers,
            fetched_bytes=totals.fetched_bytes,
            requests=totals.requests,
            failed_requests=totals.failed_requests,
        )


class Pass(Iterator[Any]):
    """The iterator of a `for` loop. A pass that is dropped before its end takes the feeder's processes with it.

    Args:
        connection: to a feeder that has been told to start the epoch.
        delivery: builds the batches.
        standing: kept up to date for the loader.
        meter: adds up.
        timeout_s: how long to wait for a batch, or None.
        in_order: the batches come in order; else there is no position, and what is begun again is begun from the start.
    """

    def __init__(
        self,
        connection: Connection,
        delivery: Delivery,
        standing: Standing,
        meter: Meter,
        *,
        timeout_s: float | None,
        in_order: bool,
    ) -> None:
        self._start = standing.epoch, standing.position
        self._in_order = in_order
        self._connection = connection
        self._delivery = delivery
        self._standing = standing
        self._meter = meter
        self._timeout_s = timeout_s
        self._pending: deque[ReadyBatch] = deque()
        self._untold = 0
        self._tell_after = 1
        self._gave_at: float | None = None
        self._batches = 0
        self._skipped_before = len(delivery.skipped)
        self._why = ""
        self._over: Literal["no", "finished", "closed"] = "no"
        standing.state = "running"

    def __next__(self) -> Any:
        if self._over == "finished":
            raise StopIteration
        if self._over == "closed":
            raise LoaderClosedError(f"this pass is over: {self._why}")
        asked_at = perf_counter()
        if self._gave_at is not None:
            self._meter.loop_worked_s += asked_at - self._gave_at
        try:
            batch = self._next_batch()
        except StopIteration:
            self._over = "finished"
            self._standing.epoch += 1
            self._standing.position = 0
            self._standing.state = "ready"
            raise
        except BaseException as error:
            # After an error of ours the loop may go on from where it stands; Ctrl-C is a way to leave it.
            self.close("it was ended by an error", state="ready" if isinstance(error, Exception) else "left")
            raise
        self._gave_at = perf_counter()
        self._meter.loop_waited_s += self._gave_at - asked_at
        return batch

    def _next_batch(self) -> Any:
        while True:
            while not self._pending:
                self._handle(self._message())
            ready = self._pending.popleft()
            self._untold += 1
            if self._untold >= self._tell_after:
                self._tell()
            built = self._delivery.build(ready, self._connection.lend)
            if self._in_order:
                self._standing.position = ready.end
            if built is not None:
                batch, samples = built
                self._meter.samples += samples
                self._meter.batches += 1
                self._batches += 1
                return batch

    def _let_go(self, batches: tuple[ReadyBatch, ...]) -> None:
        """Give back the batches of an epoch that was begun ahead and is not the one that is wanted."""
        for batch in batches:
            self._connection.lend(batch.slot, batch.size_bytes)
        self._connection.taken(len(batches))

    def _tell(self) -> None:
        if self._untold:
            self._connection.taken(self._untold)
            self._untold = 0

    def _message(self) -> Any:
        self._tell()  # else the feeder may wait for that, and its next message never come
        try:
            return self._connection.receive(self._timeout_s)
        except TimeoutError as error:
            raise WorkerError(
                f"no batch came within timeout={self._timeout_s} seconds; a transform hangs, or the time is too short"
            ) from error

    def _handle(self, message: Any) -> None:
        match message:
            case Ready():
                self._connection.forget(message.retired)  # not sooner: batches of earlier messages may lie there
                self._meter.totals = message.totals
                if message.start == self._start:
                    self._pending.extend(message.batches)
                    self._tell_after = message.tell_after
                else:
                    self._let_go(message.batches)
            case EpochEnded():
                self._tell()
                self._meter.totals = message.totals
                self._refuse_nothing()
                raise StopIteration
            case Failed():
                raise error_from(message.failure)

    def _refuse_nothing(self) -> None:
        """An epoch without a batch because every sample of it was left out is an error, whatever `on_error` says."""
        skipped = self._delivery.skipped[self._skipped_before :]
        if skipped and self._batches == 0:
            raise SampleError(f"every one of {len(skipped)} samples has failed; the first: {skipped[0]}") from skipped[
                0
            ]

    def close(self, why: str, state: Literal["ready", "left"] = "left") -> None:
        """End the pass before its end, and the feeder's processes with it. Calling it again is fine."""
        if self._over == "no":
            self._over, self._why = "closed", why
            self._standing.state = state
            self._pending.clear()
            self._connection.close()

    def __del__(self) -> None:
        self.close("it was dropped")
