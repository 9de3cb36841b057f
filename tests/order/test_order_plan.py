import dataclasses
from collections import Counter

import numpy as np
import order_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.errors import LoaderStateError
from streamload.order.options import OrderOptions, batches_per_rank
from streamload.order.plan import EpochPlan
from streamload.order.runs import SampleSequence, shards_in_order
from streamload.order.shard_counts import ShardCounts

OPTIONS = OrderOptions(seed=5, shuffle=True, window=30, lanes=2, batch_size=4, drop_last=False, pad=True)
world_sizes = st.integers(1, 9)


def rows_of(batches):
    return [row for _, rows in batches for row in rows]


@settings(deadline=None)
@given(oracle.option_sets(), oracle.shard_counts, world_sizes, st.integers(0, 2), st.integers(1, 300), st.data())
def test_plan_gives_the_oracles_batches(options, counts, world_size, epoch, max_rows, data):
    order = oracle.epoch_order(options, counts, epoch)
    start = data.draw(st.integers(0, len(order)))
    for rank in range(world_size):
        expected = oracle.rank_batches(options, order, rank, world_size, start)
        plan = oracle.rank_plan(options, counts, rank, world_size, start, epoch)
        assert plan.missing() == []
        assert oracle.plan_batches(plan, max_rows) == expected
        assert batches_per_rank(options, len(order), rank, world_size, start) == len(expected)


@settings(deadline=None)
@given(oracle.option_sets(drop_last=False), oracle.shard_counts, world_sizes)
def test_every_sample_comes_exactly_once_beside_those_that_fill_up(options, counts, world_size):
    seen = Counter()
    per_rank = []
    for rank in range(world_size):
        batches = oracle.plan_batches(oracle.rank_plan(options, counts, rank, world_size))
        per_rank.append([len(rows) for _, rows in batches])
        seen.update(rows_of(batches))
    everything = Counter((shard, sample) for shard, count in enumerate(counts) for sample in range(count))
    wrapped = [row[2:] for row in oracle.epoch_order(options, counts, 0)]
    n_filler = -len(wrapped) % world_size if options.pad else 0
    filler = [wrapped[i % len(wrapped)] for i in range(n_filler)]
    assert seen == everything + Counter(filler)
    if options.pad:
        assert all(sizes == per_rank[0] for sizes in per_rank)
    else:
        totals = [sum(sizes) for sizes in per_rank]
        assert totals == sorted(totals, reverse=True)
        assert totals[0] - totals[-1] <= 1
        assert all(0 not in sizes for sizes in per_rank)


@settings(deadline=None)
@given(
    oracle.option_sets(), oracle.option_sets(pad=False, drop_last=False), oracle.shard_counts, world_sizes, world_sizes
)
def test_any_batch_can_be_resumed_at_another_world_and_batch_size(options, later, counts, world_size, later_world_size):
    later = dataclasses.replace(
        later, seed=options.seed, shuffle=options.shuffle, window=options.window, lanes=options.lanes
    )
    order = [row[2:] for row in oracle.epoch_order(options, counts, 0)]
    ends = [end for end, _ in oracle.plan_batches(oracle.rank_plan(options, counts, 0, world_size))]
    for end in [0, *ends]:
        rest = Counter()
        for rank in range(later_world_size):
            rest.update(rows_of(oracle.plan_batches(oracle.rank_plan(later, counts, rank, later_world_size, end))))
        assert rest == Counter(order[end:])


def test_this_order_never_changes():
    plan = oracle.rank_plan(OPTIONS, [20, 0, 33, 7, 50], 0, 1, epoch=3)
    block = plan.take(20)
    assert (block.shard.tolist(), block.sample.tolist()) == (GOLDEN_SHARDS, GOLDEN_SAMPLES)
    assert shards_in_order(OPTIONS, 5, 3).tolist() == [3, 1, 4, 2, 0]


def test_world_size_that_divides_the_lanes_reads_whole_lanes():
    options = dataclasses.replace(OPTIONS, lanes=8, batch_size=6)
    for rank in range(4):
        plan = oracle.rank_plan(options, [100] * 12, rank, 4)
        while plan.take(60).ends[-1] < 1200 - 24:
            pass
        assert oracle.lanes_read(plan) == [2 * rank, 2 * rank + 1]


