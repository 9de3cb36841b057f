"""Feeders on the nodes of a real Ray cluster: the same batches, whatever dies, and nothing left on any node."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import logging
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from functions_of_users import noisy, slow, stacked
from preloaded import Preloaded
from ray_cluster import LocalRayCluster, ray_cluster
from same_batches import assert_same
from servers.rclone import S3Server

from streamload import RayFeeders, StreamLoader, StreamloadError
from streamload.errors import ClusterError, WorkerError

if importlib.util.find_spec("ray") is None:
    pytest.skip('needs Ray: pip install "streamload[ray]"', allow_module_level=True)

pytestmark = pytest.mark.timeout(300)  # ten passes and ten deaths

ARGUMENTS: dict[str, Any] = {
    "batch_size": 16,
    "shuffle": True,
    "fields": ("npy", "cls", "txt", "bin"),
    "shuffle_window": 40,
    "num_workers": 1,
}
EXHAUSTIVE = pytest.mark.exhaustive
_ENDS_S = 30.0


def expect_nothing_left(cluster: LocalRayCluster) -> None:
    """No process of an actor, and none that it has started; Ray ends them some time after their driver."""
    deadline = time.monotonic() + _ENDS_S
    while left := [*cluster.processes("FeederActor"), *cluster.processes("streamload.")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("number", [2, pytest.param(1, marks=EXHAUSTIVE), pytest.param(4, marks=EXHAUSTIVE)])
def test_the_batches_are_those_of_the_local_loader(
    cluster: LocalRayCluster, shards: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    with StreamLoader(str(shards), **ARGUMENTS, transform=noisy, lanes=2) as loader:
        expected = [list(loader), list(loader)]
    feeders = RayFeeders(number, address=cluster.address)
    caplog.set_level(logging.INFO, "streamload")
    with StreamLoader(str(shards), **ARGUMENTS, transform=noisy, lanes=2, feeders=feeders) as loader:
        found = [list(loader), list(loader)]
        assert f"the Ray cluster at {cluster.address}" in caplog.text
        assert cluster.processes("FeederActor")
        statistics = loader.statistics()
        assert statistics.totals["made_samples"] == 2 * 333
    assert_same(found, expected)
    expect_nothing_left(cluster)


@EXHAUSTIVE
def test_shards_in_a_bucket(cluster: LocalRayCluster, rclone_s3: S3Server, shards: Path) -> None:
    bucket = rclone_s3.folder / "ray"
    shutil.copytree(shards, bucket)
    options = rclone_s3.options
    given = {**ARGUMENTS, "storage_options": options, "lanes": 4}
    with StreamLoader("s3://ray", **given) as loader:
        expected = list(loader)
    with StreamLoader("s3://ray", **given, feeders=RayFeeders(2, address=cluster.address)) as loader:
        assert_same(list(loader), expected)
        assert loader.statistics().fetched_bytes > 0
    shutil.rmtree(bucket)


def test_modules_find_the_arguments_of_the_program(
    cluster: LocalRayCluster, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the relay and the actors import, as here for the file system, and those that the workers do."""
    script = Path(__file__).parents[1] / "train.py"  # actors find what is beside it
    monkeypatch.setattr(sys, "argv", [str(script), "--size", "48"])
    parses = importlib.import_module("parses_at_import")
    given = {**ARGUMENTS, "fields": ("cls",), "transform": {"cls": parses.size}, "filesystem": parses.Mounted()}
    with StreamLoader(str(shards), **given, feeders=RayFeeders(1, address=cluster.address)) as loader:
        assert next(iter(loader))[0].tolist() == [48] * 16


# -- what dies -----------------------------------------------------------------------------------------------------


def kill_one(cluster: LocalRayCluster, what: str) -> None:
    """SIGKILL to one of the processes whose command line holds a word."""
    running = cluster.processes(what)
    assert running
    with contextlib.suppress(ProcessLookupError):
        os.kill(random.choice(running), signal.SIGKILL)


KILLED = {"actor": "FeederActor", "worker": "streamload.workers", "feeder": "streamload.feeder"}


def pass_with_a_death(
    shards: Path, feeders: RayFeeders, kill: Callable[[], None], at: int, collate_fn: Any
) -> tuple[list[Any], int]:
    given = {**ARGUMENTS, "batch_size": 8, "transform": slow, "collate_fn": collate_fn, "feeders": feeders}
    found = []
    with StreamLoader(str(shards), **given) as loader:
        for number, batch in enumerate(loader):
            found.append(batch)
            if number == at:
                kill()
        return found, loader.statistics().restarted_workers


def expected_batches(shards: Path, collate_fn: Any) -> list[Any]:
    given = {**ARGUMENTS, "batch_size": 8, "transform": slow, "collate_fn": collate_fn}
    with StreamLoader(str(shards), **given) as loader:
        return list(loader)


@pytest.mark.parametrize(
    "what", ["actor", pytest.param("worker", marks=EXHAUSTIVE), pytest.param("feeder", marks=EXHAUSTIVE)]
)
@pytest.mark.parametrize("collate_fn", [None, pytest.param(stacked, marks=EXHAUSTIVE)])
def test_a_death_costs_no_sample(cluster: LocalRayCluster, shards: Path, what: str, collate_fn: Any) -> None:
    feeders = RayFeeders(2, address=cluster.address)
    found, restarted = pass_with_a_death(shards, feeders, lambda: kill_one(cluster, KILLED[what]), 8, collate_fn)
    assert_same(found, expected_batches(shards, collate_fn))
    assert restarted == 1
    expect_nothing_left(cluster)


