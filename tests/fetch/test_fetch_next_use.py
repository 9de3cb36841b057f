"""Next uses, compared with the plans themselves; and what goes first by them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from streamload.fetch.cache.disk_cache import CachedFile, files_to_evict
from streamload.fetch.cache.next_use import OrderNextUse, ShardIdentity, numbers_by_key
from streamload.order.layout import ShardCounts
from streamload.order.options import OrderOptions
from streamload.order.plan import RankPlan

INFINITY = float("inf")


def options_of(lanes: int = 1, window: int = 0, shuffle: bool = True) -> OrderOptions:
    return OrderOptions(seed=3, shuffle=shuffle, window=window, lanes=lanes, batch_size=1, drop_last=False, pad=False)


def url_of(shard: int) -> str:
    return f"s3://bucket/{shard}.tar"


def name_of(shard: int, etag: str = "x") -> str:
    return ShardIdentity(url_of(shard), etag, 5).file_name


def next_use_of(options: OrderOptions, counts: list[int], epoch: int = 0, start: int = 0) -> OrderNextUse:
    numbers = numbers_by_key(url_of(shard) for shard in range(len(counts)))
    return OrderNextUse(numbers, options, np.array(counts), epoch, start=start)


def first_uses(options: OrderOptions, counts: list[int], epoch: int) -> dict[int, list[int]]:
    """For each shard, the number of the first output of each lane that reads it, ascending, from the plan itself."""
    plan = RankPlan(options, ShardCounts.of(counts), epoch, 0, 1)
    block = plan.take(10**9)
    assert block is not None
    first: dict[tuple[int, int], int] = {}
    for place, shard in enumerate(block.shard.tolist()):
        first.setdefault((shard, place % options.lanes), place // options.lanes)
    return {shard: sorted(number for (of, _), number in first.items() if of == shard) for shard in range(len(counts))}


@pytest.mark.parametrize(("lanes", "shuffle", "seed"), [(1, True, 0), (3, True, 1), (2, False, 2), (7, True, 3)])
def test_the_uses_are_those_of_the_plan(lanes: int, shuffle: bool, seed: int) -> None:
    counts = [random.Random(f"{seed} {shard}").choice([0, 1, 4, 20, 50]) for shard in range(12)]
    total = sum(counts) // lanes * lanes
    counts[-1] += total + lanes - sum(counts)  # lanes of one length, so that a row's place says its lane
    options = options_of(lanes, shuffle=shuffle)
    known = next_use_of(options, counts)
    expected = first_uses(options, counts, 0)
    following = first_uses(options, counts, 1)
    for shard in range(12):
        for number in expected[shard]:
            assert known.position(name_of(shard)) == number
            known.advance(number)
            known.begin(name_of(shard))
        length = sum(counts) // lanes
        coming = following[shard][0] + length if following[shard] else INFINITY
        assert known.position(name_of(shard)) == coming
        known = next_use_of(options, counts)


# -- what goes first -----------------------------------------------------------------------------------------------


def files_of(*bytes_and_next_use: tuple[int, float]) -> list[CachedFile]:
    return [CachedFile(str(number), *pair, made_ns=number) for number, pair in enumerate(bytes_and_next_use)]


def test_never_more_than_the_cache_holds_and_never_a_sooner_one() -> None:
    generator = random.Random(5)
    for _ in range(300):
        present = files_of(*((generator.randrange(1, 9), generator.randrange(20)) for _ in range(6)))
        size, needed, own = generator.randrange(5, 50), generator.randrange(1, 9), generator.randrange(20)
        chosen = files_to_evict(present, needed, size, own)
        allowed = [file for file in present if file.next_use > own]
        lacking = sum(file.bytes for file in present) + needed - size
        if chosen is None:
            assert sum(file.bytes for file in allowed) < lacking
        else:
            assert set(chosen) <= set(allowed)
            assert sum(file.bytes for file in chosen) >= lacking
            assert not chosen or sum(file.bytes for file in chosen[:-1]) < lacking
