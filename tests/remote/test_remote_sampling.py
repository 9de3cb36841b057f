"""Weights, samplers, epochs of another size and mixtures on remote shards: the local order, within a tight budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matrix import exhaustive
from places import Place, local
from servers.faults import FaultServer, Script

from streamload import Mixture, StreamLoader
from streamload.feeder import stream

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

MB = 1_000_000
SIZES = [[MB // 2] * 25] * 4
TOTAL = 100
WEIGHTS = [1.0 + 9 * (number % 10 == 3) for number in range(TOTAL)]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "weights": {"weights": WEIGHTS, "shuffle": 10},
    "balanced": {"weights": "balanced", "shuffle": 10},
    "two and a half passes": {"epoch_size": 250, "shuffle": 10},
    "a third of a pass": {"epoch_size": 33, "shuffle": 10},
    "sampler": {"sampler": np.random.default_rng(1).integers(0, TOTAL, 60)},
    "mixture": {"shuffle": 10, "epoch_size": 120},
}
ALWAYS = ("balanced", "two and a half passes", "sampler")


@pytest.fixture(autouse=True)
def _short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are a small part of an epoch, so that parts are kept from one to the next, or are not."""
    monkeypatch.setattr(stream, "FIRST_BLOCK_ROWS", 8)
    monkeypatch.setattr(stream, "BLOCK_ROWS", 8)


def labels_of(samples: list[Any]) -> list[int]:
    for array, label in samples:
        assert int(array[0]) == label % 251
    return [label for _, label in samples]


def flat(batch: Any) -> Any:
    return batch if isinstance(batch[0], int) else batch[0].tolist()


def epochs(place: Place, sampling: str, form: str = "indexed", **options: Any) -> list[list[int]]:
    urls: Any = place.urls(form, range(4))
    if sampling == "mixture":
        urls = Mixture({"first": (urls[:1], 0.5), "rest": (urls[1:], 0.5)})
    defaults: dict[str, Any] = {
        "batch_size": 2,
        "fields": ("npy", "cls"),
        "collate_fn": labels_of,
        "num_workers": 0,
    }
    with StreamLoader(urls, **{**defaults, **options, **SAMPLINGS[sampling]}) as loader:
        count = 3 if sampling == "a third of a pass" else 1
        return [[int(label) for batch in loader for label in flat(batch)] for _ in range(count)]


@pytest.mark.parametrize("sampling", [name if name in ALWAYS else exhaustive((name,)) for name in SAMPLINGS])
def test_the_order_is_the_local_one_within_a_tight_budget(server: FaultServer, folder: Path, sampling: str) -> None:
    expected = epochs(local(folder), sampling)
    assert epochs(Place(server.url), sampling, memory_budget="45MB") == expected


def test_without_an_index_shards_are_counted_first(server: FaultServer, folder: Path) -> None:
    assert epochs(Place(server.url), "mixture", "plain", memory_budget="45MB") == epochs(local(folder), "mixture")


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", ["weights", exhaustive(("two and a half passes",)), exhaustive(("sampler",))])
def test_a_cache_on_the_disk_serves_the_second_time(
    server: FaultServer, folder: Path, tmp_path: Path, sampling: str
) -> None:
    expected = epochs(Place(server.url), sampling, cache_dir=tmp_path, cache_size="500MB", memory_budget="45MB")
    server.play(Script())
    assert epochs(Place(server.url), sampling, cache_dir=tmp_path, cache_size="500MB", memory_budget="45MB") == expected
    assert server.report().sent_bytes < 5 * MB


def test_tables_of_more_shards_at_once_than_are_kept(
    folder: Path, server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that came took the room of one that had come before, forever."""
    monkeypatch.setattr("streamload.index.dataset.LEAST_TABLES_BYTES", 1)
    monkeypatch.setattr("streamload.index.dataset.MOST_TABLES_BYTES", 1)
    assert epochs(Place(server.url), "sampler") == epochs(local(folder), "sampler")
    assert server.report().requests < 100
