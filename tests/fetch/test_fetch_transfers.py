"""Parts beside each other: each is told of once, and closing ends everything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from scripted_storage import Answer, ScriptedStorage
from virtual_time import run_in_virtual_time

from streamload.errors import StorageError, TransientStorageError
from streamload.fetch.transfers import Part, Source, TransferCounts, Transfers
from streamload.storage.download import Downloaded, Pin
from streamload.storage.retry_policy import Retries, RetryPolicy

PART_BYTES = 100
THROTTLED = TransientStorageError("slow down", throttled=True)
USUAL = Answer(wait_s=0.05, piece_s=0.02)
USUAL_S = 0.05 + 9 * 0.02


@dataclass
class Epoch:
    """Fetches all parts of a scripted object in order, as many beside each other as there is room for."""

    script: Callable[[int], Answer]
    count: int
    most: int = 64
    policy: RetryPolicy | None = None
    memory: bytearray = field(init=False)
    done: list[Part] = field(default_factory=list)
    failed: list[tuple[Part, BaseException]] = field(default_factory=list)
    took_s: float = 0.0
    in_flight: list[int] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        content = random.Random(0).randbytes(self.count * PART_BYTES - 7)
        self.storage = ScriptedStorage(content, self.script)
        self.memory = bytearray(len(content))

    def write(self, part: Part, offset: int, piece: bytes) -> None:
        assert part not in self.done, "nothing is written any more after a part is done"
        assert part.start <= offset < offset + len(piece) <= part.end
        self.memory[offset : offset + len(piece)] = piece

    async def fetch(self) -> TransferCounts:
        loop = asyncio.get_running_loop()
        began_s, source = loop.time(), Source(self.storage, "u", Pin())
        parts = iter([Part(0, n, n * PART_BYTES, (n + 1) * PART_BYTES) for n in range(self.count)])
        ended = asyncio.Event()

        def start_more() -> None:
            self.rooms.append(transfers.room())
            while transfers.room() and (part := next(parts, None)):
                transfers.start(part)
            self.in_flight.append(transfers.in_flight)
            if not transfers.in_flight:
                ended.set()

        def on_done(part: Part, downloaded: Downloaded) -> None:
            assert (downloaded.start, downloaded.end) == (part.start, min(part.end, len(self.memory)))
            self.done.append(part)
            start_more()

        def on_failed(part: Part, error: BaseException) -> None:
            self.failed.append((part, error))
            start_more()

        transfers = Transfers(
            lambda _: source, self.write, on_done, on_failed, retries=Retries(self.policy), most=self.most
        )
        start_more()
        await ended.wait()
        self.took_s = loop.time() - began_s
        await transfers.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return transfers.counts

    def run(self) -> TransferCounts:
        return run_in_virtual_time(self.fetch())

    def assert_whole(self) -> None:
        assert self.failed == []
        assert sorted(part.number for part in self.done) == list(range(self.count))
        assert self.memory == self.storage.content


def test_every_part_is_fetched_once_with_one_request_as_many_beside_each_other_as_allowed() -> None:
    epoch = Epoch(lambda _: USUAL, count=50, most=10)
    counts = epoch.run()
    assert (counts.requests, counts.received_bytes) == (50, 50 * PART_BYTES - 7)
    assert (counts.answered, counts.throttled, counts.broken, counts.in_flight) == (50, 0, 0, 0)
    assert 0 < counts.answer_s <= counts.connection_s <= counts.limit_s
    assert counts.full_s <= counts.connection_s
    epoch.assert_whole()
    assert epoch.rooms[0] == max(epoch.in_flight) == 10
    assert epoch.took_s == pytest.approx(5 * USUAL_S)


def test_refusals_lower_how_many_run_and_each_part_comes_in_the_end() -> None:
    epoch = Epoch(lambda number: Answer(wait_s=0.05, error=THROTTLED) if number < 32 else USUAL, count=100)
    counts = epoch.run()
    epoch.assert_whole()
    assert (counts.throttled, counts.broken) == (32, 0)
    assert epoch.rooms[0] == 32
    later = epoch.in_flight[40:80]
    assert max(later) <= 20, "one round trip of refusals halves once, and the way up is slow"
    assert min(later) >= 15


def test_a_part_that_cannot_be_fetched_is_told_of_and_the_others_go_on() -> None:
    epoch = Epoch(lambda n: Answer(error=StorageError("denied")) if n == 3 else USUAL, count=20, most=5)
    epoch.run()
    assert [(part.number, str(error)) for part, error in epoch.failed] == [(3, "denied")]
    assert len(epoch.done) == 19


def test_a_server_that_never_answers_is_told_of_within_the_time_out() -> None:
    def silent_at_the_end(number: int) -> Answer:
        return USUAL if number < 20 else Answer(wait_s=10**9)

    policy = RetryPolicy(stall_timeout_s=2.0, give_up_timeout_s=5.0)
    epoch = Epoch(silent_at_the_end, count=21, most=10, policy=policy)
    epoch.run()
    assert [part.number for part, _ in epoch.failed] == [20]
    assert isinstance(epoch.failed[0][1], StorageError)
    assert epoch.took_s <= 2 * USUAL_S + 5.0 + 1e-6


DISK_FULL = OSError(28, "disk full")


class NowhereToWrite(Epoch):
    def write(self, part: Part, offset: int, piece: bytes) -> None:
        raise DISK_FULL


def test_what_writing_raises_fails_the_part() -> None:
    epoch = NowhereToWrite(lambda _: USUAL, count=1)
    epoch.run()
    assert epoch.failed == [(Part(0, 0, 0, PART_BYTES), DISK_FULL)]


def test_closing_ends_what_is_on_its_way_and_nobody_is_called_any_more() -> None:
    storage = ScriptedStorage(bytes(1000), lambda _: Answer(piece_s=1.0))
    called: list[object] = []

    async def main() -> None:
        transfers = Transfers(
            lambda _: Source(storage, "u", Pin()),
            lambda part, offset, piece: called.append(piece),
            lambda part, downloaded: called.append(part),
            lambda part, error: called.append(error),
        )
        transfers.start(Part(0, 0, 0, 500))
        transfers.start(Part(0, 1, 500, 1000))
        await asyncio.sleep(1.5)
        assert transfers.in_flight == 2
        await transfers.close()
        await transfers.close()
        assert transfers.in_flight == 0
        before = len(called)
        await asyncio.sleep(1000)
        assert len(called) == before == 4
        with pytest.raises(RuntimeError, match="closed"):
            transfers.start(Part(0, 0, 0, 10))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(main())
    assert all(body.closed for body in storage.bodies)
