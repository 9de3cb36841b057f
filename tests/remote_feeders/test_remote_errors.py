"""What is wrong with remote feeders is said by one clear error, in the constructor where it can be known there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, cast

import pytest
from preloaded import Preloaded

from streamload import RayFeeders, StreamLoader
from streamload.decode.failure import failure_of
from streamload.errors import WorkerError
from streamload.feeder.messages import Failed
from streamload.order.epoch_start import EpochStart
from streamload.remote.cluster import Cluster
from streamload.remote.remote_feeder import FeederOwner, RemoteFeeder


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "streamload\[ray\]"'):
        RayFeeders(2)


def test_nothing_of_ray_is_imported_by_asking_for_it(preloaded: Preloaded) -> None:
    program = "import sys, streamload; streamload.RayFeeders(2); streamload.StreamLoader; print('ray' in sys.modules)"
    assert preloaded.run(program).output == "False\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"number": 0}, "number=0 must be at least 1"),
        ({"number": 2, "num_cpus": 0.5}, "num_cpus=0.5 must be an integer"),
        ({"number": 2, "memory": "many"}, "memory='many' must be"),
        ({"number": 2, "address": "ray://head:10001"}, "must be a node of the cluster"),
        ({"number": 2, "address": "head"}, "give HOST:PORT of its head"),
        ({"number": 2, "start_timeout": 0}, "start_timeout=0 must be a number of seconds above 0"),
    ],
)
def test_values_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        RayFeeders(**arguments)


def test_what_cannot_be_made_elsewhere_is_refused(shards: Path) -> None:
    with pytest.raises(ValueError, match="num_workers=0 makes batches in this thread"):
        StreamLoader(str(shards), 4, num_workers=0, feeders=RayFeeders(1))
    with pytest.raises(ValueError, match="only this process can read 'memory://shards'"):
        StreamLoader("memory://shards", 4, feeders=RayFeeders(1))
    with pytest.raises(ValueError, match="feeders=3 must be"):
        StreamLoader(str(shards), 4, feeders=3)


class Owner:
    """A relay that counts what is new."""

    news = 0

    def changed(self) -> None:
        self.news += 1


def test_what_a_feeder_fails_with_between_two_passes_is_met_by_the_next() -> None:
    """It says so once, and would never answer the next one."""
    owner = Owner()
    feeder = RemoteFeeder(0, 1, cast("Cluster", None), cast("FeederOwner", owner))
    feeder.begin(EpochStart(0, 0, 0, 1))
    feeder.items.append(Failed(failure_of(WorkerError("the workers die"))))  # it has come
    feeder.abandon()
    feeder.begin(EpochStart(1, 0, 0, 1, number=1))
    assert owner.news == 1
    assert [type(item) for item in feeder.items] == [Failed]
