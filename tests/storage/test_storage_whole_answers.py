"""Servers that answer a request for a part with the whole file: told at once from those that do it now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.asyn import get_loop
from make_shards import write_numbers
from scripted_storage import Answer, ScriptedStorage
from servers.faults import FaultServer, Script
from servers.rclone import free_port, running
from virtual_time import run_in_virtual_time

from streamload import StreamLoader
from streamload.errors import StorageError, TransientStorageError
from streamload.index.finder import find_shards
from streamload.storage.download import Downloaded, Pin, download
from streamload.storage.errors import WholeAnswerError
from streamload.storage.http_range import ServedParts
from streamload.storage.protocol import EmptyBody
from streamload.storage.retry_policy import Retries, RetryPolicy
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

CONTENT = bytes(range(100))
ADVICE = r"does not serve parts of files .*nginx, caddy, rclone serve.*simplecache:: before the urls"
THROUGH_FSSPEC = {"storage_options": {"block_size": 1}}


def whole(*, never_parts: bool) -> Answer:
    error = WholeAnswerError("the whole object")
    error.never_parts = never_parts
    return Answer(error=error)


def fetch(*answers: Answer, tries: int = 12) -> tuple[Downloaded | StorageError, int]:
    """What became of a download, and how many requests it took; the last answer is repeated."""
    storage = ScriptedStorage(CONTENT, lambda number: answers[min(number, len(answers) - 1)])
    retries = Retries(RetryPolicy(tries=tries))

    async def main() -> Downloaded:
        return await download(storage, "http://h/a.tar?key=told", 0, 100, lambda *_: None, pin=Pin(), retries=retries)

    try:
        return run_in_virtual_time(main()), len(storage.requested)
    except StorageError as exc:
        return exc, len(storage.requested)


def test_a_server_that_never_serves_parts_is_tried_three_times() -> None:
    error, requested = fetch(whole(never_parts=True))
    assert requested == 3
    assert isinstance(error, StorageError)
    assert not isinstance(error, TransientStorageError)
    assert "answer to 3 requests in a row for one was a whole file" in str(error)
    assert "http://h/a.tar" in str(error)
    assert "told" not in str(error)
    assert fetch(whole(never_parts=True), tries=2)[1] == 2


def test_one_that_does_so_now_and_then_is_tried_as_often_as_any() -> None:
    error, requested = fetch(whole(never_parts=False))
    assert requested == 12
    assert "answer to 12 requests in a row for one was a whole file" in str(error)
    assert fetch(whole(never_parts=True), whole(never_parts=True), Answer()) == (Downloaded(0, 100, 3, 0), 3)
    reset = Answer(error=TransientStorageError("reset"))
    error, requested = fetch(whole(never_parts=True), whole(never_parts=True), reset, whole(never_parts=True))
    assert requested == 12
    assert "brought no byte" in str(error)
    learned = [whole(never_parts=True), whole(never_parts=True), whole(never_parts=False)]
    assert fetch(*learned, Answer()) == (Downloaded(0, 100, 4, 0), 4), "another part has come meanwhile"


@pytest.fixture(scope="module", autouse=True)
def loop_of_fsspec() -> None:
    """It stays, on a thread of its own, from the first filesystem on that needs it."""
    get_loop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_numbers(tmp_path_factory.mktemp("whole") / "set", [30, 20], index=False))


def labels_of(root: str, **options: Any) -> list[int]:
    urls = [f"{root}/part00{number}-000000.tar" for number in range(2)]
    with StreamLoader(urls, 7, fields=("cls",), num_workers=0, timeout=60, **options) as loader:
        return [label for (labels,) in loader for label in labels.tolist()]


@pytest.mark.parametrize("options", [{}, THROUGH_FSSPEC], ids=["obstore", "fsspec"])
def test_the_storages_know_which_server_never_serves_parts(options: dict[str, Any], folder: Path) -> None:
    with FaultServer(folder, Script(whole_share=1.0)) as server:
        with pytest.raises(StorageError, match=ADVICE):
            labels_of(server.url, **options)
        requested = [path for method, path, _ in server.report().log if method == "GET"]
        assert max(requested.count(path) for path in requested) <= 4, "three times, and once to look at it"


@pytest.mark.parametrize("options", [{}, THROUGH_FSSPEC], ids=["obstore", "fsspec"])
def test_a_proxy_that_now_and_then_does_not_serve_parts_is_read(options: dict[str, Any], folder: Path) -> None:
    with FaultServer(folder, Script(seed=4, whole_share=0.3)) as server:
        assert labels_of(server.url, **options) == list(range(50))


async def test_a_server_that_has_served_a_part_is_known_for_it() -> None:
    served = ServedParts()

    async def answer(error: Exception | None) -> EmptyBody:
        if error is not None:
            raise error
        return EmptyBody(None)

    async def never_parts(place: str) -> bool:
        with pytest.raises(WholeAnswerError) as caught:
            await served.noted(place, answer(WholeAnswerError("the whole object")))
        return caught.value.never_parts

    assert await never_parts("http://one/")
    await served.noted("http://one/", answer(None))
    assert not await never_parts("http://one/")
    assert await never_parts("http://other/")


@pytest.fixture(scope="module")
def python_server(folder: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), str(port)]
    with running(command, port):
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("options", [{}, THROUGH_FSSPEC], ids=["obstore", "fsspec"])
def test_pythons_own_server_is_refused_with_advice(options: dict[str, Any], python_server: str) -> None:
    with pytest.raises(StorageError, match=ADVICE) as caught:
        labels_of(python_server, **options)
    assert caught.value.url == f"{python_server}/part000-000000.tar"


def test_the_advice_works(python_server: str) -> None:
    assert labels_of(f"simplecache::{python_server}") == list(range(50))
    for url in (f"simplecache::{python_server}/*.tar", f"simplecache::{python_server}"):
        assert find_shards(url, Storages()) == [
            f"simplecache::{python_server}/part00{number}-000000.tar" for number in range(2)
        ]


def test_several_shards_that_are_copied_are_not_looked_up_in_a_listing(folder: Path) -> None:
    with FaultServer(folder, Script(whole_share=1.0)) as server:
        assert labels_of(f"simplecache::{server.url}") == list(range(50))
        assert "/" not in {path for _, path, _ in server.report().log}
