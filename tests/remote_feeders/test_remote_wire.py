"""The connection of batches: who may connect, and whom nobody keeps waiting."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Any

import pytest

from streamload.errors import WorkerError
from streamload.remote.wire import Credit, Wire, WireListener, connect

DEADLINE_S = 5.0
"""Less than a silent connection is waited for."""


@contextlib.asynccontextmanager
async def closing(wire: Wire):  # type: ignore[no-untyped-def]
    try:
        yield wire
    finally:
        wire.close()


async def test_whoever_is_silent_or_wrong_keeps_nobody_waiting() -> None:
    listener = WireListener("127.0.0.1")
    accepted = asyncio.create_task(listener.accept())
    with socket.create_connection(listener.address), socket.create_connection(listener.address) as wrong:
        wrong.sendall(bytes(64))
        async with asyncio.timeout(DEADLINE_S):
            async with closing(await connect(listener.address, listener.token)) as ours:
                async with closing(await accepted) as theirs:
                    await ours.send(Credit(3))
                    assert await theirs.receive(lambda _: ()) == Credit(3)


class Exits:
    """Exits where it is loaded."""

    def __reduce__(self) -> Any:
        return sys.exit, (2,)


async def test_a_message_that_exits_is_an_error() -> None:
    listener = WireListener("127.0.0.1")
    accepted = asyncio.create_task(listener.accept())
    async with closing(await connect(listener.address, listener.token)) as ours, closing(await accepted) as theirs:
        await ours.send(Exits())
        with pytest.raises(WorkerError, match=r"exits in line \d+ \(SystemExit: 2\)"):
            await theirs.receive(lambda _: ())


async def test_another_token_opens_nothing() -> None:
    listener = WireListener("127.0.0.1")
    accepted = asyncio.create_task(listener.accept())
    with pytest.raises(ConnectionError):
        await connect(listener.address, bytes(32))
    assert not accepted.done()
    accepted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await accepted


async def test_whoever_took_an_actors_port_learns_nothing_and_is_refused() -> None:
    """A stranger gets no token, and cannot send back what it got as its own proof."""
    token = bytes(range(32))
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        connecting = asyncio.create_task(connect(stranger.getsockname()[:2], token))
        sock, _ = await asyncio.to_thread(stranger.accept)
        with sock:
            drawn = await asyncio.to_thread(sock.recv, 32)
            sock.sendall(drawn)
            proof = await asyncio.to_thread(sock.recv, 32)
            assert token not in (drawn, proof)
            sock.sendall(proof)
            with pytest.raises(ConnectionError, match="somebody else is at"):
                await connecting


async def test_an_address_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
    with pytest.raises(ConnectionError, match=f"cannot reach 127.0.0.1:{address[1]}"):
        await connect(address, bytes(32))
