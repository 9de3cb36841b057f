"""The verdict on a run: what the loop waits for, the figure that shows it, and what to change."""

from __future__ import annotations

from typing import Literal, NamedTuple

from streamload.text import counted
from streamload.totals import Totals

_SHORT_S = 2.0
_FEW_BATCHES = 20
_SHORT_WITH_FEW_BATCHES_S = 10.0
"""Until then, filling the pipeline is so much of a run that nothing can be said of the rest."""

_SMALL_WAIT = 0.05


class Machine(NamedTuple):
    """Where a run takes place.

    Attributes:
        workers: of the loader; 0 where the trainer makes the batches.
        processors: that this rank may use.
        all_processors: of the machine; 0 if the workers are on other machines.
    """

    workers: int
    processors: int
    all_processors: int


class Limit(NamedTuple):
    """What limits a run.

    Attributes:
        stage: "step" is the user's own code between two batches; "work" decoding, transforms and collating;
            "memory" room in `memory_budget`; "scan" reading tar headers; "machine" other processes on its processors;
            "unknown" too short a run.
        sentence: for people: with the figure behind it, and what to change.
    """

    stage: Literal["unknown", "step", "work", "network", "memory", "scan", "machine"]
    sentence: str


def find_limit(totals: Totals, machine: Machine) -> Limit:
    """Return what limits a run.

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
    waits = f"the loop waits {share:.0%} of its time"
    reason = next(iter(totals.parts("awaited_s")), "work")
    if reason == "network":
        return Limit("network", _network(totals, waits))
    if reason == "memory":
        return Limit(
            "memory",
            f"memory_budget: what is fetched next finds no room in it, and {waits}; a larger memory_budget fetches "
            "further ahead",
        )
    if reason == "scan":
        return Limit(
            "scan",
            f"reading tar headers: {waits} while shards without an index are scanned; `streamload index` does that "
            "once",
        )
    return _work(totals, machine, total_s, waits)


def _network(totals: Totals, waits: str) -> str:
    seconds, connection_s = max(1e-9, totals["feeder_s"]), max(1e-9, totals["connection_s"])
    answer_ms = 1000 * totals["answer_s"] / max(1.0, totals["answered_requests"])
    refused, requests = int(totals["throttled_requests"]), int(totals["requests"])
    return (
        f"the network: {connection_s / seconds:.0f} connections at {totals['fetched_bytes'] / connection_s / 1e6:,.1f} "
        f"MB/s each, {totals['fetched_bytes'] / seconds / 1e6:,.1f} MB/s in all; answers begin after {answer_ms:,.0f} "
        f"ms, {refused:,} of {counted(requests, 'request')} were refused, and {waits}; a disk cache serves later "
        "epochs, and fewer or smaller fields fetch less"
    )


def _work(totals: Totals, machine: Machine, total_s: float, waits: str) -> Limit:
    busy_s = max(1e-9, totals["workers_busy_s"])
    delayed = totals["workers_delayed_s"] / busy_s
    own_s = sum(totals[f"{name}_processor_s"] for name in ("trainer", "feeder", "workers"))
    others_s = max(0.0, totals["machine_processor_s"] - own_s)
    if machine.all_processors and delayed > 0.2 and others_s > 0.15 * total_s * machine.all_processors:
        return Limit(
            "machine",
            f"this machine: other processes take {others_s / total_s / machine.all_processors:.0%} of its processors, "
            f"so workers that could run stand still {delayed:.0%} of their time, and {waits}; run fewer of them",
        )
    costs: list[tuple[float, str]] = [(totals["collate_s"], "collating"), (totals["scan_s"], "reading tar headers")]
    costs += [(seconds, f"decoding {name!r}") for name, seconds in totals.parts("decode_s").items()]
    costs += [(seconds, f"the transform ({name})") for name, seconds in totals.parts("transform_s").items()]
    seconds, costliest = max(costs)
    figure = f"{costliest} is {seconds / max(1e-9, sum(each for each, _ in costs)):.0%} of the work"
    if costliest == "reading tar headers":
        return Limit("scan", f"{figure}, and {waits}; `streamload index` does that once")
    if not machine.workers:
        advice = f"num_workers={machine.processors} would make the batches beside the step"
        return Limit("work", f"{figure}, which this process does itself, and {waits}; {advice}")
    asleep = 1 - totals["workers_processor_s"] / busy_s - delayed
    if asleep > 0.5:
        advice = f"they are off the processors {asleep:.0%} of that (a disk, a server, sleep): more workers help"
    elif machine.workers < machine.processors:
        advice = f"num_workers={machine.processors} would use all processors"
    else:
        advice = "make it cheaper, or do it once with `streamload map`"
    busy = min(1.0, busy_s / max(1e-9, totals["worker_s"]))
    workers = counted(machine.workers, "worker")
    return Limit("work", f"{figure}: {workers} are busy {busy:.0%} of the time, and {waits}; {advice}")
