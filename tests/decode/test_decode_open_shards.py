"""Open shards, while they are reopened by one thread and read by another."""

from __future__ import annotations

import os

import numpy as np
import pytest
from tasks_by_hand import Shelf, job

from streamload.decode.open_shards import OpenShards
from streamload.decode.rows import RowMaker
from streamload.decode.tasks import ShardOpened
from streamload.memory.unnamed import new_memory
from streamload.order.randomness import SampleRandomness


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


@pytest.mark.parametrize("maps", [True, False])
def test_a_users_decoder_gets_bytes_of_its_own_from_mapped_shards_too(maps: bool) -> None:
    seen: list[bytes] = []
    shelf = Shelf([{"x": b"%d" % number * 9} for number in range(20)])
    content = shelf.read(0, 0, shelf.size_bytes(0))
    shards = OpenShards(maps=maps)
    shards.add(ShardOpened(0, "a.tar", len(content)), memory_of(content))
    RowMaker(job(fields=("x",), decode={"x": seen.append})).make(
        shelf.table(["x"], range(20)), shards, SampleRandomness(0, 0)
    )
    shards.close()
    assert seen == [sample["x"] for sample in shelf.samples]
    assert {type(data) for data in seen} == {bytes}


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("size", [1, 900, 5000])
def test_fields_of_one_size_are_read_in_any_order_of_shards_and_past_rows_that_fail(maps: bool, size: int) -> None:
    shelf = Shelf([{"x": b"%03d" % number + bytes(size)} for number in range(60)], per_shard=20)
    shards = OpenShards(maps=maps)
    for number in range(3):
        content = shelf.read(number, 0, shelf.size_bytes(number))
        shards.add(ShardOpened(number, f"{number}.tar", len(content)), memory_of(content))
    noted, seen, progress = [], [], [-1, -1]

    def decode(data: bytes) -> int:
        noted.append(progress[0])
        seen.append(data)
        if int(data[:3]) % 7 == 0:
            raise ValueError(data[:3].decode())
        return int(data[:3])

    order = [7 * row % 60 for row in range(60)]
    made = RowMaker(job(fields=("x",), decode={"x": decode})).make(
        shelf.table(["x"], order), shards, SampleRandomness(0, 0), progress=progress
    )
    shards.close()
    assert seen == [shelf.samples[number]["x"] for number in order]
    assert noted == list(range(60))
    assert sorted(made.failures) == [row for row, number in enumerate(order) if number % 7 == 0]
    assert [made.rows.row(row)[0] for row in range(60) if row not in made.failures] == [n for n in order if n % 7]
