"""Messages and batches between the relay and its actors, over one TCP connection for each actor.

A frame is a pickle and the bytes of batches behind a header of sixteen bytes (how many there are of each). The bytes
go from the slot in which the actor's workers have written them to the one that the relay maps, without a copy of ours.

Pickles are safe here as far as Ray's own messages are, which are pickles too: whoever connects must send the token that
the relay got by Ray, before anything of it is read.
"""

from __future__ import annotations

import asyncio
import hmac
import pickle
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from streamload.memory.mapped import Bytes

__all__ = ["Batches", "Credit", "Listener", "Wire", "connect"]

_HEADER = struct.Struct("<QQ")
_TOKEN_BYTES = 32
_MOST_MESSAGE_BYTES = 1 << 32
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""After half a minute without a sign of it a machine that has gone silently is taken for dead."""


@dataclass(frozen=True)
class Credit:
    """The relay has room for so many more batches of the current pass."""

    batches: int


@dataclass(frozen=True)
class Batches:
    """Batches of the current pass; their bytes are behind the message, one after the other.

    Attributes:
        ready: the feeder's message, with the actor's slots.
        sent_bytes: of each batch, how much of its slot follows.
    """

    ready: Any
    sent_bytes: tuple[int, ...]


Place = Callable[[Any], Sequence[Bytes]]
"""Gives for a message the memory for the bytes behind it, as much as there are of them."""


class Wire:
    """One end of a connection, in a running event loop."""

    def __init__(self, sock: socket.socket) -> None:
        _tune(sock)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()

    async def send(self, message: Any, payload: Sequence[Bytes] = ()) -> None:
        """Send a message, and bytes behind it.

        Raises:
            OSError: the other end is gone.
        """
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        header = _HEADER.pack(len(data), sum(map(len, payload)))
        async with self._sending:
            await self._loop.sock_sendall(self._socket, header + data)
            for each in payload:
                await self._loop.sock_sendall(self._socket, memoryview(each.data))

    async def receive(self, place: Place) -> Any:
        """The next message; the bytes behind it are where `place` has said.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        length, payload_bytes = _HEADER.unpack(await self._exactly(_HEADER.size))
        if length > _MOST_MESSAGE_BYTES:
            raise EOFError("what came is no message")
        message = pickle.loads(await self._exactly(length))
        if payload_bytes:
            for memory in place(message):
                await self._fill(memoryview(memory.data))
        return message

    async def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        await self._fill(memoryview(data))
        return data

    async def _fill(self, memory: memoryview) -> None:
        while len(memory):
            received = await self._loop.sock_recv_into(self._socket, memory)
            if not received:
                raise EOFError("the other end of the connection is gone")
            memory = memory[received:]

    def close(self) -> None:
        """Close the connection. Idempotent. No task may be in `send` or `receive`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # macOS has others
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener:
    """Waits for the one connection that brings the right token.

    Args:
        host: the address of this node that the others know.

    Attributes:
        address: host and port.
        token: what the other end must send.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.token = secrets.token_bytes(_TOKEN_BYTES)

    async def accept(self) -> Wire:
        """The connection; others are closed. Nobody can connect afterwards."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                sock, _ = await loop.sock_accept(self._socket)
                sock.setblocking(False)
                with suppress(OSError, EOFError, TimeoutError):
                    if await asyncio.wait_for(self._has_token(sock), 10):
                        return Wire(sock)
                sock.close()
        finally:
            self._socket.close()

    async def _has_token(self, sock: socket.socket) -> bool:
        received = b""
        while len(received) < _TOKEN_BYTES:
            data = await asyncio.get_running_loop().sock_recv(sock, _TOKEN_BYTES - len(received))
            if not data:
                return False
            received += data
        return hmac.compare_digest(received, self.token)


async def connect(address: tuple[str, int], token: bytes) -> Wire:
    """Connect to a listener.

    Raises:
        OSError: it cannot be reached.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, token)
    except BaseException:
        sock.close()
        raise
    return Wire(sock)
