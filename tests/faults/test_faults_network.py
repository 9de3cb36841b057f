"""A server that fails in every way: the right bytes or a typed error, never wrong bytes, and at a bounded cost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
from matrix import exhaustive
from servers.faults import FaultServer, Script

from streamload.errors import ShardChangedError
from streamload.fetch.fetcher import Source, TransferCounts, Transfers
from streamload.storage.download import Pin, Retries, RetryPolicy
from streamload.storage.storages import Storages

SEEDS = [0, *(exhaustive((seed,)) for seed in range(1, 30))]
SHARD_BYTES = 1_000_003
PART_BYTES = 128 << 10
SHARDS = {f"bucket/train-{n}.tar": random.Random(n).randbytes(SHARD_BYTES) for n in range(3)}
LONG_RETRIES = RetryPolicy(
    stall_timeout_s=5.0, give_up_timeout_s=20.0, tries=25, first_backoff_s=0.01, most_backoff_s=0.1
)
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    with FaultServer(SHARDS) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Fetched:
    """What an epoch has brought: each shard's bytes as far as they were written, and the errors."""

    shards: list[bytearray]
    counts: TransferCounts
    errors: list[BaseException]

    def assert_right(self) -> None:
        assert self.errors == []
        assert self.shards == [bytearray(content) for content in SHARDS.values()]


async def fetch(
    server: FaultServer,
    script: Script,
    *,
    part_bytes: int = PART_BYTES,
    limits: RetryPolicy = LONG_RETRIES,
    most: int = 8,
) -> Fetched:
    """Every part of every shard once, with the shards' sizes not known before; ends with the first error."""
    server.play(script)
    url = server.url
    storage = Storages().for_url(url)
    sources = [Source(storage, f"{url}/{name}", Pin()) for name in SHARDS]
    parts = [(shard, start) for shard in range(len(SHARDS)) for start in range(0, SHARD_BYTES, part_bytes)]
    contents = list(SHARDS.values())
    todo, fetched = iter(parts), Fetched([bytearray(SHARD_BYTES) for _ in SHARDS], TransferCounts(), [])
    ended = asyncio.Event()

    def write(shard: int, start: int, offset: int, piece: bytes) -> None:
        assert start <= offset < offset + len(piece) <= start + part_bytes
        assert contents[shard][offset : offset + len(piece)] == bytes(piece)
        fetched.shards[shard][offset : offset + len(piece)] = piece

    def start_more() -> None:
        while not fetched.errors and len(transfers.running) < most and (part := next(todo, None)):
            shard, start = part
            task = transfers.begin(sources[shard], start, start + part_bytes, partial(write, shard, start))
            task.add_done_callback(on_end)
        if not transfers.running:
            ended.set()

    def on_end(task: asyncio.Task[int]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            fetched.errors.append(error)
            ended.set()
        start_more()

    transfers = Transfers(Retries(limits))
    start_more()
    async with asyncio.timeout(DEADLINE_S):
        await ended.wait()
    await transfers.close()
    await storage.aclose()
    assert fetched.errors or next(todo, None) is None
    return replace(fetched, counts=transfers.counts)


async def test_a_server_without_faults_gets_one_request_for_each_part(server: FaultServer) -> None:
    (await fetch(server, Script())).assert_right()
    report = server.report()
    assert report.requests == 3 * -(-SHARD_BYTES // PART_BYTES)
    assert report.sent_bytes == 3 * SHARD_BYTES
    assert report.most_beside <= 8


@pytest.mark.parametrize("seed", SEEDS)
async def test_bodies_that_are_all_cut_are_continued_from_there(server: FaultServer, seed: int) -> None:
    fetched = await fetch(server, Script(seed=seed, cut_share=1.0))
    fetched.assert_right()
    assert fetched.counts.broken > 24
    assert fetched.counts.received_bytes <= 1.05 * 3 * SHARD_BYTES
    lost_bytes = 8 * PART_BYTES  # of the eight in flight when nothing had broken yet: they come in large pieces
    assert server.report().sent_bytes <= 1.05 * 3 * SHARD_BYTES + lost_bytes


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("status", [503, 429, 500])
async def test_refused_requests_are_made_again(server: FaultServer, seed: int, status: int) -> None:
    fetched = await fetch(server, Script(seed=seed, status=status, status_share=0.3), part_bytes=16 << 10)
    fetched.assert_right()
    counts = fetched.counts
    assert (counts.throttled > 20, counts.broken > 20) == ((False, True) if status == 500 else (True, False))
    assert server.report().requests <= 1.6 * 3 * -(-SHARD_BYTES // (16 << 10))


@pytest.mark.parametrize("seed", SEEDS)
async def test_answers_that_sleep_are_requested_again(server: FaultServer, seed: int) -> None:
    sleeping = Script(seed=seed, sleep_share=0.02, sleep_s=2 * DEADLINE_S, first_byte_s=0.005)
    limits = LONG_RETRIES._replace(stall_timeout_s=0.5)
    fetched = await fetch(server, sleeping, part_bytes=16 << 10, limits=limits)
    fetched.assert_right()
    assert 1 <= fetched.counts.broken <= 0.05 * 186 + 4


@pytest.mark.parametrize(("swap_at", "most"), [(1, 1), (20, 4)])
async def test_an_object_that_is_swapped_is_found_out(server: FaultServer, swap_at: int, most: int) -> None:
    fetched = await fetch(server, Script(swap_at=swap_at), most=most)
    assert isinstance(fetched.errors[0], ShardChangedError)
    assert str(fetched.errors[0]).count("1000003 bytes and the version") == 2
    assert "swapped-" in str(fetched.errors[0])


@pytest.mark.parametrize("seed", SEEDS)
async def test_an_object_that_is_swapped_while_bodies_break_is_found_out(server: FaultServer, seed: int) -> None:
    fetched = await fetch(server, Script(seed=seed, swap_at=30, cut_share=1.0), most=1)
    assert isinstance(fetched.errors[0], ShardChangedError)
