"""What the fetcher says of the budget holds at the time it is asked."""

from __future__ import annotations

import asyncio

from servers.faults import FaultServer

from streamload.fetch.fetcher import Fetcher
from streamload.fetch.listing.listing import list_shards
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.storage.storages import Storages


async def a_part_waits_for_another(url: str) -> tuple[list[bool], bool, bool]:
    """Two parts, and room for one: whether the fetcher is stuck before and after the first is let go."""
    storages = Storages()
    listing = await asyncio.to_thread(list_shards, [url], None, storages)
    came = asyncio.Event()
    woken: list[None] = []
    fetcher = Fetcher(
        listing,
        frozenset({0}),
        storages,
        budget_bytes=PART_BYTES + 1,
        slot_bytes=lambda: 0,
        wake=lambda: woken.append(None),
        progress=came.set,
    )
    try:
        keys = [part_key(0, 0)], [part_key(0, 1)]
        fetcher.ledger.hold(keys[0])
        fetcher.want(keys[0])
        fetcher.pump()
        await came.wait()
        fetcher.ledger.hold(keys[1])
        fetcher.want(keys[1])
        fetcher.pump()
        stuck = [fetcher.stuck]
        woken.clear()
        fetcher.ledger.release(keys[0])
        fetcher.freed()
        stuck.append(fetcher.stuck)
        woken_then = bool(woken)
        came.clear()
        fetcher.pump()
        await came.wait()
        return stuck, woken_then, fetcher.there(keys[1])
    finally:
        await fetcher.close()


def test_room_that_a_batch_has_left_is_seen_at_once() -> None:
    with FaultServer({"data/shard.tar": bytes(2 * PART_BYTES)}) as server:
        stuck, woken, there = asyncio.run(a_part_waits_for_another(f"{server.url}/data/shard.tar"))
    assert stuck == [True, False]
    assert woken
    assert there
