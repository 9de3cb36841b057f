"""The verdict on a run: which stage limits it, what to change, and what that would gain.

Every stage has a rate that it would reach if it never waited: samples by the time for which it was busy. While the loop
waits, the stage that the next batch waits for is the limit; without it the run goes as fast as the next slowest stage.
(These are the utilization law and the asymptotic bounds of operational analysis: Denning and Buzen, "The Operational
Analysis of Queueing Network Models", 1978.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from streamload.limits import MOST_WORKERS_PER_PROCESSOR
from streamload.text import counted
from streamload.totals import Totals

__all__ = ["Limit", "Machine", "find_limit"]

_Stage = Literal[
    "unknown",
    "step",
    "caller",
    "decode",
    "transform",
    "collate",
    "scan",
    "machine",
    "disk",
    "order",
    "feeder",
    "network",
    "latency",
    "throttling",
    "memory",
]

_SHORT_S = 2.0
_FEW_BATCHES = 20
_SHORT_WITH_FEW_BATCHES_S = 10.0
"""Until then, filling the pipeline is so much of a run that nothing can be said of the rest."""

_SMALL_WAIT = 0.05


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run takes place.

    Attributes:
        workers: of the loader, in the mean; 0 where the trainer makes the batches.
        processors: that this rank may use; with remote feeders, that these claim.
        all_processors: of the machine.
        remote_feeders: how many feeders have the workers among them, on other nodes; 0 for a feeder on this machine.
    """

    workers: int
    processors: int
    all_processors: int
    remote_feeders: int = 0


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits a run.

    Attributes:
        stage: "step" is the user's own code between two batches; "caller" the batches that the trainer makes itself
            (`num_workers=0`); "machine" other processes; "order" a batch that takes longer than those after it;
            "latency" the time until answers begin; "throttling" a storage that refuses requests; "memory" room in
            `memory_budget`; "unknown" too short a run.
        sentence: for people: with the figure behind it, and what to change.
        gain: how many times as fast the run would be after that change, at most; 1.0 where nothing is to be gained.
        workers: how many of them that takes, of each feeder, as `num_workers` says it; None where it takes something
            else.
    """

    stage: _Stage
    sentence: str
    gain: float = 1.0
    workers: int | None = None


def find_limit(totals: Totals, machine: Machine) -> Limit:
    """What limits a run.

    Args:
        totals: of the run without its first batch, as in `Statistics.totals`.
        machine: where it takes place.
    """
    total_s = totals["loop_worked_s"] + totals["loop_waited_s"]
    batches = int(totals["batches"])
    if total_s < (_SHORT_WITH_FEW_BATCHES_S if batches < _FEW_BATCHES else _SHORT_S) or not totals["samples"]:
        return Limit(
            "unknown",
            f"nothing that shows yet: {counted(batches, 'batch')} after the first one in "
            f"{total_s:.1f} s are too short a run to judge",
        )
    share = totals["loop_waited_s"] / total_s
    if share < _SMALL_WAIT:
        return Limit("step", f"the training step: after the first batch it waits for data {share:.1%} of its time")
    return _Pipeline(totals, machine, total_s).limit()


class _Pipeline:
    """The stages before the loop, in a run in which the loop waits."""

    def __init__(self, totals: Totals, machine: Machine, total_s: float) -> None:
        self._totals = totals
        self._machine = machine
        self._total_s = total_s
        self._rate = totals["samples"] / total_s
        made = max(1.0, totals["made_samples"])
        self._service_s = max(1e-9, totals["workers_busy_s"] - totals["workers_delayed_s"]) / made
        self._processor_s = (totals["workers_processor_s"] + totals["feeder_processor_s"]) / made
        if machine.workers and not machine.remote_feeders:
            self._processor_s += totals["trainer_processor_s"] / totals["samples"]
        self._waits = f"the loop waits {totals['loop_waited_s'] / total_s:.0%} of its time"

    def limit(self) -> Limit:
        """What the loop waits for most."""
        if not self._machine.workers and not self._totals["requests"]:
            return self._caller()
        awaited = self._totals.parts("awaited_s")
        reason = next(iter(awaited), "work")
        if reason == "memory" and self._is_throttled():
            reason = "network"
        match reason:
            case "network":
                return self._network()
            case "memory":
                return self._memory()
            case "order":
                return Limit(
                    "order",
                    f"a batch that takes longer than those after it: {self._waits}, while workers wait for its turn to "
                    "end; a larger prefetch_batches lets them go on, and in_order=False delivers what is ready",
                    self._gain(self._machine.workers),
                )
            case "scan":
                return Limit(
                    "scan",
                    f"reading tar headers: {self._waits} while shards without an index are scanned; `streamload index` "
                    "does that once",
                    self._gain(self._machine.workers),
                )
        return self._work()

    def _gain(self, workers: int, service_s: float | None = None, processor_s: float | None = None) -> float:
        """How many times as fast the run would be, if nothing but these limited it."""
        return max(1.0, self._bound(workers, service_s, processor_s) / self._rate)

    def _bound(self, workers: int, service_s: float | None = None, processor_s: float | None = None) -> float:
        service_s = self._service_s if service_s is None else service_s
        processor_s = self._processor_s if processor_s is None else processor_s
        return min(self._loop_rate, max(1, workers) / max(service_s, 1e-9), self._free / max(processor_s, 1e-9))

    @property
    def _loop_rate(self) -> float:
        return self._totals["samples"] / max(1e-9, self._totals["loop_worked_s"])

    @property
    def _others(self) -> float:
        """How many processors are taken by processes that are not this loader's. Of other nodes that is not known."""
        if self._machine.remote_feeders:
            return 0.0
        of_this_rank = ("trainer_processor_s", "feeder_processor_s", "workers_processor_s")
        own_s = sum(self._totals[name] for name in of_this_rank)
        return max(0.0, self._totals["machine_processor_s"] - own_s) / self._total_s

    @property
    def _free(self) -> float:
        """The processors that other processes leave to this rank."""
        machine = self._machine
        if machine.remote_feeders:
            return machine.processors
        return max(min(1.0, machine.processors), min(machine.processors, machine.all_processors - self._others))

    # -- the workers -------------------------------------------------------------------------------------------------

    def _work(self) -> Limit:
        totals, machine = self._totals, self._machine
        busy_s = max(1e-9, totals["workers_busy_s"])
        busy = min(1.0, busy_s / max(1e-9, totals["worker_s"]))
        processes = machine.remote_feeders + 1  # with the one on this machine that puts their batches together
        feeder = totals["feeder_processor_s"] / max(1e-9, totals["feeder_s"]) / processes
        if machine.workers and busy < 0.6 and feeder > 0.7:
            what = "the feeder process: it is" if processes == 1 else f"the feeder processes ({processes}): they are"
            return Limit(
                "feeder",
                f"{what} busy {feeder:.0%} of the time, and {self._waits}; larger batches cost less there",
                self._gain(machine.workers, processor_s=0.0),
            )
        taken = self._others / machine.all_processors
        if totals["workers_delayed_s"] > 0.2 * busy_s and taken > 0.15:
            return Limit(
                "machine",
                f"this machine: other processes take {taken:.0%} of its processors, so workers that could run stand "
                f"still {totals['workers_delayed_s'] / busy_s:.0%} of their time, and {self._waits}",
                max(
                    1.0,
                    min(
                        self._loop_rate,
                        machine.workers / self._service_s,
                        machine.processors / max(1e-9, self._processor_s),
                    )
                    / self._rate,
                ),
            )
        return self._busiest(busy)

    def _busiest(self, busy: float) -> Limit:
        totals, workers = self._totals, self._machine.workers
        stage, what, share = self._costliest()
        blocked = 1 - (totals["workers_processor_s"] + totals["workers_delayed_s"]) / max(
            1e-9, totals["workers_busy_s"]
        )
        are_busy = f"{counted(workers, 'worker')} {'is' if workers == 1 else 'are'} busy {busy:.0%} of the time"
        said = f"{what}: {are_busy}, {self._waits}; {what} takes {share:.0%} of the work"
        if stage != "transform" and blocked > 0.5 and totals["disk_bytes"] > 0.2 * totals["payload_bytes"]:
            rate = totals["disk_bytes"] / max(1e-9, totals["feeder_s"]) / 1e6
            return Limit(
                "disk",
                f"the disk: workers wait {blocked:.0%} of their time for what they read from it, at {rate:,.0f} MB/s, "
                f"and {self._waits}; a faster disk, or memory for what is read again, would end that",
                self._gain(workers, totals["workers_processor_s"] / max(1.0, totals["made_samples"])),
            )
        wanted = self._workers_wanted()
        if wanted > max(1, workers):
            gain = self._gain(wanted)
            ends = "would end the wait" if gain > 0.95 * self._loop_rate / self._rate else f"would give {gain:.1f}x"
            waits = f", {blocked:.0%} of it without a processor: it sleeps or waits" if blocked > 0.5 else ""
            feeders = self._machine.remote_feeders
            each = f" (num_workers={wanted // feeders})" if feeders else ""
            return Limit(
                stage, f"{said}{waits}; {counted(wanted, 'worker')}{each} {ends}", gain, wanted // (feeders or 1)
            )
        gain = self._gain(workers, self._service_s * (1 - share), self._processor_s * (1 - share))
        return Limit(
            stage,
            f"{said}, and {counted(self._machine.processors, 'processor')} are in use; without it the run would be "
            f"{gain:.1f}x as fast: make it cheaper, or do it once with `streamload map`",
            gain,
        )

    def _costliest(self) -> tuple[_Stage, str, float]:
        """The stage of the workers that takes most, what to call it, and its share of their work."""
        totals = self._totals
        named: list[tuple[float, _Stage, str]] = [(totals["collate_s"], "collate", "collating batches")]
        named.append((totals["scan_s"], "scan", "reading tar headers"))
        named += [(s, "decode", f"decoding {name!r}") for name, s in totals.parts("decode_s").items()]
        named += [(s, "transform", f"the transform ({name})") for name, s in totals.parts("transform_s").items()]
        seconds, stage, what = max(named)
        return stage, what, seconds / max(1e-9, sum(each[0] for each in named))

    def _workers_wanted(self) -> int:
        """How many workers keep up with the loop, or use all processors; as many for each feeder."""
        reachable = min(self._loop_rate, self._free / max(1e-9, self._processor_s))
        most = MOST_WORKERS_PER_PROCESSOR * self._machine.processors
        feeders = self._machine.remote_feeders or 1
        return feeders * math.ceil(min(most, 0.98 * reachable * self._service_s) / feeders)

    def _caller(self) -> Limit:
        wanted = max(1, self._workers_wanted())
        gain = self._gain(wanted)
        _, what, share = self._costliest()
        return Limit(
            "caller",
            f"this process, which makes the batches itself: {self._waits} for that, {share:.0%} of it for {what}; "
            f"num_workers={wanted} would make them beside the step",
            gain,
            wanted,
        )

    # -- the network -------------------------------------------------------------------------------------------------

    def _is_throttled(self) -> bool:
        return self._totals["throttled_requests"] > 0.02 * self._totals["requests"]

    def _network(self) -> Limit:
        totals = self._totals
        seconds, connection_s = max(1e-9, totals["feeder_s"]), max(1e-9, totals["connection_s"])
        in_use = connection_s / seconds
        feeder_s = totals["feeder_processor_s"] / max(1.0, totals["made_samples"])  # most of that is fetching
        gain = self._gain(self._machine.workers, processor_s=self._processor_s - feeder_s)
        ends = (
            f"a disk cache would make every epoch after the first up to {gain:.1f}x as fast; fewer fields or smaller "
            "ones fetch less"
        )
        if self._is_throttled():
            failed, requests = int(totals["throttled_requests"]), int(totals["requests"])
            return Limit(
                "throttling",
                f"the storage: it refused {failed:,} of {counted(requests, 'request')} as too many, so {in_use:.1f} "
                f"connections are in use, and {self._waits}; raise its limit, or spread the shards; {ends}",
                gain,
            )
        if totals["answer_s"] > 0.5 * connection_s:
            wait_ms = 1000 * totals["answer_s"] / max(1.0, totals["answered_requests"])
            return Limit(
                "latency",
                f"the network's latency: an answer begins {wait_ms:,.0f} ms after its request, on {in_use:.0f} "
                f"connections, and {self._waits}; {ends}",
                gain,
            )
        each = totals["fetched_bytes"] / connection_s / 1e6
        total = totals["fetched_bytes"] / seconds / 1e6
        return Limit(
            "network",
            f"the network: {in_use:.0f} connections at {each:,.1f} MB/s each, {total:,.1f} MB/s in all, and "
            f"{self._waits}; {ends}",
            gain,
        )

    def _memory(self) -> Limit:
        in_use = self._totals["connection_s"] / max(1e-9, self._totals["feeder_s"])
        return Limit(
            "memory",
            f"memory_budget: what is fetched next finds no room in it, {in_use:.1f} connections are in use, and "
            f"{self._waits}; a larger memory_budget fetches further ahead",
            self._gain(self._machine.workers),
        )
