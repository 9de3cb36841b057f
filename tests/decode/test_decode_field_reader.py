"""Reading fields: a large one is held once, however it is decoded, and a read that comes in pieces is put together."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tasks_by_hand import Shelf, npy

from streamload.decode.field_reader import FieldReader, Work
from streamload.decode.open_shards import OpenShards
from streamload.decode.tasks import ShardOpened
from streamload.order.randomness import SampleRandomness

LARGE_BYTES = 16 << 20


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf([{"bin": os.urandom(LARGE_BYTES), "npy": npy(np.arange(LARGE_BYTES // 4, dtype=np.int32))}])


@pytest.fixture
def shards(shelf: Shelf, tmp_path: Path) -> Iterator[OpenShards]:
    found = OpenShards()
    for number, shard in enumerate(shelf.write(tmp_path)):
        found.add(ShardOpened(number, shard.url, shard.bytes), os.open(shard.url, os.O_RDONLY))
    yield found
    found.close()


def read(shelf: Shelf, shards: OpenShards, name: str, decode: Any) -> Any:
    task = shelf.task((name,))
    work = Work(task.table, shards, SampleRandomness(0, 0))

    def failed(row: int, error: Exception) -> Any:
        raise error

    return FieldReader(decode, optional=False).read(work, work.columns[0], failed)[0]


@pytest.mark.parametrize(
    ("name", "decode"),
    [("bin", False), ("bin", True), ("npy", False), ("bin", {"bin": lambda data: data}), ("npy", True)],
)
def test_a_large_field_is_held_once(shelf: Shelf, shards: OpenShards, name: str, decode: Any) -> None:
    tracemalloc.start()
    try:
        value = read(shelf, shards, name, decode)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if isinstance(value, np.ndarray):
        assert value.flags.writeable
        assert value[-2:].tolist() == [LARGE_BYTES // 4 - 2, LARGE_BYTES // 4 - 1]
    else:
        assert type(value) is bytes
        assert value == shelf.samples[0][name]
    assert peak_bytes < 1.5 * LARGE_BYTES


def test_what_comes_in_pieces_is_put_together(
    shelf: Shelf, shards: OpenShards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shards.read(0, 0, 100_000)
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, start: real(descriptor, min(size, 30_000), start))
    assert shards.read(0, 0, 100_000) == whole
    end = shards.size_bytes(0)
    assert shards.read(0, end - 40_000, 50_000) == next(tmp_path.glob("*.tar")).read_bytes()[-40_000:]
