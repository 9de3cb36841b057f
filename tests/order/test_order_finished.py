import dataclasses
import itertools

import order_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.order.layout import ShardCounts
from streamload.order.options import OrderOptions
from streamload.order.plan import RankPlan
from streamload.order.runs import shards_in_order

OPTIONS = OrderOptions(seed=5, shuffle=True, window=30, lanes=1, batch_size=5, drop_last=False, pad=True)


def own_rows(options, n_rows, position, n_samples, world_size, rank):
    """How many rows of this rank's last batch are not wrapped ones."""
    n_own = n_samples - position
    total = n_own + -n_own % world_size
    first = rank * (total // world_size)
    return max(0, min(n_rows, n_own - first))


@settings(deadline=None)
@given(oracle.option_sets(), oracle.shard_counts, st.integers(1, 9), st.integers(1, 100), st.booleans(), st.data())
def test_no_shard_occurs_after_it_was_named_and_all_are_named_once(
    options, counts, world_size, max_rows, counts_known, data
):
    rank = data.draw(st.integers(0, world_size - 1))
    start = data.draw(st.integers(0, sum(counts)))
    known = ShardCounts.of(counts) if counts_known else ShardCounts(len(counts))
    plan = RankPlan(options, known, 0, rank, world_size, start=start)
    named, n_samples = plan.finished(), sum(counts)
    while True:
        while missing := plan.missing():
            assert not set(missing) & set(named)
            for shard in missing:
                known.set(shard, counts[shard])
        block = plan.take(max_rows)
        if block is None:
            break
        shards = block.shard.tolist()
        if options.pad and block.ends[-1] == n_samples:
            first = int(block.batch_edges[-2])
            position = int(block.ends[-2]) if len(block.ends) > 1 else None
            size = options.batch_size * world_size
            position = position if position is not None else n_samples - ((n_samples - start) % size or size)
            n_own = own_rows(options, len(shards) - first, position, n_samples, world_size, rank)
            shards = shards[: first + n_own]
        assert not set(shards) & set(named)
        named += plan.finished()
        assert len(set(named)) == len(named)
    named += plan.finished()
    assert sorted(named) == list(range(len(counts)))
    assert plan.finished() == []


@pytest.mark.parametrize(("lanes", "world_size"), [(1, 1), (1, 3), (4, 2), (4, 4), (6, 4)])
def test_shards_are_named_at_most_two_windows_late(lanes, world_size):
    """Counted in numbers of a lane: a sample moves by a window, and a shard is named a window later at most."""
    options = dataclasses.replace(OPTIONS, lanes=lanes)
    counts = [10] * 240
    plan = oracle.rank_plan(options, counts, 0, world_size)
    order = shards_in_order(options, 240, 0).tolist()
    per_lane = 240 // lanes
    named = set()
    while (block := plan.take(1)) is not None:
        named.update(plan.finished())
        number = int(block.ends[-1]) // lanes
        n_passed = max(0, (number - options.window) // 10)
        passed = {order[lane * per_lane + i] for lane in range(lanes) for i in range(n_passed)}
        assert passed <= named


def test_without_shuffle_a_shard_is_named_with_its_last_batch():
    plan = oracle.rank_plan(dataclasses.replace(OPTIONS, shuffle=False), [10, 0, 7, 13], 0, 1)
    named = []
    while plan.take(1) is not None:
        named.append(plan.finished())
    assert named == [[], [0, 1], [], [2], [], [3]]


def test_a_resumed_plan_names_what_lies_behind_at_once():
    order = shards_in_order(OPTIONS, 50, 0).tolist()
    plan = oracle.rank_plan(OPTIONS, [10] * 50, 0, 1, start=250)
    assert plan.finished() == order[:22]


def test_a_shard_in_two_lanes_waits_for_both():
    options = dataclasses.replace(OPTIONS, lanes=2, shuffle=False, batch_size=2)
    plan = oracle.rank_plan(options, [10, 20, 10], 0, 1)
    found = [plan.finished() for _ in itertools.takewhile(lambda _: plan.take(1) is not None, range(100))]
    assert [named for named in found if named] == [[0], [1, 2]]
    assert found.index([0]) == 9
