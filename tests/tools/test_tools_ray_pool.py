"""What a task of `--ray` says of its node; Ray itself is not in these tests."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from streamload.cluster.ray_cluster import Versions
from streamload.errors import ClusterError
from streamload.pack.ray_pool import run_call


def test_a_node_that_was_changed_since_says_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    here = Versions.here()
    with pytest.raises(ClusterError) as raised:
        run_call(replace(here, streamload="9.9"), os.getcwd(), b"")
    assert str(raised.value) == (
        f"on the Ray node 10.0.0.7 streamload is {here.streamload}, and 9.9 here; install the same on all nodes"
    )
    assert not hasattr(raised.value, "__notes__")
