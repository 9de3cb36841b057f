"""What the fetcher says of the budget holds at the time it is asked."""

from __future__ import annotations

import asyncio
import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from servers.faults import FaultServer, Script

from streamload.errors import ShardNotFoundError
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages


def nothing() -> None:
    """For events that do not matter."""


async def fetcher_of(
    url: str,
    *,
    budget_bytes: int = 8 * PART_BYTES,
    wake: Callable[[], None] = nothing,
    progress: Callable[[], None] = nothing,
    cache: DiskCache | None = None,
) -> Fetcher:
    """A fetcher of one shard."""
    storages = Storages()
    listing = await asyncio.to_thread(list_shards, [url], None, storages)
    return Fetcher(
        listing,
        frozenset({0}),
        storages,
        budget_bytes=budget_bytes,
        slot_bytes=lambda: 0,
        wake=wake,
        progress=progress,
        cache=cache,
    )


async def a_part_waits_for_another(url: str) -> tuple[list[bool], bool, bool]:
    """Two parts, and room for one: whether the fetcher is stuck before and after the first is let go."""
    came = asyncio.Event()
    woken: list[None] = []
    fetcher = await fetcher_of(url, budget_bytes=PART_BYTES + 1, wake=lambda: woken.append(None), progress=came.set)
    try:
        keys = [part_key(0, 0)], [part_key(0, 1)]
        fetcher.window.hold(keys[0])
        fetcher.notify()
        fetcher.pump()
        while not fetcher.are_present(keys[0]):  # that its size is known is progress too
            came.clear()
            await came.wait()
        fetcher.window.hold(keys[1])
        fetcher.notify()
        fetcher.pump()
        stalled = [fetcher.stalled]
        woken.clear()
        fetcher.window.release(keys[0])
        fetcher.notify()
        stalled.append(fetcher.stalled)
        woken_then = bool(woken)
        came.clear()
        fetcher.pump()
        await came.wait()
        return stalled, woken_then, fetcher.are_present(keys[1])
    finally:
        await fetcher.close()


async def test_room_that_a_batch_has_left_is_seen_at_once() -> None:
    with FaultServer({"data/shard.tar": bytes(2 * PART_BYTES)}) as server:
        stalled, woken, there = await a_part_waits_for_another(f"{server.url}/data/shard.tar")
    assert stalled == [True, False]
    assert woken
    assert there


async def a_shard_that_was_away(server: FaultServer, name: str, cache: DiskCache | None) -> bool:
    """Two parts of a shard that is missing, and is there when they are tried again the second time."""
    moved = asyncio.Event()
    fetcher = await fetcher_of(f"{server.url}/data/{name}", wake=moved.set, progress=moved.set, cache=cache)
    keys = [part_key(0, 0), part_key(0, 1)]

    async def come(*keys: int) -> None:
        while not fetcher.are_present(keys):
            moved.clear()
            fetcher.pump()
            await asyncio.wait_for(moved.wait(), 20)

    try:
        fetcher.window.plan(keys)
        fetcher.notify()
        for again in (False, True):
            assert bool(fetcher.try_again()) == again
            for key in keys:  # else the second one may fail after the next try has begun
                with pytest.raises(ShardNotFoundError):
                    await come(key)
        server.play(Script())
        assert fetcher.try_again()
        await come(*keys)
        return fetcher.are_present(keys)
    finally:
        await fetcher.close()


@pytest.mark.parametrize("name", ["shard.tar", "shard.tar.gz"])
@pytest.mark.parametrize("cached", [False, True])
async def test_what_was_away_comes_when_it_is_tried_again(name: str, *, cached: bool, tmp_path: Path) -> None:
    content = bytes(2 * PART_BYTES)
    objects = {"data/shard.tar": content, "data/shard.tar.gz": gzip.compress(content, 1)}
    cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES) if cached else None
    with FaultServer(objects, Script(status=404, status_share=1.0)) as server:
        assert await a_shard_that_was_away(server, name, cache)


async def test_pages_are_allocated_for_a_part_in_flight_and_freed_where_it_fails() -> None:
    with FaultServer({"data/shard.tar": bytes(2 * PART_BYTES)}) as server:
        fetcher = await fetcher_of(f"{server.url}/data/shard.tar")
        server.play(Script(first_byte_s=0.5, status=404, status_share=1.0))
        try:
            fetcher.state_of(0).total_bytes = 2 * PART_BYTES  # as an index, or an earlier answer, would have said
            fetcher.window.plan([part_key(0, 0)])
            fetcher.notify()
            fetcher.pump()
            memory = fetcher.state_of(0).pages()
            assert memory is not None
            async with asyncio.timeout(20):
                while os.fstat(memory.descriptor).st_blocks * 512 < PART_BYTES:
                    await asyncio.sleep(0.01)
                with pytest.raises(ShardNotFoundError):
                    while not fetcher.are_present([part_key(0, 0)]):
                        await asyncio.sleep(0.01)
            assert os.fstat(memory.descriptor).st_blocks == 0
        finally:
            await fetcher.close()


async def test_the_size_of_a_shard_is_known_when_its_first_answer_begins() -> None:
    """Its other parts can be requested then, and the pages of the first one are allocated."""
    with FaultServer({"data/shard.tar": bytes(2 * PART_BYTES)}) as server:
        moved = asyncio.Event()
        fetcher = await fetcher_of(f"{server.url}/data/shard.tar", progress=moved.set)
        server.play(Script(bytes_per_s=100_000))
        key = part_key(0, 0)
        try:
            fetcher.window.plan([key])
            fetcher.notify()
            fetcher.pump()
            async with asyncio.timeout(20):
                await moved.wait()
                assert fetcher.state_of(0).total_bytes == 2 * PART_BYTES
                memory = fetcher.state_of(0).pages()
                assert memory is not None
                while os.fstat(memory.descriptor).st_blocks * 512 < PART_BYTES:
                    await asyncio.sleep(0.01)
            assert not fetcher.are_present([key])
        finally:
            await fetcher.close()