@EXHAUSTIVE
@pytest.mark.parametrize("what", KILLED)
def test_deaths_at_random_instants_cost_no_sample(cluster: LocalRayCluster, shards: Path, what: str) -> None:
    expected = [expected_batches(shards, None), expected_batches(shards, stacked)]
    for at in random.Random(what).sample(range(40), 10):
        feeders = RayFeeders(2, address=cluster.address)

        def kill() -> None:
            time.sleep(random.random() / 50)
            kill_one(cluster, KILLED[what])

        found, _ = pass_with_a_death(shards, feeders, kill, at, stacked if at % 2 else None)
        assert_same(found, expected[at % 2])
    expect_nothing_left(cluster)


@EXHAUSTIVE
@pytest.mark.timeout(600)
def test_the_loss_of_nodes_costs_no_sample(shards: Path) -> None:
    expected = [expected_batches(shards, None), expected_batches(shards, stacked)]
    names = (f"node{number}" for number in itertools.count())
    with ray_cluster({"first": 2, "second": 2}) as cluster:
        for at in random.Random(5).sample(range(40), 10):
            feeders = RayFeeders(2, address=cluster.address)

            def kill() -> None:
                time.sleep(random.random() / 50)
                used = [node for node in cluster.nodes() if cluster.processes("FeederActor", node)]
                cluster.kill_node(random.choice(used))

            found, restarted = pass_with_a_death(shards, feeders, kill, at, stacked if at % 2 else None)
            assert_same(found, expected[at % 2])
            assert restarted <= 2
            cluster.add_node(next(names), 2)
        expect_nothing_left(cluster)


@EXHAUSTIVE
def test_an_actor_that_dies_again_and_again_ends_the_pass(cluster: LocalRayCluster, shards: Path) -> None:
    given = {**ARGUMENTS, "transform": slow, "batch_size": 333, "prefetch_batches": 1}
    with StreamLoader(str(shards), **given, feeders=RayFeeders(1, address=cluster.address)) as loader:
        with killing(cluster, KILLED["feeder"]), pytest.raises(WorkerError, match="died twice in turn"):
            list(loader)
    expect_nothing_left(cluster)


@contextlib.contextmanager
def killing(cluster: LocalRayCluster, what: str) -> Iterator[None]:
    """Kill whatever of this kind appears, on another thread: this one waits for the loader."""
    ended = threading.Event()

    def kill_all() -> None:
        while not ended.wait(0.05):
            for pid in cluster.processes(what):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        yield
    finally:
        ended.set()
        killer.join()


def test_nothing_is_left_when_the_trainer_is_killed(
    preloaded: Preloaded, cluster: LocalRayCluster, shards: Path
) -> None:
    program = (
        "import sys, time, streamload as s\n"
        "loader = s.StreamLoader(sys.argv[1], 8, num_workers=1, feeders=s.RayFeeders(2, address=sys.argv[2]))\n"
        "next(iter(loader)); print('ray' in sys.modules, flush=True); time.sleep(60)\n"
    )
    trainer = preloaded.start(program, shards, cluster.address)
    assert trainer.stdout.readline() == "False\n", "nothing of Ray is in the trainer's process"
    children = psutil.Process(trainer.pid).children(recursive=True)
    assert cluster.processes("FeederActor")
    trainer.kill()
    trainer.communicate()
    expect_nothing_left(cluster)
    assert psutil.wait_procs(children, _ENDS_S)[1] == []


# -- what is wrong -------------------------------------------------------------------------------------------------


def error_of(shards: Path, feeders: RayFeeders, **arguments: Any) -> StreamloadError:
    with StreamLoader(str(shards), **{**ARGUMENTS, **arguments}, feeders=feeders) as loader:
        with pytest.raises(StreamloadError) as caught:
            next(iter(loader))
    return caught.value


def test_too_few_resources_are_an_error_at_once(cluster: LocalRayCluster, shards: Path) -> None:
    error = error_of(shards, RayFeeders(3, num_cpus=2, address=cluster.address, start_timeout=300))
    assert isinstance(error, ClusterError)
    assert "has room for 2 of 3 feeders with 2 CPU each" in str(error)


@EXHAUSTIVE
def test_resources_that_others_use_are_an_error_in_time(cluster: LocalRayCluster, shards: Path) -> None:
    taken = RayFeeders(2, num_cpus=2, address=cluster.address)
    with StreamLoader(str(shards), **ARGUMENTS, feeders=taken) as loader:
        next(iter(loader))
        error = error_of(shards, RayFeeders(1, address=cluster.address, start_timeout=3))
        assert isinstance(error, ClusterError)
        assert "was not placed on the Ray cluster: 0 CPU are free there" in str(error)
        assert "start_timeout=3 s" in str(error)


def test_a_wrong_address_is_an_error(shards: Path) -> None:
    error = error_of(shards, RayFeeders(1, address="127.0.0.1:1"))
    assert isinstance(error, ClusterError)
    assert "no Ray cluster answers at '127.0.0.1:1'" in str(error)
