"""Messages and batches between the relay and its actors, over one TCP connection for each actor.

A frame is a pickle and the bytes of batches behind a header of sixteen bytes (how many there are of each). The bytes
go from the slot in which the actor's workers have written them to the one that the relay maps, without a copy of ours.

Pickles are safe here as far as Ray's own messages are, which are pickles too: each end proves that it knows the token
that went through Ray, by an HMAC of what the other end has drawn, before anything of it is unpickled. The token itself
is never sent. Nothing is encrypted.
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
from typing import Any, NamedTuple

from streamload.memory.channel import refused_exit
from streamload.memory.mapped import Bytes

__all__ = ["Batches", "Credit", "Wire", "WireListener", "connect"]

_HEADER = struct.Struct("<QQ")
_TOKEN_BYTES = 32
_MOST_MESSAGE_BYTES = 1 << 32
_TCP = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}
"""After half a minute without a sign of it, idle or in the middle of sending, a machine is taken for dead."""
_HANDSHAKE_S = 10.0


class Credit(NamedTuple):
    """The relay has room for so many more batches of the current pass."""

    batches: int


class Batches(NamedTuple):
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
            WorkerError: what the message holds, or a module that it needs, exits when it is loaded.
        """
        length, payload_bytes = _HEADER.unpack(await _exactly(self._socket, _HEADER.size))
        if length > _MOST_MESSAGE_BYTES:
            raise EOFError("what came is no message")
        data = await _exactly(self._socket, length)
        try:
            message = pickle.loads(data)
        except SystemExit as error:
            raise refused_exit(error) from error
        if payload_bytes:
            for memory in place(message):
                await _fill(self._socket, memoryview(memory.data))
        return message

    def close(self) -> None:
        """Close the connection. Idempotent. No task may be in `send` or `receive`."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _tune(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _TCP.items():
        if hasattr(socket, name):  # macOS has others
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class WireListener:
    """Waits for the one connection that brings the right token.

    Args:
        host: the address of this node that the others know.

    Attributes:
        address: host and port.
        token: what the other end must know.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.token = secrets.token_bytes(_TOKEN_BYTES)

    async def accept(self) -> Wire:
        """The connection; others are closed, and keep nobody waiting. Nobody can connect afterwards."""
        loop = asyncio.get_running_loop()
        accepting: asyncio.Task[tuple[socket.socket, Any]] = loop.create_task(loop.sock_accept(self._socket))
        checks: set[asyncio.Task[Wire | None]] = set()
        try:
            while True:
                done, _ = await asyncio.wait({accepting, *checks}, return_when=asyncio.FIRST_COMPLETED)
                if accepting in done:
                    checks.add(loop.create_task(self._check(accepting.result()[0])))
                    accepting = loop.create_task(loop.sock_accept(self._socket))
                for check in checks & done:
                    checks.remove(check)
                    if (wire := check.result()) is not None:
                        return wire
        finally:
            for task in (accepting, *checks):
                task.cancel()
            await asyncio.gather(accepting, *checks, return_exceptions=True)
            self._socket.close()

    async def _check(self, sock: socket.socket) -> Wire | None:
        """The connection, if the other end knows the token; else it is closed."""
        sock.setblocking(False)
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                if await _prove(sock, self.token, b"actor", b"relay"):
                    return Wire(sock)
        except (OSError, EOFError):
            pass
        except BaseException:
            sock.close()
            raise
        sock.close()
        return None


async def _prove(sock: socket.socket, token: bytes, own: bytes, other: bytes) -> bool:
    """Prove to the other end that this one knows the token; whether the other end does.

    Args:
        sock: connected, not blocking.
        token: the secret.
        own: the role of this end, so that a proof cannot be sent back as the other end's.
        other: the role of the other end.
    """
    loop = asyncio.get_running_loop()
    drawn = secrets.token_bytes(_TOKEN_BYTES)
    await loop.sock_sendall(sock, drawn)
    theirs = await _exactly(sock, _TOKEN_BYTES)
    await loop.sock_sendall(sock, hmac.digest(token, own + theirs, "sha256"))
    return hmac.compare_digest(await _exactly(sock, _TOKEN_BYTES), hmac.digest(token, other + drawn, "sha256"))


async def _exactly(sock: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    await _fill(sock, memoryview(data))
    return data


async def _fill(sock: socket.socket, memory: memoryview) -> None:
    while len(memory):
        received = await asyncio.get_running_loop().sock_recv_into(sock, memory)
        if not received:
            raise EOFError("the other end of the connection is gone")
        memory = memory[received:]


async def connect(address: tuple[str, int], token: bytes) -> Wire:
    """Connect to a listener.

    Raises:
        ConnectionError: it cannot be reached, or whoever is there does not know the token.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(_HANDSHAKE_S):
            await loop.sock_connect(sock, address)
            is_actor = await _prove(sock, token, b"relay", b"actor")
    except (OSError, EOFError) as error:
        sock.close()
        raise ConnectionError(
            f"the trainer's machine cannot reach {address[0]}:{address[1]}, where an actor listens "
            f"({error or 'no answer'}); nodes of the cluster must reach each other at any port"
        ) from error
    except BaseException:
        sock.close()
        raise
    if not is_actor:
        sock.close()
        raise ConnectionError(f"somebody else is at {address[0]}:{address[1]}, where an actor was")
    return Wire(sock)
