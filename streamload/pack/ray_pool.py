"""Run the calls of commands with `--ray`, each as one `ray.remote` task.

Ray repeats a task if its process or node is lost.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import cloudpickle

from streamload.cluster.ray_cluster import RayCluster, check_version, connect, own_version
from streamload.decode.failure import first_line
from streamload.decode.job_pickle import users_modules
from streamload.errors import ClusterError, WorkerError
from streamload.pack.processes import Pool

_TASK_NAME = "streamload"  # in Ray's lists, and of the processes
_RETRIES = 3
_AHEAD = 4
_CANCEL_TIMEOUT_S = 10.0
# Ray's errors for a task whose process or node was lost.
_LOST = ("WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError", "TaskUnschedulableError")


@contextlib.contextmanager
def open_pool(address: str | None, at_once: int | None) -> Iterator[Pool | None]:
    """Open a pool on the cluster at an address; None without an address. Raises ClusterError.

    Results are in order. Each task uses one CPU; by default four tasks per CPU are in flight. On exit, tasks are
    cancelled.
    """
    if address is None:
        yield None
        return
    with contextlib.closing(connect(address)) as cluster:
        cluster.require({"CPU": 1})
        task = cluster.ray.remote(num_cpus=1, max_retries=_RETRIES)(run_call).options(name=_TASK_NAME)
        most = at_once or max(1, int(_AHEAD * cluster.ray.cluster_resources().get("CPU", 0)))
        in_flight: deque[Any] = deque()

        def results(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
            for call in calls:
                if len(in_flight) == most:
                    yield _result(cluster, in_flight[0])
                    in_flight.popleft()
                in_flight.append(task.remote(own_version(), os.getcwd(), cloudpickle.dumps(call)))
            while in_flight:
                yield _result(cluster, in_flight[0])
                in_flight.popleft()

        try:
            yield results
        finally:
            _cancel(cluster.ray, list(in_flight))


def _result(cluster: RayCluster, task: Any) -> Any:
    ray = cluster.ray
    lost = [getattr(ray.exceptions, name) for name in _LOST]
    try:
        return pickle.loads(ray.get(task))
    except (*lost,) as exc:
        raise WorkerError(
            f"a task was lost {_RETRIES + 1} times with its process or node on the Ray cluster "
            f"({first_line(exc)}); where memory is short, fewer tasks at once (--workers) need less"
        ) from None
    except ray.exceptions.RayTaskError as exc:
        raise exc.cause if isinstance(exc.cause, Exception) else exc from None
    except ray.exceptions.RayError as exc:
        raise ClusterError(
            f"the Ray cluster at {cluster.address} was lost ({first_line(exc)}); look whether it still runs"
        ) from None


def _cancel(ray: Any, tasks: list[Any]) -> None:
    for force in (False, True):
        with contextlib.suppress(ray.exceptions.RayError):
            for task in tasks:
                ray.cancel(task, force=force)
            if tasks:
                _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=_CANCEL_TIMEOUT_S, fetch_local=False)


def pickled_by_value(function: Callable[..., Any]) -> bytes:
    """Pickle a function with all loaded modules of the user, which nodes may lack."""
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
    """Run a call in a task, and return its pickled result. Raises ClusterError for another version."""
    node = str(import_module("ray").util.get_node_ip_address())
    check_version(own_version(), node, version)
    try:
        with contextlib.chdir(folder) if os.path.isdir(folder) else contextlib.nullcontext():
            return pickle.dumps(cloudpickle.loads(pickled)())
    except ImportError as exc:
        raise ClusterError(
            f"a module of the program is not installed on {node} ({exc}); install it on all nodes"
        ) from exc
    except Exception as exc:
        exc.add_note(f"on the Ray node {node}")
        raise
