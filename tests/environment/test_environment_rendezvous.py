"""The process that ranks of a machine share: found, or started, under one name."""

from __future__ import annotations

import os
import sys

import pytest

from streamload.environment.rendezvous import join, rendezvous_name
from streamload.errors import WorkerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract sockets")


def test_one_that_ends_as_it_starts_is_not_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerError, match=r"^the feeder ended with status 1$"):
        join(rendezvous_name("test", str(os.getpid())), "streamload.no_such_module")
    assert capfd.readouterr().err.count("No module named streamload.no_such_module") == 1
