"""Compressed shards with little room: decompressing goes only forward, and what it brings may be in its own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from places import COMPRESSORS

from streamload import ShardWriter, StreamLoader
from streamload.errors import StorageError
from streamload.fetch.budget import budget_for

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

MB = 1_000_000
SAMPLES = list(range(60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed shard of eight parts."""
    found = tmp_path_factory.mktemp("compressed")
    with ShardWriter(found / "whole") as writer:
        for number in SAMPLES:
            writer.write({"__key__": f"{number:05d}", "bin": bytes([number]) * MB})
    (whole,) = (found / "whole").glob("*.tar")
    (found / "shard.tar.gz").write_bytes(COMPRESSORS["gz"](whole.read_bytes()))
    return found


def loader_of(folder: Path, budget: int, **options: Any) -> StreamLoader:
    return StreamLoader(
        folder / "shard.tar.gz",
        fields=("bin",),
        collate_fn=labels_of,
        memory_budget=budget_for(budget * MB),
        **options,
    )


def labels_of(samples: list[tuple[bytes]]) -> list[int]:
    return [content[-1] for (content,) in samples]


def epoch_of(loader: StreamLoader) -> list[int]:
    return sorted(label for batch in loader for label in batch)


@pytest.mark.parametrize(("batch_size", "budget"), [(1, 18), (3, 20), (3, 30), (1, 45)])
def test_in_order_there_is_room_for_one_part_after_the_other(folder: Path, batch_size: int, budget: int) -> None:
    with loader_of(folder, budget, batch_size=batch_size, num_workers=0) as loader:
        assert epoch_of(loader) == SAMPLES


ORDERS = [
    {"batch_size": 2, "shuffle": 60, "num_workers": 0, "budget": 26, "prefetch_batches": 4, "seed": 0},
    {"batch_size": 1, "shuffle": 20, "num_workers": 0, "budget": 22, "prefetch_batches": 1, "seed": 8},
]
"""With each of these a part was needed once more that decompressing had passed, and a loader waited forever."""


@pytest.mark.parametrize(
    "order",
    [ORDERS[0], *(pytest.param(order, marks=pytest.mark.exhaustive) for order in ORDERS[1:])],
    ids=lambda order: f"seed{order['seed']}",
)
def test_a_part_that_is_needed_once_more_comes_or_does_not_fit(folder: Path, order: dict[str, Any]) -> None:
    epochs: list[list[int]] = []
    too_small: list[str] = []
    with loader_of(folder, **order) as loader:
        try:
            epochs += [epoch_of(loader), epoch_of(loader)]
        except StorageError as error:
            too_small.append(str(error))
    assert epochs == [SAMPLES] * 2 or "is too small" in too_small[0]
