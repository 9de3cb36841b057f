"""One feeder for the ranks of a machine: the same batches, one process tree, and exact after any death."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from make_shards import write_numbers
from node_ranks import Node

OPTIONS: dict[str, Any] = {
    "batch_size": 7,
    "shuffle": True,
    "shuffle_window": 40,
    "fields": ["npy", "cls"],
    "num_workers": 1,
}
FEEDER, WORKER = "streamload.feeder.start", "streamload.workers.worker"


@pytest.fixture(scope="module")
def two() -> Iterator[Node]:
    """Two ranks; they import torch once."""
    node = Node(2)
    yield node
    node.end()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("numbers") / "shards", [40, 1, 7, 0, 90, 2])


def epochs(node: Node, url: str, number: int = 2, **options: Any) -> list[Any]:
    """What each rank gets in some epochs."""
    with node.loaders(url, **{**OPTIONS, **options}):
        return [node.ask("batches", None) for _ in range(number)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": [1.0, 2.0] * 70},
        {"collate_fn": "as_staircase", "fields": ["cls"]},
        {"on_error": "skip", "transform": "raise_on_bad"},
        {"drop_last": True, "lanes": 1},
        {"num_workers": 3, "batch_size": 33, "pad": False},
    ],
)
def test_the_batches_are_those_of_feeders_of_their_own(two: Node, shards: str, options: dict[str, Any]) -> None:
    shared = epochs(two, shards, feeders="node", **options)
    assert shared == epochs(two, shards, **options)
    assert shared[0] != shared[1]
    assert shared[0][0] != shared[0][1]
    assert all(batches for epoch in shared for batches in epoch)


def test_ranks_have_one_feeder_and_the_workers_of_all(two: Node, shards: str) -> None:
    with two.loaders(shards, **OPTIONS, feeders="node"):
        two.ask("batches", 2)
        assert (len(two.processes(FEEDER)), len(two.processes(WORKER))) == (1, 2)
    with two.loaders(shards, **OPTIONS):
        two.ask("batches", 2)
        assert (len(two.processes(FEEDER)), len(two.processes(WORKER))) == (2, 2)
