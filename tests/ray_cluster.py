"""A Ray cluster of several nodes on this machine, in a process of its own, so that nothing of it is left in the tests'."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

_STORE_BYTES = 100 << 20
_END_S = 60
_ENVIRONMENT = {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True)
class RayNodes:
    """A running cluster: a head without processors, and nodes with one each.

    Attributes:
        address: of its head.
        process: what holds it.
    """

    address: str
    process: subprocess.Popen[str]

    def kill(self) -> None:
        """Kill one of the nodes, with all that runs on it."""
        self._say("kill")

    def add(self) -> None:
        """Start another node."""
        self._say("add")

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer == f"{word}\n", answer


@contextmanager
def ray_nodes(count: int) -> Iterator[RayNodes]:
    """A cluster with so many nodes that work; at the end none of its processes and files is left."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets lie in it, whose paths must be short
    process = subprocess.Popen(
        [sys.executable, __file__, str(count)],
        env={**os.environ, **_ENVIRONMENT, "RAY_TMPDIR": folder},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        yield RayNodes(json.loads(process.stdout.readline()), process)
    finally:
        started = psutil.Process(process.pid).children(recursive=True)
        process.communicate("")  # the end of its input is the end of the cluster
        _, left = psutil.wait_procs(started, timeout=_END_S)
        for each in left:
            each.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _hold(count: int) -> None:
    from ray.cluster_utils import Cluster

    options = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={"num_cpus": 0, **options})
    workers = [cluster.add_node(num_cpus=1, **options) for _ in range(count)]
    cluster.wait_for_nodes()
    print(json.dumps(cluster.address), flush=True)
    for word in sys.stdin:
        if word.strip() == "kill":
            cluster.remove_node(workers.pop(0), allow_graceful=False)
        else:
            workers.append(cluster.add_node(num_cpus=1, **options))
            cluster.wait_for_nodes()
        print(word.strip(), flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _hold(int(sys.argv[1]))
