"""Next uses, compared with the plans themselves; and what goes first by them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from streamload.fetch.cache.disk_cache import CachedFile, files_to_evict, with_old_versions_last
from streamload.fetch.cache.next_use import OrderNextUse, numbers_by_key
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.order.layout import ShardCounts
from streamload.order.options import OrderOptions
from streamload.order.plan import RankPlan
from streamload.order.sequence import shards_in_order

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


@pytest.mark.parametrize("lanes", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", range(3))
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


def test_with_a_window_the_uses_are_about_those_of_the_plan() -> None:
    options, counts = options_of(lanes=2, window=300), [100] * 40
    known, expected = next_use_of(options, counts), first_uses(options, counts, 0)
    distances = [abs(known.position(name_of(shard)) - expected[shard][0]) for shard in range(40)]
    assert max(distances) < 100
    by_use = sorted(range(40), key=lambda shard: known.position(name_of(shard)))
    assert by_use[:5] != list(range(5))


def test_what_lies_behind_the_start_is_needed_in_the_next_epoch() -> None:
    known = next_use_of(options_of(shuffle=False), [10] * 4, start=20)
    assert [known.position(name_of(shard)) for shard in range(4)] == [40, 50, 20, 30]
    known.advance(30)
    known.advance(5)
    assert [known.position(name_of(shard)) for shard in range(4)] == [40, 50, 60, 30]


def test_a_shard_on_a_border_is_needed_again_by_the_other_lane() -> None:
    known = next_use_of(options_of(lanes=2, shuffle=False), [10, 10, 10])
    assert known.position(name_of(1)) == 0
    known.begin(name_of(1))
    assert known.position(name_of(1)) == 10
    known.advance(9)
    known.begin(name_of(1))
    assert known.position(name_of(1)) == 15


def test_the_use_that_begins_is_the_one_at_hand() -> None:
    known = next_use_of(options_of(lanes=2, shuffle=False), [10, 10, 10])
    known.advance(9)  # the other lane's rank has used the shard at 0
    known.begin(name_of(1))
    assert known.position(name_of(1)) == 15


def test_unknown_counts_are_taken_for_the_mean() -> None:
    known = next_use_of(options_of(shuffle=False), [10, -1, 30, -1])
    assert [known.position(name_of(shard)) for shard in range(4)] == [0, 10, 30, 60]
    known = next_use_of(options_of(shuffle=False), [-1, -1])
    assert [known.position(name_of(shard)) for shard in range(2)] == [0, 1]


def test_every_version_of_a_shard_has_its_uses_and_other_files_have_none() -> None:
    known = next_use_of(options_of(shuffle=False), [10, 10])
    assert known.position(name_of(1, "a")) == known.position(name_of(1, "b")) == 10
    assert known.position(name_of(7)) == INFINITY
    assert known.position("something else") == INFINITY
    known.begin(name_of(7))


def test_the_next_epoch_is_the_one_that_comes() -> None:
    options, counts = options_of(), [1] * 50
    known = next_use_of(options, counts, epoch=4)
    for shard in range(50):
        known.begin(name_of(shard))
    by_use = sorted(range(50), key=lambda shard: known.position(name_of(shard)))
    assert by_use == shards_in_order(options, 50, 5).tolist()


# -- what goes first -----------------------------------------------------------------------------------------------


def files_of(*bytes_and_next_use: tuple[int, float]) -> list[CachedFile]:
    return [CachedFile(str(number), *pair, made_ns=number) for number, pair in enumerate(bytes_and_next_use)]


@pytest.mark.parametrize(
    ("present", "needed", "size", "next_use", "gone"),
    [
        ([(5, 1), (5, 2)], 5, 15, 9, ""),
        ([(5, 1), (5, 3), (5, 2)], 5, 15, 1, "1"),
        ([(5, 1), (5, 3), (5, 2)], 6, 15, 1, "12"),
        ([(5, 1), (5, 3), (5, 2)], 5, 15, 3, None),  # as soon is not later
        ([(5, 1), (5, 3), (5, 2)], 5, 15, INFINITY, None),
        ([(5, 1), (5, 3), (5, 2)], 6, 15, 2, None),  # one that is needed sooner would have to go too
        ([(1, 9), (5, 8)], 5, 6, 1, "1"),  # the first is not in the way any more once the second has gone
        ([(5, INFINITY), (5, INFINITY)], 5, 10, 1, "0"),  # the older of two that are never needed
        ([], 5, 4, 1, None),
        ([(5, 1)], 0, 4, 0, "0"),
    ],
)
def test_the_furthest_go_until_there_is_room(
    present: list[tuple[int, float]], needed: int, size: int, next_use: float, gone: str | None
) -> None:
    chosen = files_to_evict(files_of(*present), needed, size, next_use)
    assert (None if chosen is None else "".join(sorted(file.name for file in chosen))) == gone


def test_what_may_not_go_stays() -> None:
    present = files_of((5, 1), (5, 3), (5, 2))
    assert files_to_evict(present, 5, 15, 1, lambda file: file.name != "1") == [present[2]]
    assert files_to_evict(present, 5, 15, 1, lambda _: False) is None


def test_never_more_than_the_cache_holds_and_never_a_sooner_one() -> None:
    generator = random.Random(5)
    for _ in range(300):
        present = files_of(*((generator.randrange(1, 9), generator.randrange(20)) for _ in range(6)))
        size, needed, own = generator.randrange(5, 50), generator.randrange(1, 9), generator.randrange(20)
        chosen = files_to_evict(present, needed, size, own)
        allowed = [file for file in present if file.next_use > own]
        ways = itertools.chain.from_iterable(itertools.combinations(allowed, n) for n in range(len(allowed) + 1))
        total = sum(file.bytes for file in present) + needed
        enough = [way for way in ways if total - sum(file.bytes for file in way) <= size]
        if chosen is None:
            assert not enough
        else:
            assert tuple(sorted(chosen, key=present.index)) in [tuple(way) for way in enough]
            assert not any(set(way) < set(chosen) for way in enough)  # none of them goes without need


def test_old_versions_are_not_needed() -> None:
    present = [
        CachedFile("a-1", 1, 5.0, made_ns=1),
        CachedFile("a-2", 1, 5.0, made_ns=2),
        CachedFile("b-1", 1, 6.0, made_ns=1),
        CachedFile("c-1", 1, 7.0, made_ns=1),
    ]
    found = with_old_versions_last(present, lambda name: name[0], "c-2")
    assert {file.name: file.next_use for file in found} == {"a-1": INFINITY, "a-2": 5.0, "b-1": 6.0, "c-1": INFINITY}
