"""Start the feeder's process: fork its workers before the imports that only the feeder needs."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket

from streamload.memory.unnamed import raise_descriptor_limit
from streamload.workers.launch import STACK_SIGNAL, Child, start_workers


def main(socket_number: int, words_number: int, progress_number: int, trainer: int, workers: int) -> None:
    """Run a feeder for a trainer, given by its process id. The first three arguments are descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the trainer blocked it before the start
    faulthandler.enable(file=words_number)
    faulthandler.register(STACK_SIGNAL, file=words_number)
    raise_descriptor_limit()
    early: list[Child] = []
    if workers:
        from streamload.workers import worker

        os.write(progress_number, b"\1")  # from now on `Connection.close` gives this process time to end its workers
        early = start_workers(workers, worker.run)
    from streamload.feeder import process

    process.run(socket.socket(fileno=socket_number), trainer, early)
