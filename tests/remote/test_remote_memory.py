"""The memory that all processes together take over a small `memory_budget`: what is refused, and what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from matrix import exhaustive
from processes import children
from servers.faults import FaultServer
from transforms import large_result
from tree_memory import TreeMemory, anonymous_bytes

from streamload import ShardWriter, StreamLoader

FIELD_BYTES = 1_000_000
SAMPLES = 360
MIB = 1 << 20
FACTOR = 1.25
"""Heaps keep some of what they have freed."""

TASKS_BYTES = 8 * (20 << 20)
"""Beside the budget: two tasks for each worker and two more, of 20 MiB each; the loop's batches, and copies."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 20 MB with fields of 1 MB, and such with tiny ones."""
    folder = tmp_path_factory.mktemp("memory")
    for name, size_bytes in (("large", FIELD_BYTES), ("tiny", 100)):
        with ShardWriter(folder / name / "%06d.tar", max_count=20) as writer:
            for number in range(SAMPLES):
                writer.write({"__key__": f"{number:06d}", "bin": bytes([number % 256]) * size_bytes, "cls": number})
    return folder


def peak_bytes(server: FaultServer, name: str, batch_size: int, budget_mib: int, **options: Any) -> int:
    """The peak over an epoch, whose every sample comes once."""
    urls = [f"{server.url}/{name}/{shard:06d}.tar" for shard in range(SAMPLES // 20)]
    given = {"fields": ("bin", "cls"), "num_workers": 2, **options}
    with StreamLoader(urls, batch_size, memory_budget=budget_mib * MIB, **given) as loader, TreeMemory() as memory:
        labels = [label for _, batch in loader for label in batch.tolist()]
    assert sorted(labels) == list(range(SAMPLES))
    return memory.peak_bytes


@pytest.mark.parametrize(
    ("epochs", "again", "sample_bytes", "budget"),
    [exhaustive((5, 50, 100_000, "auto")), exhaustive((10, 40, 5_000_000, "80MiB"))],
)
def test_many_epochs_of_bytes_leave_the_feeder_no_larger(
    tmp_path: Path, epochs: int, again: int, sample_bytes: int, budget: str
) -> None:
    """Of data that stay resident, and of such that each epoch fetches again."""
    with ShardWriter(tmp_path / "%06d.tar", max_count=20) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number:06d}", "bin": bytes(sample_bytes), "cls": number})

    def anonymous_bytes_after(loader: StreamLoader, epochs: int) -> int:
        for _ in range(epochs):
            assert sum(len(labels) for _, labels in loader) == 20
        (feeder,) = children("streamload.feeder")
        return anonymous_bytes(feeder.pid)

    with FaultServer(tmp_path) as server:
        url = f"{server.url}/000000.tar"
        options: dict[str, Any] = {"num_workers": 1, "memory_budget": budget, "shuffle": 2}
        with StreamLoader(url, 1, fields=("bin", "cls"), **options) as loader:
            before_bytes = anonymous_bytes_after(loader, epochs)
            assert anonymous_bytes_after(loader, again) - before_bytes < 8 * MIB


@pytest.mark.parametrize(
    ("budget_mib", "batch_size", "window"),
    [(64, 4, 5), *map(exhaustive, [(128, 4, 50), (128, 12, 0)])],
)
def test_a_budget_bounds_the_memory_of_all_processes(
    server: FaultServer, budget_mib: int, batch_size: int, window: int
) -> None:
    order: dict[str, Any] = {"shuffle": window} if window else {}
    base_bytes = peak_bytes(server, "tiny", 4, budget_mib)
    more_bytes = peak_bytes(server, "large", batch_size, budget_mib, **order) - base_bytes
    assert more_bytes < FACTOR * budget_mib * MIB + TASKS_BYTES


@pytest.mark.exhaustive
def test_batches_that_outgrow_the_budget_are_no_part_of_it(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shards" / "%06d.tar", max_count=1) as writer:
        for number in range(6):
            writer.write({"__key__": f"{number:06d}", "bin": bytes(3 * MIB), "cls": number})
    files = fsspec.filesystem("file")
    options: dict[str, Any] = {"collate_fn": large_result, "memory_budget": "64MiB", "num_workers": 1}
    with StreamLoader(str(tmp_path / "shards"), 1, filesystem=files, **options) as loader:
        assert sum(1 for _ in loader) == 6
