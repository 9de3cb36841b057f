"""The worker process: does tasks from a socket, and ends with the feeder.

It holds no state that matters: if it dies, another worker does its tasks again.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

from streamload.decode.batch_maker import BatchMaker
from streamload.decode.failure import Attempt, failure_of
from streamload.decode.job_pickle import load_job
from streamload.decode.open_shards import OpenShards
from streamload.decode.tasks import (
    BytesMoved,
    ForgetShards,
    ForgetSlots,
    LayoutFixed,
    MoveNoted,
    RowTask,
    ScanDone,
    ScanTask,
    ShardOpened,
    SlotOpened,
    WorkerSetup,
    WorkerStarted,
    WorkSeconds,
)
from streamload.environment.launch import PROGRESS_BYTES
from streamload.images.opencv import opencv
from streamload.log_records import Logged, forward_records, set_log_levels
from streamload.memory.channel import Channel
from streamload.memory.mapped import map_memory
from streamload.memory.slots import MappedSlots
from streamload.memory.unnamed import raise_descriptor_limit
from streamload.tar.scan import scan_file, scan_prefix

__all__ = ["run", "scan"]


def scan(task: ScanTask, shards: OpenShards, waited_s: float = 0.0) -> ScanDone:
    """Read the headers of a shard, or of the part of it that has arrived."""
    started = perf_counter()
    table = piece = None
    with Attempt() as attempt:
        if task.available is None:
            table = scan_file(
                shards.descriptor(task.shard),
                shards.size_bytes(task.shard),
                shards.url(task.shard),
                strict=task.strict,
            )
        else:
            piece = scan_prefix(
                shards.first_bytes(task.shard, task.available),
                shards.url(task.shard),
                start=task.start,
                available=task.available,
                total=task.total,
                strict=task.strict,
            )
    seconds = WorkSeconds(scan=perf_counter() - started, waited=waited_s)
    failure = None if attempt.error is None else failure_of(attempt.error)
    return ScanDone(task.number, task.shard, table, failure, seconds, piece)


class _Worker:
    def __init__(self, channel: Channel, progress: memoryview) -> None:
        self._channel = channel
        self._progress = progress
        self._shards = OpenShards()
        self._slots = MappedSlots()
        self._maker: BatchMaker | None = None
        self._waiting: deque[tuple[Any, list[int]]] = deque()
        self._sending = threading.RLock()

    def start(self, setup: WorkerSetup) -> tuple[str, ...]:
        """Load the job; returns, as text, what the user's modules hold in the trainer and could not be set here."""
        sys.path[:] = setup.import_path
        set_log_levels(setup.log_levels)
        forward_records(self._send_logged)
        job, lost = load_job(setup.job)
        self._maker = BatchMaker(job, self._slots)
        if self._maker.rows.resizes_images:
            opencv()  # loading it takes longer than a task: all workers do it now, at the same time
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)
        if job.worker_init_fn is not None:
            job.worker_init_fn(setup.worker)
        return lost

    def send(self, message: Any) -> None:
        """Send to the feeder; locked, since threads of the user's code may log at the same time."""
        with self._sending:
            self._channel.send(message)

    def _send_logged(self, logged: Logged) -> None:
        with suppress(OSError):  # the feeder is gone, and this process ends soon
            self.send(logged)

    def serve(self) -> None:
        """Answer messages until the feeder is gone."""
        while True:
            waiting_since = perf_counter()
            message, descriptors = self._waiting.popleft() if self._waiting else self._channel.receive()
            self._handle(message, descriptors, perf_counter() - waiting_since)

    def _moved(self, number: int, shard: int, start: int, end: int) -> None:
        """Report bytes that have been read, and wait until the feeder has freed them: otherwise both copies grow."""
        self.send(BytesMoved(number, shard, start, end))
        while not isinstance((received := self._channel.receive())[0], MoveNoted):
            self._waiting.append(received)

    def _handle(self, message: Any, descriptors: list[int], waited_s: float) -> None:
        assert self._maker is not None
        match message:
            case RowTask():
                self._progress[1] = message.number
                self._shards.on_moved = partial(self._moved, message.number) if message.moves else None
                self.send(self._maker.run(message, self._shards, self._progress, waited_s))
            case ScanTask():
                self._progress[0], self._progress[1] = -1, message.number
                self.send(scan(message, self._shards, waited_s))
            case ShardOpened():
                self._shards.add(message, descriptors[0])
            case SlotOpened():
                self._slots.add(message.slot, descriptors[0])
            case LayoutFixed():
                self._maker.fix_layout(message.layout)
            case ForgetShards():
                self._shards.drop(message.shards)
            case ForgetSlots():
                for slot in message.slots:
                    self._slots.drop(slot)


def run(socket_number: int, words_number: int, progress_number: int) -> None:
    """Serve one feeder until it is gone.

    Args:
        socket_number: descriptor of the socket to the feeder.
        words_number: descriptor of memory for the traceback of a fatal signal.
        progress_number: descriptor of memory for the current task and row.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the feeder; the trainer handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for programs that the user's code starts
    faulthandler.enable(file=words_number, all_threads=False)
    raise_descriptor_limit()
    channel = Channel(socket.socket(fileno=socket_number))
    progress = memoryview(map_memory(progress_number, PROGRESS_BYTES, writable=True).view("<i8").data)
    worker = _Worker(channel, progress)
    try:
        setup, _ = channel.receive()
        lost: tuple[str, ...] = ()
        with Attempt() as attempt:
            lost = worker.start(setup)
        worker.send(WorkerStarted(None if attempt.error is None else failure_of(attempt.error), lost))
        worker.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing needs cleaning up, and the feeder is waiting
