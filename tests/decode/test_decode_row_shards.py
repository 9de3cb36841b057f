"""Tables of rows: which shards the rows lie in, against the plainest way of finding out, and how tables travel."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamload.decode.row_table import ColumnKind, RowTable, by_shard


@given(st.lists(st.integers(0, 9) | st.integers(0, 100_000), max_size=60))
@example([65_535, 0, 65_535])
@example([65_536, 0, 65_536])
@example([2] * 50)
def test_rows_are_grouped_by_shard(numbers: list[int]) -> None:
    shards = np.array(numbers, np.int64)
    expected = {shard: [row for row, each in enumerate(numbers) if each == shard] for shard in sorted(set(numbers))}
    assert [(shard, rows.tolist()) for shard, rows in by_shard(shards)] == list(expected.items())
    table = RowTable.empty(len(shards), ())
    table.values[:, 0] = shards
    assert table.read_shards() == list(expected)


@pytest.mark.parametrize("rows", [1, 255, 256, 5000])
@given(st.lists(st.integers(-(1 << 62), 1 << 62) | st.integers(-1, 70_000), min_size=1, max_size=9))
@example([-(1 << 63), (1 << 63) - 1])
@example([-1])
def test_a_table_is_the_same_after_it_has_travelled(rows: int, values: list[int]) -> None:
    table = RowTable.empty(rows, (ColumnKind("a;b", ("a", "b"), has_which=True),))
    table.values[:] = np.resize(np.array(values, np.int64), table.values.shape)
    found = pickle.loads(pickle.dumps(table.rows(0, rows)))
    assert found.kinds == table.kinds
    assert found.values.dtype == np.int64
    assert (found.values == table.values).all()


def test_the_table_of_a_long_task_fits_into_a_sockets_buffer() -> None:
    """What does not waits there until the worker reads it, and then the worker waits for the feeder."""
    table = RowTable.empty(10_000, (ColumnKind("npy", ("npy",)), ColumnKind("cls", ("cls",))))
    rng = np.random.default_rng(0)
    table.values[:] = rng.integers(0, [12, 5000, 1, 10_000_000, 1, 10_000_000, 3], (10_000, 7))
    table.values[:, 4] += 912
    assert len(pickle.dumps(table)) < 150_000 < table.values.nbytes / 3
