"""Which shards rows lie in, against the plainest way of finding out."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from streamload.decode.row_table import RowTable, by_shard


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