def test_a_rank_of_many_touches_only_its_own_lane_in_a_billion_samples(monkeypatch):
    drawn, draw = [], SampleSequence.uniforms
    monkeypatch.setattr(
        SampleSequence, "uniforms", lambda self, first, count: drawn.append(count) or draw(self, first, count)
    )
    n_ranks, batch_size = 1024, 256
    options = OrderOptions(
        seed=1, shuffle=True, window=10_000, lanes=n_ranks, batch_size=batch_size, drop_last=True, pad=True
    )
    counts = ShardCounts.of(np.full(100_000, 10_000))
    for start in (0, 2_000 * n_ranks * batch_size):
        plan = EpochPlan(options, counts, 0, 517, n_ranks, start=start)
        drawn.clear()
        block = plan.take(4 * batch_size)
        assert oracle.lanes_read(plan) == [517]
        assert len(block.shard) == 4 * batch_size
        assert sum(drawn) < 4 * options.window
        assert block.ends.tolist() == [start + k * n_ranks * batch_size for k in (1, 2, 3, 4)]
        shards = set(block.shard.tolist())
        position = {shard: i for i, shard in enumerate(shards_in_order(options, 100_000, 0).tolist())}
        lane_start, lane_end = 517 * 10**9 // 1024, 518 * 10**9 // 1024
        assert all(lane_start < (position[s] + 1) * 10_000 and position[s] * 10_000 < lane_end for s in shards)


@pytest.mark.parametrize("lanes", [1, 2, 3, 8])
@pytest.mark.parametrize("n_samples", [1, 2, 3, 4, 5, 8, 10, 11, 19, 20, 28])
def test_filling_up_wraps_round_as_often_as_it_must(lanes, n_samples):
    """One short batch for nine ranks: up to eight rows fill up, several of them in one rank's slice."""
    options = dataclasses.replace(OPTIONS, lanes=lanes, batch_size=20)
    order = oracle.epoch_order(options, [n_samples], 0)
    for rank in range(9):
        plan = oracle.rank_plan(options, [n_samples], rank, 9)
        assert oracle.plan_batches(plan) == oracle.rank_batches(options, order, rank, 9)


def test_a_start_beyond_the_end_is_a_state_that_does_not_belong_here():
    with pytest.raises(LoaderStateError, match="position 24 lies outside the epoch's 23 samples"):
        EpochPlan(OPTIONS, ShardCounts.of([10, 13]), 0, rank=0, world_size=1, start=24)


def test_no_shards_and_no_samples_make_an_empty_epoch():
    for counts in ([], [0], [0, 0, 0]):
        for lanes in (1, 3):
            plan = oracle.rank_plan(dataclasses.replace(OPTIONS, lanes=lanes), counts, 0, 2)
            assert plan.missing() == []
            assert plan.take(10) is None
            assert sorted(plan.finished()) == list(range(len(counts)))


GOLDEN_SHARDS = [3, 3, 2, 2, 3, 3, 2, 4, 3, 3, 2, 2, 4, 4, 2, 2, 4, 4, 4, 2]
GOLDEN_SAMPLES = [1, 0, 3, 5, 3, 6, 2, 48, 2, 4, 0, 6, 1, 8, 11, 17, 2, 3, 49, 8]


@given(oracle.option_sets(), oracle.shard_counts, st.integers(1, 4), st.data())
@settings(deadline=None)
def test_shards_ahead_are_those_of_the_batches_that_follow(options, counts, world_size, data):
    start = data.draw(st.integers(0, sum(counts)))
    plan = oracle.rank_plan(options, counts, data.draw(st.integers(0, world_size - 1)), world_size, start)
    ahead = plan.shards_ahead()
    assert len(set(ahead)) == len(ahead)
    size = options.batch_size * world_size
    batches = list(oracle.plan_batches(plan))
    # The last samples, of which not every lane has one, are not foreseen.
    rounds_end = max((end for end, _ in batches), default=0) // options.lanes * options.lanes
    following = [
        rows for end, rows in batches if end - start <= 16 * size and end % size == start % size and end <= rounds_end
    ]
    assert {shard for rows in following for shard, _ in rows} <= set(ahead)
