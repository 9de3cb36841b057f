"""Does calls as tasks of a Ray cluster, with their results in order: the nodes' counterpart of threads and processes.

Ray places the tasks, watches their processes and runs a task again whose process or node is lost. So what a task
returns and leaves must not depend on how often it ran.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

import cloudpickle
from streamload_tools.failures import UsageError

from streamload.decode.failure import first_line
from streamload.decode.job_pickle import is_users
from streamload.environment.ray_cluster import FileOfAll, RayCluster, Versions, connect
from streamload.errors import ClusterError, StreamloadError, WorkerError

__all__ = ["ON_A_NODE", "RayPool", "open_pool", "pickled_by_value"]

_Result = TypeVar("_Result")

Call = Callable[[Callable[[int, int], None]], _Result]
"""Picklable; called on a node with a function that takes numbers of items and of bytes as they are done."""

ON_A_NODE: Mapping[str, Any] = {"num_workers": 0, "rank": 0, "world_size": 1}
"""Options of a loader in a task: it has one processor, and the launcher that started Ray is not to make it a rank."""

TASK_NAME = "streamload"
"""What tasks are called in Ray's lists and by their processes."""

_MOST_FINISHED = 4
"""So many times as many calls as run at once may have been given and not taken."""

_RETRIES = 3
_LEAST_IN_FLIGHT = 8
_COUNTED_EVERY_S = 10.0
_CANCEL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Done:
    """What a task has to say: its result, or an error that is not a bug; and what it has done."""

    result: Any
    error: Exception | None
    items: int
    item_bytes: int


class RayPool:
    """Tasks on the nodes of a cluster, each with one processor.

    Args:
        cluster: the connection.
        at_once: how many tasks run at once; None is one for each processor of the cluster.
    """

    def __init__(self, cluster: RayCluster, at_once: int | None) -> None:
        self._cluster = cluster
        self._at_once = at_once
        cluster.require({"CPU": 1})
        self._task = cluster.ray.remote(num_cpus=1, max_retries=_RETRIES)(_runner()).options(name=TASK_NAME)
        self._counted_s, self._limit = -_COUNTED_EVERY_S, _LEAST_IN_FLIGHT

    def check_nodes(self, files: Sequence[FileOfAll] = ()) -> None:
        """See `RayCluster.check_nodes`."""
        self._cluster.check_nodes(files)

    def results(
        self, calls: Iterable[Call[_Result]], report: Callable[[int, int], None] = lambda *_: None
    ) -> Iterator[_Result]:
        """The results of calls, in their order. When the iterator ends, however it does, no task is left.

        Args:
            calls: consumed one by one, somewhat more than the cluster has processors ahead.
            report: called with what a task has reported, when it is done.

        Raises:
            OSError, StreamloadError: what a call has raised; a note names the node.
            WorkerError: the process or the node of a task was lost each time that it was run.
        """
        remaining = iter(calls)
        order: dict[Any, int] = {}
        finished: dict[int, _Done] = {}
        given = taken = 0
        try:
            while True:
                in_flight = self._in_flight()
                # Where the first one takes long, what waits for it is bounded, too.
                while len(order) < in_flight and len(order) + len(finished) < _MOST_FINISHED * in_flight:
                    if (call := next(remaining, None)) is None:
                        break
                    order[self._start(call)] = given
                    given += 1
                if not order:
                    return
                ready, _ = self._cluster.ray.wait(list(order), num_returns=len(order), timeout=0)
                if not ready:
                    ready, _ = self._cluster.ray.wait(list(order))
                for each in ready:
                    done = self._answer(each)
                    report(done.items, done.item_bytes)
                    finished[order.pop(each)] = done
                while taken in finished:
                    done = finished.pop(taken)
                    taken += 1
                    if done.error is not None:
                        raise done.error
                    yield done.result
        finally:
            self._cancel(list(order))

    def _start(self, call: Call[Any]) -> Any:
        return self._task.remote(Versions.here(), os.getcwd(), cloudpickle.dumps(call))

    def _answer(self, task: Any) -> _Done:
        ray = self._cluster.ray
        try:
            done: _Done = pickle.loads(ray.get(task))
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
        return done

    def _in_flight(self) -> int:
        """How many tasks to give to Ray: some are waiting there, so that a processor is never without one."""
        if self._at_once is not None:
            return self._at_once
        if time.monotonic() - self._counted_s >= _COUNTED_EVERY_S:  # nodes may join
            self._counted_s = time.monotonic()
            self._limit = max(_LEAST_IN_FLIGHT, int(2 * self._cluster.cpus()))
        return self._limit

    def _cancel(self, tasks: list[Any]) -> None:
        """End tasks and wait until they have ended, so that none writes anything any more."""
        ray = self._cluster.ray
        for force in (False, True):
            with suppress(ray.exceptions.RayError):
                for task in tasks:
                    ray.cancel(task, force=force)
                if tasks:
                    _, tasks = ray.wait(tasks, num_returns=len(tasks), timeout=_CANCEL_TIMEOUT_S, fetch_local=False)


@contextmanager
def open_pool(address: str | None, at_once: int | None) -> Iterator[RayPool | None]:
    """A pool on the cluster at an address; None for no address, where work is done by this machine.

    Raises:
        ClusterError: there is no such cluster, or its nodes have other versions.
    """
    if address is None:
        yield None
        return
    with connect(address) as cluster:
        pool = RayPool(cluster, at_once)
        pool.check_nodes()
        yield pool


def pickled_by_value(function: Callable[..., Any]) -> bytes:
    """A user's function with all of the user's own modules that are loaded, since nodes need not have these files."""
    chosen = cloudpickle.list_registry_pickle_by_value()
    modules = [sys.modules[name] for name in list(sys.modules) if is_users(name) and name not in chosen]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _runner() -> Callable[[Versions, str, bytes], bytes]:
    """What Ray runs. A function within a function travels by its code: a node without streamload can say so."""

    def run(versions: Any, folder: str, call: bytes) -> bytes:
        from streamload_tools.ray_pool import run_call

        done: bytes = run_call(versions, folder, call)
        return done

    return run


def run_call(versions: Versions, folder: str, pickled: bytes) -> bytes:
    """Do a call in a task, in the folder of the command where there is one; a pickled `_Done`."""
    items = item_bytes = 0

    def report(more: int, more_bytes: int) -> None:
        nonlocal items, item_bytes
        items += more
        item_bytes += more_bytes

    result, error = None, None
    try:
        versions.check(Versions.here(), _address())
    except ClusterError as exc:
        return pickle.dumps(_Done(None, exc, 0, 0))
    try:
        with _in_folder(folder):
            result = _loaded(pickled)(report)
    except (OSError, ValueError, UsageError, StreamloadError) as exc:
        exc.add_note(f"on the Ray node {_address()}")
        error = exc
    return pickle.dumps(_Done(result, error, items, item_bytes))


def _loaded(pickled: bytes) -> Call[Any]:
    try:
        call: Call[Any] = cloudpickle.loads(pickled)
    except ImportError as exc:
        raise ClusterError(f"a module of the program cannot be imported ({exc}); install it on all nodes") from exc
    return call


@contextmanager
def _in_folder(folder: str) -> Iterator[None]:
    """Relative paths mean what they mean to the command. A folder that is not here is needed by urls alone."""
    before = os.getcwd()
    with suppress(OSError):
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _address() -> str:
    return str(import_module("ray").util.get_node_ip_address())
