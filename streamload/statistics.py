"""What each stage of a run did and what it waited for, and the verdict: what limits this run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from streamload.decode.tasks import RowsDone, ScanDone
from streamload.text import counted

__all__ = ["FeederTotals", "Meter", "Statistics"]

_SHORT_S = 2.0
_FEW_BATCHES = 20
_SHORT_WITH_FEW_BATCHES_S = 10.0
"""Until then, starting processes and filling the pipeline is so much of a run that nothing can be said of the rest."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds that one stage worked and waited, added up over those who did the work."""

    worked_s: float
    waited_s: float


@dataclass(slots=True)
class FeederTotals:
    """What a feeder adds up."""

    payload_bytes: int = 0
    plan_s: float = 0.0
    scan_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0
    workers_waited_s: float = 0.0
    restarted_workers: int = 0
    fetched_bytes: int = 0
    requests: int = 0
    failed_requests: int = 0
    skipped_members: Mapping[str, int] = field(default_factory=dict)

    def add(self, done: RowsDone | ScanDone) -> None:
        """Take in a finished task."""
        seconds = done.seconds
        if isinstance(done, RowsDone):
            self.payload_bytes += done.payload_bytes
        self.scan_s += seconds.scan
        self.decode_s += seconds.decode
        self.transform_s += seconds.transform
        self.collate_s += seconds.collate
        self.workers_waited_s += seconds.waited

    def plus(self, other: FeederTotals) -> FeederTotals:
        """What two feeders, one after the other, have added up; members that both have skipped are the same ones."""
        names = {each.name for each in fields(self)} - {"skipped_members"}
        reasons = {**self.skipped_members, **other.skipped_members}
        return FeederTotals(
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            skipped_members={
                reason: max(self.skipped_members.get(reason, 0), other.skipped_members.get(reason, 0))
                for reason in reasons
            },
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a loader has done so far.

    Attributes:
        samples: delivered to the loop.
        batches: delivered to the loop.
        payload_bytes: bytes of the fields that were read, as stored.
        stages: by name. "plan" (the feeder: order and index), "scan" (reading tar headers), "decode", "transform" and
            "collate" (the workers, added up; they wait for tasks), "loop" (the user's own code between two batches;
            its `waited_s` is what it waited for batches).
        first_batch_s: what the loop waited for the very first batch, part of `stages["loop"].waited_s`; the verdict
            leaves it out.
        skipped_members: members of shards that are no part of a sample, by reason, for shards scanned in this run.
        skipped_samples: samples that failed and were left out or replaced (`on_error`).
        restarted_workers: workers that died and were replaced; a feeder that died counts as one.
        fetched_bytes: what has arrived from remote storage, before it was decompressed.
        requests: for ranges of shards.
        failed_requests: how many of these failed and were made again.
    """

    samples: int
    batches: int
    payload_bytes: int
    stages: Mapping[str, Stage]
    first_batch_s: float
    skipped_members: Mapping[str, int]
    skipped_samples: int
    restarted_workers: int
    fetched_bytes: int
    requests: int
    failed_requests: int

    @property
    def verdict(self) -> str:
        """What limits this run, in one sentence, with what to do about it."""
        loop = self.stages["loop"]
        waited_s = loop.waited_s - self.first_batch_s
        total_s = loop.worked_s + waited_s
        if not self.batches:
            return "nothing yet: no batch has been delivered"
        if total_s < (_SHORT_WITH_FEW_BATCHES_S if self.batches < _FEW_BATCHES else _SHORT_S):
            few = counted(self.batches, "batch")
            return (
                f"nothing that shows yet: {few} in {total_s:.1f} s are too short a run to judge, as starting is in it"
            )
        share = waited_s / total_s
        if share < 0.05:
            return f"the training loop: after the first batch it waits for data {share:.1%} of its time"
        waits = f"after the first batch the loop waits {share:.1%} of its time"
        work = {name: self.stages[name].worked_s for name in ("scan", "decode", "transform", "collate")}
        busiest = max(work, key=lambda name: work[name])
        if self.stages["decode"].waited_s > sum(work.values()):
            where = "fetching" if self.requests else "the feeder or the storage"
            return f"{where}: {waits}, and the workers wait as well"
        return f"the workers: {waits}, most of the work is {busiest}; use more workers"

    def __str__(self) -> str:
        given = f"{counted(self.samples, 'sample')} in {counted(self.batches, 'batch')}"
        lines = [f"{given}, {self.payload_bytes / 1e6:.1f} MB read"]
        lines += [
            f"  {name:<10} worked {stage.worked_s:8.3f} s   waited {stage.waited_s:8.3f} s"
            for name, stage in self.stages.items()
        ]
        if self.first_batch_s:
            lines[-1] += f", {self.first_batch_s:.3f} s of it for the first batch"
        if self.requests:
            failed = f", {self.failed_requests} of them failed" if self.failed_requests else ""
            lines.append(f"  fetched {self.fetched_bytes / 1e6:.1f} MB in {counted(self.requests, 'request')}{failed}")
        if self.skipped_members:
            lines.append("  members skipped: " + ", ".join(f"{n} {r}" for r, n in self.skipped_members.items()))
        if self.skipped_samples:
            lines.append(f"  samples skipped: {self.skipped_samples}")
        if self.restarted_workers:
            lines.append(f"  workers restarted: {self.restarted_workers}")
        lines.append(f"  limited by {self.verdict}")
        return "\n".join(lines)


@dataclass(slots=True)
class Meter:
    """What the trainer's side adds up over all passes.

    Attributes:
        totals: of the present feeder.
        earlier: of those before it.
    """

    samples: int = 0
    batches: int = 0
    loop_worked_s: float = 0.0
    loop_waited_s: float = 0.0
    first_batch_s: float = 0.0
    restarted_feeders: int = 0
    totals: FeederTotals = field(default_factory=FeederTotals)
    earlier: FeederTotals = field(default_factory=FeederTotals)
    _feeder: weakref.ref[object] | None = None

    def note_totals(self, totals: FeederTotals, feeder: object) -> None:
        """Note what a feeder has added up so far."""
        if self._feeder is None or self._feeder() is not feeder:
            self.earlier, self._feeder = self.earlier.plus(self.totals), weakref.ref(feeder)
        self.totals = totals

    def add_wait(self, waited_s: float) -> None:
        """The loop has got a batch, which is counted already, and has waited so long for it."""
        self.loop_waited_s += waited_s
        if self.batches == 1:
            self.first_batch_s = waited_s

    def statistics(self, skipped_samples: int) -> Statistics:
        """The figures as the user gets them."""
        totals = self.earlier.plus(self.totals)
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
            first_batch_s=self.first_batch_s,
            skipped_members=dict(totals.skipped_members),
            skipped_samples=skipped_samples,
            restarted_workers=totals.restarted_workers + self.restarted_feeders,
            fetched_bytes=totals.fetched_bytes,
            requests=totals.requests,
            failed_requests=totals.failed_requests,
        )
