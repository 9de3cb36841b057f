"""A picture of the plan for many ranks: what is fetched for each wanted byte, and what the loss of a feeder costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from scale_model import Cluster, loss
from scale_traffic import Reader, times_expected

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from scale import Simulated

OURS, THEIRS, LIMIT = "#1a6e9e", "#b9c3ca", "#e8a33d"
RANKS, FEEDERS = 1_024, (1, 2, 4, 8)
AHEAD = (1, 4, 16, 40, 80, 120, 160, 200, 240)


def plot(found: Sequence[Simulated], path: Path, *, restart_s: float) -> None:
    """Write a PNG of three panels."""
    figure, (times, feeders, losses) = plt.subplots(1, 3, figsize=(13.5, 3.8), layout="constrained")
    bars = times.barh([one.layout.name.replace(", ", ",\n") for one in found], [one.epoch.times for one in found])
    for bar, one in zip(bars, found, strict=True):
        bar.set_color(OURS if one.epoch.times < 1.1 else LIMIT)
    times.bar_label(bars, [f" {one.epoch.times:.2f} x" for one in found], fontsize=8)
    times.set_xscale("log")
    times.set_xlim(0.8, 3 * max(one.epoch.times for one in found))
    times.invert_yaxis()
    times.set_title("bytes fetched for each wanted, by the real plan", loc="left", fontsize=10)
    for lanes, colour in ((RANKS, LIMIT), (4 * RANKS, OURS)):
        readers = [Reader(RANKS, 256, lanes, 10_000, count) for count in FEEDERS]
        values = [times_expected(reader, 10**9, 64_000) for reader in readers]
        feeders.plot(FEEDERS, values, "o-", color=colour, label=f"{lanes:,} lanes")
    feeders.set_title(f"the same, by feeders of each of {RANKS:,} ranks", loc="left", fontsize=10)
    feeders.set_xticks(FEEDERS)
    feeders.set_xlabel("remote feeders of a rank", fontsize=9)
    feeders.set_ylim(0)
    feeders.legend(frameon=False, fontsize=8)
    _plot_losses(losses, restart_s)
    for panel in (times, feeders, losses):
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    for axis in (times.xaxis, losses.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_losses(panel: plt.Axes, restart_s: float) -> None:
    cluster, reader = Cluster(), Reader(RANKS, 256, 4 * RANKS, 10_000, 4)
    kinds = (("its process", cluster.process_lost_s, OURS), ("its node", cluster.node_lost_s, LIMIT))
    for what, noticed_s, colour in kinds:
        stalls = [
            loss(replace(cluster, batches_ahead=ahead), reader, noticed_s + restart_s).stalled_s for ahead in AHEAD
        ]
        panel.plot(AHEAD, stalls, "o-", color=colour, label=what)
    panel.set_title("a remote feeder dies: seconds that all ranks wait", loc="left", fontsize=10)
    panel.set_xlabel("batches ahead (of 0.1 s)", fontsize=9)
    panel.set_ylim(0)
    panel.legend(frameon=False, fontsize=8)
