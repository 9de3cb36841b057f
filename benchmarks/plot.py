"""A picture of the speed table: how many samples a second each loader gives, of what streamload gives."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from peers import CEILINGS, OWN_FUNCTIONS, STREAMLOAD
from results import Results

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

OURS, THEIRS, LIMIT = "#1a6e9e", "#b9c3ca", "#e8a33d"
COLOURS = {STREAMLOAD: OURS, OWN_FUNCTIONS: OURS} | dict.fromkeys(CEILINGS, LIMIT)


def plot(results: Results, path: Path) -> None:
    """Write a PNG with a row of bars for each workload, on a logarithmic scale."""
    workloads = results.workloads()
    heights = [len(_bars(results, workload)) for workload in workloads]
    figure, panels = plt.subplots(
        len(workloads), 1, figsize=(8.5, 0.27 * sum(heights) + 0.75 * len(workloads)), squeeze=False,
        sharex=True, gridspec_kw={"height_ratios": heights}, layout="constrained",
    )  # fmt: skip
    for panel, workload in zip(panels[:, 0], workloads, strict=True):
        bars = _bars(results, workload)
        colours = [COLOURS.get(loader, THEIRS) for loader, _, _ in bars]
        drawn = panel.barh([loader for loader, _, _ in bars], [share for _, share, _ in bars], color=colours)
        labels = [f" {share:.{2 if share >= 0.095 else 3}f} x   ({rate:,.0f}/s)" for _, share, rate in bars]
        for text in panel.bar_label(drawn, labels, fontsize=8, padding=2):
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        panel.invert_yaxis()
        panel.set_xscale("log")
        panel.set_title(workload, loc="left", fontsize=11, fontweight="bold")
        panel.tick_params(axis="y", length=0, labelsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.axvline(1, color=OURS, linewidth=0.8, linestyle=":", zorder=0)
    last = panels[-1, 0]
    shares = [share for workload in workloads for _, share, _ in _bars(results, workload)]
    last.set_xlim(min(shares) / 2, max(shares) * 5)  # room for the labels
    last.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    last.xaxis.set_minor_formatter(NullFormatter())
    last.set_xlabel("samples per second, of streamload's in the same round (median; logarithmic)", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(results: Results, workload: str) -> list[tuple[str, float, float]]:
    """Loader, its rate as a share of streamload's, and its rate; those that failed are left out."""
    found = []
    for loader in results.loaders(workload):
        share, rate = results.ratio(workload, loader, STREAMLOAD), results.median(workload, loader, "rate")
        if share is not None and rate is not None:
            found.append((loader, share, rate))
    return found
