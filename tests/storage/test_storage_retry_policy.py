"""How often small requests are made again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fsspec.asyn import AsyncFileSystem
from servers.faults import FaultServer
from servers.rclone import free_port
from servers.threaded_server import Answer, ThreadedServer
from through_fsspec import through_fsspec as filesystem

from streamload.errors import StorageError, TransientStorageError
from streamload.storage import filesystem_storage
from streamload.storage.download import Attempts, Pin, Retries, RetryPolicy, download
from streamload.storage.errors import NoConnectionError, fsspec_error, parse_retry_after
from streamload.storage.filesystem_storage import FilesystemStorage
from streamload.storage.storages import Storages

URL = "s3://bucket/set/index.json"
BUSY = TransientStorageError("busy")
SOON = Retries(RetryPolicy(tries=10, first_backoff_s=0.0))


def waits(error: StorageError) -> list[float]:
    """The waits between tries that fail at once."""
    now_s, found = 1000.0, list[float]()
    attempts = Retries().begin(URL, lambda: now_s)
    while (wait_s := attempts.wait_s(error)) is not None:
        found.append(wait_s)
        now_s += wait_s
    return found


def test_what_may_pass_is_tried_for_two_minutes_with_growing_waits() -> None:
    *found, last = waits(BUSY)
    for number, wait_s in enumerate(found):
        longest_s = min(10.0, 0.1 * 2**number)
        assert longest_s / 2 <= wait_s <= longest_s
    assert sum(found) + last == pytest.approx(120.0)


@pytest.mark.parametrize(("asked_s", "waited_s"), [(None, 0.0), (0.0, 0.0), (7.0, 7.0), (3600.0, 60.0)])
def test_the_wait_that_a_storage_asks_for_is_kept_to_up_to_a_minute(asked_s: float | None, waited_s: float) -> None:
    busy = TransientStorageError("busy", throttled=True)
    busy.retry_after_s = asked_s
    found = waits(busy)
    assert waited_s + 0.05 <= found[0] <= waited_s + 0.1
    assert sum(found) == pytest.approx(120.0)


class BusyServer(ThreadedServer):
    """Refuses the first requests, and says when to come back."""

    def __init__(self, refusals: int, retry_after: str, asked_s: float = 0.0) -> None:
        super().__init__()
        self.gets_s: list[float] = []
        self.asked = 0
        self._refusals = refusals
        self._headers = {"Retry-After": retry_after}
        self._asked_s = asked_s

    def answer(self, method: str, address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if {name.lower(): value for name, value in headers.items()}.get("range") == "bytes=0-0":
            self.asked += 1
            time.sleep(self._asked_s)
        else:
            self.gets_s.append(time.monotonic())
        if len(self.gets_s) <= self._refusals:
            return 429, self._headers, b""
        return 200, {"ETag": '"v"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}, b"content"


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_server_is_asked_again_when_it_says(kind: str) -> None:
    """Obstore does not show the header; one more request asks for it."""
    with BusyServer(1, "1") as server:
        url = f"{server.url}/index.json" if kind == "http" else "s3://bucket/index.json"
        options = {"key": "k", "secret": "s", "endpoint_url": server.url} if kind == "s3" else {}
        assert Storages(options, retries=SOON).for_url(url).read_bytes(url, most_bytes=10) == b"content"
    before_s, after_s = server.gets_s
    assert 0.8 <= after_s - before_s < 5.0


async def test_requests_that_are_refused_together_share_one_question() -> None:
    with BusyServer(100, "9", asked_s=1.2) as server:
        url = f"http://{server.address}/a.tar"
        storage = Storages(retries=SOON).for_url(url)
        found = await asyncio.gather(*(storage.open_range(url, 0, 9) for _ in range(3)), return_exceptions=True)
        await storage.aclose()
    for error in found:
        assert isinstance(error, TransientStorageError)
        assert 8.0 < (error.retry_after_s or 0.0) <= 9.0
    assert server.asked == 1


def test_a_pause_is_of_one_host() -> None:
    with BusyServer(100, "9") as server, BusyServer(100, "1") as other:
        storage = Storages(retries=Retries(RetryPolicy(tries=1))).for_url(f"{server.url}/a.tar")
        for each, most_s in (server, 9.0), (other, 1.0):
            with pytest.raises(TransientStorageError) as caught:
                storage.read_bytes(f"{each.url}/a.tar", most_bytes=10)
            assert most_s - 1.0 < (caught.value.retry_after_s or 0.0) <= most_s


def test_a_retry_after_is_seconds_or_a_date() -> None:
    assert [parse_retry_after(value) for value in ("3", "soon", None)] == [3.0, None, None]
    assert parse_retry_after(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(99.0, abs=60.0)
    assert parse_retry_after(formatdate(0, usegmt=True)) == 0.0


BOTOCORE = {"ResponseMetadata": {"HTTPStatusCode": 503, "HTTPHeaders": {"retry-after": "9"}}}
HEADERS = {"Retry-After": "9"}


@pytest.mark.parametrize(
    "told",
    [
        {"status": 429, "headers": HEADERS},
        {"response": SimpleNamespace(status_code=429, headers=HEADERS)},
        {"response": BOTOCORE},
    ],
    ids=["aiohttp", "requests", "botocore"],
)
def test_the_header_is_found_in_what_a_filesystem_raises(told: dict[str, object]) -> None:
    refused = OSError("told-secret")
    vars(refused).update(told)
    error = fsspec_error("hf://datasets/a/b", refused)
    assert isinstance(error, TransientStorageError)
    assert (error.throttled, error.retry_after_s) == (True, 9.0)
    assert "told-secret" not in str(error)


class Tries:
    """Notes how each try has failed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures: list[type[StorageError]] = []
        self._wait_s = Attempts.wait_s
        monkeypatch.setattr(Attempts, "wait_s", lambda attempts, error: self._fail(attempts, error))

    def _fail(self, attempts: Attempts, error: StorageError) -> float | None:
        self.failures.append(type(error))
        return self._wait_s(attempts, error)


