"""Open shards, while they are opened anew by one thread and read by another."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from streamload.decode import open_shards
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


def test_a_mapping_that_was_begun_before_a_shard_was_opened_anew_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of which more has come is opened anew, on threads while another one of them maps it."""
    retired: list[int] = []
    shards = OpenShards(retired.append)
    shards.add(ShardOpened(0, "a.tar", 4), memory_of(b"four"))
    map_memory = open_shards.map_memory

    def slowly(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        mapped = map_memory(*arguments, **options)
        shards.add(ShardOpened(0, "a.tar", 8), memory_of(b"and more"))
        return mapped

    monkeypatch.setattr(open_shards, "map_memory", slowly)
    assert whole(shards, 4) == b"four"
    assert whole(shards, 8) == b"and more"
    assert whole(shards, 8) == b"and more"
    shards.close()
    os.close(*retired)
