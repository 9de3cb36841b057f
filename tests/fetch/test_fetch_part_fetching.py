"""What is brought tells whoever waits for room, whatever becomes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from nobody import Nobody

from streamload.errors import ShardNotFoundError
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.compressed_body import COMPRESSED_BYTES_HELD
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.part_fetching import PartFetcher
from streamload.fetch.parts import PART_BYTES
from streamload.storage.download import Pin
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of

DEADLINE_S = 20.0


class RefusingStorage(Storages):
    """Refuses every request, when its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.requested = asyncio.Event()
        self.gate = asyncio.Event()

    def for_url(self, url: str) -> Any:
        return self

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> Any:
        self.requested.set()
        await self.gate.wait()
        raise ShardNotFoundError("there is none", url=url)


class Waiting(Nobody):
    """Someone who waits for room, and wants the first part of one shard."""

    def __init__(self, state: FetchedShard) -> None:
        super().__init__([state])
        self.woken = asyncio.Event()

    def has_room(self) -> None:
        self.woken.set()


@pytest.mark.parametrize(("name", "cached"), [("a.tar", False), ("a.tar.gz", False), ("a.tar", True)])
async def test_a_request_that_fails_when_nobody_wants_it_any_more_makes_room_for_another(
    tmp_path: Path, name: str, cached: bool
) -> None:
    """Nothing else may be in flight that would ever wake whoever waits for that. For a cache it is of the version."""

    url = f"s3://bucket/{name}"
    size_bytes = 2 * PART_BYTES
    storage = RefusingStorage()
    pin = Pin() if cached else Pin(size_bytes, None)
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES) if cached else None
    waiting = Waiting(FetchedShard(0, url, pin, compression_of(url), 0, size_bytes))
    part_fetcher = PartFetcher(storage, cache, lambda _: -1, waiting)
    try:
        async with asyncio.timeout(DEADLINE_S):
            part_fetcher.fetch(waiting.states[0], 0)
            await storage.requested.wait()
            part_fetcher.forget(waiting.states[0])
            waiting.states[0].release(1)
            await asyncio.sleep(0.01)  # whatever reads the shard from its start has ended
            assert waiting.woken.is_set() == name.endswith(".gz")  # what that has held is free, which is told too
            waiting.woken.clear()
            storage.gate.set()
            await waiting.woken.wait()
    finally:
        await part_fetcher.close()


async def test_a_decompression_counts_from_its_first_moment_to_its_last() -> None:
    """Else another one is begun beside it before the first has read anything, and there is room for one only."""
    storage = RefusingStorage()
    url = "s3://bucket/a.tar.gz"
    waiting = Waiting(FetchedShard(0, url, Pin(1000, None), compression_of(url), 0, None))
    part_fetcher = PartFetcher(storage, None, lambda _: -1, waiting)
    try:
        async with asyncio.timeout(DEADLINE_S):
            part_fetcher.fetch(waiting.states[0], 0)
            held_bytes = [part_fetcher.held_bytes]
            await storage.requested.wait()
            held_bytes.append(part_fetcher.held_bytes)
            part_fetcher.forget(waiting.states[0])
            await waiting.woken.wait()
            held_bytes.append(part_fetcher.held_bytes)
    finally:
        storage.gate.set()
        await part_fetcher.close()
    assert held_bytes == [COMPRESSED_BYTES_HELD, COMPRESSED_BYTES_HELD, 0]


class Paused(Nobody):
    """Notes of which shards nothing comes any more."""

    def __init__(self, states: list[FetchedShard]) -> None:
        super().__init__(states)
        self.given_up: list[int] = []

    def not_coming(self, state: FetchedShard) -> None:
        self.given_up.append(state.number)

    def arrived(self, state: FetchedShard, number: int, size_bytes: int) -> None:
        pass


class PausedUnpacking:
    """A decompression that waits for room, and begins again at once when it is ended."""

    over, ends, waits_for_room = False, False, True

    def cancel(self) -> None:
        pass


async def test_decompressions_end_for_another_shard_but_not_for_ever() -> None:
    async def run() -> tuple[int, list[int]]:
        gz = compression_of("a.tar.gz")
        states = [FetchedShard(shard, f"s3://bucket/{shard}.tar.gz", Pin(), gz, 0, None) for shard in (0, 1)]
        events = Paused(states)
        part_fetcher = PartFetcher(RefusingStorage(), None, lambda _: -1, events)
        times = 0
        while times < 100:
            for state in states:
                state.decompressing = cast("Any", PausedUnpacking())
            part_fetcher._decompressions = [
                (state, state.decompressing) for state in states if state.decompressing is not None
            ]
            if not part_fetcher.evict(1):
                break
            assert states[0].decompressing is None
            assert states[1].decompressing is not None
            times += 1
        part_fetcher.decompressed(states[1], 0, PART_BYTES)  # it goes on, so there is a reason to try again
        assert part_fetcher.evict(1)
        return times, events.given_up

    times, given_up = await run()
    assert 1 < times < 100
    assert given_up == [0] * (times + 1)
