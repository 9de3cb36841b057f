"""The feeders of a process's trainers, each of a rank: they share one pipeline, one pool of workers, one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from streamload.decode.tasks import RowsDone, ScanDone
from streamload.environment.launch import EarlyWorkers
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Configure
from streamload.feeder.pipeline import Pipeline
from streamload.feeder.process import SendDescriptors, TrainersFeeder
from streamload.feeder.shared_streams import SharedStreams
from streamload.fetch.resident import ResidentShards
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.memory.heap import keep_freed_memory
from streamload.memory.slots import SlotPools
from streamload.memory.unnamed import descriptor_limit
from streamload.workers.caller_pool import CallerPool
from streamload.workers.process_pool import ProcessPool
from streamload.workers.protocol import Pool

__all__ = ["RankFeeders"]

_KEPT_BYTES = 256 << 20


class RankFeeders:
    """See `process.Feeders`: the first trainer starts the pipeline, which makes the batches of all.

    Args:
        early: the workers that have been started already.
        indexes: those that listing has read, by folder.
    """

    def __init__(self, early: EarlyWorkers, indexes: Mapping[str, DatasetIndex]) -> None:
        self._early = early
        self._indexes = indexes
        self._slots = SlotPools()
        self._pipeline: Pipeline | None = None
        self._pool: ProcessPool | None = None
        self._caller: CallerPool | None = None
        self._shared: SharedStreams | None = None

    @property
    def worker_pids(self) -> Sequence[int]:
        """See `process.Feeders`."""
        return self._early.pids if self._pool is None else self._pool.pids

    @property
    def are_broken(self) -> bool:
        """See `process.Feeders`."""
        return self._pipeline is not None and self._pipeline.broken is not None

    def make(self, message: Configure, listing: Listing, send: SendDescriptors) -> TrainersFeeder:
        """See `process.Feeders`."""
        if self._pipeline is None:
            start_pool = partial(self._start_pool, message, send)
            self._pipeline = Pipeline(message, start_pool, listing=listing, indexes=self._indexes)
            if self._pipeline.prerequisites is not None:
                keep_freed_memory(_KEPT_BYTES)
        descriptors = message.descriptors or (descriptor_limit() // message.ranks if message.ranks > 1 else 0)
        if message.ranks > 1 and message.shared_by > 1:
            return self._share(message, self._pipeline, descriptors).join(send)
        slots = self._slots.new(descriptors)
        feeder = Feeder(self._pipeline, slots, send, workers=message.workers)
        return _RankFeeder(feeder, partial(self._slots.close, slots), self._caller)

    async def aclose(self) -> None:
        """See `process.Feeders`."""
        self._slots.close_all()
        if self._pipeline is None:
            return
        self._pipeline.close()
        if self._pipeline.prerequisites is not None:
            await self._pipeline.prerequisites.close()

    def _share(self, message: Configure, pipeline: Pipeline, descriptors: int) -> SharedStreams:
        """The streams of trainers of which several get the same batches."""
        if self._shared is None:
            sharers = min(message.shared_by, message.ranks)
            self._shared = SharedStreams(
                pipeline, self._slots, descriptors=descriptors, workers=message.workers, sharers=sharers
            )
        return self._shared

    def _start_pool(
        self, message: Configure, send: SendDescriptors, pipeline: Pipeline, shards: ResidentShards
    ) -> Pool:
        if not message.workers:
            self._caller = CallerPool(
                partial(send, close=True),
                shards=shards,
                slots=self._slots,
                events=pipeline,
                descriptors=message.descriptors,
            )
            return self._caller
        self._pool = ProcessPool(
            message.workers,
            job=message.job,
            import_path=message.import_path,
            shards=shards,
            slots=self._slots,
            events=pipeline,
            ends_at_failure=message.ends_at_failure,
            log_levels=message.log_levels,
            launched=self._early.take(),
        )
        return self._pool


class _RankFeeder:
    """See `process.TrainersFeeder`: a feeder with slots of its own."""

    def __init__(self, feeder: Feeder, close_slots: Callable[[], Sequence[int]], caller: CallerPool | None) -> None:
        self._feeder = feeder
        self._close_slots = close_slots
        self._caller = caller

    def handle(self, message: Any) -> None:
        """Take a message from the trainer, which may do the tasks itself."""
        if isinstance(message, RowsDone | ScanDone):
            if self._caller is not None:
                self._caller.on_done(message)
            return
        self._feeder.handle(message)

    async def what_holds_up(self) -> str:
        """See `process.TrainersFeeder`."""
        return await self._feeder.pipeline.what_holds_up()

    def leave(self) -> None:
        """See `process.TrainersFeeder`."""
        self._feeder.leave()
        self._feeder.pipeline.pool.forget_slots(self._close_slots())
