"""Compressed shards in flight: whatever goes wrong is told, and nothing runs on when the fetcher is closed."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from streamload.fetch.decompressed_parts import DecompressedParts
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages
from streamload.tar.decompression import Compression, Decompressor

DEADLINE_S = 20.0
KEYS = [part_key(0, number) for number in range(3)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shard of three parts."""
    path = tmp_path_factory.mktemp("packed") / "a.tar.gz"
    path.write_bytes(gzip.compress(bytes(3 * PART_BYTES), 1))
    return str(path)


async def fetch(path: str, budget_bytes: int) -> bool:
    """Ask for all parts, go on until something has come or failed, and then close; whether all parts have come."""
    came = asyncio.Event()
    listing = list_shards([path])
    fetcher = Fetcher(
        listing,
        frozenset({0}),
        Storages(),
        budget_bytes=budget_bytes,
        slot_bytes=lambda: 0,
        wake=lambda: None,
        progress=came.set,
    )
    try:
        fetcher.window.hold(KEYS)
        fetcher.notify()
        fetcher.pump()
        async with asyncio.timeout(DEADLINE_S):
            await came.wait()
        return fetcher.are_present(KEYS)
    finally:
        await fetcher.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


class WithLittleRoom:
    """A fetcher of the shard, which goes on by itself; what slots take says for how many parts there is room."""

    def __init__(self, path: str) -> None:
        self._room = 0
        self.fetcher = Fetcher(
            list_shards([path]),
            frozenset({0}),
            Storages(),
            budget_bytes=1 << 30,
            slot_bytes=lambda: (1 << 30) - self._room,
            wake=self._wake,
            progress=self._wake,
        )

    def room_for(self, parts: int) -> None:
        """For so many parts."""
        self._room = parts * PART_BYTES

    def want(self, *keys: int) -> None:
        self.fetcher.window.hold(keys)
        self.fetcher.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self.fetcher.pump)


async def test_a_part_that_was_just_granted_is_on_its_way(packed: str) -> None:
    """Decompressing has waited for room, and has it, but has not run since."""

    little = WithLittleRoom(packed)
    fetcher = little.fetcher
    try:
        little.room_for(1)
        little.want(*KEYS)
        await little.until(lambda: fetcher.are_present(KEYS[:1]) and fetcher.state_of(0).waits_for_room)
        assert fetcher.stalled
        little.room_for(2)
        fetcher.pump()
        assert not fetcher.stalled
        await little.until(lambda: fetcher.are_present(KEYS[:2]) and fetcher.state_of(0).waits_for_room)
        assert fetcher.stalled
    finally:
        await fetcher.close()


async def test_a_part_that_is_needed_once_more_does_not_end_the_unpacking_of_what_is_on_its_way(packed: str) -> None:
    little = WithLittleRoom(packed)
    fetcher = little.fetcher
    try:
        little.room_for(2)
        little.want(*KEYS[:2])
        await little.until(lambda: fetcher.are_present(KEYS[:2]))
        fetcher.window.release(KEYS[:2])
        little.room_for(1)
        little.want(KEYS[2])
        fetcher.pump()  # the first two have made room
        little.want(KEYS[1])
        fetcher.pump()
        await little.until(lambda: fetcher.are_present(KEYS[2:]))
        await little.until(lambda: fetcher.stalled)
        fetcher.window.release(KEYS[2:])
        little.room_for(2)
        fetcher.notify()
        await little.until(lambda: fetcher.are_present(KEYS[1:2]))
    finally:
        await fetcher.close()


async def test_nothing_runs_on_when_it_is_closed_in_the_middle(packed: str) -> None:
    room = PART_BYTES * 2 + (32 << 20)
    assert not await fetch(packed, room)


async def test_whatever_ends_the_unpacking_is_told(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop would wait for the parts forever."""

    def feed(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(Decompressor, "feed", feed)
    with pytest.raises(MemoryError, match="no more"):
        await fetch(packed, 1 << 30)


class _OnlyFirstIsMissing:
    """Events of a shard whose other parts are there."""

    def __init__(self) -> None:
        self.told_when_over: list[bool] = []
        self.parts: DecompressedParts | None = None

    def has(self, number: int, /) -> bool:
        return number > 0

    def is_wanted(self, number: int, /) -> bool:
        return True

    def waits(self) -> None:
        assert self.parts is not None
        self.told_when_over.append(self.parts.over)

    def write(self, offset: int, data: bytes, /) -> None:
        pass

    def decompressed(self, number: int, size_bytes: int, /) -> None:
        pass

    def ended(self, total_bytes: int, /) -> None:
        pass

    def failed(self, error: Exception, /) -> None:
        pass


@pytest.mark.parametrize("is_whole", [True, False])
async def test_one_that_has_ended_says_so_when_its_memory_is_free(packed: str, is_whole: bool) -> None:
    """Nothing comes of the rest of the shard, so nothing else would tell who waits for that memory."""
    events = _OnlyFirstIsMissing()

    async def body() -> AsyncGenerator[bytes]:
        data = Path(packed).read_bytes()
        yield data if is_whole else data[:-100]

    events.parts = DecompressedParts(body(), Decompressor(Compression.GZIP, packed), events, granted=[0])
    async with asyncio.timeout(DEADLINE_S):
        while not events.told_when_over:
            await asyncio.sleep(0.001)
    assert events.told_when_over == [True]
