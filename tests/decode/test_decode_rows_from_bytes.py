"""Rows from bytes alone: a table of places and a reader of bytes are all that is needed to make them."""

from __future__ import annotations

from typing import Any

import numpy as np
from tasks_by_hand import job, npy

from streamload.decode.field_reader import ShardReader
from streamload.decode.row_table import ColumnKind, RowTable
from streamload.decode.rows import RowMaker
from streamload.order.randomness import SampleRandomness


class Contents(ShardReader):
    def __init__(self, contents: dict[int, bytes]) -> None:
        self._contents = contents

    def read(self, shard: int, start: int, size_bytes: int) -> bytes:
        return self._contents[shard][start : start + size_bytes]

    def url(self, shard: int) -> str:
        return f"memory://{shard}.tar"

    def size_bytes(self, shard: int) -> int:
        return len(self._contents[shard])


def stored(rows: list[tuple[bytes, bytes]]) -> tuple[RowTable, Contents]:
    """A label and an array for each row; even rows lie in shard 7, odd ones in shard 9."""
    contents = {7: b"", 9: b""}
    table = RowTable.empty(len(rows), (ColumnKind("cls", ("cls",)), ColumnKind("npy", ("npy",))))
    for row, fields in enumerate(rows):
        shard = 9 if row % 2 else 7
        table.shards[row], table.samples[row] = shard, row // 2
        for (_, offsets, sizes), payload in zip(table.places(), fields, strict=True):
            offsets[row], sizes[row] = len(contents[shard]), len(payload)
            contents[shard] += payload
    return table, Contents(contents)


def augmented(sample: tuple[int, Any], rng: np.random.Generator) -> tuple[int, Any, int]:
    number, array = sample
    if number < 0:
        raise ValueError("negative")
    return number, array * 2, int(rng.integers(1 << 60))


def test_rows_are_made_of_bytes_alone() -> None:
    """Not of slots, descriptors, tasks or processes: a worker on another machine has none of these."""
    table, contents = stored([(b"1", npy([1, 2])), (b"-5", npy([0, 0])), (b"x", npy([0, 0])), (b"4", npy([7, 8]))])
    random = SampleRandomness(3, 0)
    made = RowMaker(job(fields=("cls", "npy"), transform=augmented)).make(table, contents, random)
    rows = made.rows.as_list()
    assert [(number, array.tolist()) for number, array, _ in (rows[0], rows[3])] == [(1, [2, 4]), (4, [14, 16])]
    assert rows[3][2] == int(random.generator(9, 1).integers(1 << 60))
    assert {row: (failure.kind, failure.shard, failure.sample) for row, failure in made.failures.items()} == {
        1: ("TransformError", 9, 0),
        2: ("DecodeError", 7, 1),
    }


def test_columns_that_no_function_sees_stay_columns() -> None:
    table, contents = stored([(b"%d" % number, npy(np.full(3, number))) for number in range(100)])
    made = RowMaker(job(fields=("cls", "npy"))).make(table, contents, SampleRandomness(0, 0))
    assert made.rows.values is None
    labels, arrays = made.rows.columns or ()
    assert [array.tolist() for array in arrays] == [[number] * 3 for number in range(100)]
    assert list(labels) == list(range(100))
