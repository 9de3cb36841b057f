"""The first lines of the feeder's process: it starts its workers before it imports what it needs itself.

So all of them import at once. It is started as `python -m streamload.feeder_start SOCKET LAST_WORDS TRAINER WORKERS`:
two descriptors, the number of the trainer's process, and how many workers there are to be.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys

from streamload.launch import launch_worker

__all__ = ["main"]


def main() -> None:
    """Run a feeder on the descriptors given as arguments."""
    socket_number, words_number, trainer, workers = map(int, sys.argv[1:5])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the trainer had it blocked until here
    faulthandler.enable(file=words_number)
    launched = [launch_worker() for _ in range(workers)]
    from streamload import feeder_process

    feeder_process.run(socket.socket(fileno=socket_number), trainer, launched)


if __name__ == "__main__":
    main()
