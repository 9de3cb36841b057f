"""One version and one memory of a shard at a time: what comes for another one is never taken for its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from servers.faults import FaultServer, Script

from streamload.errors import ShardChangedError
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages

DEADLINE_S = 20.0


async def read_twice(urls: list[str], between: Callable[[], None]) -> None:
    """The first shard, then the second in its room, then the first once more."""
    listing = await asyncio.to_thread(list_shards, urls)
    came = asyncio.Event()
    fetcher = Fetcher(
        listing,
        frozenset({0, 1}),
        Storages(),
        budget_bytes=PART_BYTES,
        slot_bytes=lambda: 0,
        wake=lambda: None,
        progress=came.set,
    )
    try:
        for shard in (0, 1, 0):
            keys = [part_key(shard, 0)]
            fetcher.window.hold(keys)
            fetcher.notify()
            fetcher.pump()
            async with asyncio.timeout(DEADLINE_S):
                while not fetcher.are_present(keys):
                    came.clear()
                    await came.wait()
            fetcher.window.release(keys)
            fetcher.finish([shard])
            if shard == 1:
                assert fetcher.take_closed() == [0]
                between()
    finally:
        await fetcher.close()


def test_a_shard_that_is_read_again_must_still_be_the_one_that_was_read_first() -> None:
    """Its samples are looked for where they were, also where no listing has told its version."""
    with FaultServer({"data/0.tar": bytes(PART_BYTES), "data/1.tar": bytes(PART_BYTES)}) as server:
        urls = [f"{server.url}/data/{number}.tar" for number in range(2)]
        asyncio.run(read_twice(urls, lambda: None))
        with pytest.raises(ShardChangedError):
            asyncio.run(read_twice(urls, lambda: server.play(Script(swap_at=0))))
