"""Configure feeders on other nodes by `RayFeeders`, without importing Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from math import isfinite
from typing import Any

from streamload.arguments import check_int, parse_bytes

MOST_WORKERS, _MOST_FEEDERS = 1024, 1024


@dataclass(frozen=True)
class RayFeeders:
    """Run a loader's feeders as actors of a Ray cluster that includes the trainer's machine.

    Attributes:
        number: of feeders.
        num_cpus: processors of each, and the workers of each with `num_workers="auto"`.
        resources: other resources that each claims, by Ray's names, as `{"cpu_node": 1}`.
        memory: that each claims, as a number of bytes or "8GB"; None claims none.
        address: `HOST:PORT` of the cluster's head; "auto" uses RAY_ADDRESS, or else the cluster that Ray finds here.
        runtime_env: of the actors, as for `ray.init`.
        start_timeout: seconds until all must have been placed and answer, before a ClusterError.

    Raises:
        ImportError: Ray is not installed.
        TypeError, ValueError: a value is invalid.
    """

    number: int
    _: KW_ONLY
    num_cpus: int = 1
    resources: Mapping[str, float] | None = None
    memory: int | str | None = None
    address: str = "auto"
    runtime_env: Mapping[str, Any] | None = field(default=None, repr=False)  # it may hold keys
    start_timeout: float = 60.0

    def __post_init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ImportError('RayFeeders needs Ray, which is not installed: pip install "streamload[ray]"')
        check_int("number", self.number, 1, most=_MOST_FEEDERS)
        check_int("num_cpus", self.num_cpus, 1, most=MOST_WORKERS)
        timeout = self.start_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not (timeout > 0 and isfinite(timeout)):
            raise ValueError(f"start_timeout={timeout!r} must be a number of seconds above 0")
        if not isinstance(self.address, str) or not self.address:
            raise TypeError(f'address={self.address!r} must be that of a Ray cluster, or "auto"')
        if self.address != "auto" and ("://" in self.address or not is_host_and_port(self.address)):
            raise ValueError(
                f"address={self.address!r}: the trainer's machine must be a node of the cluster (`ray start "
                '--address=HOST:PORT`), so give HOST:PORT of its head, or "auto"'
            )
        for name in ("resources", "runtime_env"):
            if not isinstance(getattr(self, name), Mapping | None):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a mapping, or None")
        if self.memory is not None:
            parse_bytes("memory", self.memory)

    @property
    def demands(self) -> dict[str, float]:
        """Return the resources that each feeder claims, by Ray's names."""
        memory = {} if self.memory is None else {"memory": float(parse_bytes("memory", self.memory))}
        return {"CPU": float(self.num_cpus), **memory, **(self.resources or {})}


def is_host_and_port(address: str) -> bool:
    """Return True if a text has the form `HOST:PORT`."""
    host, colon, port = address.rpartition(":")
    return bool(host and colon) and port.isdecimal()
