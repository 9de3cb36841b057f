"""Connecting to a Ray cluster: one clear error for each reason why it fails, and no Ray unless it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from launched import run_python
from servers.rclone import free_port

from streamload.cluster.connection import RayCluster, check_version, connect, own_version
from streamload.errors import ClusterError


class RayError(Exception):
    """Ray's."""


def ray_module(nodes: list[dict[str, Any]] | None = None, init: Callable[..., None] = lambda *_, **__: None) -> Any:
    """A module `ray` that knows some nodes."""
    return SimpleNamespace(
        is_initialized=lambda: False,
        init=init,
        get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"),
        shutdown=lambda: None,
        nodes=lambda: nodes or [],
        exceptions=SimpleNamespace(RayError=RayError),
    )


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r'pip install "streamload\[ray\]"'):
        connect("auto")


def test_nothing_of_ray_is_imported_unless_it_is_asked_for() -> None:
    program = "import streamload, streamload.cli.main, streamload.cli.shardify, sys; print('ray' in sys.modules)"
    assert run_python("-c", program).output.strip() == "False"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:PORT", "no Ray cluster answers at '127.0.0.1:.*check that it runs"),
        ("ray://127.0.0.1:PORT", "no Ray cluster answers at 'ray://127.0.0.1:"),
        ("127.0.0.1:99999", "no Ray cluster answers at"),
        ("head", "'head' is not the address of a Ray cluster; give auto"),
    ],
)
def test_a_wrong_address(monkeypatch: pytest.MonkeyPatch, address: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_module())
    with pytest.raises(ClusterError, match=message):
        connect(address.replace("PORT", str(free_port())))


def test_a_wrong_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray_module())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ClusterError, match="no Ray cluster answers at '127.0.0.1:1', which RAY_ADDRESS names"):
        connect("auto")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            ConnectionError("No running Ray instance."),
            "no Ray cluster runs on this machine, .*start one",
        ),
        (RuntimeError("Version mismatch: Cluster:\n Ray: 2.1"), "has another version: .* Ray: 2.1"),
    ],
)
def test_what_ray_raises_is_said_in_one_message(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str
) -> None:
    def init(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray_module(init=init))
    with pytest.raises(ClusterError, match=message) as caught:
        connect("auto")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_what_fits_is_counted_node_by_node() -> None:
    nodes: list[dict[str, Any]] = [
        {"Alive": True, "Resources": resources} for resources in ({"CPU": 7.0, "memory": 9e9}, {"CPU": 16.0}, {})
    ]
    cluster = RayCluster(ray_module(nodes), "auto", is_own=False)
    cluster.require({"CPU": 3}, 7)
    cluster.require({"CPU": 3, "memory": 4e9}, 2)
    with pytest.raises(
        ClusterError, match="'auto' has room for 7 of 8 tasks with 3 CPU each; the largest of its 3 nodes"
    ):
        cluster.require({"CPU": 3}, 8)
    with pytest.raises(ClusterError, match="room for 2 of 3 feeders"):
        cluster.require({"CPU": 3, "memory": 4e9}, 3, "feeders")


def test_other_versions_are_refused() -> None:
    check_version(own_version(), "n1", own_version())
    with pytest.raises(ClusterError, match="streamload is 9.9 on the Ray node n1, but .* here; install the same"):
        check_version("9.9", "n1", own_version())
