"""One version and one memory of a shard at a time: what comes for another one is never taken for its bytes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from servers.faults import FaultServer, Script

from streamload.errors import ShardChangedError
from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
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
        self.fetcher.window.hold(KEYS)
        self.fetcher.notify()
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


async def test_what_is_in_flight_when_a_shard_moves_to_a_file_is_not_written_anywhere(tmp_path: Path) -> None:
    """Another process has filled the file; here half of a part has come, and the other half comes later."""
    fetching = GoesOn(tmp_path)
    fetcher, gates = fetching.fetcher, fetching.storage.gates
    try:
        fetching.begin()
        await fetching.until(lambda: len(gates) == 2)
        gates[0].set()
        await fetching.until(lambda: fetcher.are_present(KEYS[:1]))
        other = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES)
        file = other.open(ShardIdentity(URL, ETAG, len(CONTENT)), concurrently=True)
        assert file is not None
        for start in range(0, len(CONTENT), PART_BYTES):
            file.write(start, CONTENT[start : start + PART_BYTES])
        other.publish(file)
        fetcher.on_disk(fetcher.state_of(0), file)
        assert fetcher.are_present(KEYS)
        assert fetching.bytes_there() == CONTENT
        assert fetcher.window.used_bytes == 0
        assert fetcher.take_closed() == [0], "workers close their memory"
        gates[1].set()
        await fetching.until(lambda: fetcher.counts.received_bytes == len(CONTENT))
        await asyncio.sleep(0.01)  # what has come is announced
        assert fetcher.window.used_bytes == 0
        assert fetching.bytes_there() == CONTENT
    finally:
        await fetcher.close()


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


class GoesOn(Fetching):
    """The same, and it goes on by itself."""

    def wake(self) -> None:
        super().wake()
        asyncio.get_running_loop().call_soon(self.fetcher.pump)


async def test_a_shard_that_was_fetched_is_found_in_the_cache(tmp_path: Path) -> None:
    """As soon as it is whole its parts take no memory, and none of them is kept when nobody needs it."""
    fetching = GoesOn(tmp_path)
    fetcher, gates = fetching.fetcher, fetching.storage.gates
    try:
        fetching.begin()
        await fetching.until(lambda: len(gates) == 2)
        for gate in gates:
            gate.set()
        await fetching.until(lambda: fetcher.are_present(KEYS) and fetcher.window.used_bytes == 0)
        fetcher.window.release(KEYS)
        fetcher.pump()
        assert not fetcher.are_present(KEYS[:1])
        fetching.begin()
        await fetching.until(lambda: fetcher.are_present(KEYS))
        assert len(gates) == 2
        assert fetching.bytes_there() == CONTENT
    finally:
        await fetcher.close()


async def test_a_part_stays_until_it_is_written_or_somebody_waits_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, real = threading.Event(), CacheFile.write

    def write(self: CacheFile, offset: int, data: bytes) -> None:
        assert disk.wait(DEADLINE_S)
        real(self, offset, data)

    monkeypatch.setattr(CacheFile, "write", write)
    fetching = GoesOn(tmp_path)
    fetcher, gates = fetching.fetcher, fetching.storage.gates
    try:
        fetching.begin()
        for number, gate in enumerate(KEYS):
            await fetching.until(lambda: len(gates) == 2)
            gates[number].set()
            await fetching.until(lambda gate=gate: fetcher.are_present([gate]))
        fetcher.window.release(KEYS)
        assert not list(fetcher.window.evictable())
        assert fetcher.stop_caching(), "what is being written may make room"
        assert not list(fetcher.window.evictable()), "the disk may be fast enough"
        monkeypatch.setattr("streamload.fetch.part_fetching.SLOW_WRITE_S", 0.0)
        assert fetcher.stop_caching()
        assert list(fetcher.window.evictable()) == KEYS[1:], "but for that which is being written"
        disk.set()
        await fetching.until(lambda: fetcher.window.used_bytes == 0)
    finally:
        disk.set()
        await fetcher.close()
    file = DiskCache(str(tmp_path), 1 << 30, part_bytes=PART_BYTES).open(ShardIdentity(URL, ETAG, len(CONTENT)))
    assert file is not None
    assert os.pread(file.descriptor, len(CONTENT), 0) == CONTENT
    file.close()
