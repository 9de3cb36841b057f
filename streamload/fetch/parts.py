"""Divide shards into parts, the aligned ranges to fetch, and find the parts that rows need."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 8 << 20
"""Size of a part, except for a shard's last: large, because of each request's latency, and small, because a part is
held as long as one of its samples is needed."""

_NUMBER_BITS = 32

Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


def part_key(shard: int, number: int) -> int:
    """Return an integer that identifies a shard's part."""
    return shard << _NUMBER_BITS | number


def shard_and_number(key: int) -> tuple[int, int]:
    """Return a key's shard, and the part's number."""
    return key >> _NUMBER_BITS, key & (1 << _NUMBER_BITS) - 1


def part_edges(number: int, shard_bytes: int | None) -> tuple[int, int]:
    """Return a part's start and end, clipped to the shard if its size is known."""
    start = number * PART_BYTES
    end = start + PART_BYTES
    return start, end if shard_bytes is None else min(end, shard_bytes)


def parts_of_batches(places: Sequence[Places], edges: NDArray[np.int64]) -> tuple[list[int], ...]:
    """Return the distinct keys of the parts that each batch needs, in the order of its rows.

    Args:
        places: shards, offsets and sizes of each field, int64[rows]; a negative offset stands for a missing field.
        edges: int64[batches + 1], ascending from 0: the first row of each batch, and the number of rows.
    """
    keys: list[NDArray[np.int64]] = []
    needing: list[NDArray[np.int64]] = []
    for shards, offsets, sizes in places:
        rows = np.flatnonzero((offsets >= 0) & (sizes > 0))
        first = offsets[rows] // PART_BYTES
        last = (offsets[rows] + sizes[rows] - 1) // PART_BYTES
        for step in range(int((last - first).max()) + 1 if len(rows) else 0):
            reaching = first + step <= last
            keys.append((shards[rows[reaching]] << _NUMBER_BITS) | (first[reaching] + step))
            needing.append(rows[reaching])
    if not keys:
        return tuple([] for _ in range(len(edges) - 1))
    rows = np.concatenate(needing)
    by_row = np.argsort(rows, kind="stable")
    joined = np.concatenate(keys)[by_row].tolist()
    ends = np.searchsorted(rows[by_row], edges).tolist()
    return tuple(list(dict.fromkeys(joined[start:end])) for start, end in pairwise(ends))
