"""A Ray cluster of several nodes on this machine, in a process of its own that is no child of the tests' process.

So neither Ray nor a thread of it comes into the process of a test, and what Ray itself starts and ends at any time is
not taken for something that a test has left behind. Run as a program, it serves a cluster: it reads commands, one a
line, and answers each with a line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

_STORE_BYTES = 100 << 20


class LocalRayCluster:
    """A cluster that another process serves; nodes have names.

    Attributes:
        address: of its head node.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address: str = self._ask("address")

    def add_node(self, name: str, cpus: float) -> None:
        """Start a node, and wait until the others know it."""
        self._ask("add", name, cpus)

    def kill_node(self, name: str) -> None:
        """End a node and all that runs there with SIGKILL."""
        self._ask("kill", name)

    def processes(self, module: str) -> list[int]:
        """The running processes of all nodes whose command line holds `module`."""
        found: list[int] = self._ask("processes", module)
        return found

    def _ask(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the cluster's process has ended")
        return json.loads(answer)


@contextlib.contextmanager
def ray_cluster(nodes: Mapping[str, float]) -> Iterator[LocalRayCluster]:
    """A cluster with a head node without processors and some nodes with so many."""
    folder = tempfile.mkdtemp(prefix="rc", dir="/tmp")  # Ray's sockets need a short path
    program = [sys.executable, __file__]
    environment = {**os.environ, "RAY_TMPDIR": folder}
    started = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert started.stdin is not None
    assert started.stdout is not None
    try:
        cluster = LocalRayCluster(started)
        for name, cpus in nodes.items():
            cluster.add_node(name, cpus)
        yield cluster
    finally:
        started.stdin.close()
        started.stdout.read()  # to its end: the cluster's
        started.stdout.close()
        started.wait()
        _end_all(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _end_all(folder: str) -> None:
    """End what is left of a cluster: its processes name its folder."""
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class _Served:
    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self._nodes: dict[str, Any] = {}

    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, cpus: float) -> None:
        self._nodes[name] = self._cluster.add_node(num_cpus=cpus, object_store_memory=_STORE_BYTES)
        self._cluster.wait_for_nodes(timeout=60)

    def kill(self, name: str) -> None:
        """Raylet and workers at once, as when the machine goes."""
        node = self._nodes.pop(name)
        for pid in self._of_node(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def processes(self, module: str) -> list[int]:
        found = {pid for node in (self._cluster.head_node, *self._nodes.values()) for pid in self._of_node(node)}
        return [pid for pid in sorted(found) if module in _command(pid)]

    def _of_node(self, node: Any) -> list[int]:
        found = []
        for raylet in (info.process.pid for info in node.all_processes.get("raylet", [])):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(raylet)
                found += [process.pid, *(child.pid for child in process.children(recursive=True))]
        return found

    def close(self) -> None:
        self._cluster.shutdown()


def _command(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints is no answer
    if os.fork():
        os._exit(0)
    os.setsid()
    served = _Served()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(served, name)(*arguments)), file=answers, flush=True)
    served.close()
    time.sleep(0.1)


if __name__ == "__main__":
    _serve()
