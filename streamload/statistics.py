"""Measure a loader stage by stage, and find its bottleneck."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Literal, NamedTuple

from streamload.text import counted
from streamload.totals import Event, Totals
from streamload.workers.launchers import processors_of_rank

# Shorter runs are not judged: the pipeline is still filling.
_LEAST_S, _LEAST_BATCHES = 1.0, 5
# The step is the bottleneck if the loop waits for less than this share of its time.
_SMALL_WAIT = 0.05
# The verdict mentions a first batch that took longer than this, and longer than the rest of the run.
_LATE_S = 5.0


class Machine(NamedTuple):
    """The processors of a run.

    Attributes:
        workers: number of workers per feeder; 0 if the trainer makes the batches.
        processors: number of processors for this rank, or for each remote feeder.
        all_processors: the machine's number of processors; 0 if the workers are on other machines.
    """

    workers: int
    processors: int
    all_processors: int


class Limit(NamedTuple):
    """The bottleneck of a run.

    Attributes:
        stage: "step" is the user's own code between two batches; "work" decoding, transforms and collating; "network"
            fetching; "memory" a full `memory_budget`; "scan" reading tar headers; "machine" other processes on this
            machine; "unknown" too short a run.
        sentence: the stage, the supporting figure, and any remedy.
    """

    stage: Literal["unknown", "step", "work", "network", "memory", "scan", "machine"]
    sentence: str


def find_limit(totals: Totals, machine: Machine) -> Limit:
    """Return the bottleneck of a run; `totals` exclude the first batch, like `Statistics.settled`."""
    total_s = totals["loop_worked_s"] + totals["loop_waited_s"]
    batches = int(totals["batches"])
    if total_s < _LEAST_S or batches < _LEAST_BATCHES or not totals["samples"]:
        run = f"{counted(batches, 'batch')} after the first one in {total_s:.1f} s"
        return Limit("unknown", f"nothing visible yet: {run} is too short a run to judge")
    share = totals["loop_waited_s"] / total_s
    if share < _SMALL_WAIT:
        return Limit("step", f"the training step: after the first batch the loop waits {share:.1%} of its time")
    waits = f"the loop waits {share:.0%} of its time"
    match next(iter(totals.parts("awaited_s")), "work"):
        case "network":
            return Limit("network", _network(totals, waits))
        case "memory":
            figure = f"it has no room for the next part, and {waits}"
            return Limit("memory", f"memory_budget: {figure}; a larger memory_budget fetches further ahead")
        case "scan":
            figure = f"{waits} while shards without an index are scanned"
            return Limit("scan", f"reading tar headers: {figure}; `streamload index` does that once")
    return _work(totals, machine, total_s, waits)


def _network(totals: Totals, waits: str) -> str:
    seconds, connection_s = max(1e-9, totals["feeder_s"]), max(1e-9, totals["connection_s"])
    answer_ms = 1000 * totals["answer_s"] / max(1.0, totals["answered_requests"])
    refused, requests = int(totals["throttled_requests"]), int(totals["requests"])
    return (
        f"the network: {connection_s / seconds:.0f} connections at {totals['fetched_bytes'] / connection_s / 1e6:,.1f} "
        f"MB/s each, {totals['fetched_bytes'] / seconds / 1e6:,.1f} MB/s in all; answers begin after {answer_ms:,.0f} "
        f"ms, {refused:,} of {counted(requests, 'request')} were refused, and {waits}; a disk cache serves later epochs"
    )


def _work(totals: Totals, machine: Machine, total_s: float, waits: str) -> Limit:
    busy_s = max(1e-9, totals["workers_busy_s"])
    delayed = totals["workers_delayed_s"] / busy_s
    own_s = sum(totals[f"{name}_processor_s"] for name in ("trainer", "feeder", "workers"))
    machine_s = total_s * machine.all_processors  # 0 if workers are elsewhere
    others_s = max(0.0, totals["machine_processor_s"] - own_s)
    if machine_s and delayed > 0.2 and others_s > 0.15 * machine_s:
        return Limit(
            "machine",
            f"this machine: other processes take {others_s / machine_s:.0%} of its processors, so workers wait "
            f"for a processor {delayed:.0%} of their time, and {waits}; run fewer other processes",
        )
    costs: list[tuple[float, str]] = [(totals["collate_s"], "collating"), (totals["scan_s"], "reading tar headers")]
    costs += [(seconds, f"decoding {name!r}") for name, seconds in totals.parts("decode_s").items()]
    costs += [(seconds, f"the transform ({name})") for name, seconds in totals.parts("transform_s").items()]
    seconds, costliest = max(costs)
    figure = f"{costliest} is {seconds / max(1e-9, sum(each for each, _ in costs)):.0%} of the work"
    if costliest == "reading tar headers":
        return Limit("scan", f"{figure}, and {waits}; `streamload index` does that once")
    if not machine.workers:
        advice = f"num_workers={machine.processors} would make the batches during the step"
        return Limit("work", f"{figure}, which this process does itself, and {waits}; {advice}")
    asleep = 1 - totals["workers_processor_s"] / busy_s - delayed
    advice = "make it cheaper, or do it once with `streamload map`"
    if asleep > 0.5:
        advice = f"busy workers are off the processors {asleep:.0%} of the time (disk, server, sleep): add workers"
    elif machine.workers < machine.processors:
        advice = f"num_workers={machine.processors} would use all processors"
    busy = min(1.0, busy_s / max(1e-9, totals["worker_s"]))
    workers = counted(machine.workers, "worker")
    return Limit("work", f"{figure}: {workers} are busy {busy:.0%} of the time, and {waits}; {advice}")


_PER_SECOND_OF_STAT = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds that one stage worked and waited, summed over processes and connections."""

    worked_s: float
    waited_s: float


