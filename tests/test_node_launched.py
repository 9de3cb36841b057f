"""Ranks that share a feeder under torchrun, and killed at random instants."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from node_ranks import FEEDER, WORKER, RankError, node_of
from preloaded import Preloaded
from test_example_ddp import recorded, run, undisturbed

_UNEVEN = [200, 1, 7, 0, 90, 2]

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(280)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_torchrun(tmp_path: Path, ranks: int) -> None:
    shards = write_numbers(tmp_path / "shards", _UNEVEN, index=ranks == 2)
    ended = run(tmp_path / "run", shards, ranks, 6 * ranks, feeders="node")
    assert ended.status == 0, ended.output
    whole = undisturbed(shards, 6 * ranks, lanes=ranks)
    assert recorded(tmp_path / "run", ranks)[:-1] == whole[:-1]


OPTIONS: dict[str, Any] = {
    "batch_size": 7,
    "shuffle": True,
    "fields": ["npy", "cls"],
    "transform": "slow",
    "num_workers": 1,
}


@pytest.mark.parametrize("module", [FEEDER, WORKER])
def test_helpers_killed_at_random_instants(preloaded: Preloaded, tmp_path: Path, module: str) -> None:
    """As long as batches come in between, the epochs are whole and in order."""
    shards, draw = write_numbers(tmp_path / "shards", [*_UNEVEN, 400]), random.Random(1)
    with node_of(preloaded, 3) as node:
        with node.loaders(shards, **OPTIONS):
            wanted = [node.ask("batches", None) for _ in range(2)]
        for _ in range(5):
            with node.loaders(shards, **OPTIONS, feeders="node"):
                assert node.ask("batches", 3) == [batches[:3] for batches in wanted[0]]
                for rank in node.ranks:
                    rank.tell("batches", None)
                time.sleep(draw.uniform(0, 0.7))
                for process in node.processes(module)[:1]:
                    process.kill()
                assert [rank.heard() for rank in node.ranks] == [batches[3:] for batches in wanted[0]]
                assert node.ask("batches", None) == wanted[1]


def test_the_starter_killed_at_random_instants(preloaded: Preloaded, tmp_path: Path) -> None:
    shards, draw = write_numbers(tmp_path / "shards", [*_UNEVEN, 400]), random.Random(2)
    for _ in range(4):
        with node_of(preloaded, 3) as node:
            with node.loaders(shards, **OPTIONS):
                wanted = node.ask("batches", None)
            with node.loaders(shards, **OPTIONS, feeders="node"):
                for rank in node.ranks:
                    rank.tell("batches", None)
                time.sleep(draw.uniform(0, 1.2))
                killed = node.ranks[draw.randrange(3)]
                killed.kill()
                left = [number for number, rank in enumerate(node.ranks) if rank is not killed]
                assert [node.ranks[number].heard() for number in left] == [wanted[number] for number in left]


def test_two_groups_of_two_ranks(preloaded: Preloaded, tmp_path: Path) -> None:
    shards = write_numbers(tmp_path / "shards", _UNEVEN)
    with node_of(preloaded, 4) as node:
        with node.loaders(shards, **OPTIONS, shared_by=2, feeders="node"):
            found = node.ask("batches", None)
        with node.loaders(shards, **OPTIONS, each=[{"rank": rank // 2, "world_size": 2} for rank in range(4)]):
            assert found == node.ask("batches", None)
        assert found[0] == found[1] != found[2] == found[3]


def test_a_broken_storage_is_raised_by_each_rank(preloaded: Preloaded, tmp_path: Path) -> None:
    shards = write_numbers(tmp_path / "shards", _UNEVEN)
    with node_of(preloaded, 2) as node:
        with node.loaders(shards, **OPTIONS, feeders="node"):
            node.ask("batches", 1)
            for path in Path(shards).glob("*.tar"):
                path.unlink()
            for rank in node.ranks:
                with pytest.raises(RankError, match="Shard"):
                    [rank.ask("batches", None) for _ in range(2)]
