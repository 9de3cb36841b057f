"""What answers cost that come ten seconds late: the time of a pass beside the same pass without them."""

from __future__ import annotations

import statistics
from dataclasses import replace

from goals import Goal
from remote_bucket import FAR_AWAY, bucket_of
from remote_parts import Runs, Sizes, run
from remote_reading import Question
from tables import table

SHARE, SLEEP_S = 0.02, 10.0
SEEDS_PER_ROUND = 4


def measure_sleepers(sizes: Sizes) -> tuple[str, list[Goal]]:
    """Passes over a far server that lets 2 % of the answers sleep, others each time, and clean passes in turn."""
    with bucket_of(sizes.shards_of_images, sizes.sustained_copies * len(sizes.shards_of_images)) as bucket:
        question = Question("streamload", bucket.urls(), bucket.shard_bytes, touched=True)
        runs: Runs = {"clean": [], "some sleep": []}
        for seed in range(SEEDS_PER_ROUND * sizes.rounds):
            sleepy = replace(FAR_AWAY, seed=seed, sleep_share=SHARE, sleep_s=SLEEP_S, only=".tar")
            runs["clean"].append(run(bucket, FAR_AWAY, question))
            runs["some sleep"].append(run(bucket, sleepy, question))
    pairs = list(zip(runs["clean"], runs["some sleep"], strict=True))
    times = sorted(clean.rate / sleepy.rate for clean, sleepy in pairs)
    requests = sorted(sleepy.seen.requests / clean.seen.requests for clean, sleepy in pairs)
    size = f"{bucket.total_bytes / 1e6:,.0f} MB"
    rates = [f"{statistics.median(each.rate for each in found):,.0f}" for found in runs.values()]
    middle, ratio = statistics.median(times), statistics.median(requests)
    row = [size, *rates, f"{middle:.2f} ({times[0]:.2f} to {times[-1]:.2f})", f"{ratio:.2f}"]
    header = [
        "far server",
        "clean, MB/s",
        f"{SHARE:.0%} sleep {SLEEP_S:.0f} s, MB/s",
        "time, of a clean pass",
        "requests",
    ]
    goal = Goal(f"far, {size}, {SHARE:.0%} of answers sleep: time, of a clean pass", middle, "<=", 1.25)
    return table(header, [row]), [goal]
