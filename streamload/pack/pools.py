"""Run calls in processes of this machine, or as tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import chdir, closing, contextmanager, nullcontext, suppress
from importlib import import_module
from itertools import islice
from multiprocessing.connection import Connection
from threading import Thread
from types import ModuleType
from typing import Any

import cloudpickle

from streamload.cluster.ray_cluster import check_version, connect, own_version
from streamload.decode.failure import first_line
from streamload.decode.job_pickle import users_modules
from streamload.errors import ClusterError, WorkerError

# Runs calls, which are picklable, and yields their results in any order; raises the exception of a call.
Pool = Callable[[Iterable[Callable[[], Any]]], Iterator[Any]]

_SPAWN = multiprocessing.get_context("spawn")
_TASK_NAME = "streamload"  # in Ray's lists, and of the processes
_RETRIES = 3
_AHEAD = 4
_CANCEL_TIMEOUT_S = 10.0


@contextmanager
def processes(count: int) -> Iterator[Pool]:
    """Start processes, which end with this one even if it is killed; with a count of 1, run calls in this process.

    The pool raises WorkerError if a process died.
    """
    if count == 1:
        yield lambda calls: (call() for call in calls)
        return
    inherited, life = _SPAWN.Pipe(duplex=False)
    executor = ProcessPoolExecutor(count, _SPAWN, _end_with, (inherited,))

    def results(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
        with _starting_processes():
            futures = [executor.submit(call) for call in calls]
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                raise WorkerError("a worker process died; if memory is short, fewer workers need less") from None

    try:
        yield results
    finally:
        life.close()  # ends the workers, even busy ones
        executor.shutdown(wait=True, cancel_futures=True)
        inherited.close()


@contextmanager
def _starting_processes() -> Iterator[None]:
    """Start processes that ignore Ctrl-C and do not run the user's script again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with(life: Connection) -> None:
    def wait() -> None:
        life.poll(None)  # until the process at the other end closes it, or dies
        os._exit(1)

    Thread(target=wait, daemon=True).start()


@contextmanager
def ray_pool(address: str, at_once: int | None) -> Iterator[Pool]:
    """Open a pool on the Ray cluster at an address. Raises ClusterError.

    Each call is a task of one CPU, which Ray repeats if its process or node is lost; by default four per CPU are in
    flight. Results are in order. On exit, tasks are cancelled.
    """
    with closing(connect(address)) as cluster:
        cluster.require({"CPU": 1})
        ray = cluster.ray
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(run_call).options(name=_TASK_NAME)
        most = at_once or max(1, int(_AHEAD * ray.cluster_resources().get("CPU", 0)))
        in_flight: deque[Any] = deque()

        def results(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
            waiting = iter(calls)
            while True:
                for call in islice(waiting, most - len(in_flight)):
                    in_flight.append(task.remote(own_version(), os.getcwd(), cloudpickle.dumps(call)))
                if not in_flight:
                    return
                try:
                    result = pickle.loads(ray.get(in_flight[0]))
                except ray.exceptions.RayTaskError as exc:
                    raise exc.cause if isinstance(exc.cause, Exception) else exc from None
                except ray.exceptions.RayError as exc:
                    raise ClusterError(
                        f"the Ray cluster at {cluster.address} was lost, or a task {_RETRIES + 1} times with its "
                        f"process or node ({first_line(exc)}); if memory is short, fewer tasks at once (--workers) "
                        "need less"
                    ) from None
                in_flight.popleft()
                yield result

        try:
            yield results
        finally:
            with suppress(ray.exceptions.RayError):
                for unfinished in in_flight:
                    ray.cancel(unfinished, force=True)
                if in_flight:
                    ray.wait([*in_flight], num_returns=len(in_flight), timeout=_CANCEL_TIMEOUT_S, fetch_local=False)


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
        with chdir(folder) if os.path.isdir(folder) else nullcontext():
            return pickle.dumps(cloudpickle.loads(pickled)())
    except ImportError as exc:
        raise ClusterError(
            f"a module of the program is not installed on {node} ({exc}); install it on all nodes"
        ) from exc
    except Exception as exc:
        exc.add_note(f"on the Ray node {node}")
        raise