class Statistics:
    """Counts and durations of a loader's run so far, or since earlier statistics.

    Attributes:
        samples: number delivered to the loop.
        batches: number delivered to the loop.
        payload_bytes: bytes of the fields that were read, as stored.
        first_batch_s: the wait for the first batch, part of `stages["loop"].waited_s`.
        skipped_samples: number of samples that failed and were skipped or replaced (`on_error`).
        restarted_workers: number of workers that died and were replaced; a feeder that died counts as one.
        fetched_bytes: bytes from remote storage, before decompression.
        requests: number of requests for ranges of shards.
        failed_requests: number of requests that failed and were retried.
        stages: seconds by stage: "plan" (order and index), "fetch" (all connections), "scan" (tar headers), "decode"
            (all workers; its wait is for tasks), "transform", "collate" (all workers), "loop" (the user's code between
            batches).
        limit: the bottleneck's stage, and the sentence of `verdict`.
        verdict: the bottleneck and any remedy, in one sentence.
        skipped_members: number of skipped members, by reason, and of missing end-of-archive markers, in scanned shards.
        totals: sums by name, as in `as_dict`.
        settled: totals without the first batch, whose time includes the start of processes; the basis of the verdict.
        machine: the processors of the run.
    """

    def __init__(self, totals: Totals, settled: Totals, skipped_members: Mapping[str, int], machine: Machine) -> None:
        self.totals, self.settled, self.skipped_members, self.machine = totals, settled, skipped_members, machine
        self.samples, self.batches = int(totals["samples"]), int(totals["batches"])
        self.payload_bytes = int(totals["payload_bytes"])
        self.first_batch_s = totals["first_batch_s"]
        self.skipped_samples = int(totals["skipped_samples"])
        self.restarted_workers = int(totals["restarted_workers"])
        self.fetched_bytes, self.requests = int(totals["fetched_bytes"]), int(totals["requests"])
        self.failed_requests = int(totals["throttled_requests"] + totals["broken_requests"])
        self.stages: Mapping[str, Stage] = {
            "plan": Stage(totals["plan_s"], 0.0),
            "fetch": Stage(totals["connection_s"] - totals["answer_s"], totals["answer_s"]),
            "scan": Stage(totals["scan_s"], 0.0),
            "decode": Stage(totals["decode_s"], totals["workers_waited_s"]),
            "transform": Stage(totals["transform_s"], 0.0),
            "collate": Stage(totals["collate_s"], 0.0),
            "loop": Stage(totals["loop_worked_s"], totals["loop_waited_s"]),
        }
        self.limit = Limit("unknown", "nothing yet: no batch has been delivered")
        if self.batches:
            self.limit = find_limit(settled, machine)
            if self.first_batch_s >= max(_LATE_S, settled["loop_worked_s"] + settled["loop_waited_s"]):
                sentence = f"{self.limit.sentence}; the first batch came after {self.first_batch_s:.1f} s"
                self.limit = self.limit._replace(sentence=sentence)
        self.verdict = self.limit.sentence

    def since(self, earlier: Statistics) -> Statistics:
        """Return the difference from earlier statistics of the same loader, such as those of the previous epoch.

        `skipped_members` stays that of the whole run.
        """
        totals, settled = self.totals.since(earlier.totals), self.settled.since(earlier.settled)
        return Statistics(totals, settled, self.skipped_members, self.machine)

    def as_dict(self) -> dict[str, float]:
        """Return flat numbers by name, for TensorBoard, Weights & Biases or a log.

        Names end in a unit; `decode_s/jpg` is the share of `decode_s` for `jpg`. The numbers are sums over the loader's
        life; `now.since(before).as_dict()` returns the sums of an interval.
        """
        return dict(sorted(self.totals.items()))

    def __repr__(self) -> str:
        totals = self.totals
        delivered = f"{counted(self.samples, 'sample')} in {counted(self.batches, 'batch')}"
        lines = [f"{delivered}, {self.payload_bytes / 1e6:.1f} MB read"]
        for name, stage in self.stages.items():
            if name == "fetch" and not self.requests:
                continue
            first = f", {self.first_batch_s:.3f} s of it for the first batch" if name == "loop" else ""
            lines.append(f"  {name:<10} worked {stage.worked_s:8.3f} s   waited {stage.waited_s:8.3f} s{first}")
            parts = list(totals.parts(f"{name}_s").items())[:3]
            lines += [f"    {part:<8} {seconds:15.3f} s" for part, seconds in parts]
        names = ("trainer", "feeder", "workers")
        lines.append("  processors " + ", ".join(f"{name} {totals[f'{name}_processor_s']:.3f} s" for name in names))
        if self.requests:
            failed = f", {self.failed_requests} of them failed" if self.failed_requests else ""
            lines.append(f"  fetched {self.fetched_bytes / 1e6:.1f} MB in {counted(self.requests, 'request')}{failed}")
        if totals["cached_bytes"]:
            lines.append(f"  cached {totals['cached_bytes'] / 1e6:.1f} MB read from the disk cache")
        if self.skipped_members:
            lines.append("  members skipped: " + ", ".join(f"{n} {why}" for why, n in self.skipped_members.items()))
        if self.skipped_samples:
            lines.append(f"  samples skipped: {self.skipped_samples}")
        if self.restarted_workers:
            lines.append(f"  workers restarted: {self.restarted_workers}")
        return "\n".join([*lines, f"  limited by {self.verdict}"])


