"""One range, fetched whole: what breaks is continued, what stalls is given up, and no wrong byte is written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from scripted_storage import Answer, ScriptedStorage
from virtual_time import run_in_virtual_time

from streamload.errors import StorageError, TransientStorageError
from streamload.storage.download import Pin, Retries, RetryPolicy, download

CONTENT = random.Random(0).randbytes(1000)
RESET = TransientStorageError("connection reset")
SLOW_DOWN = TransientStorageError("slow down", throttled=True)


class Fetching:
    """Downloads from a scripted storage in virtual time, and keeps what was written and how long it took."""

    def __init__(self, script: Callable[[int], Answer] = lambda _: Answer(), content: bytes = CONTENT) -> None:
        self.storage = ScriptedStorage(content, script)
        self.pin = Pin()
        self.written: list[tuple[int, bytes]] = []
        self.took_s = 0.0

    def get(self, start: int, end: int, **limits: float) -> int:
        async def main() -> int:
            clock = asyncio.get_running_loop().time
            began_s = clock()
            try:
                return await download(
                    self.storage,
                    "s3://b/a.tar",
                    start,
                    end,
                    lambda offset, piece: self.written.append((offset, piece)),
                    pin=self.pin,
                    retries=Retries(RetryPolicy(**limits)),
                )
            finally:
                self.took_s = clock() - began_s

        return run_in_virtual_time(main())

    def assert_written(self, start: int, end: int) -> None:
        at = start
        for offset, piece in self.written:
            assert offset == at
            at += len(piece)
        assert at == end
        assert b"".join(piece for _, piece in self.written) == CONTENT[start:end]


def in_turn(*answers: Answer) -> Callable[[int], Answer]:
    return lambda number: answers[number] if number < len(answers) else Answer()


def test_the_bytes_are_handed_on_piece_by_piece() -> None:
    fetching = Fetching()
    assert fetching.get(100, 200) == 200
    fetching.assert_written(100, 200)
    assert len(fetching.written) == 10
    assert not fetching.storage.bodies[0].closed, "a body that was read to its end leaves a connection to use again"


def test_a_start_behind_the_object_is_an_error() -> None:
    fetching = Fetching()
    fetching.pin = Pin(1000, "v1")
    with pytest.raises(StorageError, match="bytes from 1000 on were requested, and the shard has 1000"):
        fetching.get(1000, 1010)
    assert not fetching.storage.requested


@pytest.mark.parametrize("error", [RESET, None], ids=["reset", "early end"])
def test_a_broken_body_is_continued_at_once_from_where_it_broke(error: Exception | None) -> None:
    fetching = Fetching(in_turn(Answer(breaks_after=33, error=error), Answer(breaks_after=1, error=error)))
    fetching.get(0, 100)
    fetching.assert_written(0, 100)
    assert [(requested.start, requested.end, requested.etag) for requested in fetching.storage.requested] == [
        (0, 100, None),
        (33, 100, "v1"),
        (34, 100, "v1"),
    ]
    assert fetching.took_s == 0.0
    assert [body.closed for body in fetching.storage.bodies] == [True, True, False]


def test_after_so_many_fruitless_tries_it_says_why_and_what_to_do() -> None:
    fetching = Fetching(lambda number: Answer(error=SLOW_DOWN if number % 2 else RESET))
    with pytest.raises(StorageError, match="5 requests in a row brought no byte") as caught:
        fetching.get(0, 10, tries=5)
    assert not isinstance(caught.value, TransientStorageError)
    assert "the last: connection reset" in str(caught.value)
    assert "run again" in str(caught.value)
    assert (caught.value.url, caught.value.offset) == ("s3://b/a.tar", 0)
    assert caught.value.__cause__ is RESET
    assert len(fetching.storage.requested) == 5


def test_a_server_that_never_answers_is_warned_of_and_then_an_error(caplog: pytest.LogCaptureFixture) -> None:
    fetching = Fetching(lambda _: Answer(wait_s=10**9))
    with pytest.raises(StorageError, match=r"no byte for 30 s\); check the network") as caught:
        fetching.get(0, 10)
    assert fetching.took_s == pytest.approx(120.0)
    assert len(fetching.storage.requested) == 4
    assert "4 requests in a row brought no byte, over 120.0 s" in str(caught.value)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "s3://b/a.tar: no answer. Nothing has come from there for 5.0 s; it is tried for up to 115 s more"


def test_a_body_that_stalls_is_given_up_and_continued() -> None:
    fetching = Fetching(in_turn(Answer(breaks_after=50, hangs=True)))
    fetching.get(0, 100, stall_timeout_s=3.0)
    fetching.assert_written(0, 100)
    assert fetching.took_s == 3.0
    assert fetching.storage.bodies[0].closed
    assert fetching.storage.requested[1].start == 50


@pytest.mark.parametrize("known", [True, False], ids=["size known", "size not known"])
def test_more_bytes_than_requested_are_never_written(known: bool) -> None:
    fetching = Fetching(lambda _: Answer(more=b"x", piece_bytes=60))
    fetching.pin = Pin(1000, "v1") if known else Pin()
    with pytest.raises(StorageError, match="holds more than that"):
        fetching.get(900, 5000)
    fetching.assert_written(900, 960)
    assert fetching.storage.bodies[0].closed


@pytest.mark.parametrize("error", [TimeoutError("disk"), OSError(28, "disk full")], ids=["time-out", "full"])
def test_what_writing_raises_ends_the_download(error: OSError) -> None:
    def write(offset: int, piece: bytes) -> None:
        raise error

    storage = ScriptedStorage(CONTENT)
    with pytest.raises(type(error)) as caught:
        run_in_virtual_time(download(storage, "u", 0, 10, write, pin=Pin()))
    assert caught.value is error
    assert len(storage.requested) == 1
    assert storage.bodies[0].closed


def test_a_cancelled_download_writes_nothing_more_and_frees_its_connection() -> None:
    storage = ScriptedStorage(CONTENT, lambda _: Answer(piece_s=1.0))
    written = []

    async def main() -> None:
        task = asyncio.create_task(download(storage, "u", 0, 100, lambda at, _: written.append(at), pin=Pin()))
        await asyncio.sleep(2.5)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(10)

    run_in_virtual_time(main())
    assert written == [0, 10, 20]
    assert storage.bodies[0].closed
