"""A pool of worker processes; with one worker, tasks are done in the caller's process.

`concurrent.futures` would run the user's main script again or fork, and its workers survive a killed parent.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from streamload.errors import WorkerError
from streamload.memory.channel import Frames, frame, read_from
from streamload.pack.work import Done, Failed, Progressed, Report, Result, Task, do
from streamload.workers.launch import launch


class Workforce:
    """A pool of worker processes, started when needed. After its `with` block no process is left."""

    def __init__(self, workers: int, kept_open: int) -> None:
        """Start no process yet.

        Args:
            workers: how many processes; with 1, tasks are done in the caller's process.
            kept_open: a descriptor, such as that of a lock, that every worker keeps open until it ends.
        """
        self._count = workers
        self._kept_open = kept_open
        self._workers: list[_Worker] = []

    def start(self, number: int) -> None:
        """Start the workers for at least this number of tasks now; none for a single task."""
        wanted = min(self._count, number)
        while wanted > 1 and len(self._workers) < wanted:
            self._workers.append(_Worker(self._kept_open))

    def results(self, tasks: Iterable[Task], number: int, report: Report) -> Iterator[Result]:
        """The results of tasks, in their order.

        Args:
            tasks: consumed one by one, as workers become free.
            number: an upper bound of the number of tasks.
            report: called with numbers of files and bytes as they are done.

        Raises:
            OSError, StreamloadError: a task failed.
            WorkerError: a process died.
        """
        if not self._workers and min(self._count, number) <= 1:
            for task in tasks:
                yield do(task, report)
            return
        while len(self._workers) < min(self._count, number):
            self._workers.append(_Worker(self._kept_open))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            yield from self._shared(iter(tasks), selector, report)

    def _shared(self, tasks: Iterator[Task], selector: selectors.BaseSelector, report: Report) -> Iterator[Result]:
        busy: dict[_Worker, int] = {}
        finished: dict[int, Result] = {}
        given = taken = 0

        def give(worker: _Worker) -> None:
            nonlocal given
            if (task := next(tasks, None)) is not None:
                worker.send(task)
                busy[worker] = given
                given += 1

        for worker in self._workers:
            give(worker)
        while busy:
            for key, _ in selector.select():
                worker = key.data
                for message in worker.messages():
                    match message:
                        case Progressed(items, item_bytes):
                            report(items, item_bytes)
                        case Failed(error):
                            raise error
                        case Done(result):
                            finished[busy.pop(worker)] = result
                            give(worker)
            while taken in finished:
                yield finished.pop(taken)
                taken += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._workers:
            self._workers.pop().end()


class _Worker:
    """One process. It has one task at most, so that the two sides cannot both block on writing."""

    def __init__(self, kept_open: int) -> None:
        self._child = launch("streamload.pack.worker", descriptors=(kept_open,))
        self.socket = self._child.socket
        self._frames = Frames()

    def send(self, task: Task) -> None:
        """Send it a task. If it is dead, `messages` raises the error."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(frame(task, ()))

    def messages(self) -> Iterator[Progressed | Done | Failed]:
        """Its next messages; blocks until there is data. Raises WorkerError if it has died."""
        data, ancillary = read_from(self.socket)
        if not data:
            raise WorkerError(f"a worker process {self._how_it_ended()}")
        self._frames.feed(data, ancillary)
        while (taken := self._frames.take()) is not None:
            yield taken[0]

    def _how_it_ended(self) -> str:
        status = self._child.process.wait()
        hint = "; if memory is short, fewer --workers need less" if status == -signal.SIGKILL else ""
        return f"{self._child.how_it_ended(status)}{hint}"

    def end(self) -> None:
        """Kill it and wait until it has exited."""
        self._child.end(0)
        self.socket.close()
        os.close(self._child.words)
