"""Small files over HTTP: from servers that give no ranges, and with answers that break off at any place."""

from __future__ import annotations

import asyncio

import pytest
from scripted_server import CONTENT, Script, serve
from test_storage_errors import storages_of

from streamload.errors import StorageError, TransientStorageError
from streamload.storage.retry_policy import Retries, RetryPolicy

KINDS = ["http", "s3"]
OF_FSSPEC = ["fsspec-http", "s3fs"]


async def read(kind: str, script: Script, most_bytes: int = len(CONTENT), policy: RetryPolicy | None = None) -> bytes:
    """The small file that a scripted server has."""
    async with serve(script):
        storages, url = storages_of(kind, script, Retries(policy))
        return await asyncio.to_thread(storages.for_url(url).read_bytes, url, most_bytes=most_bytes)


def ranges(script: Script) -> list[str]:
    """Which range each GET was for; empty where it was for the whole file."""
    gets = [request for request in script.requests if request.startswith("GET")]
    lines = [line.lower() for request in gets for line in [*request.split("\r\n"), "end"]]
    found, requested = [], ""
    for line in lines:
        if line.startswith("range: bytes="):
            requested = line.removeprefix("range: bytes=")
        elif line == "end":
            found.append(requested)
            requested = ""
    return found


@pytest.mark.parametrize("kind", ["http", "s3", "fsspec-http"])
async def test_a_server_needs_no_ranges(kind: str) -> None:
    script = Script(["whole"] * 9)
    assert await read(kind, script) == CONTENT
    assert ranges(script) == [""]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_has_come_of_a_file_that_breaks_off_is_kept(kind: str) -> None:
    """Each byte is progress: two tries in a row without one would be the end."""
    script = Script(["cut"] * 8)
    assert await read(kind, script, policy=RetryPolicy(tries=2, first_backoff_s=0.0)) == CONTENT
    assert ranges(script)[1:] == [f"{len(CONTENT) - len(CONTENT) // 2**tries}-" for tries in range(1, 9)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("faults", [["cut", "whole"], ["replaced"]])
async def test_a_file_is_read_anew_where_there_is_no_rest_of_the_same(kind: str, faults: list[str]) -> None:
    """The server ignores ranges, or has another version by now."""
    script = Script([*faults])
    assert await read(kind, script) == CONTENT
    assert ranges(script)[1:] == [f"{len(CONTENT) // 2}-", *ranges(script)[:1]]


@pytest.mark.parametrize("kind", OF_FSSPEC)
async def test_fsspec_reads_a_file_again_that_breaks_off(kind: str) -> None:
    script = Script(["", "cut", "cut"])
    assert await read(kind, script, policy=RetryPolicy(first_backoff_s=0.0)) == CONTENT


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
