"""How often small requests are made again."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import ClassVar

import pytest
from fsspec.asyn import AsyncFileSystem
from servers.faults import FaultServer
from servers.rclone import free_port
from through_fsspec import through_fsspec as filesystem

from streamload.errors import StorageError, TransientStorageError
from streamload.storage import filesystem_storage
from streamload.storage.download import Attempts, Pin, Retries, RetryPolicy, download
from streamload.storage.errors import NoConnectionError
from streamload.storage.filesystem_storage import FilesystemStorage
from streamload.storage.storages import Storages

URL = "s3://bucket/set/index.json"
BUSY = TransientStorageError("busy")
SOON = Retries(RetryPolicy(tries=10, first_backoff_s=0.0))


class Clock:
    """Goes on by as much whenever it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def waits(error: StorageError, try_s: float = 0.0, retries: Retries | None = None) -> list[float]:
    """The waits between tries that fail after so long each."""
    clock, found = Clock(), []
    attempts = (retries or Retries()).begin(URL, clock)
    while True:
        clock.now_s += try_s
        wait_s = attempts.wait_s(error)
        if wait_s is None:
            return found
        found.append(wait_s)
        clock.now_s += wait_s


def test_what_may_pass_is_tried_for_two_minutes_with_growing_waits() -> None:
    *found, last = waits(BUSY)
    for number, wait_s in enumerate(found):
        longest_s = min(10.0, 0.1 * 2**number)
        assert longest_s / 2 <= wait_s <= longest_s
    assert sum(found) + last == pytest.approx(120.0)


def test_an_outage_is_reported_once_with_what_fails_and_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    retries, clock = Retries(), Clock()
    several = [retries.begin(f"https://me:told@host/{number}.tar?sig=told", clock) for number in range(5)]
    for _ in range(4):
        clock.now_s += 2.0
        for attempts in several:
            attempts.wait_s(BUSY)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("streamload", "WARNING")
    said = "https://host/0.tar: busy. Nothing has come from there for 6.0 s; it is tried for up to 114 s more"
    assert record.getMessage() == said
    several[0].progressed()
    for _ in range(4):
        several[1].wait_s(BUSY)
        clock.now_s += 2.0
    several[1].wait_s(BUSY)
    assert len(caplog.records) == 2, "of the next one too"


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
        with pytest.raises(StorageError, match="2 requests in a row brought no byte"):
            await fetch()
        assert SilentFilesystem.requested.count("cat_file") == 2
