"""Results in Markdown: one table an answer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from peers import AT_ONCE, CEILING, CEILINGS, STREAMLOAD
from results import Results


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def speed_table(results: Results) -> str:
    """How many samples a second, and how soon the first batch."""
    rows = []
    for workload in results.workloads():
        for loader in results.loaders(workload):
            if failure := results.failure("speed", workload, loader):
                rows.append([workload, loader, f"failed: {failure}", "-", "-", "-"])
                continue
            ahead, ceiling = (
                results.ratio(workload, STREAMLOAD, loader),
                results.ratio(workload, loader, CEILING),
            )
            first = "-" if loader in CEILINGS else _spread(results.values(workload, loader, "first_batch_s"), 2)
            rate = _spread(results.values(workload, loader, "rate"), 0)
            rows.append([workload, loader, rate, _number(ahead, ".2f"), _number(ceiling, ".3f"), first])
    header = ["workload", "loader", "samples/s, median (range)", "streamload is x times", "share of ceiling"]
    return table([*header, "first batch, s"], rows)


def cost_table(results: Results) -> str:
    """What it costs: processor time, memory, what it does to the trainer's process, how it ends."""
    rows = []
    for workload in results.workloads():
        for loader in results.loaders(workload):
            if loader == AT_ONCE or results.failure("speed", workload, loader):
                continue
            cpu_ms = [1000 * value for value in results.values(workload, loader, "cpu_s_per_1000")]
            row = [workload, loader, _spread(cpu_ms, 1)]
            if loader in CEILINGS:
                rows.append([*row, "-", "-", "-", "-"])
                continue
            share = results.median(workload, loader, "trainer_cpu")
            threads = results.median(workload, loader, "threads_more")
            shutdown = results.median(workload, loader, "shutdown_s")
            row += [_number(results.peak_mb(workload, loader), ",.0f"), _number(share, ".1%")]
            rows.append([*row, _number(threads, ".0f"), _number(shutdown, ".2f")])
    header = ["workload", "loader", "CPU ms per 1,000 samples", "peak PSS, MB", "trainer's process, of a core"]
    return table([*header, "threads more", "shutdown, s"], rows)


def busy_table(results: Results) -> str:
    """The rate beside a trainer that works 5 ms in Python on each batch of tiny."""
    rows = []
    for loader in [loader for loader in results.loaders("tiny") if loader not in CEILINGS]:
        if runs := results.busy.get(loader):
            rates, shares = ([run[name] for run in runs] for name in ("batches_per_s", "share"))
            rows.append([loader, _spread(rates, 0), _spread(shares, 2)])
        elif failure := results.failure("busy", "tiny", loader):
            rows.append([loader, f"failed: {failure}", "-"])
    return table(["loader", "batches/s, median (range)", "share of what the step alone allows"], rows)
