"""Which parts of shards rows need."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamload.fetch.parts import (
    PART_BYTES,
    part_edges,
    part_key,
    parts_by_share,
    parts_of_batches,
    parts_of_rows,
    shard_and_number,
)

places = st.tuples(
    st.integers(0, 100_000), st.integers(-1, 5 * PART_BYTES), st.integers(0, 3 * PART_BYTES), st.integers(-1, 9)
)


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 31))
def test_a_key_tells_shard_and_number(shard: int, number: int) -> None:
    assert shard_and_number(part_key(shard, number)) == (shard, number)


def test_edges_end_with_the_shard() -> None:
    assert part_edges(0, None) == (0, PART_BYTES)
    assert part_edges(1, PART_BYTES + 5) == (PART_BYTES, PART_BYTES + 5)
    assert part_edges(1, PART_BYTES) == (PART_BYTES, PART_BYTES)


@given(st.lists(places, max_size=20), st.lists(st.integers(0, 20), max_size=4))
def test_all_parts_of_all_fields_of_each_batch_in_the_order_of_its_rows(
    rows: list[tuple[int, int, int, int]], ends: list[int]
) -> None:
    shards, first, first_size, second = (
        (np.array(column, np.int64) for column in zip(*rows, strict=True))
        if rows
        else (np.empty(0, np.int64) for _ in range(4))
    )
    second_size = np.full(len(rows), 7, np.int64)
    edges = sorted([0, *(min(end, len(rows)) for end in ends), len(rows)])
    places = [(shards, first, first_size), (shards, second, second_size)]
    found = parts_of_batches(places, np.array(edges))
    assert len(found) == len(edges) - 1
    for keys, start, end in zip(found, edges[:-1], edges[1:], strict=True):
        expected: dict[int, int] = {}
        for row, (shard, offset, size, other) in enumerate(rows[start:end]):
            for at, length in ((offset, size), (other, 7)):
                if at >= 0 and length:
                    for number in range(at // PART_BYTES, (at + length - 1) // PART_BYTES + 1):
                        expected.setdefault(part_key(shard, number), row)
        assert sorted(keys) == sorted(expected)
        assert [expected[key] for key in keys] == sorted(expected.values())
    assert parts_of_rows(places) == list(dict.fromkeys(key for keys in found for key in keys))


def test_where_rows_probably_lie_follows_from_their_share_of_the_shard() -> None:
    shards = np.array([4, 4, 4, 7, 4, 9], np.int64)
    samples = np.array([0, 99, 50, 3, 51, 0], np.int64)
    sizes = np.array([4, 4, 4, -1, 4, 1], np.int64) * PART_BYTES
    counts = np.full(6, 100, np.int64)
    expected = [part_key(4, 0), part_key(4, 3), part_key(4, 2), part_key(9, 0)]
    assert parts_by_share(shards, samples, sizes, counts) == expected
