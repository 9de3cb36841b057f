"""Send messages with descriptors over a Unix socket between streamload's own processes.

A message is a header, with the length and the number of descriptors, and a pickle. Pickles are safe here: both
processes belong to one program, and no pickle comes from the data.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import pickle
import socket
import struct
import traceback
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

from streamload.errors import WorkerError

MAX_DESCRIPTORS = 64
"""Maximum descriptors in one message; the kernel's limit is 253."""

_HEADER = struct.Struct("<QI")
_READ_BYTES = 1 << 16
_LEAST_TIMEOUT_S = 1e-6  # a timeout of 0 would make the socket non-blocking, which raises another error
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)

Message = tuple[Any, list[int]]


class Frames:
    """Split received bytes and descriptors into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        """Add received data."""
        self._bytes += data
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._descriptors.extend(numbers)

    def take(self) -> Message | None:
        """Return the next message with its descriptors; None until it has arrived completely.

        Raises:
            WorkerError: loading the message calls `sys.exit`.
            OSError: the process has too many open files for the descriptors.
        """
        if len(self._bytes) < _HEADER.size:
            return None
        length, count = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + length
        if len(self._bytes) < end:
            return None
        if len(self._descriptors) < count:
            # The kernel drops descriptors beyond the receiver's limit.
            raise OSError(errno.EMFILE, "too many open files to receive shared memory; raise the limit (ulimit -n)")
        with memoryview(self._bytes) as view:
            try:
                message = pickle.loads(view[_HEADER.size : end])
            except SystemExit as error:
                raise refused_exit(error) from error
        del self._bytes[:end]
        return message, [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the descriptors of remaining messages."""
        while self._descriptors:
            os.close(self._descriptors.popleft())


def refused_exit(error: SystemExit) -> WorkerError:
    """Return the error for a message that calls `sys.exit` when it is loaded."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((each for each in reversed(frames) if each.name == "<module>"), frames[-1])
    return WorkerError(
        f"{at.filename} exits in line {at.lineno} (SystemExit: {error}) when a worker imports it for the loader's "
        'arguments; call sys.exit and parse arguments only in functions, or under `if __name__ == "__main__":`'
    )


def frame(message: Any, descriptors: Sequence[int]) -> bytes:
    """Encode a message with its header."""
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(descriptors)} descriptors with one message; the limit is {MAX_DESCRIPTORS}")
    payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload), len(descriptors)) + payload


def read_from(sock: socket.socket, *, wait: bool = True) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """Read data and ancillary data; both are empty at the end of the stream.

    Raises:
        BlockingIOError: nothing has arrived, and `wait` or the socket forbids waiting.
    """
    flags = _CLOSE_ON_EXEC if wait else _CLOSE_ON_EXEC | socket.MSG_DONTWAIT
    try:
        data, ancillary, _, _ = sock.recvmsg(_READ_BYTES, _ANCILLARY_BYTES, flags)
    except ConnectionError:
        return b"", []
    return data, ancillary


class Channel:
    """One end of a socket pair, for a process that waits for messages. Owns the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames = Frames()

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message; its descriptors stay open here. Raises OSError if the other end is gone."""
        data = frame(message, descriptors)
        sent = socket.send_fds(self._socket, [data], list(descriptors)) if descriptors else 0
        if sent < len(data):
            self._socket.sendall(data[sent:])

    def send_all(self, messages: Sequence[Any]) -> None:
        """Send messages in one call. Raises OSError if the other end is gone."""
        self._socket.sendall(b"".join(frame(message, ()) for message in messages))

    def receive(self, timeout_s: float | None = None) -> Message:
        """Wait for a message; return it with its descriptors, which the caller closes.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: no complete message arrived in time.
            WorkerError, OSError: as for `Frames.take`.
        """
        deadline_s = None if timeout_s is None else monotonic() + timeout_s
        while (message := self._frames.take()) is None:
            if deadline_s is not None:  # for the whole message, however slowly its bytes arrive
                self._socket.settimeout(max(_LEAST_TIMEOUT_S, deadline_s - monotonic()))
            try:
                self._read(wait=True)
            finally:
                if deadline_s is not None:
                    self._socket.settimeout(None)
        return message

    def receive_now(self) -> Message | None:
        """Return the next message if it has arrived completely, else None. Raises what `receive` raises."""
        while (message := self._frames.take()) is None:
            try:
                self._read(wait=False)
            except BlockingIOError:
                return None
        return message

    def _read(self, *, wait: bool) -> None:
        data, ancillary = read_from(self._socket, wait=wait)
        self._frames.feed(data, ancillary)
        if not data:
            raise EOFError("the other end of the channel is gone")

    def fileno(self) -> int:
        """Return a descriptor that is readable when there may be a message."""
        return self._socket.fileno()

    def close(self, *, ends: bool = False) -> None:
        """Close the socket; `ends` ends the stream even if a fork keeps the socket open. Idempotent."""
        if ends:
            with contextlib.suppress(OSError):  # the other end is gone
                self._socket.shutdown(socket.SHUT_WR)
        self._frames.close()
        self._socket.close()
