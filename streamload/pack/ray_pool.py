"""The `--ray` option of commands: each call is one `ray.remote` task.

Ray runs a task again if its process or node is lost.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any, TypeVar

import cloudpickle

from streamload.cluster.ray_cluster import RayCluster, check_version, connect, own_version
from streamload.decode.failure import first_line
from streamload.decode.job_pickle import users_modules
from streamload.errors import ClusterError, WorkerError

_Result = TypeVar("_Result")

Call = Callable[[Callable[[int, int], None]], _Result]
"""Picklable; called on a node with a function that takes numbers of finished items and bytes."""

TASK_NAME = "streamload"
"""The name of tasks in Ray's lists and of their processes."""

_RETRIES = 3
_AHEAD = 4
_CANCEL_TIMEOUT_S = 10.0


class RayPool:
    """Runs tasks on the nodes of a cluster, each with one processor; by default four for each processor at once."""

    def __init__(self, cluster: RayCluster, at_once: int | None) -> None:
        self._cluster = cluster
        self._at_once = at_once
        self._in_flight: set[Any] = set()
        cluster.require({"CPU": 1})
        self._task = cluster.ray.remote(num_cpus=1, max_retries=_RETRIES)(run_call).options(name=TASK_NAME)

    def results(
        self, calls: Iterable[Call[_Result]], report: Callable[[int, int], None] = lambda *_: None
    ) -> Iterator[_Result]:
        """Yield the results of calls in order; raise the exception of a call, with a note that names the node.

        Raises:
            WorkerError: the process or the node of a task was lost each time that it ran.
        """
        at_once = self._at_once or max(1, int(_AHEAD * self._cluster.cpus()))
        waiting: deque[Any] = deque()
        for call in calls:
            if len(waiting) == at_once:
                yield self._result(waiting.popleft(), report)
            waiting.append(self._task.remote(own_version(), os.getcwd(), cloudpickle.dumps(call)))
            self._in_flight.add(waiting[-1])
        while waiting:
            yield self._result(waiting.popleft(), report)

    def _result(self, task: Any, report: Callable[[int, int], None]) -> Any:
        ray = self._cluster.ray
        try:
            result, items, item_bytes = pickle.loads(ray.get(task))
        except self._cluster.lost_errors() as exc:
            raise WorkerError(
                f"a task was lost {_RETRIES + 1} times with its process or node on the Ray cluster "
                f"({first_line(exc)}); where memory is short, fewer tasks at once (--workers) need less"
            ) from None
        except ray.exceptions.RayTaskError as exc:
            raise exc.cause if isinstance(exc.cause, Exception) else exc from None
        except ray.exceptions.RayError as exc:
            raise ClusterError(
                f"the Ray cluster at {self._cluster.address} was lost ({first_line(exc)}); look whether it still runs"
            ) from None
        self._in_flight.discard(task)
        report(items, item_bytes)
        return result

    def end(self) -> None:
        """Cancel the tasks in flight, and wait for their end, after which they write nothing."""
        ray = self._cluster.ray
        tasks, self._in_flight = list(self._in_flight), set()
        for force in (False, True):
            with contextlib.suppress(ray.exceptions.RayError):
                for task in tasks:
                    ray.cancel(task, force=force)
                if tasks:
                    _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=_CANCEL_TIMEOUT_S, fetch_local=False)


@contextlib.contextmanager
def open_pool(address: str | None, at_once: int | None) -> Iterator[RayPool | None]:
    """Open a pool on the cluster at an address, or None without an address. Raises ClusterError."""
    if address is None:
        yield None
        return
    with connect(address) as cluster:
        pool = RayPool(cluster, at_once)
        try:
            yield pool
        finally:
            pool.end()


def pickled_by_value(function: Callable[..., Any]) -> bytes:
    """Pickle a function with all loaded modules of the user, whose files nodes may not have."""
    chosen = cloudpickle.list_registry_pickle_by_value()
    modules = [module for name, module in users_modules().items() if name not in chosen]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def run_call(version: str, folder: str, pickled: bytes) -> bytes:
    """Run a call in a task; return a pickle of its result and reports. Raises ClusterError for another version."""
    reported = [0, 0]

    def report(items: int, item_bytes: int) -> None:
        reported[0] += items
        reported[1] += item_bytes

    node = str(import_module("ray").util.get_node_ip_address())
    check_version(own_version(), node, version)
    try:
        with contextlib.chdir(folder) if os.path.isdir(folder) else contextlib.nullcontext():
            return pickle.dumps((cloudpickle.loads(pickled)(report), *reported))
    except ImportError as exc:
        raise ClusterError(
            f"a module of the program is not installed on {node} ({exc}); install it on all nodes"
        ) from exc
    except Exception as exc:
        exc.add_note(f"on the Ray node {node}")
        raise
