"""The cache does on a disk what its simulation does, clearly better than LRU, and never better than is possible."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
EPOCHS = 5


@pytest.fixture
def bench_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_cache

    yield bench_cache
    del sys.modules["bench_cache"]


@pytest.mark.parametrize("kind", ["equal", "uneven"])
def test_the_hit_rates(bench_cache: Any, kind: str) -> None:
    shards = {"equal": bench_cache.equal, "uneven": bench_cache.uneven}[kind](24, 100_000)
    simulated, lru, bound, on_disk = (list(cache(shards, EPOCHS)) for cache in bench_cache.CACHES.values())
    assert on_disk == simulated
    assert sum(simulated) > 1.5 * sum(lru)
    if kind == "uneven":
        assert 0.85 * sum(bound) < sum(simulated) <= sum(bound)
    else:
        assert simulated == bound


def test_the_table(bench_cache: Any) -> None:
    text = bench_cache.table([bench_cache.equal(4, 10)], 3, on_disk=frozenset())
    assert text.splitlines()[2].startswith("| 4 equal | 50.0% |")
    assert text.endswith("| 50.0% | - |")
