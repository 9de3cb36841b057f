"""Start a feeder whose tasks are done by processes, or by its trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Configure
from streamload.fetch.resident import ResidentShards
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.limits import CALLER_SHARDS_SHARE
from streamload.memory.slots import SlotPool
from streamload.memory.unnamed import keep_freed_memory
from streamload.workers.launch import Child
from streamload.workers.pool import Pool, PoolEvents, WorkerLink
from streamload.workers.process_pool import ProcessPool

_KEPT_BYTES = 256 << 20


def start_feeder(
    configure: Configure,
    listing: Listing,
    send: Callable[..., None],
    launched: Sequence[Child] = (),
    *,
    indexes: Mapping[str, DatasetIndex] | None = None,
    shards: ResidentShards | None = None,
) -> Feeder:
    """Start a feeder with its pool.

    Args:
        configure: what to do.
        listing: the shards.
        send: takes messages for the trainer, as `AsyncChannel.send`.
        launched: workers that have been started already.
        indexes: indexes that have been read already, by folder.
        shards: opens all shards, if this is the trainer's process.
    """
    slots = SlotPool(configure.descriptors)

    def start_pool(shards: ResidentShards, events: PoolEvents) -> Pool:
        if not configure.workers:
            most_open = configure.descriptors // CALLER_SHARDS_SHARE
            return Pool([WorkerLink(partial(send, close=True), shards, slots, most_open)], shards, events)
        return ProcessPool(
            configure.workers,
            job=configure.job,
            import_path=configure.import_path,
            shards=shards,
            slots=slots,
            events=events,
            ends_at_failure=configure.ends_at_failure,
            log_levels=configure.log_levels,
            launched=launched,
        )

    feeder = Feeder(configure, listing, slots, send, start_pool, shards=shards, indexes=indexes)
    if feeder.fetcher is not None:
        keep_freed_memory(_KEPT_BYTES)
    return feeder
