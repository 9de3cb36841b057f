"""Feeders on the nodes of a real Ray cluster: the same batches, whatever dies, and nothing left on any node."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from preloaded import Preloaded
from processes import wait_until
from ray_cluster import LocalRayCluster

if importlib.util.find_spec("ray") is None:
    pytest.skip('needs Ray: pip install "streamload[ray]"', allow_module_level=True)

pytestmark = pytest.mark.timeout(300)

EXHAUSTIVE = pytest.mark.exhaustive
PROGRAM = "import sys, training_programs; getattr(training_programs, sys.argv[1])(*sys.argv[2:])"


def expect_nothing_left(cluster: LocalRayCluster) -> None:
    """No process of an actor, and none that it has started; Ray ends them some time after their driver."""
    assert wait_until(lambda: not [*cluster.processes("FeederActor"), *cluster.processes("streamload.")])


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("resumed",), marks=EXHAUSTIVE),
        pytest.param(("same", "2", "short tail on two ranks", "left out"), marks=EXHAUSTIVE),
        ("killed", "FeederActor", "8"),
        pytest.param(("failing", "bad.npy"), marks=EXHAUSTIVE),
        pytest.param(("left",), marks=EXHAUSTIVE),
        pytest.param(("same", "1", "plain", "collate_fn", "empty at the end"), marks=EXHAUSTIVE),
        pytest.param(("same", "4", "plain", "sampler"), marks=EXHAUSTIVE),
        pytest.param(("same", "3", "padded on three ranks", "drop_last", "weights", "where"), marks=EXHAUSTIVE),
        pytest.param(("same", "3", "not alike", "replaced"), marks=EXHAUSTIVE),
        pytest.param(("mixed",), marks=EXHAUSTIVE),
        pytest.param(("refused",), marks=EXHAUSTIVE),
        pytest.param(("uncounted",), marks=EXHAUSTIVE),
        pytest.param(("failing", "npy", "mistaken"), marks=EXHAUSTIVE),
        pytest.param(("killed", "streamload.feeder.start", "0"), marks=EXHAUSTIVE),
        pytest.param(("killed", "FeederActor", "24"), marks=EXHAUSTIVE),
        pytest.param(("killed", "streamload.workers", "20"), marks=EXHAUSTIVE),
        pytest.param(("dying",), marks=EXHAUSTIVE),
    ],
    ids=" ".join,
)
def test_a_training_program(
    preloaded: Preloaded, cluster: LocalRayCluster, shards: Path, arguments: tuple[str, ...]
) -> None:
    """Each is described in `training_programs`."""
    name, *more = arguments
    ended = preloaded.run(PROGRAM, name, shards, cluster.address, *more)
    assert ended.status == 0, ended.output
    expect_nothing_left(cluster)


def test_nothing_is_left_when_the_trainer_is_killed(
    preloaded: Preloaded, cluster: LocalRayCluster, shards: Path
) -> None:
    trainer = preloaded.start(PROGRAM, "waiting", shards, cluster.address, merged=True)
    while (line := trainer.stdout.readline()) != "waits\n":
        assert line, "it has ended"
    assert cluster.processes("FeederActor")
    trainer.kill()
    trainer.communicate()
    expect_nothing_left(cluster)