@pytest.mark.parametrize("through_fsspec", [False, True])
def test_a_server_that_has_answered_once_is_waited_for(monkeypatch: pytest.MonkeyPatch, through_fsspec: bool) -> None:
    """It may just be started again; a server that never was there is not waited for."""
    storages = Storages(filesystem=filesystem("http") if through_fsspec else None, retries=SOON)
    with FaultServer({"a.tar": b"abc"}) as server:
        url = f"{server.url}/a.tar"
        assert storages.for_url(url).info(url).bytes == 3
    tries = Tries(monkeypatch)
    with pytest.raises(NoConnectionError):
        storages.for_url(url).read_bytes(url, most_bytes=10)
    assert tries.failures == [NoConnectionError] * 10
    tries.failures.clear()
    elsewhere = f"http://127.0.0.1:{free_port()}/a.tar"
    with pytest.raises(NoConnectionError):
        storages.for_url(elsewhere).read_bytes(elsewhere, most_bytes=10)
    assert tries.failures == [NoConnectionError] * 3


class SilentFilesystem(AsyncFileSystem):
    """Never answers but for the size of sized.tar; what was requested is kept, of all instances."""

    protocol = "silent"
    cachable = False
    requested: ClassVar[list[str]] = []

    async def _info(self, path: str, **_: object) -> dict[str, object]:
        self.requested.append("info")
        if path.endswith("sized.tar"):
            return {"name": path, "size": 9, "type": "file"}
        return await asyncio.sleep(1e6, {})

    async def _cat_file(self, path: str, start: object = None, end: object = None, **_: object) -> bytes:
        self.requested.append("cat_file")
        return await asyncio.sleep(1e6, b"")


def test_a_filesystem_that_is_silent_is_tried_again_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs of fsspec's own are long, and met several times for one question."""
    for timeout in ("INFO_TIMEOUT_S", "FILE_TIMEOUT_S"):
        monkeypatch.setattr(filesystem_storage, timeout, 0.01)
    storage = FilesystemStorage({}, SilentFilesystem(), SOON)
    for act, url, requested in (
        (storage.info, "silent://a.tar", "info"),
        (partial(storage.read_bytes, most_bytes=9), "silent://sized.tar", "cat_file"),
    ):
        SilentFilesystem.requested.clear()
        with pytest.raises(TransientStorageError, match="did not answer in time"):
            act(url)
        assert SilentFilesystem.requested.count(requested) == 10


class SlowFilesystem(SilentFilesystem):
    """Answers, but takes longer than a request may be silent."""

    async def _cat_file(self, path: str, start: object = None, end: object = None, **_: object) -> bytes:
        self.requested.append("cat_file")
        return await asyncio.sleep(0.3, b"123456789")


@pytest.mark.parametrize("kind", [SlowFilesystem, SilentFilesystem])
async def test_a_range_may_take_long_on_a_slow_link_but_not_for_ever(
    kind: type[SilentFilesystem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fsspec reads a range whole, and tells nothing before its end."""
    for timeout, value in {"PROGRESS_S": 0.02, "FILE_TIMEOUT_S": 0.6}.items():
        monkeypatch.setattr(filesystem_storage, timeout, value)
    SilentFilesystem.requested.clear()
    storage, retries = FilesystemStorage({}, kind()), Retries(RetryPolicy(0.1, 1.0, tries=2))
    fetched: list[bytes] = []

    async def fetch() -> int:
        write = lambda _, piece: fetched.append(piece)  # noqa: E731
        return await download(storage, "silent://sized.tar", 0, 9, write, pin=Pin(), retries=retries)

    if kind is SlowFilesystem:
        await fetch()
        assert SilentFilesystem.requested.count("cat_file") == 1
        assert fetched == [b"123456789"]
    else:
        with pytest.raises(StorageError, match="2 requests in a row received no byte"):
            await fetch()
        assert SilentFilesystem.requested.count("cat_file") == 2
