"""Run calls in processes of this machine, which end with this process even if it is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from threading import Thread
from types import ModuleType
from typing import Any

from streamload.errors import WorkerError

# Runs calls, which are picklable, and yields their results in any order; raises the exception of a call.
Pool = Callable[[Iterable[Callable[[], Any]]], Iterator[Any]]

_SPAWN = multiprocessing.get_context("spawn")


@contextmanager
def processes(count: int) -> Iterator[Pool]:
    """Start a pool of processes; with a count of 1, run calls in this process.

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
