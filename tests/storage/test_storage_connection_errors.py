"""Connections that cannot be made or that break, each as it really happens: what passes is told from what does not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from matrix import exhaustive
from servers.rclone import free_port
from test_storage_errors import storages_of

from streamload.errors import StorageError, TransientStorageError
from streamload.storage.errors import UntrustedServerError

KINDS = ["http", "s3", "fsspec-http", exhaustive(("s3fs",))]
PASSES = ["closed", "unknown host", "reset", "cut"]
NEEDS_TLS = ["certificate", "no TLS"]


@pytest.fixture(autouse=True)
def s3fs_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would sleep between its own tries."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


@contextlib.asynccontextmanager
async def listening(fault: str, certificate: Path | None) -> AsyncIterator[int]:
    """The port of a server that does as it is told with whoever connects."""
    if fault in ("closed", "unknown host"):
        yield free_port()
        return
    tls = None
    if fault == "certificate":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        assert certificate is not None
        tls.load_cert_chain(certificate)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(100)
            if fault == "reset":
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            elif fault != "cut":
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def met(kind: str, protocol: str, fault: str, certificate: Path | None = None) -> StorageError:
    """The error of asking for a range."""
    async with listening(fault, certificate) as port:
        host = "no-such-host.invalid" if fault == "unknown host" else "127.0.0.1"
        storages, url = storages_of(kind, f"{protocol}://{host}:{port}")
        try:
            with pytest.raises(StorageError) as caught:
                await storages.for_url(url).open_range(url, 0, 100)
        finally:
            await storages.aclose()
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("protocol", ["http", "https"])
@pytest.mark.parametrize("fault", PASSES)
async def test_what_may_pass_is_tried_again(kind: str, protocol: str, fault: str) -> None:
    error = await met(kind, protocol, fault)
    assert isinstance(error, TransientStorageError), error
    assert "certificate" not in error.message
    if fault == "closed":
        assert f"no connection to {protocol}://" in error.message
    if fault == "unknown host" and kind != "s3fs":  # botocore does not say so
        assert f"the host of {protocol}://no-such-host.invalid" in error.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", NEEDS_TLS)
async def test_what_is_wrong_with_tls_does_not_pass(kind: str, fault: str, authority: tuple[Path, Path]) -> None:
    error = await met(kind, "https", fault, authority[1])
    assert type(error) is UntrustedServerError
    assert "certificate is not trusted, or the server does not speak TLS" in error.message


@pytest.mark.parametrize("kind", KINDS)
async def test_plain_http_to_a_port_with_tls_is_no_mistake_of_the_certificate(
    kind: str, authority: tuple[Path, Path]
) -> None:
    assert "certificate" not in (await met(kind, "http", "certificate", authority[1])).message
