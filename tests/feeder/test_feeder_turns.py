"""Ranks that share a feeder get its workers in turn, where none of them is behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from feeder_by_hand import PoolByHand
from make_shards import write_numbers

from streamload.feeder.messages import Configure
from streamload.feeder.pipeline import Pipeline, Served
from streamload.fetch.fetch_options import Fetching
from streamload.index.listing import list_shards
from streamload.memory.slots import SlotPool
from streamload.order.options import OrderOptions
from streamload.schedule.scheduler import PipelineSettings
from streamload.storage.storages import Storages


class Rank:
    """Has a task whenever it is asked, as long as the workers take any."""

    def __init__(self, name: str, room: list[int], served: list[str]) -> None:
        self.name, self._room, self._served = name, room, served
        self.epochs = SimpleNamespace(outstanding=0)
        self.meter = SimpleNamespace(note_state=lambda: None)

    def pump(self, most: float) -> int:
        assert most == 1
        if not self._room[0]:
            return 0
        self._room[0] -= 1
        self._served.append(self.name)
        return 1

    def answer_count(self) -> None:
        """Nobody counts."""


def test_ranks_that_are_as_far_take_turns(tmp_path: Path) -> None:
    """Else the first one would be done with an epoch long before the last one."""
    listing = list_shards(write_numbers(tmp_path / "shards", [3]))
    order = OrderOptions(seed=0, shuffle=False, window=0, lanes=1, batch_size=1, drop_last=False, pad=False)
    settings = PipelineSettings(
        order, None, verify=False, strict=True, whole_batches=False, prefetch_batches=2, in_order=True
    )
    fetching = Fetching(Storages(), 1 << 30, None, 0)
    served: list[str] = []
    room = [0]

    async def run() -> None:
        def start_pool(pipeline: Pipeline, _: object) -> PoolByHand:
            return PoolByHand(pipeline)

        pipeline = Pipeline(Configure(listing, settings, b"", 1, fetching, (), ranks=3), start_pool, listing=listing)
        ranks = [Rank(name, room, served) for name in "abc"]
        for rank in ranks:
            pipeline.join(cast("Served", rank), SlotPool())
        for tasks in (2, 2, 5):
            room[0] = tasks
            pipeline.pump()
        ranks[1].epochs.outstanding = -1
        room[0] = 2
        pipeline.pump()
        pipeline.close()

    asyncio.run(run())
    assert "".join(served) == "abcabcabc" + "bb"
