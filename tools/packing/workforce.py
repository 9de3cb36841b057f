"""Several worker processes that share tasks; or none, and the tasks are done right here."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from streamload_tools.packing.work import Done, Failed, Progressed, Report, Result, Task, do

from streamload.environment.launch import launch
from streamload.errors import WorkerError
from streamload.memory.channel import Frames, frame, read_from

__all__ = ["Workforce"]


class Workforce:
    """Does tasks with so many processes, started at the first need; use it in a `with` block.

    With one worker, tasks are done in the caller's own process. At the end of the block no process is left, whatever
    it was doing.
    """

    def __init__(self, workers: int, kept_open: int) -> None:
        """Start nothing yet.

        Args:
            workers: how many.
            kept_open: a descriptor that every process holds until it ends, such as that of a lock.
        """
        self._count = workers
        self._kept_open = kept_open
        self._workers: list[_Worker] = []

    def start(self, number: int) -> None:
        """Start processes now, for there will be at least so many tasks; none for a single one."""
        wanted = min(self._count, number)
        while wanted > 1 and len(self._workers) < wanted:
            self._workers.append(_Worker(self._kept_open))

    def results(self, tasks: Iterable[Task], number: int, tell: Report) -> Iterator[Result]:
        """The results of tasks, in their order.

        Args:
            tasks: taken one by one, only as a worker becomes free for the next.
            number: how many tasks there are.
            tell: called with files and bytes as they are done.

        Raises:
            OSError, StreamloadError: a task failed.
            WorkerError: a process died.
        """
        if not self._workers and min(self._count, number) <= 1:
            for task in tasks:
                yield do(task, tell)
            return
        while len(self._workers) < min(self._count, number):
            self._workers.append(_Worker(self._kept_open))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.socket, selectors.EVENT_READ, worker)
            yield from self._shared(iter(tasks), selector, tell)

    def _shared(self, tasks: Iterator[Task], selector: selectors.BaseSelector, tell: Report) -> Iterator[Result]:
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
                            tell(items, item_bytes)
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
    """One process, with one task in hand at most: then neither side can wait for the other to read."""

    def __init__(self, kept_open: int) -> None:
        self._child = launch("streamload_tools.packing.worker", descriptors=(kept_open,))
        self.socket = self._child.socket
        self._frames = Frames()

    def send(self, task: Task) -> None:
        """Give it a task. If it is dead, `messages` says so."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(frame(task, ()))

    def messages(self) -> Iterator[Progressed | Done | Failed]:
        """What has come from it, after waiting for at least some bytes. Raises WorkerError if it has died."""
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
        """Kill it and wait for its end."""
        self._child.end(0)
        self.socket.close()
        os.close(self._child.words)
