"""Compressed shards on their way: whatever goes wrong is told, and nothing runs on when the fetcher is closed."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from streamload.fetch.fetcher import Fetcher
from streamload.fetch.listing.listing import list_shards
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.storage.storages import Storages
from streamload.fetch.unpack.unpacking import Unpacker

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
        fetcher.ledger.hold(KEYS)
        fetcher.want(KEYS)
        fetcher.pump()
        async with asyncio.timeout(DEADLINE_S):
            await came.wait()
        return fetcher.there(KEYS)
    finally:
        await fetcher.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


def test_nothing_runs_on_when_it_is_closed_in_the_middle(packed: str) -> None:
    room = PART_BYTES * 2 + (32 << 20)
    assert not asyncio.run(fetch(packed, room))


def test_whatever_ends_the_unpacking_is_told(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop would wait for the parts for ever."""

    def feed(*_: object) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(Unpacker, "feed", feed)
    with pytest.raises(MemoryError, match="no more"):
        asyncio.run(fetch(packed, 1 << 30))
