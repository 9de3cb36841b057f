"""The worker process of `shardify`: does one task after another, and ends with its parent.

SIGINT stays blocked, since the parent handles Ctrl-C. If it dies, it leaves a hidden file
that no later run takes for finished.
"""

from __future__ import annotations

import faulthandler
import os
import socket

from streamload.errors import StreamloadError
from streamload.memory.channel import Channel
from streamload.pack.work import Done, Failed, Progressed, Task, do
from streamload.workers.launch import die_with


def main(number: int, words: int, parent: int, _kept_open: int) -> None:
    """Do the tasks that arrive on the socket given as an argument."""
    die_with(parent)
    faulthandler.enable(file=words)
    channel = Channel(socket.socket(fileno=number))
    try:
        while True:
            message, _ = channel.receive()
            channel.send(_answer(message, channel))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _answer(task: Task, channel: Channel) -> Done | Failed:
    try:
        return Done(do(task, lambda items, item_bytes: channel.send(Progressed(items, item_bytes))))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except (OSError, StreamloadError) as exc:
        return Failed(exc)
