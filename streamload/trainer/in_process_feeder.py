"""A feeder in the caller's own thread, for shards that are read without waiting: no process is started for them."""

from __future__ import annotations

import os
from typing import Any

from streamload.decode.tasks import Job
from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Acknowledge, Configure
from streamload.fetch.fetched_listing import fetched_shards
from streamload.fetch.resident import OpenShard, ResidentShards
from streamload.index.listing import Listing
from streamload.limits import RESIDENT_BYTES
from streamload.memory.mapped import Bytes
from streamload.memory.slots import HeapSlots
from streamload.memory.unnamed import descriptor_limit, new_memory
from streamload.order.share import EpochStart
from streamload.storage.storages import Storages
from streamload.tar.decompression import decompressed
from streamload.trainer.connection import Connection
from streamload.workers.caller_pool import CallerPool, CallerWorker

_MOST_SHARD_BYTES = 1 << 40


class CopiedShards(ResidentShards):
    """Opens shards; what only this process can read (`memory://`) is copied whole for that, and decompressed."""

    def __init__(self, listing: Listing, storages: Storages) -> None:
        self._copied = fetched_shards(listing, storages)
        super().__init__(listing.numbered, kept_bytes=0 if self._copied else RESIDENT_BYTES)
        self._listing = listing
        self._storages = storages

    def open(self, shard: int) -> OpenShard:
        """See `ResidentShards.open`.

        Raises:
            ShardFormatError: it is compressed, and damaged.
        """
        if shard not in self._copied:
            return super().open(shard)
        listed = self._listing.shard(shard)
        storage = self._storages.for_url(listed.url)
        found = storage.info(listed.url)
        self._listing.pin(shard).check(listed.url, found.bytes, found.etag)
        content = storage.read_bytes(listed.url, most_bytes=_MOST_SHARD_BYTES)
        descriptor = new_memory(0)
        try:
            with open(descriptor, "wb", closefd=False) as copy:
                copy.writelines(decompressed(listed.url, content))
            return OpenShard(listed.url, os.fstat(descriptor).st_size, descriptor)
        except BaseException:
            os.close(descriptor)
            raise


class InProcessFeeder(Connection):
    """A feeder in the caller's own thread, which works only while its next message is received."""

    def __init__(self, configure: Configure, listing: Listing, job: Job) -> None:
        super().__init__()
        self._slots = slots = HeapSlots()
        self._worker = worker = CallerWorker(job, slots)

        def start_pool(feeder: Feeder, shards: ResidentShards) -> CallerPool:
            limit = descriptor_limit()
            return CallerPool(worker.put, shards=shards, slots=None, events=feeder, descriptors=limit)

        shards = CopiedShards(listing, configure.fetching.storages)
        self._feeder = Feeder(
            configure, listing, slots, lambda message, _: self._put(message), start_pool, shards=shards
        )

    def send(self, message: Any) -> None:
        """Send the feeder a message."""
        if isinstance(message, EpochStart):
            self._worker.begin(message.number)
        self._feeder.handle(message)

    def _go_on(self, _deadline_s: float | None) -> None:
        done = self._worker.step()
        if done is None:
            raise RuntimeError("the feeder has nothing to do and nothing to say")
        self._feeder.handle(done)

    def note_taken(self, batches: int) -> None:
        """Acknowledge batches. At once, because it costs a call only."""
        self._feeder.handle(Acknowledge(batches, ()))

    def lease(self, slot: int) -> Bytes:
        """Return the memory of a batch."""
        return self._slots.lease(slot)

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._closed = True
        self._feeder.close()
        self._worker.close()
        self._messages.clear()
