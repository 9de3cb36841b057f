"""Connect to a running Ray cluster, and check versions and room early. Only `connect` imports Ray."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from streamload.errors import ClusterError
from streamload.options import is_host_and_port

_log = logging.getLogger("streamload")

_CONNECT_TIMEOUT_S = 10.0
_INSTALL = 'pip install "streamload[ray]"'
_NONE_RUNS = (
    "no Ray cluster runs on this machine, and RAY_ADDRESS names none; start one with `ray start --head`, join this "
    "machine to one with `ray start --address HOST:PORT`, or give the address"
)


def own_version() -> str:
    """Return the version of streamload in this process."""
    return str(sys.modules["streamload"].__version__)


def check_version(there: str, where: str, here: str) -> None:
    """Raise ClusterError if a node has another version of streamload; Ray compares Ray and Python."""
    if there != here:
        raise ClusterError(
            f"on the Ray node {where} streamload is {there}, and {here} here; install the same on all nodes"
        )


class RayCluster:
    """A connection of this process to a Ray cluster.

    Attributes:
        ray: the module.
        address: where it is.
    """

    def __init__(self, ray: Any, address: str, *, is_own: bool) -> None:
        """Use `connect`."""
        self.ray, self.address = ray, address
        self._is_own = is_own

    def require(self, resources: Mapping[str, float], number: int = 1, of: str = "tasks") -> None:
        """Raise ClusterError if even idle nodes lack room for the tasks: Ray would wait forever."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        room = 0
        for node in nodes:
            room += min(number, *(int(node.get(name, 0) // amount) for name, amount in resources.items() if amount))
        if room >= number:
            return
        wanted = listed_amounts(resources)
        largest = {name: max((node.get(name, 0) for node in nodes), default=0) for name in resources}
        missing = f"no node of the Ray cluster at {self.address!r} has {wanted}"
        if room:
            missing = f"the Ray cluster at {self.address!r} has room for {room} of {number} {of} with {wanted} each"
        raise ClusterError(
            f"{missing}: of its {len(nodes)} nodes the largest have {listed_amounts(largest)}; start nodes that have "
            "it, or ask for less"
        )

    def close(self) -> None:
        """Disconnect, if `connect` made the connection. Idempotent."""
        is_own, self._is_own = self._is_own, False
        if is_own:
            self.ray.shutdown()


def connect(address: str = "auto", *, runtime_env: Mapping[str, Any] | None = None) -> RayCluster:
    """Connect this process to a Ray cluster, or use the program's connection.

    Args:
        address: "auto" for the cluster that this machine belongs to, `HOST:PORT` of its head, or `ray://HOST:PORT`.
        runtime_env: of the processes on the nodes, as `ray.init` takes it.

    Raises:
        ClusterError: Ray is not installed, there is no such cluster, or it has another version of Ray or Python.
    """
    try:
        ray: Any = import_module("ray")
    except ImportError as exc:
        raise ClusterError(f"Ray cannot be imported ({exc}); install it: {_INSTALL}") from None
    is_own = not ray.is_initialized()
    if is_own:
        _join(ray, address, runtime_env)
    cluster = RayCluster(ray, str(ray.get_runtime_context().gcs_address), is_own=is_own)
    _log.info("this process uses the Ray cluster at %s", cluster.address)
    return cluster


def _join(ray: Any, address: str, runtime_env: Mapping[str, Any] | None) -> None:
    where, named = repr(address), os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto" and named != "auto":  # which Ray would take, too
        address, where = named, f"{named!r}, which RAY_ADDRESS names"
    if address not in ("auto", "local"):
        _check_reachable(address.removeprefix("ray://"), where)
    options: dict[str, Any] = {} if runtime_env is None else {"runtime_env": dict(runtime_env)}
    try:
        ray.init(address, namespace="streamload", log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as exc:
        ray.shutdown()
        text = " ".join(str(exc).split())
        why = f"the Ray cluster at {where} cannot be used from here: {text}; this machine has to be one of its nodes"
        if where == "'auto'" and isinstance(exc, ConnectionError):
            why = f"{_NONE_RUNS} ({text})"
        elif "ersion mismatch" in text:
            why = f"the Ray cluster at {where} has another version: {text}; install the same here as on its nodes"
        raise ClusterError(why) from None


def _check_reachable(address: str, where: str) -> None:
    """Try an address: Ray would try for a minute, and then may end the process."""
    if not is_host_and_port(address):
        raise ClusterError(
            f"{where} is not the address of a Ray cluster; give auto for the one that runs here, or HOST:PORT"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as exc:
        raise ClusterError(
            f"no Ray cluster answers at {where} ({exc}); check that it runs, that its address is the one that `ray "
            "start --head` prints, and that its port is open"
        ) from None


def listed_amounts(amounts: Mapping[str, float]) -> str:
    """Return resources in words, as `3 CPU, 1 GPU`."""
    return ", ".join(f"{amount:,g} {name}" for name, amount in amounts.items())
