"""What streamload is meant to reach, and what it did."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from peers import AT_ONCE, CEILING, OWN_FUNCTIONS, PEERS, STREAMLOAD
from results import Results

Comparison = Callable[[float, float], bool]
SIGNS: dict[str, Comparison] = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Goal:
    """A measured value and the bound it is held against; None if it was not measured."""

    text: str
    value: float | None
    sign: str
    bound: float

    def line(self) -> str:
        """Met or not, and by how much."""
        if self.value is None:
            return f"not measured  {self.text} {self.sign} {self.bound:g}"
        met = "met    " if SIGNS[self.sign](self.value, self.bound) else "NOT MET"
        return f"{met}  {self.text}: {self.value:.3g} ({self.sign} {self.bound:g})"


def _ahead_of(results: Results, workload: str, peers: list[str]) -> float | None:
    """How many times the rate of the best of these peers streamload has."""
    ratios = [ratio for peer in peers if (ratio := results.ratio(workload, STREAMLOAD, peer)) is not None]
    return min(ratios, default=None)


def _beside_best(results: Results, workload: str, *, shards_only: bool = False) -> float | None:
    peers = results.peers(workload)
    if shards_only:
        peers = [peer for peer in peers if PEERS[peer].same_decoding and PEERS[peer].reads_shards]
    return _ahead_of(results, workload, peers)


def _speed(results: Results) -> Iterator[Goal]:
    bounds = {"images": (0.90, 1.5, 1.0, 0.95), "tiny": (0.80, 40, 4, 0.80), "tokens": (0.70, 30, 7, 0.50)}
    for workload, (ceiling, webdataset, best, own) in bounds.items():
        if workload not in results.workloads():
            continue
        yield Goal(f"{workload}, of the ceiling", results.ratio(workload, STREAMLOAD, CEILING), ">=", ceiling)
        at_once = results.ratio(workload, STREAMLOAD, AT_ONCE)
        yield Goal(f"{workload}, of the ceiling of processes that run at once", at_once, ">=", ceiling)
        own_functions = results.ratio(workload, OWN_FUNCTIONS, AT_ONCE)
        yield Goal(f"{workload}, the user's functions, of the same ceiling", own_functions, ">=", own)
        times = results.ratio(workload, STREAMLOAD, "WebDataset")
        yield Goal(f"{workload}, times WebDataset", times, ">=", webdataset)
        beside = _beside_best(results, workload, shards_only=True)
        yield Goal(f"{workload}, times the best peer that finds the samples itself", beside, ">=", best)
        yield Goal(f"{workload}, times the best peer of all", _beside_best(results, workload), ">=", best)
        yield Goal(f"{workload}, first batch, s", results.median(workload, STREAMLOAD, "first_batch_s"), "<", 0.8)
    if "images" in results.workloads():
        yield Goal("images, times LitData", results.ratio("images", STREAMLOAD, "LitData"), ">=", 1.2)


def _cost(results: Results) -> Iterator[Goal]:
    for workload in ("tiny", "tokens"):
        if workload in results.workloads():
            ratios = [
                ratio
                for peer in results.peers(workload)
                if (ratio := results.ratio(workload, STREAMLOAD, peer, "cpu_s_per_1000")) is not None
            ]
            yield Goal(f"{workload}, CPU per sample, of the most thrifty peer's", max(ratios, default=None), "<", 1)
    if "images" not in results.workloads():
        return
    cpu = results.ratio("images", STREAMLOAD, CEILING, "cpu_s_per_1000")
    yield Goal("images, CPU per sample, of the ceiling's", cpu, "<=", 1.1)
    share = results.median("images", STREAMLOAD, "trainer_cpu")
    yield Goal("images, trainer's process, of a core", share, "<", 0.03)
    threads = max(results.values("images", STREAMLOAD, "threads_more"), default=None)
    yield Goal("images, threads more in the trainer's process", threads, "<=", 0)
    own = results.peak_mb("images", STREAMLOAD)
    for peer in ("LitData", "WebDataset"):
        other = results.peak_mb("images", peer)
        ratio = own / other if own is not None and other is not None else None
        yield Goal(f"images, peak PSS, of {peer}'s", ratio, "<", 1)


def goals(results: Results) -> list[Goal]:
    """All that can be held against what was measured."""
    busy = [Goal("tiny, beside a busy trainer, of what it allows", results.busy_share(STREAMLOAD), ">=", 0.9)]
    return [*_speed(results), *(busy if results.busy else []), *_cost(results)]
