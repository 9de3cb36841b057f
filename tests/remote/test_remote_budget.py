"""A memory budget that is smaller than the data: every sample exactly once, nothing above it, and never a hang.

What was fetched for later, for a scan or by decompressing ahead, is evicted for what comes first.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from matrix import exhaustive
from places import Place, write_datasets
from processes import children
from servers.faults import FaultServer
from transforms import labels_of
from tree_memory import memory_files

from streamload import StreamLoader
from streamload.errors import StorageError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

MB = 1_000_000
SIZES = [[MB] * 30] * 4
SHARDS = range(len(SIZES))
SAMPLES = list(range(120))


def loader_of(server: FaultServer, form: str, shards: Any = SHARDS, **options: Any) -> StreamLoader:
    defaults: dict[str, Any] = {
        "batch_size": 4,
        "shuffle": 20,
        "fields": ("npy", "cls"),
        "collate_fn": labels_of,
        "num_workers": 0,
    }
    return StreamLoader(Place(server.url).urls(form, shards), **{**defaults, **options})


def epoch_of(loader: StreamLoader) -> list[int]:
    return sorted(int(label) for batch in loader for label in batch)


@pytest.mark.parametrize("form", ["indexed", exhaustive(("plain",))])
def test_every_sample_once_in_each_epoch_within_the_budget(server: FaultServer, form: str) -> None:
    """Also while the loop sleeps: nothing more is fetched than fits."""
    budget_bytes = 75 * MB
    most = 0
    with loader_of(server, form, memory_budget=budget_bytes, num_workers=1) as loader:
        feeder = children("streamload.feeder")[0].pid
        for epoch in range(2):
            labels = []
            for step, batch in enumerate(loader):
                labels += [int(label) for label in batch]
                time.sleep(0.5 if (epoch, step) == (0, 0) else 0)
                most = max(most, sum(memory_files(feeder).values()))
            assert sorted(labels) == SAMPLES
    assert 30 * MB < most <= budget_bytes


@pytest.mark.parametrize(("budget", "workers"), [("100MB", 0), ("66MB", 1), exhaustive(("66MB", 0))])
def test_passes_that_are_left_and_counting_in_the_middle_of_one(server: FaultServer, budget: str, workers: int) -> None:
    """Without an index: what is kept of left passes' scans, or planned, makes room for a pass, and for counting."""
    with loader_of(server, "plain", memory_budget=budget, num_workers=workers, batch_size=2) as loader:
        for _ in range(2):
            next(iter(loader))
            time.sleep(0.3)  # in which more is scanned
        batches = iter(loader)
        first = next(batches)
        time.sleep(0.3)
        assert len(loader) == 60
        rest = [int(label) for batch in batches for label in batch]
    assert sorted([*map(int, first), *rest]) == SAMPLES


def test_what_fits_is_fetched_once(server: FaultServer) -> None:
    with loader_of(server, "indexed", memory_budget="400MB") as loader:
        assert [epoch_of(loader) for _ in range(2)] == [SAMPLES] * 2
    # Once for two epochs, and a few parts again that were evicted before their copy on the disk was complete.
    assert server.report().sent_bytes < 1.5 * sum(map(sum, SIZES))


def test_a_budget_that_a_batch_does_not_fit_into_is_an_error(server: FaultServer) -> None:
    order: dict[str, Any] = {"batch_size": 16, "shuffle": False, "collate_fn": None}
    with (
        loader_of(server, "indexed", memory_budget="30MB", **order) as loader,
        pytest.raises(StorageError, match=r"memory_budget of 30 MB is too small.* a smaller batch_size"),
    ):
        sum(1 for _ in loader)
    with loader_of(server, "indexed", memory_budget="45MB", **order) as loader:  # less than the data
        assert sorted(label for _, labels in loader for label in labels.tolist()) == SAMPLES


def test_a_dataset_within_the_budget_is_read_whatever_the_window(server: FaultServer) -> None:
    with loader_of(server, "indexed", range(1), memory_budget="40MB", shuffle=1000) as loader:
        assert epoch_of(loader) == SAMPLES[:30]


def test_what_the_parts_of_one_batch_take_is_in_the_error(server: FaultServer) -> None:
    """Its samples lie in four parts; three have come, and none of these can make room for the rest of the shard."""
    with loader_of(server, "plain", memory_budget="36MB", batch_size=28, shuffle=False) as loader:
        held = r"4\.9 MB more are needed now, but 25 MB are held for other samples"
        with pytest.raises(StorageError, match=rf"{held}.* memory_budget of at least 39 MB, a smaller"):
            epoch_of(loader)


def test_a_window_that_does_not_fit_is_an_error_when_nothing_goes_on(server: FaultServer) -> None:
    with loader_of(server, "plain", memory_budget="60MB", shuffle=1000) as loader:
        with pytest.raises(StorageError, match=r"memory_budget of 60 MB is too small.*shuffle window.*cache_dir"):
            epoch_of(loader)
        with pytest.raises(StorageError, match="too small") as caught:
            epoch_of(loader)
    enough = int(re.search(r"memory_budget of at least (\d+) MB", str(caught.value))[1])  # type: ignore[index]
    with loader_of(server, "plain", memory_budget=f"{enough}MB", shuffle=1000) as loader:
        assert epoch_of(loader), "the first advice is enough"


def test_a_budget_smaller_than_a_part_is_an_error(server: FaultServer) -> None:
    with loader_of(server, "plain", memory_budget="4MB") as loader:
        with pytest.raises(StorageError, match="memory_budget of 4 MB is too small"):
            epoch_of(loader)


def test_a_batch_whose_samples_fit_is_not_refused(server: FaultServer) -> None:
    order: dict[str, Any] = {"lanes": 8, "world_size": 3, "rank": 0, "batch_size": 8, "shuffle": False}
    with loader_of(server, "indexed", memory_budget="64MB", **order) as loader:
        assert len(epoch_of(loader)) == len(SAMPLES) // 3


@pytest.mark.exhaustive
def test_one_member_much_larger_than_a_part(tmp_path: Path) -> None:
    write_datasets(tmp_path / "data", [[100_000] * 10 + [40 * MB] + [100_000] * 10] * 2, [])
    with FaultServer(tmp_path / "data") as server:
        with loader_of(server, "plain", range(2), memory_budget="80MB", shuffle=5) as loader:
            assert [epoch_of(loader) for _ in range(2)] == [list(range(42))] * 2
        with (
            loader_of(server, "plain", range(2), memory_budget="30MB", shuffle=5) as loader,
            pytest.raises(StorageError, match="too small"),
        ):
            epoch_of(loader)


def test_a_cache_on_the_disk_takes_what_the_budget_does_not(server: FaultServer, tmp_path: Path) -> None:
    with loader_of(server, "indexed", memory_budget="20MB", cache_dir=tmp_path, shuffle=1000) as loader:
        assert [epoch_of(loader) for _ in range(2)] == [SAMPLES] * 2
    # Once for two epochs, and a few parts again that were evicted before their copy on the disk was complete.
    assert server.report().sent_bytes < 1.5 * sum(map(sum, SIZES))
