"""The first lines of the feeder's process: it starts its workers before it imports what it needs itself.

So all of them import at once. It is started as `python -m streamload.feeder.start SOCKET LAST_WORDS TRAINER WORKERS`:
two descriptors, the number of the trainer's process, and how many workers to start now; 0 where they are threads.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
from contextlib import suppress

from streamload.launch import WorkerChild, launch_worker
from streamload.memory.unnamed import raise_descriptor_limit

__all__ = ["main"]


def _launched(workers: int) -> list[WorkerChild]:
    """The workers that could be started; the pool starts the others, and reports what keeps it from that."""
    launched: list[WorkerChild] = []
    with suppress(OSError):
        while len(launched) < workers:
            launched.append(launch_worker())
    return launched


def main() -> None:
    """Run a feeder on the descriptors given as arguments."""
    socket_number, words_number, trainer, workers = map(int, sys.argv[1:5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the trainer had it blocked until here
    faulthandler.enable(file=words_number)
    raise_descriptor_limit()
    launched = _launched(workers)
    from streamload.feeder import process

    if workers:
        process.run(socket.socket(fileno=socket_number), trainer, launched, None)
    else:
        from streamload.decode.in_process import ThreadPool  # with all that makes samples: no feeder else needs it

        process.run(socket.socket(fileno=socket_number), trainer, launched, ThreadPool)


if __name__ == "__main__":
    main()
