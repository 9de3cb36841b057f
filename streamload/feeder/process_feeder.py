"""Starts the feeder of a process: it has workers of its own, or its trainer does the tasks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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


def start_feeder(
    configure: Configure,
    listing: Listing,
    channel: AsyncChannel,
    early: EarlyWorkers,
    indexes: Mapping[str, DatasetIndex],
) -> Feeder:
    """Start a feeder with its pool, in a process that has started some workers and read some indexes already."""
    slots = SlotPool(configure.descriptors)

    def start_pool(feeder: Feeder, shards: ResidentShards) -> Pool:
        if not configure.workers:
            send, limit = partial(channel.send, close=True), configure.descriptors
            return CallerPool(send, shards=shards, slots=slots, events=feeder, descriptors=limit)
        return ProcessPool(
            configure.workers,
            job=configure.job,
            import_path=configure.import_path,
            shards=shards,
            slots=slots,
            events=feeder,
            ends_at_failure=configure.ends_at_failure,
            log_levels=configure.log_levels,
            launched=early.take(),
        )

    feeder = Feeder(configure, listing, slots, channel.send, start_pool, indexes=indexes)
    if feeder.fetcher is not None:
        keep_freed_memory(_KEPT_BYTES)
    return feeder
