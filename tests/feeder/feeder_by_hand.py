"""A feeder in a test's own event loop: its tasks are answered by hand, and what it sends is kept."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from streamload.decode.open_shards import OpenShards
from streamload.decode.tasks import PieceDone, RowsDone, RowTask, ScanTask, ShardOpened, Task, TaskCosts
from streamload.feeder.epoch import ReadyBatch
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Acknowledge, Configure, Ready
from streamload.feeder.scheduler import PipelineSettings
from streamload.fetch.budget import budget_for
from streamload.fetch.fetch_options import Fetching
from streamload.fetch.fetcher import Fetcher
from streamload.index.listing import list_shards
from streamload.memory.slots import SlotPool
from streamload.order.epoch_start import EpochStart
from streamload.order.options import OrderOptions
from streamload.storage.storages import Storages
from streamload.workers.process_pool import ReturnedTasks
from streamload.workers.protocol import PoolEvents
from streamload.workers.task_runner import scan

DEADLINE_S = 20.0
SAMPLE_BYTES = 6_000_000
"""Four of them take three parts, and two do not fit into one."""


class PoolByHand:
    """Keeps every task; a worker of it dies with some of them when the test says so.

    Attributes:
        tasks: all rows that were submitted.
        scans: all scans.
        full: takes nothing.
        returned: those that are to be done again.
        again: those that have been given to a worker again.
    """

    capacity = 4

    def __init__(self, events: PoolEvents) -> None:
        self.tasks: list[RowTask] = []
        self.scans: list[ScanTask] = []
        self.full = False
        self.again: list[Task] = []
        self._waiting = ReturnedTasks(events)

    @property
    def returned(self) -> deque[Task]:
        return self._waiting.tasks

    def has_room(self) -> bool:
        return not self.returned and not self.full

    def workers_with_tasks(self) -> tuple[int, int]:
        return 2, min(2, len(self.tasks) + len(self.scans))

    def submit(self, task: Task) -> None:
        if isinstance(task, RowTask):
            self.tasks.append(task)
        else:
            self.scans.append(task)

    def drop_unwanted(self) -> None:
        self._waiting.drop_unwanted()

    def lose(self, *tasks: Task) -> None:
        """A worker dies with tasks; those that are still wanted are given to another one."""
        self.returned.extend(tasks)
        self.drop_unwanted()
        while self.returned:
            self.again.append(self.returned.popleft())

    def abandon_unwanted(self) -> None:
        """No worker hangs."""

    def fix_layout(self, layout: bytes) -> None:
        """Nobody makes batches."""

    def forget_shards(self, shards: Sequence[int]) -> None:
        """Nobody has opened them."""

    def drop_shards(self, shards: Sequence[int]) -> None:
        """Nobody has opened them."""

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Nobody has opened them."""

    def close(self) -> None:
        """Nothing runs."""


class GrowingSlots(SlotPool):
    """Slots that take as much memory as the test says, besides their own."""

    more_bytes = 0

    def held_bytes(self) -> int:
        return super().held_bytes() + self.more_bytes


class FeederByHand:
    """A feeder for the shards at one url, without shuffle. It has no workers.

    Attributes:
        sent: all that the trainer would have got.
    """

    def __init__(self, configure: Configure) -> None:
        self.sent: list[Any] = []
        self._taken = 0
        self.slots = GrowingSlots()
        pools: list[PoolByHand] = []

        def start_pool(feeder: Feeder, _: object) -> PoolByHand:
            pools.append(PoolByHand(feeder))
            return pools[0]

        assert configure.listing is not None
        self.feeder = Feeder(
            configure, configure.listing, self.slots, lambda message, _: self.sent.append(message), start_pool
        )
        self.pool = pools[0]

    @property
    def fetcher(self) -> Fetcher:
        assert self.feeder.fetcher is not None
        return self.feeder.fetcher

    def kinds(self) -> list[str]:
        """What was sent, by the names of the messages."""
        return [type(message).__name__ for message in self.sent]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def settled(self) -> None:
        """Nothing is to be done any more in the loop, and nothing is in flight."""
        await self.until(lambda: not self.fetcher.window.in_flight())
        for _ in range(5):
            await asyncio.sleep(0)

    async def acknowledged_all(self) -> None:
        """The same, when the trainer has taken all."""
        await self.settled()
        self.take_all()
        await self.settled()

    async def begin(self, tasks: int, epoch: int = 0) -> list[RowTask]:
        """Begin an epoch; its first so many tasks."""
        self.feeder.handle(EpochStart(epoch, 0, 0, 1))
        return await self.dealt_out(tasks)

    async def dealt_out(self, tasks: int) -> list[RowTask]:
        """All tasks so far, when there are so many."""
        await self.until(lambda: len(self.pool.tasks) >= tasks)
        return self.pool.tasks

    def answer(self, task: RowTask, **changes: Any) -> None:
        """A task is done, and took long."""
        pieces = tuple(
            PieceDone(piece, layout=b"any", size_bytes=1, rows=piece.rows)._replace(**changes) for piece in task.pieces
        )
        self.feeder.on_done(RowsDone(task.number, pieces, len(task.table), 1, TaskCosts(decode=1.0)))

    def scan(self, task: ScanTask) -> None:
        """Do a scan, of what has been fetched."""
        (shard,) = task.shards
        opened = self.fetcher.open(shard)
        shards = OpenShards()
        shards.add(ShardOpened(shard, opened.url, opened.size_bytes), opened.descriptor)
        done = scan(task, shards)
        shards.close()
        self.feeder.on_done(done)

    async def work_until(self, condition: Callable[[], bool], *, answered: int, scanned: int) -> None:
        """Do all tasks and scans, from those of these numbers on, and take what they give."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                for number, task in enumerate(self.pool.tasks[answered:], answered + 1):
                    self.answer(task)
                    answered = number
                for number, scanning in enumerate(self.pool.scans[scanned:], scanned + 1):
                    self.scan(scanning)
                    scanned = number
                self.take_all()
                await asyncio.sleep(0.001)

    def batches(self) -> list[ReadyBatch]:
        """Those that were delivered."""
        return [batch for message in self.sent if isinstance(message, Ready) for batch in message.batches]

    def take_all(self) -> None:
        """The trainer takes what it has not taken yet."""
        untaken, self._taken = len(self.batches()) - self._taken, len(self.batches())
        if untaken:
            self.feeder.handle(Acknowledge(untaken, ()))


def with_feeder(
    url: str,
    body: Callable[[FeederByHand], Coroutine[Any, Any, None]],
    *,
    batch_size: int,
    budget_bytes: int,
    cache_folder: str | None = None,
    works_ahead: bool = False,
) -> None:
    """Run a test with a feeder, in an event loop."""
    order = OrderOptions(seed=0, shuffle=False, window=0, lanes=1, batch_size=batch_size, drop_last=False, pad=False)
    settings = PipelineSettings(order, None, verify=False, whole_batches=False, prefetch_batches=2)
    storages = Storages()
    listing = list_shards([url], None, storages)
    fetching = Fetching(storages, budget_for(budget_bytes), cache_folder, 1 << 30)

    async def run() -> None:
        by_hand = FeederByHand(Configure(listing, settings, b"", int(works_ahead), fetching, ()))
        try:
            await body(by_hand)
        finally:
            by_hand.feeder.close()
            assert by_hand.feeder.prerequisites is not None
            await by_hand.feeder.prerequisites.close()

    asyncio.run(run())
