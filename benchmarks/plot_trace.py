"""Draw a trace of `StreamLoader.trace` as Perfetto shows it: `python benchmarks/plot_trace.py run.json trace.png`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {"step": "#4c956c", "wait": "#d1495b", "task": "#30638e", "scan": "#8d6a9f", "fetch": "#edae49"}


def draw(trace: Path, picture: Path) -> None:
    """Draw each line of a trace, in its order, with a colour for each kind of event."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            bars[event["tid"], event["name"]].append((event["ts"] / 1e6, event["dur"] / 1e6))
    tracks = sorted(names)
    figure, axes = plt.subplots(figsize=(11, 0.32 * len(tracks) + 1.1))
    for (track, kind), spans in bars.items():
        axes.broken_barh(spans, (tracks.index(track) - 0.4, 0.8), color=COLOURS[kind], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(tracks)), [names[track] for track in tracks], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    kinds = [kind for kind in COLOURS if any(kind == each for _, each in bars)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
    axes.legend(handles, kinds, ncol=len(kinds), loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(picture, dpi=90)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
