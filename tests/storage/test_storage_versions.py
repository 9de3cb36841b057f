"""One version and one memory of a shard at a time: what comes for another one is never taken for its bytes."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from servers.faults import FaultServer, Script

from streamload.errors import ShardChangedError
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.partial_shard import PartialShard
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.transfers import Transfers
from streamload.index.listing import Listing, Shard, list_shards
from streamload.storage.storages import Storages

URL = "s3://bucket/a.tar"
ETAG = '"1"'
CONTENT = bytes(range(1, 252)) * (2 * PART_BYTES // 251)
KEYS = [part_key(0, 0), part_key(0, 1)]
DEADLINE_S = 20.0


@dataclass
class GatedBody:
    """Half of a range; the other half when the gate opens."""

    content: bytes
    gate: asyncio.Event
    total_bytes: int = len(CONTENT)
    etag: str = ETAG

    async def chunks(self) -> AsyncIterator[bytes]:
        half = len(self.content) // 2
        yield self.content[:half]
        await self.gate.wait()
        yield self.content[half:]

    async def aclose(self) -> None:
        return


@dataclass
class GatedStorage:
    """Answers every request, one gate for each."""

    gates: list[asyncio.Event] = field(default_factory=list)

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None) -> GatedBody:
        self.gates.append(asyncio.Event())
        return GatedBody(CONTENT[start:end], self.gates[-1])


class Place(Storages):
    """Where all urls lead to one storage."""

    def __init__(self, storage: Any) -> None:
        super().__init__()
        self.storage = storage

    def for_url(self, url: str) -> Any:
        return self.storage


class Fetching:
    """A fetcher of one shard of two parts, through a disk cache."""

    def __init__(self, folder: Path) -> None:
        self.storage = GatedStorage()
        self.moved = asyncio.Event()
        self.wakes = 0
        shard = Shard(URL, "a.tar", len(CONTENT), 0, "s3://bucket", ETAG)
        self.fetcher = Fetcher(
            Listing((shard,), None, (None,), ()),
            frozenset({0}),
            Place(self.storage),
            budget_bytes=8 * PART_BYTES,
            slot_bytes=lambda: 0,
            wake=self.wake,
            progress=self.moved.set,
            cache=DiskCache(str(folder), 1 << 30, part_bytes=PART_BYTES),
        )

    def wake(self) -> None:
        self.wakes += 1
        self.moved.set()

    def begin(self) -> None:
        self.fetcher.ledger.hold(KEYS)
        self.fetcher.want(KEYS)
        self.fetcher.pump()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    def bytes_there(self) -> bytes:
        opened = self.fetcher.open(0)
        try:
            return os.pread(opened.descriptor, len(CONTENT), 0)
        finally:
            os.close(opened.descriptor)


def refuse_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(PartialShard, "write", write)


def test_what_was_in_flight_to_the_cache_is_not_taken_for_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        fetching = Fetching(tmp_path)
        fetcher, gates = fetching.fetcher, fetching.storage.gates
        try:
            fetching.begin()
            await fetching.until(lambda: len(gates) == 2)
            await asyncio.sleep(0.01)  # the first halves have been written to the disk
            refuse_from_now(monkeypatch)
            before = fetching.wakes
            gates[0].set()
            await fetching.until(lambda: fetching.wakes > before)
            fetcher.pump()
            await fetching.until(lambda: len(gates) == 4)
            wakes = fetching.wakes
            gates[1].set()
            await fetching.until(lambda: fetching.wakes > wakes)  # there is room for other parts now
            assert not fetcher.there(KEYS[:1])
            assert not fetcher.there(KEYS[1:])
            gates[2].set()
            gates[3].set()
            await fetching.until(lambda: fetcher.there(KEYS))
            assert fetching.bytes_there() == CONTENT
        finally:
            await fetcher.close()

    asyncio.run(run())


def test_a_part_that_another_process_fetches_is_fetched_here_when_the_cache_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        other = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
        shared = other.open(ShardIdentity(URL, ETAG, len(CONTENT)))
        assert shared is not None
        assert await shared.claim(1)
        fetching = Fetching(tmp_path)
        fetcher, gates = fetching.fetcher, fetching.storage.gates
        try:
            fetching.begin()
            await fetching.until(lambda: len(gates) == 1)
            await asyncio.sleep(0.05)  # the other part is being waited for
            refuse_from_now(monkeypatch)
            before = fetching.wakes
            gates[0].set()
            await fetching.until(lambda: fetching.wakes > before)
            fetcher.pump()
            await fetching.until(lambda: len(gates) == 3)
            for gate in gates:
                gate.set()
            await fetching.until(lambda: fetcher.there(KEYS))
            await asyncio.sleep(0.1)  # the wait for the other process has ended, and said nothing
            assert fetcher.there(KEYS)
            assert fetching.bytes_there() == CONTENT
            assert len(gates) == 3
        finally:
            await fetcher.close()
            other.close()

    asyncio.run(run())
    gc.collect()
    assert not told


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
            came.clear()
            fetcher.ledger.hold(keys)
            fetcher.want(keys)
            fetcher.pump()
            async with asyncio.timeout(DEADLINE_S):
                await came.wait()
            assert fetcher.there(keys)
            fetcher.ledger.release(keys)
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


class GoesOn(Fetching):
    """The same, and it goes on by itself."""

    def wake(self) -> None:
        super().wake()
        asyncio.get_running_loop().call_soon(self.fetcher.pump)


def test_one_part_after_the_other_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one wakes the fetcher before it is over, when there is no room yet for the second one."""
    monkeypatch.setattr(Transfers, "room", lambda _: 1)

    async def run() -> None:
        fetching = GoesOn(tmp_path)
        fetcher, gates = fetching.fetcher, fetching.storage.gates
        try:
            fetching.begin()
            for number in (1, 2):
                await fetching.until(lambda number=number: len(gates) == number)
                gates[-1].set()
            await fetching.until(lambda: fetcher.there(KEYS))
            fetcher.ledger.release(KEYS)
            fetcher.pump()
            assert not fetcher.there(KEYS[:1])
            fetching.begin()
            await fetching.until(lambda: fetcher.there(KEYS))
            assert len(gates) == 2
            assert fetching.bytes_there() == CONTENT
        finally:
            await fetcher.close()

    asyncio.run(run())
