"""The part of the remote benchmark that watches memory: data 20 times the budget, in small and in large samples."""

from __future__ import annotations

import sys
from pathlib import Path

from goals import Goal
from remote_bucket import NO_LIMIT, bucket_of, random_shards, traffic
from remote_memory import BATCH_SIZE, Question
from remote_parts import Sizes
from running import RunFailedError, run_command
from tables import table

PROGRAM = Path(__file__).with_name("remote_memory.py")
LONGEST_RUN_S = 500.0
TIMES_THE_BUDGET = 20
SHARD_SAMPLES = 1000
REAL_SHARDS = 8
WINDOW = 10_000


def measure_budget(sizes: Sizes) -> tuple[str, list[Goal]]:
    """Peak memory of the whole tree beyond what it held before the first batch, as a share of the budget."""
    rows, goals = [], []
    budget = sizes.budget_bytes
    # The window's samples take half of the budget; with a large one among them, a fifth.
    usual, beside_large, large = budget // 2 // WINDOW, budget // 5 // WINDOW, 300_000_000 * budget // (512 << 20)
    cases = {
        f"samples of {usual / 1000:.0f} kB": (usual, 0, 0.0),
        f"one of {large / 1e6:.0f} MB among samples of {beside_large / 1000:.0f} kB": (beside_large, large, 0.0),
        f"a consumer that sleeps {sizes.sleep_s:.0f} s": (usual, 0, sizes.sleep_s),
    }
    for name, (sample_bytes, large_bytes, sleep_s) in cases.items():
        try:
            row, share = _measure(budget, sample_bytes, large_bytes, sleep_s)
        except RunFailedError as error:
            rows.append([name, f"failed: {error}", *["-"] * 7])
            goals.append(Goal(f"budget, {name}: peak, of the budget", float("inf"), "<=", 1.1))
            continue
        rows.append([name, *row])
        goals.append(Goal(f"budget, {name}: peak, of the budget", share, "<=", 1.1))
    header = ["data", "GB", "peak beyond the start, MB", "of the budget", "shared memory, MB"]
    return table([*header, "trainer, MB", "feeder, MB", "workers, MB", "MB/s"], rows), goals


def _measure(budget: int, sample_bytes: int, large_bytes: int, sleep_s: float) -> tuple[list[str], float]:
    shard_bytes = SHARD_SAMPLES * (sample_bytes + 1024)
    number = TIMES_THE_BUDGET * budget // shard_bytes
    with random_shards(REAL_SHARDS, SHARD_SAMPLES, sample_bytes, large_bytes=large_bytes) as shards:
        # Only the first shard has the large sample, and is served once.
        plain = shards[1:] if large_bytes else shards
        with bucket_of([*shards[:1], *(plain[place % len(plain)] for place in range(number - 1))]) as bucket:
            bucket.server.play(NO_LIMIT)
            question = Question(bucket.pattern(), budget, sleep_s, number * SHARD_SAMPLES // BATCH_SIZE)
            found = run_command([sys.executable, str(PROGRAM), question.argument()], LONGEST_RUN_S)
            sent_bytes = traffic(bucket.server.report(), NO_LIMIT).sent_bytes
    names = ("files_bytes", "trainer_bytes", "feeder_bytes", "workers_bytes")
    share = found["more_bytes"] / budget
    row = [f"{sent_bytes / 1e9:.1f}", f"{found['more_bytes'] / 1e6:,.0f}", f"{share:.3f}"]
    row += [f"{found[name] / 1e6:,.0f}" for name in names]
    return [*row, f"{found['values'] / 1e6 / found['seconds']:,.0f}"], share
