"""Run the feeder in the caller's thread, for plain local shards and shards that only this process can read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

from streamload.feeder.feeder import Feeder
from streamload.feeder.messages import Configure
from streamload.fetch.resident import OpenShard, ResidentShards, fetched_shards
from streamload.index.listing import Listing
from streamload.limits import RESIDENT_BYTES
from streamload.memory.channel import Message
from streamload.memory.unnamed import new_memory
from streamload.storage.storages import Storages
from streamload.tar.decompression import decompressed

_MOST_SHARD_BYTES = 1 << 40


class CopiedShards(ResidentShards):
    """Open plain local shards, and uncompressed copies in memory of all other shards."""

    def __init__(self, listing: Listing, storages: Storages) -> None:
        self._copied = fetched_shards(listing, storages)
        super().__init__(listing.numbered, kept_bytes=0 if self._copied else RESIDENT_BYTES)
        self._listing = listing
        self._storages = storages

    def open(self, shard: int) -> OpenShard:
        """Open a shard. Raises as `ResidentShards.open`, and ShardFormatError for a damaged compressed shard."""
        if shard not in self._copied:
            return super().open(shard)
        listed = self._listing.shard(shard)
        storage = self._storages.for_url(listed.url)
        info = storage.info(listed.url)
        self._listing.pin(shard).check(listed.url, info.bytes, info.etag)
        content = storage.read_bytes(listed.url, most_bytes=_MOST_SHARD_BYTES)
        descriptor = new_memory(0)
        try:
            with open(descriptor, "wb", closefd=False) as copy:
                copy.writelines(decompressed(listed.url, content))
            return OpenShard(listed.url, os.fstat(descriptor).st_size, descriptor)
        except BaseException:
            os.close(descriptor)
            raise


class InProcessChannel:
    """Exchange messages, like a `Channel`, with a feeder that does its work while a message is sent."""

    def __init__(self, configure: Configure) -> None:
        self._arrived: deque[Message] = deque()
        self._working, self._closed = Lock(), False
        shards = CopiedShards(configure.listing, configure.fetching.storages)
        configure = configure._replace(descriptors=configure.descriptors // 2)  # each slot has two descriptors here
        self._feeder = Feeder(configure, self._put, shards=shards)

    def _put(self, message: Any, descriptors: Sequence[int] = (), *, close: bool = False) -> None:
        self._arrived.append((message, list(descriptors) if close else [os.dup(each) for each in descriptors]))

    def send_all(self, messages: Sequence[Any]) -> None:
        """Let the feeder handle messages."""
        with self._working:
            for message in messages:
                self._feeder.handle(message)
        if self._closed:  # `close` was called meanwhile, by another thread or a signal handler
            self.close()

    def receive_now(self) -> Message | None:
        """Return the next message, if any."""
        return self._arrived.popleft() if self._arrived else None

    def receive(self, _timeout_s: float | None) -> Message:
        """Return the next message. Raises RuntimeError if none has arrived; the caller must do all tasks first."""
        if not self._arrived:
            raise RuntimeError("the feeder has neither a task nor a message")
        return self._arrived.popleft()

    def wait_reason(self) -> str:
        """Return an empty string, since this channel never waits."""
        return ""

    def close(self, *, ends: bool = True) -> None:  # noqa: ARG002
        """Close the feeder and unreceived descriptors, once the messages being handled are done. Idempotent."""
        self._closed = True
        if self._working.acquire(blocking=False):
            self._feeder.close()
            while self._arrived:
                for descriptor in self._arrived.popleft()[1]:
                    os.close(descriptor)
            self._working.release()
