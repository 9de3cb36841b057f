"""The feeder of a process: it has workers of its own, or its trainer does the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from streamload.decode.tasks import RowsDone, ScanDone
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Configure
from streamload.feeder.process import SendDescriptors
from streamload.fetch.resident import ResidentShards
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import keep_freed_memory
from streamload.workers.caller_pool import CallerPool
from streamload.workers.launch import EarlyWorkers
from streamload.workers.process_pool import ProcessPool
from streamload.workers.protocol import Pool

_KEPT_BYTES = 256 << 20


class ProcessFeeder:
    """See `process.TrainersFeeder`.

    Args:
        configure: as the trainer sent it.
        listing: the shards.
        send: takes messages for the trainer, with descriptors.
        early: the workers that have been started already.
        indexes: those that listing has read, by folder.
    """

    def __init__(
        self,
        configure: Configure,
        listing: Listing,
        send: SendDescriptors,
        early: EarlyWorkers,
        indexes: Mapping[str, DatasetIndex],
    ) -> None:
        self._slots = SlotPool(configure.descriptors)
        self._caller: CallerPool | None = None
        start_pool = partial(self._start_pool, configure, send, early)
        self._feeder = Feeder(configure, listing, self._slots, send, start_pool, indexes=indexes)
        if self._feeder.prerequisites is not None:
            keep_freed_memory(_KEPT_BYTES)

    def handle(self, message: Any) -> None:
        """Take a message from the trainer, which may do the tasks itself."""
        if self._caller is not None and isinstance(message, RowsDone | ScanDone):
            self._caller.on_done(message)
        else:
            self._feeder.handle(message)

    async def what_holds_up(self) -> str:
        """See `process.TrainersFeeder`."""
        return await self._feeder.what_holds_up()

    async def aclose(self) -> None:
        """See `process.TrainersFeeder`."""
        self._feeder.close()
        if self._feeder.prerequisites is not None:
            await self._feeder.prerequisites.close()

    def _start_pool(
        self,
        configure: Configure,
        send: SendDescriptors,
        early: EarlyWorkers,
        feeder: Feeder,
        shards: ResidentShards,
    ) -> Pool:
        if not configure.workers:
            self._caller = CallerPool(
                partial(send, close=True),
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
