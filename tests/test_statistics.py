"""What a loader measures of itself, in its parts and as text for other programs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from transforms import slow

from streamload import ShardWriter, StreamLoader
from streamload.statistics import Meter


def shards(folder: Path, samples: int) -> Path:
    with ShardWriter(folder / "some") as writer:
        for number in range(samples):
            writer.write({"__key__": str(number), "cls": number})
    return folder / "some"


def test_the_table_says_how_much_of_the_wait_was_for_the_first_batch() -> None:
    """Otherwise the share of the verdict contradicts the table above it."""
    meter = Meter()
    for batch in range(240):
        if batch:
            meter.add_time("step", 0.05)
        meter.add_batch(8)
        meter.add_time("wait", 3.7 if batch == 0 else 0.001)
    lines = str(meter.statistics(skipped_samples=0)).splitlines()
    (loop,) = [line for line in lines if line.startswith("  loop")]
    assert loop.endswith("waited    3.939 s, 3.700 s of it for the first batch")
    assert lines[-1] == "  limited by the training step: after the first batch it waits for data 2.0% of its time"


def test_a_run_adds_up(tmp_path: Path) -> None:
    with StreamLoader(shards(tmp_path, 200), 10, transform={"cls": slow}, num_workers=2) as loader:
        before = loader.statistics()
        began_s = time.perf_counter()
        for _ in loader:
            pass
        wall_s = time.perf_counter() - began_s
        once = loader.statistics()
        list(loader)
        twice = loader.statistics()
    totals = once.totals
    assert before.totals["samples"] == 0
    assert (once.samples, once.batches, twice.since(once).samples) == (200, 20, 200)
    assert totals["transform_s"] == pytest.approx(totals["transform_s/cls: slow"])
    assert totals["decode_s"] == pytest.approx(totals["decode_s/cls"])
    stages_s = totals["decode_s"] + totals["transform_s"] + totals["collate_s"]
    assert 200 * 0.002 <= stages_s <= totals["workers_busy_s"] <= totals["worker_s"] <= 2 * (wall_s + 60)
    assert totals["workers_processor_s"] < totals["workers_busy_s"], "they sleep"
    assert totals["loop_worked_s"] + totals["loop_waited_s"] <= wall_s
    waits = sum(amount for name, amount in totals.items() if name.startswith("awaited_s/"))
    assert 0 < waits <= totals["feeder_s"]
    numbers = once.as_dict()
    assert numbers["samples"] == 200
    assert all(isinstance(value, int | float) for value in numbers.values())
