"""One feeder for the ranks of a machine: the same batches, one process tree, and exact after any death."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import node_ranks
import psutil
import pytest
from make_shards import write_numbers
from node_ranks import FEEDER, WORKER, Node, RankError, node_of
from preloaded import Preloaded
from servers.faults import FaultServer, Script

from streamload import StreamLoader

OPTIONS: dict[str, Any] = {**node_ranks.OPTIONS, "batch_size": 7}


@pytest.fixture(scope="module")
def two(preloaded: Preloaded) -> Iterator[Node]:
    with node_of(preloaded, 2) as node:
        yield node


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbers(tmp_path_factory.mktemp("numbers") / "shards", [40, 1, 7, 0, 90, 2])


@pytest.fixture(scope="module")
def alone(two: Node, shards: str) -> list[Any]:
    """What each rank gets with a feeder of its own, in three epochs."""
    return epochs(two, shards, 3)


def epochs(node: Node, url: str, number: int = 2, **options: Any) -> list[Any]:
    """What each rank gets in some epochs."""
    with node.loaders(url, **{**OPTIONS, **options}):
        return [node.ask("batches", None) for _ in range(number)]


@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "skip", "transform": "raise_on_bad", "drop_last": True, "lanes": 1},
        pytest.param({"weights": [1.0, 2.0] * 70}, marks=pytest.mark.exhaustive),
        pytest.param({"collate_fn": "as_staircase", "fields": ["cls"]}, marks=pytest.mark.exhaustive),
        pytest.param({"num_workers": 3, "batch_size": 33, "pad": False}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_batches_are_those_of_feeders_of_their_own(two: Node, shards: str, options: dict[str, Any]) -> None:
    shared = epochs(two, shards, feeders="node", **options)
    assert shared == epochs(two, shards, **options)
    assert shared[0] != shared[1]
    assert shared[0][0] != shared[0][1]
    assert all(batches for epoch in shared for batches in epoch)


def test_ranks_have_one_feeder_with_the_workers_of_all_and_the_batches_of_feeders_of_their_own(
    two: Node, shards: str, alone: list[Any]
) -> None:
    with two.loaders(shards, **OPTIONS, feeders="node"):
        assert [two.ask("batches", None) for _ in range(2)] == alone[:2]
        assert (len(two.processes(FEEDER)), len(two.processes(WORKER))) == (1, 2)
    with two.loaders(shards, **OPTIONS):
        two.ask("batches", 2)
        assert (len(two.processes(FEEDER)), len(two.processes(WORKER))) == (2, 2)


@pytest.mark.parametrize("index", [True, False])
def test_remote_shards_are_listed_once_and_each_part_is_fetched_once(two: Node, tmp_path: Path, index: bool) -> None:
    """With one lane both ranks read all shards, and with feeders of their own each fetches them all."""
    counts = [40, 1, 7, 0, 90, 2]
    write_numbers(tmp_path / "bucket" / "numbers", counts, index=index)
    options = {"lanes": 1, "weights": [1.0, 2.0] * 70} if index else {"lanes": 1}
    with FaultServer(tmp_path / "bucket") as server:
        options["storage_options"] = {"endpoint_url": f"{server.url}", "anon": True}
        found, requests = [], []
        for feeders in ("node", None):
            server.play(Script())
            found.append(epochs(two, "s3://numbers", feeders=feeders, **options))
            log = [f"{path} {part}" for method, path, part in server.report().log if method == "GET"]
            listing = ("/index.json None",) if index else ("/numbers None", "/numbers/ None")
            listed = sum(line.endswith(listing) for line in log)
            requests.append((listed, [line for line in log if ".tar" in line]))
    assert found[0] == found[1]
    (listings, shared), (own_listings, own) = requests
    assert own_listings == 2 * listings > 0
    assert len(shared) == len(set(shared)) == len(counts) - 1, shared
    assert len(own) == 2 * len(shared)


def test_a_loader_goes_on_from_a_state_of_feeders_of_their_own(two: Node, shards: str, alone: list[Any]) -> None:
    with two.loaders(shards, **OPTIONS):
        two.ask("batches", 4)
        state = two.ranks[0].ask("state")
    with two.loaders(shards, **OPTIONS, feeders="node"):
        two.ask("load", state)
        assert two.ask("batches", None) == [batches[4:] for batches in alone[0]]


def test_a_rank_may_come_late_and_go_early(two: Node, shards: str, alone: list[Any]) -> None:
    with two.loaders(shards, **OPTIONS, feeders="node"):
        early, late = two.ranks
        assert [early.ask("batches", None) for _ in range(2)] == [epoch[0] for epoch in alone[:2]]
        assert early.ask("batches", 3) == alone[2][0][:3]
        assert late.ask("batches", 5) == alone[0][1][:5]
        early.ask("close")
        assert late.ask("batches", None) == alone[0][1][5:]
        assert late.ask("batches", None) == alone[1][1]


def test_a_rank_that_leaves_its_pass_or_fails_does_not_disturb_the_other(
    two: Node, shards: str, alone: list[Any]
) -> None:
    with two.loaders(shards, **OPTIONS, feeders="node"):
        one, other = two.ranks
        assert one.ask("batches", 3) == alone[0][0][:3]
        other.tell("batches", None)
        one.ask("leave")
        assert one.ask("batches", None) == alone[1][0]
        assert other.heard() == alone[0][1]
    with two.loaders(shards, **OPTIONS, transform="raise_on_bad", feeders="node"):
        for rank in two.ranks:
            with pytest.raises(RankError, match=r"TransformError.*part"):
                rank.ask("batches", None)


def test_loaders_that_differ_are_refused_with_what_differs(two: Node, shards: str) -> None:
    each: list[dict[str, Any]] = [{}, {"seed": 1, "transform": "negative"}]
    with two.loaders(shards, **OPTIONS, feeders="node", each=each):
        two.ranks[0].ask("batches", 1)
        with pytest.raises(
            RankError, match=r"ValueError: feeders=\"node\".*: seed \(1, not \d+\), the functions given"
        ):
            two.ranks[1].ask("batches", 1)
        assert len(two.ranks[0].ask("batches", None)) == 9


def test_a_transform_that_all_change_is_used_from_the_next_pass_on(two: Node, shards: str) -> None:
    with two.loaders(shards, **OPTIONS):
        two.ask("batches", None)
        two.ask("change", "negative")
        wanted = two.ask("batches", None)
    with two.loaders(shards, **OPTIONS, feeders="node"):
        two.ask("batches", None)
        two.ask("change", "negative")
        assert two.ask("batches", None) == wanted
        assert len(two.processes(FEEDER)) == 1


@pytest.mark.parametrize("module", [FEEDER, pytest.param(WORKER, marks=pytest.mark.exhaustive)])
def test_helpers_may_be_killed(two: Node, shards: str, alone: list[Any], module: str) -> None:
    with two.loaders(shards, **OPTIONS, transform="slow", feeders="node"):
        assert two.ask("batches", 2) == [batches[:2] for batches in alone[0]]
        two.kill_helper(module)
        assert two.ask("batches", None) == [batches[2:] for batches in alone[0]]
        for rank in two.ranks:
            rank.tell("batches", None)
        two.kill_helper(module)
        assert [rank.heard() for rank in two.ranks] == alone[1]


def test_the_statistics_of_ranks_add_up(two: Node, shards: str) -> None:
    with two.loaders(shards, **OPTIONS, feeders="node"):
        given = two.ask("batches", None)
        totals = two.ask("totals")
    assert sum(each["made_samples"] for each in totals) >= 140
    assert [each["batches"] for each in totals] == list(map(len, given))
    assert 0 < totals[0]["worker_s"] <= totals[0]["feeder_s"] * 1.01, "its share of two workers is one"


@pytest.mark.parametrize("feeders", ["node", pytest.param(None, marks=pytest.mark.exhaustive)])
def test_ranks_of_a_group_get_the_same_batches(two: Node, shards: str, feeders: str | None) -> None:
    with two.loaders(shards, **OPTIONS, shared_by=2, feeders=feeders):
        one, other = two.ask("batches", None)
    with two.loaders(shards, **OPTIONS, each=[{"rank": 0, "world_size": 1}] * 2):
        assert one == other == two.ranks[0].ask("batches", None)


def test_a_group_must_divide_the_world(two: Node, shards: str) -> None:
    with pytest.raises(RankError, match=r"shared_by=3 does not divide the world size, 2: start the processes with"):
        two.open(shards, **OPTIONS, shared_by=3)


def test_without_workers_there_is_nothing_to_share(shards: str) -> None:
    with pytest.raises(ValueError, match=r'feeders="node" shares worker processes among ranks, and num_workers=0'):
        StreamLoader(shards, feeders="node", num_workers=0)


def test_other_feeders_are_refused(shards: str) -> None:
    with pytest.raises(ValueError, match="feeders='machine' must be"):
        StreamLoader(shards, feeders="machine")  # type: ignore[arg-type]


def test_ranks_that_are_bound_to_processors_share_all_of_these(two: Node, shards: str) -> None:
    """As srun and mpirun bind them: else all workers would be where the first rank is."""
    ranks, own = [psutil.Process(rank.process.pid) for rank in two.ranks], sorted(os.sched_getaffinity(0))[:2]
    if len(own) < 2:
        pytest.skip("needs two processors")
    try:
        for rank, processor in zip(ranks, own, strict=True):
            rank.cpu_affinity([processor])
        with two.loaders(shards, **OPTIONS, feeders="node"):
            two.ask("batches", 1)
            assert [process.cpu_affinity() for process in two.processes()] == [own] * 3
    finally:
        for rank in ranks:
            rank.cpu_affinity(list(os.sched_getaffinity(0)))


def test_a_rank_that_comes_when_the_workers_have_failed_is_told_why(two: Node, shards: str) -> None:
    with two.loaders(shards, **OPTIONS, feeders="node", worker_init_fn="raise_at_start"):
        early, late = two.ranks
        early.ask("batches", 0)  # it has begun its pass, and does not read
        time.sleep(3)  # no process shows when they have; if this is too short, the other one comes in time
        for rank in (late, early):
            with pytest.raises(RankError, match="no worker can start"):
                rank.ask("batches", 1)


@pytest.mark.exhaustive
def test_ranks_that_do_not_come_are_missed_in_the_log(shards: str) -> None:
    """As where each is in a container of its own. It takes a minute."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    program = f"""if True:
        import logging, time
        logging.basicConfig()
        from streamload import StreamLoader
        with StreamLoader({shards!r}, 7, feeders="node", num_workers=1) as loader:
            passed = iter(loader)
            next(passed)
            time.sleep(62)
            list(passed)
    """
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert 'feeders="node": 1 of the 2 ranks of this machine have come to this feeder' in done.stderr


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_rank_goes_on_when_the_other_one_is_killed(
    preloaded: Preloaded, shards: str, alone: list[Any], killed: int
) -> None:
    """The starter of the feeder, or another one, while both read."""
    with node_of(preloaded, 2) as node, node.loaders(shards, **OPTIONS, feeders="node"):
        assert node.ask("batches", 2) == [batches[:2] for batches in alone[0]]
        node.ranks[killed].kill()
        left = 1 - killed
        assert node.ranks[left].ask("batches", None) == alone[0][left][2:]
