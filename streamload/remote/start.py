"""The first lines of a relay's process, which stands where a feeder's process does; see `feeder.start`.

On its own because `launch` has it called in a process.
"""

from __future__ import annotations

import faulthandler
import signal
import socket

from streamload.environment.launch import EarlyWorkers, write_stack_on_request
from streamload.feeder import process
from streamload.memory.unnamed import raise_descriptor_limit
from streamload.remote.relay import make_relay

__all__ = ["main"]


def main(socket_number: int, words_number: int, trainer: int, _: int) -> None:
    """Run a relay on the descriptors given as arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the trainer had it blocked until here
    faulthandler.enable(file=words_number)
    write_stack_on_request(words_number)
    raise_descriptor_limit()
    process.run(socket.socket(fileno=socket_number), trainer, EarlyWorkers(), lambda: make_relay)
