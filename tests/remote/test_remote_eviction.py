"""Little room: what was fetched for later, for a scan or by decompressing ahead, is evicted for what comes first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matrix import exhaustive
from places import Place, write_datasets
from servers.faults import FaultServer

from streamload import ShardWriter, StreamLoader
from streamload.fetch.budget import budget_for

MB = 1_000_000
SIZES = [[MB] * 20] * 4
SAMPLES = list(range(80))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    """Four shards of 20 MB, of three parts each."""
    folder = tmp_path_factory.mktemp("ways")
    write_datasets(folder, SIZES, ["zst"])
    with FaultServer(folder) as running:
        yield running


def slow_epoch(server: FaultServer, form: str, **options: Any) -> list[int]:
    """The labels of an epoch of a loop that is slower than what is brought, so that much is brought for later."""
    defaults: dict[str, Any] = {"fields": ("cls", "npy"), "num_workers": 1, "prefetch_batches": 1, "timeout": 30}
    found: list[int] = []
    urls = Place(server.url).urls(form, range(len(SIZES)))
    with StreamLoader(urls, **{**defaults, **options}) as loader:
        for labels, _ in loader:
            found += labels.tolist()
            time.sleep(0.02)
    return found


@pytest.mark.parametrize("budget", [30, exhaustive((32,)), exhaustive((35,))])
@pytest.mark.parametrize("workers", [1, exhaustive((2,))])
def test_parts_for_scans_ahead_are_evicted(server: FaultServer, budget: int, workers: int) -> None:
    """Without an index the next shard is scanned while rows of the one before are still to be made."""
    assert (
        slow_epoch(server, "plain", batch_size=4, memory_budget=budget_for(budget * MB), num_workers=workers) == SAMPLES
    )


@pytest.mark.parametrize("budget", [50, exhaustive((45,)), exhaustive((55,))])
def test_decompressing_ahead_is_evicted(server: FaultServer, budget: int) -> None:
    assert slow_epoch(server, "zst", batch_size=4, memory_budget=budget_for(budget * MB)) == SAMPLES


@pytest.mark.exhaustive
@pytest.mark.parametrize("budget", [38, 43])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_decompressions_of_several_lanes_take_turns(server: FaultServer, budget: int, workers: int) -> None:
    options: dict[str, Any] = {"lanes": 4, "num_workers": workers}
    assert sorted(slow_epoch(server, "zst", batch_size=1, memory_budget=budget_for(budget * MB), **options)) == SAMPLES


# what is refused at the start


def numbered(folder: Path, sizes: list[dict[str, int]], max_count: int) -> dict[str, bytes]:
    """Samples with fields of so many bytes, as objects for a server."""
    with ShardWriter(folder / "shard", max_count=max_count) as writer:
        for number, fields in enumerate(sizes):
            writer.write(
                {"__key__": f"{number:03d}", **{name: bytes([number]) * size for name, size in fields.items()}}
            )
    files = [path for path in (folder / "shard").rglob("*") if path.is_file()]
    return {path.relative_to(folder / "shard").as_posix(): path.read_bytes() for path in files}


def first_bytes(samples: list[tuple[bytes]]) -> list[int]:
    return [content[0] for (content,) in samples]


def read_all(objects: dict[str, bytes], batch_size: int, **options: Any) -> list[int]:
    defaults: dict[str, Any] = {"fields": ("bin",), "collate_fn": first_bytes, "num_workers": 0, "timeout": 30}
    with FaultServer(objects) as running:
        urls = [f"{running.url}/{name}" for name in sorted(objects) if name.endswith(".tar")]
        with StreamLoader(urls, batch_size, **{**defaults, **options}) as loader:
            return [int(number) for batch in loader for number in batch]


def test_a_batch_that_a_rank_never_fills_is_not_refused(tmp_path: Path) -> None:
    objects = numbered(tmp_path, [{"bin": 4 * MB}] * 32, 8)
    got = read_all(objects, 32, rank=1, world_size=8, memory_budget="80MB")
    assert len(got) == 4


def test_a_batch_of_alternatives_that_are_small_is_not_refused(tmp_path: Path) -> None:
    objects = numbered(tmp_path, [{"bin": 1000, "raw": 30 * MB}] * 8, 4)
    assert read_all(objects, 4, fields=("bin;raw",), memory_budget="90MB") == list(range(8))
    with pytest.raises(ValueError, match="too small for a batch of 4 samples"):
        read_all(objects, 4, fields=("bin", "raw"), memory_budget="90MB")


@pytest.mark.parametrize("drop_last", [False, True])
def test_few_batches_of_unlike_samples_are_not_judged_by_the_mean(tmp_path: Path, drop_last: bool) -> None:
    objects = numbered(tmp_path, [{"bin": size * MB} for size in (25, 25, 50)], 1)
    got = read_all(objects, 2, memory_budget="75MB", drop_last=drop_last)
    assert got == [0, 1] if drop_last else [0, 1, 2]
