"""10^9 samples in 10^5 shards on 1,024 ranks: what is real at that size is run, the rest is simulated.

The list of shards, the index, the plan and a loader of one rank run in full size, each in a process of its own; the
shards come from a server on this machine and have one content. What a thousand nodes do follows by arithmetic from
these costs and from what is assumed of the nodes (`Cluster` in scale_model.py). It prints Markdown:

    python benchmarks/scale.py                                                     # some minutes, 1 GB
    python benchmarks/scale.py --drawn-samples 1000000000 --plot docs/scale.png    # weights in full size: 5 GB
    python benchmarks/scale.py --quick                                             # a small dataset, some seconds
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from running import run_command
from scale_dataset import Scale, served, write_dataset
from scale_model import Cluster, Layout, Links, Loss, Measured, Start, layouts, links, loss, start
from scale_traffic import Reader, Traffic, times_expected, traffic
from servers.faults import FaultServer, Script

from streamload.order.plan import ShardCounts

FULL = Scale(shards=100_000, samples=10_000, ranks=1_024, batch_size=256)
QUICK = Scale(shards=240, samples=400, ranks=16, batch_size=16)
WINDOW, FEEDERS, SPARE = 10_000, 4, 1.25
ROWS_OF_ONE_LANE = 30_000
LONGEST_S = 280.0
ROUNDS = 3
"""Runs of what takes seconds, of which the fastest counts: others may use the machine too."""

PARTS = Path(__file__).with_name("scale_parts.py")
Found = dict[str, float]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


@dataclass(frozen=True)
class Simulated:
    """One layout: what its readers need by the real plan, and what follows."""

    layout: Layout
    first: Traffic
    later: Traffic
    epoch: Traffic
    expected: float
    start: Start
    links: Links


def measured_in_child(what: str, **arguments: Any) -> Found:
    """A measurement of scale_parts.py, in a fresh process."""
    return run_command([sys.executable, str(PARTS), what, json.dumps(arguments)], LONGEST_S)


def run_loader(server: FaultServer, scale: Scale, lanes: int) -> Found:
    """The first batch of a rank, and what the server saw until a little after it."""
    server.play(Script())
    url = f"{server.url}/data"
    found = measured_in_child("loader", url=url, scale=asdict(scale), lanes=lanes, rank=scale.ranks // 2)
    log = [path for _, path, _ in server.report().log]
    return found | {"index_requests": sum(path.endswith("index.json") for path in log) / 2}  # of two loaders


def simulate(scale: Scale, cluster: Cluster, measured: Measured, window: int) -> list[Simulated]:
    """All layouts, by the plan of the last feeder of the middle rank."""
    counts = ShardCounts.of([scale.samples] * scale.shards)
    middle = scale.total // 2 // (scale.ranks * scale.batch_size) * scale.ranks * scale.batch_size
    found = []
    for layout in layouts(scale.ranks, scale.batch_size, window, FEEDERS):
        reader = replace(layout.reader, rank=scale.ranks // 2, feeder=layout.reader.feeders - 1)
        reader_of_first = replace(reader, feeder=0) if reader.in_turn else reader
        own, turn = reader.rows_of_batch, reader_of_first.turn
        sizes = scale.samples, cluster.sample_bytes
        first = traffic(reader.plan(counts), *sizes, own, turn=turn)
        later = traffic(reader.plan(counts, start=middle), *sizes, own, turn=turn)
        epoch = traffic(reader.plan(counts), *sizes, ROWS_OF_ONE_LANE if reader.lanes == 1 else None, turn=turn)
        expected = times_expected(reader, scale.total, cluster.sample_bytes)
        begun = start(layout, cluster, measured, first)
        flows = links(layout, cluster, measured, scale.total, epoch.times)
        found.append(Simulated(layout, first, later, epoch, expected, begun, flows))
    return found


def losses(cluster: Cluster, ranks: int, batch_size: int, restart_s: float) -> list[tuple[str, Loss]]:
    """What dies, and what that costs."""
    alone, one_of_four = Reader(ranks, batch_size, ranks, WINDOW), Reader(ranks, batch_size, ranks, WINDOW, FEEDERS)
    deep = replace(cluster, batches_ahead=160)
    process, node = cluster.process_lost_s + restart_s, cluster.node_lost_s + restart_s
    many = cluster.ranks_of_node
    ahead = cluster.batches_ahead
    return [
        (f"the local feeder of a rank, {ahead} batches ahead", loss(cluster, alone, process, spare=SPARE)),
        (f"a remote feeder, its node lives, {ahead} ahead", loss(cluster, one_of_four, process, spare=SPARE)),
        (f"a node of {many} remote feeders, {ahead} ahead", loss(cluster, one_of_four, node, spare=SPARE, lost=many)),
        (f"the same, {deep.batches_ahead} ahead", loss(deep, one_of_four, node, spare=SPARE, lost=many)),
    ]


def real_tables(found: dict[str, Any], scale: Scale) -> list[str]:
    """What was run."""
    listing = found["listing"]
    lists = [
        ("`index.json`", f"{found['index_bytes'] / 1e6:.1f} MB"),
        ("all tables, for two members a sample", f"{found['table_bytes'] * scale.shards / 1e9:.1f} GB"),
        ("feeder: parse it", f"{listing['read_s']:.2f} s"),
        ("feeder: fetch, parse and list", f"{listing['list_s']:.2f} s, {listing['feeder_bytes'] / 1e6:.0f} MB held"),
        (
            "feeder: pack the listing for the trainer",
            f"{listing['send_s']:.2f} s, {listing['sent_bytes'] / 1e6:.1f} MB",
        ),
        ("trainer: take it", f"{listing['receive_s']:.2f} s, {listing['trainer_bytes'] / 1e6:.0f} MB held"),
        ("trainer: fingerprint, once for `state_dict`", f"{listing['fingerprint_s']:.2f} s"),
        ("feeder: where one table lies", f"{1e3 * listing['group_s']:.1f} ms"),
    ]
    plans = [
        [
            f"{lanes:,}",
            where,
            f"{1e3 * of['begin_s']:.0f} ms",
            f"{of['rows_per_s'] / 1e6:.2f} million",
            f"{of['held_bytes'] / 1e6:.1f} MB",
            f"{of['lanes_read']:.0f}",
            f"{of['first_shards']:.0f}",
        ]
        for lanes, where, of in found["plans"]
    ]
    draws = [
        [
            kind,
            f"{found['drawn_samples']:,}",
            f"{of['first_s']:.1f} s",
            *(f"{of[f'{what}_bytes_of_sample']:.1f}" for what in ("given", "held", "peak")),
        ]
        for kind, of in found["drawn"].items()
    ]
    starts = [
        [
            f"{lanes:,}",
            f"{of['opened_s']:.2f} s",
            f"{of['first_s']:.2f} s",
            f"{of['index_requests']:.0f}",
            f"{of['trainer_bytes'] / 1e6:.0f} MB",
            f"{of['feeder_bytes'] / 1e6:.0f} MB",
            f"{of['state_bytes']:.0f} bytes",
        ]
        for lanes, of in found["loaders"]
    ]
    return [
        table(("list and index", "cost"), lists),
        table(("lanes", "begins", "first batch planned", "rows/s", "memory", "lanes read", "shards in it"), plans),
        table(("drawn by", "samples", "first batch planned", "given, bytes a sample", "held", "at the peak"), draws),
        table(("lanes", "constructor", "first batch", "reads of the list", "trainer", "feeder", "state"), starts),
    ]


def simulated_tables(found: Sequence[Simulated], lost: Sequence[tuple[str, Loss]], cluster: Cluster) -> list[str]:
    """What follows."""
    needs = [
        [
            one.layout.name,
            f"{one.epoch.times:.2f} ({one.expected:.2f})",
            f"{one.links.bucket_bytes / 1e12:,.0f} TB",
            f"{one.epoch.shards:,}",
            f"{one.epoch.held_bytes / 1e9:.2f} GB",
            f"{one.first.parts} / {one.later.parts}",
        ]
        for one in found
    ]
    begins = [
        [
            one.layout.name,
            f"{one.start.index_requests:,}",
            f"{one.start.requests_of_node:,}",
            f"{one.start.requests:,}",
            f"{one.start.bytes_of_node / 1e9:.2f} GB",
            f"{one.start.seconds:.1f} s",
        ]
        for one in found
    ]
    flows = [
        [
            one.layout.name,
            *(
                f"{8 * value / 1e9:,.1f}"
                for value in (one.links.into_feeder_node, one.links.into_trainer_node, one.links.copied)
            ),
            f"{one.links.feeder_cores:.0f}",
            f"{one.links.trainer_cores:.1f}",
        ]
        for one in found
    ]
    deaths = [[what, f"{of.stalled_s:.1f} s", f"{of.made_again}", f"{of.full_again_s:.0f} s"] for what, of in lost]
    rank_s = cluster.restart_s
    deaths.append(["a node with ranks", f"{rank_s:.0f} s and the steps since the last state", "their batches", "-"])
    return [
        table(
            (
                "",
                "times fetched (by formula)",
                "bucket, an epoch",
                "shards of a reader",
                "parts held",
                "first batch, parts",
            ),
            needs,
        ),
        table(
            ("", "reads of the list", "requests of a feeder node", "requests in all", "bytes of a node", "first batch"),
            begins,
        ),
        table(
            (
                "Gbit/s",
                "bucket to feeder node",
                "feeders to trainer node",
                "into slots",
                "cores, all",
                "cores, trainer node",
            ),
            flows,
        ),
        table(("lost", "all ranks wait", "batches made again", "as far ahead as before after"), deaths),
    ]


def measure_plans(scale: Scale, window: int, seconds: float) -> list[tuple[int, str, Found]]:
    """Plans at several numbers of lanes: from the start, in the middle, and in the middle at another world size."""
    ranks, middle = scale.ranks, scale.total // 2 // (scale.ranks * scale.batch_size)
    more = ranks * 3 // 2
    places = [
        (f"rank {ranks // 2}", {"rank": ranks // 2, "start_batch": 0, "ranks": ranks}),
        ("in the middle", {"rank": ranks - 1, "start_batch": middle, "ranks": ranks}),
        (f"in the middle, of {more:,} ranks", {"rank": ranks, "start_batch": middle, "ranks": more}),
    ]
    cases = [(lanes, where, place) for lanes in (1, ranks, FEEDERS * ranks) for where, place in places]
    asked = [{"lanes": lanes, **place} for lanes, _, place in cases]
    found = measured_in_child("plans", scale=asdict(scale), window=window, seconds=seconds, cases=asked)
    numbered = [
        {name.split()[0]: value for name, value in found.items() if name.endswith(f" {number}")}
        for number in range(len(cases))
    ]
    return [(lanes, where, of) for (lanes, where, _), of in zip(cases, numbered, strict=True)]


def measure_real(scale: Scale, drawn_samples: int, window: int, *, quick: bool) -> dict[str, Any]:
    """Everything that is run in its full size."""
    ranks = scale.ranks
    of_draws = replace(scale, shards=max(1, drawn_samples // scale.samples))
    dataset = write_dataset(scale)
    with served(dataset) as server:
        rounds = range(1 if quick else ROUNDS)
        listings = [measured_in_child("listing", url=f"{server.url}/data") for _ in rounds]
        listing = min(listings, key=lambda one: one["list_s"])
        lanes_run = (ranks,) if quick else (ranks, FEEDERS * ranks, 1)
        loaders = [
            (lanes, min((run_loader(server, scale, lanes) for _ in rounds), key=lambda one: one["first_s"]))
            for lanes in lanes_run
        ]
    plans = measure_plans(scale, window, 0.1 if quick else 1.0)
    drawn = {
        kind: measured_in_child("drawn", scale=asdict(of_draws), kind=kind, ranks=ranks)
        for kind in ("weights", "where")
    }
    sizes = {"index_bytes": len(dataset.index), "table_bytes": dataset.table_bytes, "drawn_samples": of_draws.total}
    return {"listing": listing, "plans": plans, "loaders": loaders, "drawn": drawn, **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small dataset")
    parser.add_argument("--drawn-samples", type=int, help="of the dataset for weights and conditions")
    parser.add_argument("--plot", type=Path, help="draw a picture")
    parser.add_argument("--json", type=Path, help="write everything that was found")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    window = 500 if arguments.quick else WINDOW
    cluster = replace(Cluster(), ranks_of_node=4) if arguments.quick else Cluster()
    real = measure_real(scale, arguments.drawn_samples or min(scale.total, 100_000_000), window, quick=arguments.quick)
    start_s = real["loaders"][0][1]["first_s"]
    measured = Measured(start_s, real["index_bytes"], real["table_bytes"])
    simulated = simulate(scale, cluster, measured, window)
    lost = losses(cluster, scale.ranks, scale.batch_size, start_s)
    print("\n\n".join(["Run:", *real_tables(real, scale), "Simulated:", *simulated_tables(simulated, lost, cluster)]))
    if arguments.json:
        found = real | {"simulated": [asdict(one) for one in simulated], "lost": [(w, asdict(of)) for w, of in lost]}
        arguments.json.write_text(json.dumps(found))
    if arguments.plot:
        from scale_plot import plot  # matplotlib, which only the picture needs

        plot(simulated, arguments.plot, restart_s=start_s)


if __name__ == "__main__":
    main()
