"""Divide shards into parts, the aligned ranges to fetch."""

from __future__ import annotations

PART_BYTES = 8 << 20
"""Size of a part, except for a shard's last: large, because of each request's latency, and small, because a part is
held as long as one of its samples is needed."""

NUMBER_BITS = 32
"""Bits of a part's number in its key, below those of the shard."""


def part_key(shard: int, number: int) -> int:
    """Return an integer that identifies a shard's part."""
    return shard << NUMBER_BITS | number


def shard_and_number(key: int) -> tuple[int, int]:
    """Return a key's shard, and the part's number."""
    return key >> NUMBER_BITS, key & (1 << NUMBER_BITS) - 1


def part_edges(number: int, shard_bytes: int | None) -> tuple[int, int]:
    """Return a part's start and end, clipped to the shard if its size is known."""
    start = number * PART_BYTES
    end = start + PART_BYTES
    return start, end if shard_bytes is None else min(end, shard_bytes)
