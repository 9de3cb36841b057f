"""Tables of remote indexes: loaded in the order of need, so many at once, and a failure is told where it matters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from streamload.fetch.fetcher import Fetcher
from streamload.fetch.prerequisites import Prerequisites
from streamload.index.tables import Tables


class SlowTables:
    """Tables that come when the test says so."""

    def __init__(self) -> None:
        self.requested: list[int] = []
        self.here: set[int] = set()
        self.gate = asyncio.Event()
        self.broken: dict[int, Exception] = {}
        self.cancelled = 0

    def is_remote(self, shard: int) -> bool:
        return shard not in self.here

    def with_sidecars(self, shards: Iterable[int]) -> list[int]:
        return list(shards)

    def hold(self, shards: Iterable[int]) -> None:
        """None is dropped here."""

    async def fetch(self, shard: int) -> None:
        self.requested.append(shard)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if shard in self.broken:
            raise self.broken[shard]
        self.here.add(shard)


class NoParts:
    closed = 0

    def pump(self) -> None:
        """Nothing is wanted."""

    def try_again(self) -> list[Exception]:
        """Nothing has failed."""
        return []

    async def close(self) -> None:
        self.closed += 1


class Progressed:
    def __init__(self) -> None:
        self.woken = self.progressed = 0

    def wake(self) -> None:
        self.woken += 1

    def progress(self) -> None:
        self.progressed += 1


def near_of(tables: SlowTables, listener: Progressed, fetcher: Any = None) -> Prerequisites:
    parts = cast("Fetcher", fetcher or NoParts())
    return Prerequisites(parts, cast("Tables", tables), wake=listener.wake, progress=listener.progress)


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tables_are_loaded_in_the_order_of_need_sixteen_at_once() -> None:
    tables, listener = SlowTables(), Progressed()
    prerequisites = near_of(tables, listener)
    assert not prerequisites.has_tables([7, 3])
    prerequisites.want_tables([3, *range(10, 40)])
    assert listener.woken == 2
    prerequisites.pump()
    await some_turns()
    assert tables.requested == [7, 3, *range(10, 24)]
    tables.gate.set()
    await some_turns()
    assert listener.progressed == 16
    assert prerequisites.has_tables([7, 3, 23])
    prerequisites.pump()
    await some_turns()
    assert tables.requested == [7, 3, *range(10, 40)]
    await prerequisites.close()


async def test_a_table_that_is_here_is_not_asked_for() -> None:
    tables, listener = SlowTables(), Progressed()
    tables.here.add(1)
    prerequisites = near_of(tables, listener)
    assert prerequisites.has_tables([1])
    assert listener.woken == 0
    prerequisites.pump()
    await some_turns()
    assert tables.requested == []
    await prerequisites.close()


@pytest.mark.parametrize("kind", [OSError, KeyError])
async def test_a_failure_is_raised_for_its_shard_alone_and_not_tried_again(kind: type[Exception]) -> None:
    tables, listener = SlowTables(), Progressed()
    tables.broken[2] = kind("broken")
    tables.gate.set()
    prerequisites = near_of(tables, listener)
    prerequisites.want_tables([1, 2])
    prerequisites.pump()
    await some_turns()
    assert prerequisites.has_tables([1])
    for _ in range(2):
        with pytest.raises(kind, match="broken"):
            prerequisites.has_tables([1, 2])
    prerequisites.want_tables([2])
    prerequisites.pump()
    await some_turns()
    assert tables.requested == [1, 2]
    await prerequisites.close()


async def test_what_has_failed_is_loaded_once_more_when_it_is_tried_again() -> None:
    tables, listener = SlowTables(), Progressed()
    error = tables.broken[2] = OSError("broken")
    tables.gate.set()
    prerequisites = near_of(tables, listener)
    prerequisites.want_tables([2])
    prerequisites.pump()
    await some_turns()
    assert prerequisites.try_again() == [error]
    assert prerequisites.try_again() == []
    assert not prerequisites.has_tables([2])
    prerequisites.pump()
    await some_turns()
    with pytest.raises(OSError, match="broken"):
        prerequisites.has_tables([2])
    prerequisites.try_again()
    del tables.broken[2]
    assert not prerequisites.has_tables([2])
    prerequisites.pump()
    await some_turns()
    assert prerequisites.has_tables([2])
    assert tables.requested == [2, 2, 2]
    await prerequisites.close()


async def test_closing_ends_what_is_loading_and_the_fetcher() -> None:
    tables, parts = SlowTables(), NoParts()
    prerequisites = near_of(tables, Progressed(), parts)
    prerequisites.want_tables([1, 2])
    prerequisites.pump()
    await some_turns()
    await prerequisites.close()
    assert (tables.cancelled, parts.closed) == (2, 1)
