"""One range, fetched whole: what breaks is continued, what stalls is given up, and no wrong byte is written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from scripted_storage import Answer, ScriptedStorage
from virtual_time import run_in_virtual_time

from streamload.errors import ShardChangedError, ShardNotFoundError, StorageError, TransientStorageError
from streamload.storage.download import Downloaded, Pin, Watch, download
from streamload.storage.retry_policy import Retries, RetryPolicy

CONTENT = random.Random(0).randbytes(1000)
RESET = TransientStorageError("connection reset")
SLOW_DOWN = TransientStorageError("slow down", throttled=True)


class Fetching:
    """Downloads from a scripted storage in virtual time, and keeps what was written and how long it took."""

    def __init__(self, script: Callable[[int], Answer] = lambda _: Answer(), content: bytes = CONTENT) -> None:
        self.storage = ScriptedStorage(content, script)
        self.pin = Pin()
        self.watch = Watch()
        self.written: list[tuple[int, bytes]] = []
        self.took_s = 0.0

    def get(self, start: int, end: int, **limits: float) -> Downloaded:
        async def main() -> Downloaded:
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
                    watch=self.watch,
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
    assert fetching.get(100, 200) == Downloaded(100, 200, requests=1, throttled=0)
    fetching.assert_written(100, 200)
    assert len(fetching.written) == 10
    assert not fetching.storage.bodies[0].closed, "a body that was read to its end leaves a connection to use again"


def test_an_end_behind_the_object_is_cut_and_the_size_learned() -> None:
    fetching = Fetching()
    assert fetching.get(900, 5000).end == 1000
    assert fetching.pin == Pin(1000, "v1")
    fetching.get(990, 5000)
    assert fetching.storage.requested[1].end == 1000
    assert fetching.storage.requested[1].etag == "v1"


def test_a_start_behind_the_object_is_an_error() -> None:
    fetching = Fetching()
    fetching.pin = Pin(1000, "v1")
    with pytest.raises(StorageError, match="bytes from 1000 on were requested, and the shard has 1000"):
        fetching.get(1000, 1010)
    assert not fetching.storage.requested


@pytest.mark.parametrize("error", [RESET, None], ids=["reset", "early end"])
def test_a_broken_body_is_continued_at_once_from_where_it_broke(error: Exception | None) -> None:
    fetching = Fetching(in_turn(Answer(breaks_after=33, error=error), Answer(breaks_after=1, error=error)))
    assert fetching.get(0, 100).requests == 3
    fetching.assert_written(0, 100)
    assert [(requested.start, requested.end, requested.etag) for requested in fetching.storage.requested] == [
        (0, 100, None),
        (33, 100, "v1"),
        (34, 100, "v1"),
    ]
    assert fetching.took_s == 0.0
    assert [body.closed for body in fetching.storage.bodies] == [True, True, False]


def test_any_number_of_broken_bodies_is_continued_while_each_has_bytes() -> None:
    fetching = Fetching(lambda _: Answer(breaks_after=1, error=RESET))
    assert fetching.get(0, 100, tries=2).requests == 100
    fetching.assert_written(0, 100)


def test_the_waits_between_fruitless_tries_double_up_to_a_bound() -> None:
    limits = RetryPolicy(first_backoff_s=0.1, most_backoff_s=1.0)
    longest = [limits.backoff_s(count, 1.0) for count in range(1, 7)]
    assert longest == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert [limits.backoff_s(count, 0.0) for count in range(1, 7)] == pytest.approx([s / 2 for s in longest])
    assert limits.backoff_s(10**6, 1.0) == 1.0


def test_the_waits_differ_from_one_download_to_the_next() -> None:
    fetching = [Fetching(in_turn(Answer(error=SLOW_DOWN))) for _ in range(5)]
    for one in fetching:
        assert one.get(0, 10) == Downloaded(0, 10, requests=2, throttled=1)
        assert 0.05 <= one.took_s <= 0.1
    assert len({one.took_s for one in fetching}) > 1


def test_after_so_many_fruitless_tries_it_says_what_happened_how_often_and_what_to_do() -> None:
    fetching = Fetching(lambda number: Answer(error=SLOW_DOWN if number % 2 else RESET))
    with pytest.raises(StorageError, match="5 requests in a row brought no byte") as caught:
        fetching.get(0, 10, tries=5)
    assert not isinstance(caught.value, TransientStorageError)
    assert "2 refused because there were too many, 3 failed; the last: connection reset" in str(caught.value)
    assert "run again" in str(caught.value)
    assert (caught.value.url, caught.value.offset) == ("s3://b/a.tar", 0)
    assert caught.value.__cause__ is RESET
    assert len(fetching.storage.requested) == 5


def test_what_it_says_last_is_of_what_happened_most_often() -> None:
    fetching = Fetching(lambda number: Answer(error=RESET if number < 4 else SLOW_DOWN))
    with pytest.raises(StorageError, match="1 refused .*, 4 failed; the last: connection reset.*; check whether"):
        fetching.get(0, 10, tries=5)


def test_a_byte_resets_the_count_of_tries() -> None:
    fetching = Fetching(lambda n: Answer(breaks_after=1, error=RESET) if n in (4, 9) else Answer(error=RESET))
    with pytest.raises(StorageError, match="5 requests in a row"):
        fetching.get(0, 10, tries=5)
    assert len(fetching.storage.requested) == 4 + 1 + 4 + 1 + 5
    fetching.assert_written(0, 2)


def test_a_server_that_never_answers_is_an_error_within_the_time_out() -> None:
    fetching = Fetching(lambda _: Answer(wait_s=10**9))
    with pytest.raises(StorageError, match=r"without a byte for up to 30 s.*check the network") as caught:
        fetching.get(0, 10)
    assert fetching.took_s == pytest.approx(120.0)
    assert len(fetching.storage.requested) == 4
    assert "4 requests in a row brought no byte, over 120.0 s" in str(caught.value)


def test_of_a_server_that_hangs_a_warning_says_so_long_before_it_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StorageError):
        Fetching(lambda _: Answer(wait_s=10**9)).get(0, 10)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "s3://b/a.tar: no answer. Nothing has come from there for 5.0 s; it is tried for up to 115 s more"


def test_of_a_slow_server_there_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    Fetching(lambda _: Answer(wait_s=4.0, piece_s=4.0)).get(0, 100)
    assert caplog.records == []


def test_a_body_that_stalls_is_given_up_and_continued() -> None:
    fetching = Fetching(in_turn(Answer(breaks_after=50, hangs=True)))
    fetching.get(0, 100, stall_timeout_s=3.0)
    fetching.assert_written(0, 100)
    assert fetching.took_s == 3.0
    assert fetching.storage.bodies[0].closed
    assert fetching.storage.requested[1].start == 50


def test_a_slow_body_that_goes_on_is_not_abandoned() -> None:
    fetching = Fetching(lambda _: Answer(wait_s=29.0, piece_s=29.0))
    assert fetching.get(0, 100).requests == 1
    assert fetching.took_s == pytest.approx(290.0)


@pytest.mark.parametrize("known", [True, False], ids=["size known", "size not known"])
def test_more_bytes_than_requested_are_never_written(known: bool) -> None:
    fetching = Fetching(lambda _: Answer(more=b"x", piece_bytes=60))
    fetching.pin = Pin(1000, "v1") if known else Pin()
    with pytest.raises(StorageError, match="holds more than that"):
        fetching.get(900, 5000)
    fetching.assert_written(900, 960)
    assert fetching.storage.bodies[0].closed


@pytest.mark.parametrize(
    ("answer", "versions"),
    [
        (Answer(etag="v2"), "1000 bytes and the version v1 and has 1000 bytes and the version v2"),
        (Answer(total_bytes=900), "1000 bytes and the version v1 and has 900 bytes and the version v1"),
    ],
    ids=["etag", "size"],
)
def test_an_answer_of_another_version_is_refused_and_both_are_named(answer: Answer, versions: str) -> None:
    fetching = Fetching(lambda _: answer)
    fetching.pin = Pin(1000, "v1")
    with pytest.raises(ShardChangedError, match=versions) as caught:
        fetching.get(0, 10)
    assert caught.value.url == "s3://b/a.tar"
    assert fetching.written == []
    assert fetching.storage.bodies[0].closed
    assert fetching.pin == Pin(1000, "v1")


def test_no_etag_in_an_answer_says_nothing_and_the_pin_keeps_its_own() -> None:
    pin = Pin(None, "v1")
    pin.check("url", 10, None)
    assert pin == Pin(10, "v1")


def test_a_version_that_the_storage_refuses_is_named_by_requesting_the_current_one() -> None:
    fetching = Fetching()
    fetching.pin = Pin(900, "v0")
    with pytest.raises(ShardChangedError, match="900 bytes and the version v0 and has 1000 bytes and the version v1"):
        fetching.get(0, 10)
    assert fetching.written == []
    assert all(body.closed for body in fetching.storage.bodies)


def test_where_naming_fails_the_refusal_stands() -> None:
    fetching = Fetching(in_turn(Answer(), Answer(error=RESET)))
    fetching.pin = Pin(1000, "v0")
    with pytest.raises(ShardChangedError, match="precondition failed"):
        fetching.get(0, 10)


def test_what_is_final_is_not_tried_again() -> None:
    fetching = Fetching(lambda _: Answer(error=ShardNotFoundError("no such shard")))
    with pytest.raises(ShardNotFoundError):
        fetching.get(0, 10)
    assert len(fetching.storage.requested) == 1


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


def test_a_cancelled_download_writes_nothing_more_and_gives_its_connection_up() -> None:
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
