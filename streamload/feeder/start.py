"""The first lines of the feeder's process: it starts its workers before it imports what it needs itself.

So all of them import at once. It is started as `python -m streamload.feeder.start SOCKET LAST_WORDS TRAINER WORKERS
AT_ONCE`: two descriptors, the number of the trainer's process, how many workers there are to be, and how many
of them to start now. Where shards are to be listed first, the others are started meanwhile:
sooner they would take the processors from that.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys

from streamload.environment.launch import EarlyWorkers, write_stack_on_request
from streamload.memory.unnamed import raise_descriptor_limit

__all__ = ["main"]


def main() -> None:
    """Run a feeder on the descriptors given as arguments."""
    socket_number, words_number, trainer, workers, at_once = map(int, sys.argv[1:6])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the trainer had it blocked until here
    faulthandler.enable(file=words_number)
    write_stack_on_request(words_number)
    raise_descriptor_limit()
    early = EarlyWorkers(workers)
    early.start(at_once)
    from streamload.feeder import process

    process.run(socket.socket(fileno=socket_number), trainer, early)


if __name__ == "__main__":
    main()
