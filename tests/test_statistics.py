"""The verdict on a run: what limits it, or that it is too early to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamload import ShardWriter, StreamLoader, TarDataset
from streamload.statistics import FeederTotals, Meter


def verdict(batches: int, worked_s: float, waited_s: float, first_batch_s: float = 0.0, **totals: Any) -> str:
    meter = Meter(
        samples=8 * batches,
        batches=batches,
        loop_worked_s=worked_s,
        loop_waited_s=waited_s,
        first_batch_s=first_batch_s,
        totals=FeederTotals(**totals),
    )
    return meter.statistics(skipped_samples=0).verdict


@pytest.mark.parametrize(
    ("batches", "worked_s", "waited_s", "begins"),
    [
        (0, 0.0, 0.0, "nothing yet"),
        (1, 0.0, 0.8, "nothing that shows yet: 1 batch in 0.8 s"),
        (500, 0.5, 0.7, "nothing that shows yet: 500 batches in 1.2 s"),
        (10, 0.5, 4.0, "nothing that shows yet: 10 batches in 4.5 s"),
        (500, 4.0, 0.1, "the training loop"),
        (10, 40.0, 1.0, "the training loop"),
        (500, 1.0, 9.0, "the feeder or the storage"),
    ],
)
def test_a_run_is_judged_when_there_is_enough_of_it(
    batches: int, worked_s: float, waited_s: float, begins: str
) -> None:
    assert verdict(batches, worked_s, waited_s, decode_s=0.2, workers_waited_s=9.0).startswith(begins)


def test_what_limits_a_long_run_is_named() -> None:
    assert verdict(500, 1.0, 9.0, decode_s=9.0, transform_s=2.0).startswith("the workers")
    assert verdict(500, 1.0, 9.0, workers_waited_s=9.0, requests=7).startswith("fetching")


def test_the_wait_for_the_first_batch_is_no_reason_to_blame_anything() -> None:
    assert verdict(240, 12.0, 0.9, first_batch_s=0.85, workers_waited_s=9.0).startswith(
        "the training loop: after the first batch it waits for "
    )
    assert verdict(240, 12.0, 0.9, first_batch_s=0.05, workers_waited_s=9.0).startswith("the feeder or the storage")
    assert verdict(240, 1.0, 9.5, first_batch_s=9.4, workers_waited_s=9.0).startswith("nothing that shows yet")


def test_the_table_says_how_much_of_the_wait_was_for_the_first_batch() -> None:
    """Otherwise the share of the verdict contradicts the table above it."""
    meter = Meter(samples=80, batches=240, loop_worked_s=12.0, loop_waited_s=3.9, first_batch_s=3.7)
    lines = str(meter.statistics(skipped_samples=0)).splitlines()
    (loop,) = [line for line in lines if line.startswith("  loop")]
    assert loop.endswith("waited    3.900 s, 3.700 s of it for the first batch")
    assert lines[-1] == "  limited by the training loop: after the first batch it waits for data 1.6% of its time"


def test_what_the_first_batch_took_is_measured_once(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "some") as writer:
        for number in range(40):
            writer.write({"__key__": str(number), "cls": number})
    with StreamLoader(tmp_path / "some", 10, num_workers=1) as loader:
        next(iter(loader))
        first = loader.statistics()
        assert first.first_batch_s == first.stages["loop"].waited_s > 0
        list(loader)
        assert loader.statistics().first_batch_s == first.first_batch_s


def test_one_is_singular(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "one") as writer:
        writer.write({"__key__": "0", "cls": 0})
    with StreamLoader(tmp_path / "one", num_workers=0) as loader, TarDataset(tmp_path / "one") as dataset:
        list(loader)
        assert repr(loader).startswith("<StreamLoader of 1 shard from ")
        assert "0 workers" in repr(loader)
        assert str(loader.statistics()).startswith("1 sample in 1 batch, ")
        assert repr(dataset).startswith("<TarDataset of 1 sample in 1 shard from ")
