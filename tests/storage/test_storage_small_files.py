"""Small files over HTTP: from servers that give no ranges, and with answers that break off at any place."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import CONTENT, Script, serve
from test_storage_errors import storages_of

from streamload.errors import StorageError, TransientStorageError
from streamload.storage.download import Retries, RetryPolicy

KINDS = ["http", "s3"]
OF_FSSPEC = ["fsspec-http", "s3fs"]


async def read(kind: str, script: Script, most_bytes: int = len(CONTENT), policy: RetryPolicy | None = None) -> bytes:
    """The small file that a scripted server has."""
    async with serve(script):
        storages, url = storages_of(kind, script.address, Retries(policy))
        return await asyncio.to_thread(storages.for_url(url).read_bytes, url, most_bytes=most_bytes)


@pytest.mark.parametrize("kind", ["http", "s3", "fsspec-http"])
async def test_a_server_needs_no_ranges(kind: str) -> None:
    script = Script(["whole"] * 9)
    assert await read(kind, script) == CONTENT
    assert not any("range:" in request.lower() for request in script.requests)


@pytest.mark.parametrize("kind", [*KINDS, *OF_FSSPEC])
@pytest.mark.parametrize("fault", ["cut", "replaced"])
async def test_a_file_that_breaks_off_is_read_again(kind: str, fault: str) -> None:
    script = Script(["", fault, fault] if kind in OF_FSSPEC else [fault])
    assert await read(kind, script, policy=RetryPolicy(first_backoff_s=0.0)) == CONTENT
    assert sum(request.startswith("GET") for request in script.requests) >= 2 or kind in OF_FSSPEC


async def test_half_a_file_of_unknown_length_is_not_taken_for_a_whole_one() -> None:
    with pytest.raises(StorageError, match="does not say how long the whole file is"):
        await read("fsspec-http", Script(["unsized"] * 20))
    with pytest.raises(StorageError):
        await read("http", Script(["unsized"] * 20))


@pytest.mark.parametrize("kind", ["s3", *OF_FSSPEC])
async def test_a_file_that_is_too_large_is_refused(kind: str) -> None:
    script = Script()
    with pytest.raises(StorageError, match="more than 100,000 bytes") as caught:
        await read(kind, script, 100_000)
    assert not isinstance(caught.value, TransientStorageError)
    assert len(script.requests) == 1
