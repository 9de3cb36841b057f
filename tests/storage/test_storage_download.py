"""One range, fetched whole: what breaks is continued, what stalls is given up, and no wrong byte is written."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from streamload.errors import StorageError, TransientStorageError
from streamload.storage.download import Pin, Retries, RetryPolicy, download
from streamload.storage.protocol import RangeBody

CONTENT = random.Random(0).randbytes(1000)
RESET = TransientStorageError("connection reset")
SOON = RetryPolicy(stall_timeout_s=0.1, give_up_timeout_s=0.4, first_backoff_s=0.0, warn_after_s=0.02)
Answer = Callable[[bytes], AsyncGenerator[bytes, None]]


async def slowly(content: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(content), 10):
        yield content[start : start + 10]
        await asyncio.sleep(0.001)


async def broken(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content[:33]
    raise RESET


async def too_short(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content[:33]


async def stalled(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content[:33]
    await asyncio.sleep(1e6)


async def silent(_: bytes) -> AsyncGenerator[bytes, None]:
    yield await asyncio.sleep(1e6, b"")


async def reset(_: bytes) -> AsyncGenerator[bytes, None]:
    yield b""
    raise RESET


async def too_long(content: bytes) -> AsyncGenerator[bytes, None]:
    yield content[:60]
    yield content[60:] + b"x"


class Scripted:
    """A storage of one object that gives these answers one after the other, and then sound ones."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requested: list[tuple[int, int]] = []
        self.written = bytearray()
        self.body: Any = None

    async def open_range(self, _: str, start: int, end: int) -> RangeBody:
        self.requested.append((start, end))
        answer = self.answers.pop(0) if self.answers else slowly
        self.body = answer(CONTENT[start:end])
        return RangeBody(len(CONTENT), "v1", self.body)

    async def get(self, start: int, end: int, pin: Pin | None = None, policy: RetryPolicy = SOON) -> int:
        def write(offset: int, piece: bytes) -> None:
            assert offset == start + len(self.written)
            self.written += piece

        storage: Any = self
        return await download(storage, "s3://b/a.tar", start, end, write, pin=pin or Pin(), retries=Retries(policy))


async def test_a_start_behind_the_object_is_an_error() -> None:
    with pytest.raises(StorageError, match="bytes from 1000 on were requested, but the shard has 1000"):
        await Scripted().get(1000, 1010, Pin(1000, "v1"))


@pytest.mark.parametrize("answer", [broken, too_short, stalled])
async def test_a_body_that_breaks_off_is_continued_from_there(answer: Answer) -> None:
    storage = Scripted(answer, reset)
    assert await storage.get(0, 100) == 100
    assert storage.requested == [(0, 100), (33, 100), (33, 100)]
    assert storage.written == CONTENT[:100]


async def test_after_so_many_fruitless_tries_it_says_why_and_what_to_do() -> None:
    storage = Scripted(*[reset] * 9)
    with pytest.raises(
        StorageError, match=r"5 requests in a row .*\(the last: connection reset\).*run again"
    ) as caught:
        await storage.get(0, 10, policy=SOON._replace(tries=5))
    assert not isinstance(caught.value, TransientStorageError)
    assert (caught.value.url, caught.value.offset, caught.value.__cause__) == ("s3://b/a.tar", 0, None)
    assert len(storage.requested) == 5


async def test_a_server_that_never_answers_is_warned_of_and_then_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StorageError, match=r"received no byte, over 0\.\d s .*no byte for 0.1 s\); check the network"):
        await Scripted(*[silent] * 9).get(0, 10)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("s3://b/a.tar: no answer. No byte has arrived from there for 0.0 s; retrying for up to 0 s")


@pytest.mark.parametrize("pin", [Pin(1000, "v1"), Pin()], ids=["size known", "size not known"])
async def test_more_bytes_than_requested_are_never_written(pin: Pin) -> None:
    storage = Scripted(too_long)
    with pytest.raises(StorageError, match="holds more; the server"):
        await storage.get(900, 5000, pin)
    assert storage.written == CONTENT[900:960]


@pytest.mark.parametrize("error", [TimeoutError("disk"), OSError(28, "disk full")], ids=["time-out", "full"])
async def test_what_writing_raises_ends_the_download(error: OSError) -> None:
    def write(*_: object) -> None:
        raise error

    storage: Any = Scripted()
    with pytest.raises(type(error)) as caught:
        await download(storage, "u", 0, 10, write, pin=Pin())
    assert caught.value is error
    assert len(storage.requested) == 1


async def test_a_cancelled_download_writes_nothing_more_and_frees_its_connection() -> None:
    storage = Scripted()
    task = asyncio.create_task(storage.get(0, 1000))
    while not storage.written:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert len(storage.written) < 1000
    assert storage.body.ag_frame is None, "the body was closed"
