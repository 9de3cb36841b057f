"""What is brought tells whoever waits for room, whatever becomes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from nobody import Nobody

from streamload.errors import ShardNotFoundError
from streamload.fetch.bringing import Bringer
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.parts import PART_BYTES
from streamload.fetch.storage.storages import Storages
from streamload.fetch.transfer.download import Pin
from streamload.fetch.unpack.unpacking import compression_of

DEADLINE_S = 20.0


class RefusingStorage(Storages):
    """Refuses every request, when its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.gate = asyncio.Event()

    def for_url(self, url: str) -> Any:
        return self

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> Any:
        self.asked.set()
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
def test_a_request_that_fails_when_nobody_wants_it_any_more_makes_room_for_another(
    tmp_path: Path, name: str, cached: bool
) -> None:
    """Nothing else may be on its way that would ever wake whoever waits for that. For a cache it is of the version."""

    async def run() -> None:
        url = f"s3://bucket/{name}"
        size_bytes = 2 * PART_BYTES
        storage = RefusingStorage()
        pin = Pin() if cached else Pin(size_bytes, None)
        cache = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES) if cached else None
        waiting = Waiting(FetchedShard(0, url, pin, compression_of(url), 0, size_bytes))
        bringer = Bringer(storage, cache, lambda _: -1, waiting)
        try:
            async with asyncio.timeout(DEADLINE_S):
                bringer.bring(waiting.states[0], 0)
                await storage.asked.wait()
                bringer.forget(waiting.states[0])
                waiting.states[0].release(1)
                await asyncio.sleep(0.01)  # whatever reads the shard from its start has ended
                assert waiting.woken.is_set() == name.endswith(".gz")  # what that has held is free, which is told too
                waiting.woken.clear()
                storage.gate.set()
                await waiting.woken.wait()
        finally:
            await bringer.close()

    asyncio.run(run())
