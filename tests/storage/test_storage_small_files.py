"""Small files over HTTP: from servers that give no ranges, and with answers that break off at any place."""

from __future__ import annotations

import pytest
from servers.scripted_server import CONTENT, ScriptedServer
from test_storage_errors import storages_of

from streamload.errors import StorageError, TransientStorageError
from streamload.storage.download import Retries, RetryPolicy

KINDS = ["http", "s3"]
OF_FSSPEC = ["fsspec-http", "s3fs"]


def read(kind: str, server: ScriptedServer, most_bytes: int = len(CONTENT)) -> bytes:
    """The small file that a scripted server has."""
    with server:
        storages, url = storages_of(kind, server.url, Retries(RetryPolicy(first_backoff_s=0.0)))
        return storages.for_url(url).read_bytes(url, most_bytes=most_bytes)


@pytest.mark.parametrize("kind", ["http", "s3", "fsspec-http"])
def test_a_server_needs_no_ranges(kind: str) -> None:
    server = ScriptedServer(*["whole"] * 9)
    assert read(kind, server) == CONTENT
    assert not any("range:" in request for request in server.requests)


@pytest.mark.parametrize("kind", [*KINDS, *OF_FSSPEC])
@pytest.mark.parametrize("fault", ["cut", "replaced"])
def test_a_file_that_breaks_off_is_read_again(kind: str, fault: str) -> None:
    server = ScriptedServer(*(["", fault, fault] if kind in OF_FSSPEC else [fault]))
    assert read(kind, server) == CONTENT
    assert sum(request.startswith("get") for request in server.requests) >= 2 or kind in OF_FSSPEC


def test_half_a_file_of_unknown_length_is_not_taken_for_a_whole_one() -> None:
    with pytest.raises(StorageError, match="does not say how long the whole file is"):
        read("fsspec-http", ScriptedServer(*["unsized"] * 20))
    with pytest.raises(StorageError):
        read("http", ScriptedServer(*["unsized"] * 20))


@pytest.mark.parametrize("kind", ["s3", *OF_FSSPEC])
def test_a_file_that_is_too_large_is_refused(kind: str) -> None:
    server = ScriptedServer()
    with pytest.raises(StorageError, match="more than 100,000 bytes") as caught:
        read(kind, server, 100_000)
    assert not isinstance(caught.value, TransientStorageError)
    assert len(server.requests) == 1
