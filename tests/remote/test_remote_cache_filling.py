"""Shards of which an epoch does not need all parts: what is cached of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import Place
from processes import wait_until
from servers.faults import FaultServer, Script

from streamload import StreamLoader
from streamload.feeder import stream

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

MB = 1_000_000
SIZES = [[MB] * 30, [1000] * 40]
"""A shard of four parts, and one of small samples."""
SEED = 0
"""The large shard comes first."""


@pytest.fixture(autouse=True)
def _short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_BLOCK_ROWS", 4)
    monkeypatch.setattr(stream, "BLOCK_ROWS", 4)


def cached_shards(cache: Path) -> int:
    return len(list((cache / "streamload-shards").glob("*.tar")))


def read(server: FaultServer, cache: Path, samples: set[int], shards: int) -> float:
    """Read some samples of the first shard and all of the second; the megabytes that were sent."""
    server.play(Script())
    with StreamLoader(
        Place(server.url).urls("indexed", range(2)),
        1,
        fields=("cls",),
        num_workers=0,
        shuffle=2,
        seed=SEED,
        weights=[float(number in samples or number >= 30) for number in range(70)],
        cache_dir=cache,
        memory_budget="200MB",
    ) as loader:
        seen = {int(label) for (labels,) in loader for label in labels}
        assert {label for label in seen if label < 30} <= samples
        assert wait_until(lambda: cached_shards(cache) >= shards)
    return server.report().sent_bytes / MB


def test_the_rest_of_a_shard_that_is_mostly_needed_is_fetched_too(server: FaultServer, tmp_path: Path) -> None:
    assert read(server, tmp_path, {1, 9, 20}, 2) > 30
    assert read(server, tmp_path, {2, 12, 29}, 2) < 0.1


def test_a_shard_of_which_little_is_needed_is_not_cached(server: FaultServer, tmp_path: Path) -> None:
    for _ in range(2):
        assert 8 < read(server, tmp_path, {2}, 1) < 9
    assert cached_shards(tmp_path) == 1
    assert not list((tmp_path / "streamload-shards" / "partial").iterdir())


def test_statistics_say_what_came_from_the_cache(server: FaultServer, tmp_path: Path) -> None:
    assert read(server, tmp_path, {1, 9, 20}, 2) > 30
    with StreamLoader(
        Place(server.url).urls("indexed", range(2)), 10, num_workers=0, cache_dir=tmp_path, memory_budget="200MB"
    ) as loader:
        assert sum(len(batch["__key__"]) for batch in loader) == 70
        found = loader.statistics()
    assert found.totals["fetched_bytes"] < MB
    assert 30 * MB < found.totals["cached_bytes"] < 31 * MB
    assert " MB read from the disk cache" in str(found)
