"""Exchange messages over a socket in an event loop; a separate module, since workers do not import asyncio."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from streamload.memory.channel import Frames, frame, read_from


class AsyncChannel:
    """One end of a socket pair, served by an event loop.

    Args:
        sock: owned by the channel.
        on_message: called with every message and its descriptors.
        on_lost: called once if the other end is gone before `close()`.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Any, list[int]], None], on_lost: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._frames = Frames()
        self._on_message = on_message
        self._on_lost = on_lost
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    def send(self, message: Any, descriptors: Sequence[int] = (), *, close: bool = False) -> None:
        """Send without waiting; bytes beyond the socket's buffer are sent later.

        Args:
            message: picklable.
            descriptors: sent as duplicates, unless `close`.
            close: close the descriptors once they are sent.
        """
        if self._closed:
            _close_all(descriptors if close else ())
            return
        owned = list(descriptors) if close else [os.dup(descriptor) for descriptor in descriptors]
        self._unsent.append((memoryview(frame(message, owned)), owned))
        if len(self._unsent) == 1:
            self._write()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        for _, descriptors in self._unsent:
            _close_all(descriptors)
        self._unsent.clear()
        self._frames.close()
        self._socket.close()

    def _write(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [data], descriptors) if descriptors else self._socket.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._write)
                return
            except OSError:  # skipping this message would corrupt the stream
                self._lose()
                return
            _close_all(descriptors)
            if sent < len(data):
                self._unsent[0] = (data[sent:], [])
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data, ancillary = read_from(self._socket)
        except BlockingIOError:
            return
        self._frames.feed(data, ancillary)
        while not self._closed and (message := self._frames.take()) is not None:
            self._on_message(*message)
        if not data and not self._closed:
            self._lose()

    def _lose(self) -> None:
        self.close()
        # Not at once, since the caller may be inside `send`.
        self._loop.call_soon(self._on_lost)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
