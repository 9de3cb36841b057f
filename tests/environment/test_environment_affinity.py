"""Processors that processes share although each was bound to some of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from streamload.environment.affinity import share_processors_of

OWN = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = pytest.mark.skipif(len(OWN) < 2, reason="needs Linux, and two processors")


@pytest.fixture
def worker() -> Iterator[int]:
    """A process that its user has bound to the first processor."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.sched_setaffinity(process.pid, OWN[:1])
    yield process.pid
    process.communicate(b"\n")


def test_a_process_may_run_where_one_of_other_processors_may(worker: int) -> None:
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.sched_setaffinity(rank.pid, OWN[1:2])
        os.sched_setaffinity(0, OWN[:1])
        share_processors_of(rank.pid, [os.getpid(), worker])
        assert os.sched_getaffinity(0) == os.sched_getaffinity(worker) == set(OWN[:2])
    finally:
        os.sched_setaffinity(0, OWN)
        rank.communicate(b"\n")


def test_what_its_user_has_bound_stays_so_where_nothing_is_gained(worker: int) -> None:
    share_processors_of(os.getpid(), [os.getpid(), worker])
    assert os.sched_getaffinity(worker) == set(OWN[:1])