def _machine_processor_s() -> float:
    """Return the busy seconds of this machine's processors since boot; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError), open("/proc/stat", "rb") as stat:
        user, nice, system, _, _, irq, softirq, steal = map(int, stat.readline().split()[1:9])
        return (user + nice + system + irq + softirq + steal) / _PER_SECOND_OF_STAT
    return 0.0


@dataclass(slots=True)
class Meter:
    """Sum the trainer's own measurements, and its feeders' reports, over all passes.

    Attributes:
        totals: the sums of the trainer itself.
        events: the events of the trace being recorded, or None.
    """

    workers: int = 0
    totals: Totals = field(default_factory=Totals)
    events: list[Event] | None = None
    _of_feeder: Totals = field(default_factory=Totals)
    _of_earlier_feeders: Totals = field(default_factory=Totals)
    _first: Totals | None = None
    _skipped: Mapping[str, int] = field(default_factory=dict)
    _feeder: weakref.ref[object] | None = None
    _processor_s: float = field(default_factory=process_time)
    _machine_s: float = field(default_factory=_machine_processor_s)

    def record_totals(self, totals: Totals | None, skipped_members: Mapping[str, int], feeder: object) -> None:
        """Record a feeder's sums so far."""
        if self._feeder is None or self._feeder() is not feeder:
            self._of_earlier_feeders.add(self._of_feeder)
            self._of_feeder, self._feeder = Totals(), weakref.ref(feeder)
        if totals is not None:
            self._of_feeder = Totals(totals)
        if skipped_members:  # the largest count, since two feeders skip the same members
            self._skipped = Counter(self._skipped) | Counter(skipped_members)

    def add_batch(self, samples: int) -> None:
        """Count a batch delivered to the loop."""
        self.totals["samples"] += samples
        self.totals["batches"] += 1

    def add_time(self, kind: Literal["step", "wait"], seconds: float) -> None:
        """Add the duration of the loop's step, or of its wait, for the batch counted last."""
        self.totals["loop_worked_s" if kind == "step" else "loop_waited_s"] += seconds
        if self.events is not None:
            batch = int(self.totals["batches"]) - 1
            self.events.append(Event(kind, "loop", perf_counter() - seconds, seconds, {"batch": batch}))
        if kind == "wait" and self._first is None:
            self.totals["first_batch_s"] = seconds
            self._first = self._now()

    def statistics(self, skipped_samples: int, processors_elsewhere: int | None = None) -> Statistics:
        """Return the statistics so far.

        `processors_elsewhere` is each remote feeder's number of processors; None for local feeders.
        """
        self.totals["skipped_samples"] = skipped_samples
        now = self._now()
        settled = now.since(self._first) if self._first is not None else Totals()
        all_processors = (os.cpu_count() or 1) if processors_elsewhere is None else 0
        machine = Machine(self.workers, processors_elsewhere or processors_of_rank(), all_processors)
        return Statistics(now, settled, dict(self._skipped), machine)

    def _now(self) -> Totals:
        self.totals["trainer_processor_s"] = process_time() - self._processor_s
        self.totals["machine_processor_s"] = _machine_processor_s() - self._machine_s
        return Totals(self.totals).add(self._of_earlier_feeders).add(self._of_feeder)
