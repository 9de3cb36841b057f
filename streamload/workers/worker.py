"""Run a worker process: do tasks from a socket until the feeder is gone.

A worker is stateless, so another can do its tasks again.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, NoReturn

from streamload.decode.batch_maker import TaskRunner
from streamload.decode.failure import Attempt, failure_of
from streamload.decode.job_pickle import load_job
from streamload.decode.tasks import WorkerSetup, WorkerStarted
from streamload.images.placing import opencv
from streamload.log_records import Logged, forward_records, set_log_levels
from streamload.memory.channel import Channel
from streamload.memory.mapped import map_memory
from streamload.memory.unnamed import keep_freed_memory, raise_descriptor_limit
from streamload.workers.launch import PROGRESS_BYTES, STACK_SIGNAL

# Freed memory that a worker keeps, since users' functions allocate and free hundreds of kilobytes for each row.
_KEPT_BYTES = 32 << 20


def run(socket_number: int, words_number: int, progress_number: int) -> NoReturn:
    """Serve a feeder until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the feeder; the trainer handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # so that programs that user code starts can handle it
    faulthandler.enable(file=words_number, all_threads=False)
    faulthandler.register(STACK_SIGNAL, file=words_number)
    raise_descriptor_limit()
    keep_freed_memory(_KEPT_BYTES)
    channel, sending = Channel(socket.socket(fileno=socket_number)), threading.RLock()
    progress = memoryview(map_memory(progress_number, PROGRESS_BYTES, writable=True).view("<i8").data)
    progress[0] = progress[1] = -1

    def send(message: Any) -> None:
        with sending:  # threads of the user's code may log at the same time
            channel.send(message)

    try:
        setup, _ = channel.receive()
        runner: TaskRunner | None = None
        with Attempt(exits=True) as attempt:
            runner = _start(setup, send)
        send(WorkerStarted(None if attempt.error is None else failure_of(attempt.error)))
        while True:
            waiting_since = perf_counter()
            message, descriptors = channel.receive()
            assert runner is not None
            done = runner.handle(message, descriptors, progress, perf_counter() - waiting_since)
            if done is not None:
                send(done)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing needs cleaning up, and a living feeder waits for this exit


def _start(setup: WorkerSetup, send: Callable[[Any], None]) -> TaskRunner:
    """Load the job and the user's libraries, and call `worker_init_fn`."""

    def forward(logged: Logged) -> None:
        with suppress(OSError):  # if the feeder is gone, this process ends soon
            send(logged)

    # The program's path may have changed since this process began, and differs on another node.
    sys.path[:] = dict.fromkeys((*setup.import_path, *sys.path))
    set_log_levels(setup.log_levels)
    forward_records(forward)
    job = load_job(setup.job)
    runner = TaskRunner(job)
    if runner.rows.resizes_images:
        opencv()  # loading OpenCV takes longer than a task, so all workers load it here, in parallel
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    if job.worker_init_fn is not None:
        job.worker_init_fn(setup.worker)
    return runner
