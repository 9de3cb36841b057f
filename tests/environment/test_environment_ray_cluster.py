"""Connecting to a Ray cluster: one clear error for each reason why it fails, and no Ray unless it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from launched import run_python
from servers.rclone import free_port

from streamload.environment.ray_cluster import RayCluster, connect
from streamload.errors import ClusterError


class RayError(Exception):
    """Ray's."""


def ray_module(nodes: list[dict[str, Any]] | None = None, init: Callable[..., None] = lambda *_, **__: None) -> Any:
    """A module `ray` that knows some nodes."""
    return SimpleNamespace(
        is_initialized=lambda: False,
        init=init,
        shutdown=lambda: None,
        nodes=lambda: nodes or [],
        exceptions=SimpleNamespace(RayError=RayError),
    )


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r'pip install "streamload\[ray\]"'):
        connect("auto")


def test_nothing_of_ray_is_imported_unless_it_is_asked_for() -> None:
    program = "import streamload, streamload_tools.main, streamload_tools.shardify, sys; print('ray' in sys.modules)"
    assert run_python("-c", program).output.strip() == "False"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:PORT", "no Ray cluster answers at '127.0.0.1:.*check the address"),
        ("ray://127.0.0.1:PORT", "no Ray cluster answers at 'ray://127.0.0.1:"),
        ("127.0.0.1:99999", "no Ray cluster answers at"),
        ("head", "'head' is no address of a Ray cluster; give auto"),
    ],
)
def test_a_wrong_address(monkeypatch: pytest.MonkeyPatch, address: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_module())
    with pytest.raises(ClusterError, match=message):
        connect(address.replace("PORT", str(free_port())))


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            ConnectionError("Could not find any running Ray instance."),
            "no Ray cluster runs on this machine .*start one",
        ),
        (
            RuntimeError("Version mismatch: The cluster was started with:\n Ray: 2.1"),
            "has another version: .* Ray: 2.1",
        ),
    ],
)
def test_what_ray_raises_is_said_in_one_message(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str
) -> None:
    def init(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setitem(sys.modules, "ray", ray_module(init=init))
    with pytest.raises(ClusterError, match=message) as caught:
        connect("auto")
    assert "\n" not in str(caught.value)


def test_resources_that_no_node_has() -> None:
    nodes: list[dict[str, Any]] = [
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {"CPU": 2.0, "disk": 1.0}},
    ]
    cluster = RayCluster(ray_module(nodes), "head:6379", is_own=False)
    cluster.require({"CPU": 4})
    cluster.require({"CPU": 2, "disk": 1})
    for wanted in ({"CPU": 5}, {"CPU": 4, "disk": 1}):
        with pytest.raises(ClusterError, match="of its 2 nodes the largest have 4 CPU"):
            cluster.require(wanted)
