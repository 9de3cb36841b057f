"""What a feeder measures: the costs of tasks, the traffic, and what the workers do while the loop waits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import perf_counter, process_time
from typing import Literal

from streamload.decode.tasks import RowsDone, ScanDone
from streamload.feeder.epoch import Epochs
from streamload.feeder.scans import Scans
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.transfers import TransferCounts
from streamload.totals import TimeIntegral, Totals, duration_bucket
from streamload.trace import Event
from streamload.workers.protocol import Pool

_SENT_EVERY_S = 0.02
"""Totals go with batches, and a message with them takes a hundredth of a millisecond more."""

_Reason = Literal["work", "memory", "network", "scan"]


class FeederMeter:
    """Adds up, in `totals`, what a feeder and its workers do.

    While the loop waits, it adds up where the workers' time goes, as "awaited_s/REASON": "work"; or what idle workers
    wait for: the "network", a "scan" of a shard, or room in memory_budget ("memory"). If one of three workers is at
    work and the others wait for the network, a third of that time counts as work. So does all time in which the
    batches after the awaited one are ready. The loop counts as waiting as soon as it has so few batches that it need
    not acknowledge any.

    Args:
        totals: where to add.
        pool: the workers.
        epochs: says whether the loop waits.
        scans: which are outstanding.
        fetcher: of remote bytes, or None.

    Attributes:
        totals: as given.
        events: for a trace, since the last message; None where there is none.
    """

    def __init__(
        self,
        totals: Totals,
        pool: Pool,
        *,
        epochs: Epochs,
        scans: Scans,
        fetcher: Fetcher | None,
    ) -> None:
        self.totals = totals
        self._pool = pool
        self._epochs = epochs
        self._scans = scans
        self._fetcher = fetcher
        self._started_s = self._noted_s = perf_counter()
        self._sent_s = -math.inf
        self._shares: tuple[tuple[str, float], ...] = ()
        self._used_bytes = TimeIntegral()
        self.events: list[Event] | None = None

    def add(self, done: RowsDone | ScanDone) -> None:
        """Add what a task has taken."""
        costs, totals = done.costs, self.totals
        if isinstance(done, RowsDone):
            totals["payload_bytes"] += done.payload_bytes
            totals["made_samples"] += done.rows
        totals["scan_s"] += costs.scan
        totals["decode_s"] += costs.decode
        totals["transform_s"] += costs.transform
        totals["collate_s"] += costs.collate
        totals["workers_waited_s"] += costs.waited
        totals["workers_busy_s"] += costs.whole
        totals["workers_processor_s"] += costs.processor
        totals["workers_delayed_s"] += costs.delayed
        totals[duration_bucket("task", costs.whole)] += 1
        totals.add(costs.named)
        if self.events is not None:
            kind, details = _described(done)
            self.events.append(Event(kind, f"worker {costs.process}", costs.started, costs.whole, details))

    def trace(self, *, on: bool) -> None:
        """Note events from now on, or no more."""
        if not on:
            self.events = None
        elif self.events is None:
            self.events = []
        self.watch_transfers()

    def watch_transfers(self) -> None:
        """Have transfers noted as well, as soon as there are any; to be called after each of them has begun."""
        if self._fetcher is None:
            return
        counts = self._fetcher.counts
        if self.events is None:
            counts.ended = None
        elif counts.ended is None:
            counts.ended = []

    def take_events(self) -> tuple[Event, ...]:
        """The events since the last call; none unless they are noted."""
        if self.events is None:
            return ()
        if self._fetcher is not None and (ended := self._fetcher.counts.ended):
            self.events += [
                Event("fetch", "connection", began_s, ended_s - began_s, {"url": url, "start": start, "bytes": size})
                for url, start, began_s, ended_s, size in ended
            ]
            ended.clear()
        taken, self.events = tuple(self.events), []
        return taken

    def note_state(self) -> None:
        """Add the time since the last call, for the reason that held then; to be called after every event."""
        now_s = perf_counter()
        for name, share in self._shares:
            self.totals[name] += share * (now_s - self._noted_s)
        self._noted_s = now_s
        if self._fetcher is not None:
            self._used_bytes.set(self._fetcher.used_bytes)
        self._shares = tuple(self._reasons()) if self._epochs.awaited else ()

    def to_send(self, *, always: bool, in_own_process: bool) -> Totals | None:
        """The totals until now, if it is time to send them.

        Args:
            always: it is.
            in_own_process: the processor time of this process is the feeder's.
        """
        now_s, totals = perf_counter(), self.totals
        if not always and now_s - self._sent_s < _SENT_EVERY_S:
            return None
        self._sent_s = now_s
        totals["feeder_s"] = now_s - self._started_s
        totals["worker_s"] = totals["feeder_s"] * self._pool.workers_with_tasks()[0]
        if in_own_process:
            totals["feeder_processor_s"] = process_time()
        if self._fetcher is not None:
            totals.update(_of_transfers(self._fetcher.counts))
            totals["memory_byte_s"] = self._used_bytes.now()
            totals["memory_limit_byte_s"] = self._fetcher.window.budget_bytes * totals["feeder_s"]
        return totals

    def _reasons(self) -> Iterator[tuple[str, float]]:
        workers, with_tasks = self._pool.workers_with_tasks()
        if with_tasks:
            yield "awaited_s/work", with_tasks / workers
        if with_tasks < workers:
            yield f"awaited_s/{self._why_idle()}", 1 - with_tasks / workers

    def _why_idle(self) -> _Reason:
        if self._epochs.full:
            return "work"  # one batch takes longer than those after it
        if self._fetcher is None:
            return "scan"
        if self._fetcher.counts.in_flight or not self._scans.outstanding:
            return "memory" if self._fetcher.lacks_room else "network"
        return "scan"


def _described(done: RowsDone | ScanDone) -> tuple[str, dict[str, float]]:
    costs = done.costs
    if isinstance(done, ScanDone):
        return "scan", {"shards": len(done.found)}
    return "task", {
        "samples": done.rows,
        "decode_s": costs.decode,
        "transform_s": costs.transform,
        "collate_s": costs.collate,
        "processor_s": costs.processor,
    }


def _of_transfers(counts: TransferCounts) -> dict[str, float]:
    return {
        "fetched_bytes": counts.received_bytes,
        "cached_bytes": counts.cached_bytes,
        "requests": counts.requests,
        "throttled_requests": counts.throttled,
        "broken_requests": counts.broken,
        "answered_requests": counts.answered,
        "answer_s": counts.answer_s,
        "connection_s": counts.connection_s,
        "connection_limit_s": counts.limit_s,
        "connections_full_s": counts.full_s,
    }
