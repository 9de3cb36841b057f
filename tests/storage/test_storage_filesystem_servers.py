"""Filesystems of fsspec that connect as soon as they are made: a server that is not there is one clear error."""

from __future__ import annotations

import ftplib
import socket
from collections.abc import Iterator

import pytest
from fsspec.implementations.ftp import FTPFileSystem

from streamload import StreamLoader
from streamload.errors import StorageError
from streamload.storage.errors import NoConnectionError
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, and on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_says_what_to_check(closed_port: int, workers: int) -> None:
    place = f"ftp://127.0.0.1:{closed_port}/set"
    with pytest.raises(
        StorageError, match="no connection .*check that it runs, and its host and port in the url"
    ) as caught:
        StreamLoader(f"{place}/a.tar", num_workers=workers)
    assert str(caught.value.url).startswith(place)
    assert "endpoint" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ftplib.error_perm("530 Login incorrect, told-secret"), StorageError, "check the url and storage_options"),
        (socket.gaierror(-2, "Name or service not known"), NoConnectionError, "the host of the storage is not known"),
        (PermissionError("told-secret"), StorageError, "access is denied"),
        (ValueError("of an option"), ValueError, "of an option"),
        (TypeError("of an option"), ValueError, "storage_options do not fit ftp://: of an option"),
    ],
)
def test_what_it_raises_becomes_one_of_ours(
    error: Exception, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(filesystem: FTPFileSystem) -> None:
        filesystem.ftp = ftplib.FTP()
        raise error

    monkeypatch.setattr(FTPFileSystem, "_connect", connect)
    with pytest.raises(kind, match=message) as caught:
        Storages().for_url("ftp://host/a.tar").info("ftp://host/a.tar")
    assert type(caught.value) is kind
    assert "told-secret" not in str(caught.value)
