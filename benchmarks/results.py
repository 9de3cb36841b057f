"""What all runs found: values by workload, loader and round, failures among them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from peers import CEILINGS, OWN_FUNCTIONS, PEERS, STREAMLOAD

Run = dict[str, float]


@dataclass
class Results:
    """Attributes:
    runs: for each workload and loader, the run of each round.
    memory: for each workload and loader, one run.
    busy: for each loader, the run of each round.
    failures: for a part of the benchmark, a workload and a loader, why it failed there.
    """

    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    memory: dict[str, dict[str, Run]] = field(default_factory=dict)
    busy: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def workloads(self) -> list[str]:
        """Those that were measured, in order."""
        return list(self.runs)

    def loaders(self, workload: str) -> list[str]:
        """Those that were tried on it, the ones that failed included, in order."""
        tried = {*self.runs.get(workload, ()), *(loader for _, at, loader in self.failures if at == workload)}
        return [loader for loader in PEERS if loader in tried]

    def failure(self, part: str, workload: str, loader: str) -> str | None:
        """Why a loader has no result in a part of the benchmark: it failed there, or before."""
        earlier = ("prepare", part) if part == "speed" else ("prepare", "speed", part)
        return next((why for at in earlier if (why := self.failures.get((at, workload, loader)))), None)

    def values(self, workload: str, loader: str, name: str) -> list[float]:
        """One of the measures in every round; empty if the loader failed."""
        return [run[name] for run in self.runs.get(workload, {}).get(loader, ())]

    def median(self, workload: str, loader: str, name: str) -> float | None:
        """The median over rounds; None if there is none."""
        values = self.values(workload, loader, name)
        return statistics.median(values) if values else None

    def ratio(self, workload: str, loader: str, other: str, name: str = "rate") -> float | None:
        """The median over rounds of a measure of `loader` divided by that of `other` in the same round."""
        pairs = list(zip(self.values(workload, loader, name), self.values(workload, other, name), strict=False))
        return statistics.median(one / another for one, another in pairs) if pairs else None

    def peak_mb(self, workload: str, loader: str) -> float | None:
        """Peak memory of the tree."""
        run = self.memory.get(workload, {}).get(loader)
        return run["peak_bytes"] / 1e6 if run else None

    def busy_share(self, loader: str) -> float | None:
        """Of the rate that the trainer's own work allows, the share it gets beside the loader: the median."""
        runs = self.busy.get(loader)
        return statistics.median(run["share"] for run in runs) if runs else None

    def peers(self, workload: str, allowed: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The other loaders that were measured on it."""
        ours = (STREAMLOAD, OWN_FUNCTIONS, *CEILINGS)
        return [loader for loader in self.loaders(workload) if loader not in ours and allowed(loader)]
