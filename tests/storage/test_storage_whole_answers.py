"""Servers that answer a request for a part with the whole file, always or now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_shards import write_numbers
from scripted_storage import Answer, ScriptedStorage
from servers.faults import FaultServer, Script
from through_fsspec import through_fsspec
from virtual_time import run_in_virtual_time

from streamload import StreamLoader
from streamload.errors import StorageError, TransientStorageError
from streamload.storage.download import Pin, Retries, RetryPolicy, download
from streamload.storage.errors import WholeAnswerError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

CONTENT = bytes(range(100))
ADVICE = r"does not serve parts of files .*nginx, caddy, rclone serve.*copy the shards"


WHOLE = Answer(error=WholeAnswerError("the whole object"))


def fetch(*answers: Answer, tries: int = 12) -> tuple[int | StorageError, int]:
    """What became of a download, and how many requests it took; the last answer is repeated."""
    storage = ScriptedStorage(CONTENT, lambda number: answers[min(number, len(answers) - 1)])
    retries = Retries(RetryPolicy(tries=tries))

    async def main() -> int:
        return await download(storage, "http://h/a.tar?key=told", 0, 100, lambda *_: None, pin=Pin(), retries=retries)

    try:
        return run_in_virtual_time(main()), len(storage.requested)
    except StorageError as exc:
        return exc, len(storage.requested)


def test_whole_answers_in_a_row_are_tried_five_times() -> None:
    error, requested = fetch(WHOLE)
    assert requested == 5
    assert isinstance(error, StorageError)
    assert not isinstance(error, TransientStorageError)
    assert "answer to 5 requests in a row for one was a whole file" in str(error)
    assert "http://h/a.tar" in str(error)
    assert "told" not in str(error)
    assert fetch(WHOLE, tries=2)[1] == 2


def test_a_part_after_whole_answers_is_taken() -> None:
    assert fetch(WHOLE, WHOLE, WHOLE, WHOLE, Answer()) == (100, 5)
    reset = Answer(error=TransientStorageError("reset"))
    error, requested = fetch(WHOLE, WHOLE, reset, WHOLE)
    assert requested == 12
    assert "brought no byte" in str(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_numbers(tmp_path_factory.mktemp("whole") / "set", [30, 20], index=False))


def labels_of(root: str, **options: Any) -> list[int]:
    urls = [f"{root}/part00{number}-000000.tar" for number in range(2)]
    with StreamLoader(urls, 7, fields=("cls",), num_workers=0, **options) as loader:
        return [label for (labels,) in loader for label in labels.tolist()]


def test_a_server_that_never_serves_parts_is_given_up(folder: Path) -> None:
    with FaultServer(folder, Script(whole_share=1.0)) as server:
        with pytest.raises(StorageError, match=ADVICE):
            labels_of(server.url)
        requested = [path for method, path, _ in server.report().log if method == "GET"]
        assert max(requested.count(path) for path in requested) <= 6, "five times, and once to look at it"


@pytest.mark.parametrize("options", [{}, {"filesystem": through_fsspec("http")}], ids=["obstore", "fsspec"])
def test_a_proxy_that_now_and_then_does_not_serve_parts_is_read(options: dict[str, Any], folder: Path) -> None:
    with FaultServer(folder, Script(seed=4, whole_share=0.3)) as server:
        assert labels_of(server.url, **options) == list(range(50))
