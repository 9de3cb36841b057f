"""Ranks of one machine: together they fetch a dataset once an epoch, and once at all with a cache that they share."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from places import Place
from servers.faults import FaultServer, Script

from streamload import StreamLoader

_SHARDS = 24
_SAMPLES = 20
SIZES = [[40_000] * _SAMPLES] * _SHARDS


def epochs_of_two_ranks(server: FaultServer, **options: Any) -> list[list[int]]:
    """Two epochs of two ranks that run beside each other; the labels of each."""
    urls = Place(server.url).urls("indexed", range(_SHARDS))
    epochs: list[list[int]] = []
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                StreamLoader(
                    urls,
                    10,
                    shuffle=30,
                    fields=("cls", "npy"),
                    num_workers=0,
                    rank=rank,
                    world_size=2,
                    **options,
                )
            )
            for rank in range(2)
        ]
        for _ in range(2):
            steps = zip(*loaders, strict=True)
            epochs.append([int(label) for step in steps for labels, _ in step for label in labels])
    return epochs


def fetched_share(server: FaultServer, folder: Path) -> float:
    """The bytes of shards that were sent, in sizes of the dataset."""
    dataset = sum(path.stat().st_size for path in (folder / "indexed").glob("*.tar"))
    other = sum(path.stat().st_size for path in (folder / "indexed" / ".streamload").iterdir())
    return (server.report().sent_bytes - 2 * other) / dataset


@pytest.mark.exhaustive
def test_two_ranks_fetch_each_part_once_an_epoch(server: FaultServer, folder: Path) -> None:
    first, second = epochs_of_two_ranks(server, memory_budget="8MB")
    assert sorted(first) == sorted(second) == list(range(_SHARDS * _SAMPLES))
    assert first != second
    # In each epoch's order there is one shard that the ranks share; the budget holds less than half of the dataset.
    assert fetched_share(server, folder) <= 2 * 1.1


def test_two_ranks_with_one_cache_fetch_nothing_in_a_second_run(
    server: FaultServer, folder: Path, tmp_path: Path
) -> None:
    """In the first, both may fetch a shard at the same time, since none waits for the other."""
    options: dict[str, Any] = {"memory_budget": "8MB", "cache_dir": tmp_path / "cache"}
    for _ in range(2):
        server.play(Script())
        first, second = epochs_of_two_ranks(server, **options)
        assert sorted(first) == sorted(second) == list(range(_SHARDS * _SAMPLES))
        assert first != second
    assert fetched_share(server, folder) <= 0.01
