"""The feeder of a process: it has workers of its own, or its trainer does the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from streamload.decode.tasks import RowsDone, ScanDone
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Configure
from streamload.fetch.resident import ResidentShards
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.memory.async_channel import AsyncChannel
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import keep_freed_memory
from streamload.workers.caller_pool import CallerPool
from streamload.workers.launch import EarlyWorkers
from streamload.workers.process_pool import ProcessPool
from streamload.workers.protocol import Pool

_KEPT_BYTES = 256 << 20


class ProcessFeeder:
    """Makes the trainer's batches, or has them made.

    Args:
        configure: as the trainer sent it.
        listing: the shards.
        channel: to the trainer.
        early: the workers that have been started already.
        indexes: those that listing has read, by folder.
    """

    def __init__(
        self,
        configure: Configure,
        listing: Listing,
        channel: AsyncChannel,
        early: EarlyWorkers,
        indexes: Mapping[str, DatasetIndex],
    ) -> None:
        self._slots = SlotPool(configure.descriptors)
        self._caller: CallerPool | None = None
        start_pool = partial(self._start_pool, configure, channel, early)
        self._feeder = Feeder(configure, listing, self._slots, channel.send, start_pool, indexes=indexes)
        if self._feeder.prerequisites is not None:
            keep_freed_memory(_KEPT_BYTES)

    def handle(self, message: Any) -> None:
        """Take a message from the trainer, which may do the tasks itself."""
        if self._caller is not None and isinstance(message, RowsDone | ScanDone):
            self._caller.on_done(message)
        else:
            self._feeder.handle(message)

    async def what_holds_up(self) -> str:
        """What the next batch waits for, in words; empty where nothing shows."""
        return await self._feeder.what_holds_up()

    async def aclose(self) -> None:
        """The trainer is gone: end all that was started."""
        self._feeder.close()
        if self._feeder.prerequisites is not None:
            await self._feeder.prerequisites.close()

    def _start_pool(
        self,
        configure: Configure,
        channel: AsyncChannel,
        early: EarlyWorkers,
        feeder: Feeder,
        shards: ResidentShards,
    ) -> Pool:
        if not configure.workers:
            self._caller = CallerPool(
                partial(channel.send, close=True),
                shards=shards,
                slots=self._slots,
                events=feeder,
                descriptors=configure.descriptors,
            )
            return self._caller
        return ProcessPool(
            configure.workers,
            job=configure.job,
            import_path=configure.import_path,
            shards=shards,
            slots=self._slots,
            events=feeder,
            ends_at_failure=configure.ends_at_failure,
            log_levels=configure.log_levels,
            launched=early.take(),
        )
