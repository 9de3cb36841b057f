"""Open shards, while they are reopened by one thread and read by another."""

from __future__ import annotations

import os

import numpy as np

from streamload.decode.open_shards import OpenShards
from streamload.decode.tasks import ShardOpened
from streamload.memory.unnamed import new_memory


def memory_of(content: bytes) -> int:
    descriptor = new_memory(len(content))
    os.pwrite(descriptor, content, 0)
    return descriptor


def whole(shards: OpenShards, size_bytes: int) -> bytes:
    found = shards.gather(0, np.array([0]), np.array([size_bytes]))
    assert found is not None
    return bytes(found[0].data)


def test_a_shard_that_is_opened_again_is_mapped_again() -> None:
    """More of it has come."""
    shards = OpenShards()
    shards.add(ShardOpened(0, "a.tar", 4), memory_of(b"four"))
    assert whole(shards, 4) == b"four"
    shards.add(ShardOpened(0, "a.tar", 8), memory_of(b"and more"))
    assert whole(shards, 8) == b"and more"
    shards.close()
