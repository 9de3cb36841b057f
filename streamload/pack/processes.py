"""Run calls in processes of this machine, which end with this one, even if it is killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from threading import Thread
from types import ModuleType
from typing import Any, Self, TypeVar

from streamload.errors import WorkerError

_Result = TypeVar("_Result")
Report = Callable[[int, int], None]
"""Takes numbers of items and bytes that were finished since the last call."""

Call = Callable[[Report], _Result]
"""Picklable; cloudpickle's results are contained as bytes."""

_POLL_S = 0.2
_SPAWN = multiprocessing.get_context("spawn")
_counters: list[Any] = []
"""In a worker process: the array of items and bytes that all workers have finished."""


class Processes:
    """A pool of worker processes; a context manager.

    Args:
        count: number of processes; with 1, calls run in this process.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._running: set[Future[Any]] = set()
        if count > 1:
            self._done = _SPAWN.Array("q", 2)
            self._inherited, self._life = _SPAWN.Pipe(duplex=False)
            self._executor = ProcessPoolExecutor(count, _SPAWN, _begin, (self._inherited, self._done))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._count > 1:
            self._life.close()  # ends the workers, whatever they are doing
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._inherited.close()

    def results(self, calls: Iterable[Call[_Result]], report: Report = lambda *_: None) -> Iterator[_Result]:
        """Yield the results of calls in the order in which they end; raise the exception of a call.

        Raises:
            WorkerError: a process died.
        """
        if self._count == 1:
            yield from (call(report) for call in calls)
            return
        for call in calls:
            with _starting_processes():
                self._running.add(self._executor.submit(_run, pickle.dumps(call)))
            while len(self._running) > self._count:  # one waits, so that no process waits for this one
                yield from self._ended(report)
        while self._running:
            yield from self._ended(report)

    def _ended(self, report: Report) -> Iterator[Any]:
        ended, self._running = wait(self._running, _POLL_S, FIRST_COMPLETED)
        with self._done.get_lock():
            items, item_bytes = self._done[:]
            self._done[:] = 0, 0
        report(items, item_bytes)
        for future in ended:
            try:
                yield future.result()
            except BrokenProcessPool:
                raise WorkerError("a worker process died; if memory is short, fewer workers need less") from None


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


def _begin(life: Connection, done: Any) -> None:
    _counters.append(done)
    Thread(target=_end_with, args=(life,), daemon=True).start()


def _end_with(life: Connection) -> None:
    life.poll(None)  # until the process at the other end closes it, or dies
    os._exit(1)


def _run(pickled: bytes) -> Any:
    return pickle.loads(pickled)(_report)


def _report(items: int, item_bytes: int) -> None:
    (done,) = _counters
    with done.get_lock():
        done[0] += items
        done[1] += item_bytes
