"""Plans that go on into a shard of which only the first samples are known."""

from __future__ import annotations

import dataclasses

import order_oracle as oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan
from streamload.order.runs import shards_in_order
from streamload.order.shard_counts import ShardCounts

OPTIONS = OrderOptions(seed=5, shuffle=True, window=100, lanes=1, batch_size=4, drop_last=False, pad=True)


def reveal(known, counts, shard, draw):
    """Let a shard grow by some samples, or say that there are no more."""
    left = counts[shard] - known.least(shard)
    step = draw(st.integers(0, left))
    if step == left and draw(st.booleans()):
        known.set(shard, counts[shard])
    else:
        known.at_least(shard, known.least(shard) + step)


@settings(deadline=None)
@given(oracle.option_sets(), oracle.shard_counts, st.integers(1, 5), st.integers(1, 300), st.integers(1, 9), st.data())
def test_the_same_rows_however_the_counts_grow(options, counts, world_size, max_rows, limit, data):
    start = data.draw(st.integers(0, sum(counts)))
    rank = data.draw(st.integers(0, world_size - 1))
    known = ShardCounts(len(counts))
    for shard in data.draw(st.sets(st.integers(0, len(counts) - 1))):
        reveal(known, counts, shard, data.draw)
    plan = EpochPlan(options, known, 0, rank, world_size, start=start)
    batches, named, refused = [], [], 0
    while True:
        while missing := plan.missing(limit):
            assert all(known.values[shard] < 0 for shard in missing)
            first = next(s for s in shards_in_order(options, len(counts), 0).tolist() if known.values[s] < 0)
            assert missing[0] == first
            named += plan.finished()
            assert not set(named) & set(missing)
            shard = data.draw(st.sampled_from(missing))
            before = known.least(shard)
            reveal(known, counts, shard, data.draw)
            if known.values[shard] < 0 and known.least(shard) == before:
                refused += 1
                if refused > 20:  # the draws say no for too long
                    known.set(shard, counts[shard])
        block = plan.take(max_rows)
        if block is None:
            break
        assert not set(block.shard.tolist()) & set(named) or block.ends[-1] == sum(counts)
        named += plan.finished()
        assert all(known.values[shard] >= 0 for shard in named)
        rows = oracle.block_rows(block)
        edges = block.batch_edges.tolist()
        batches += [(end, rows[a:b]) for a, b, end in zip(edges[:-1], edges[1:], block.ends.tolist(), strict=True)]
    assert batches == oracle.rank_batches(options, oracle.epoch_order(options, counts, 0), rank, world_size, start)
    assert sorted(named + plan.finished()) == list(range(len(counts)))


@settings(deadline=None)
@given(oracle.option_sets(lanes=1), oracle.shard_counts, st.integers(1, 4), st.data())
def test_a_batch_comes_as_soon_as_the_samples_known_so_far_determine_it(options, counts, world_size, data):
    """One sample at a time: whenever a count is missing, what is known does not settle the batch."""
    rank = data.draw(st.integers(0, world_size - 1))
    known = ShardCounts(len(counts))
    plan = EpochPlan(options, known, 0, rank, world_size)
    order, keys = oracle.keys_on_one_lane(options, counts)
    size, position = options.batch_size * world_size, 0
    while True:
        while missing := plan.missing(1):
            (shard,) = missing
            known_end = sum(counts[s] for s in order[: order.index(shard)]) + known.least(shard)
            finalized = sum(keyed <= known_end for keyed in keys[:known_end]) if options.shuffle else known_end
            assert known_end < position + size or finalized < position + (rank + 1) * options.batch_size
            if known.least(shard) < counts[shard]:
                known.at_least(shard, known.least(shard) + 1)
            else:
                known.set(shard, counts[shard])
        block = plan.take(1)
        if block is None:
            return
        position = int(block.ends[-1])


def test_the_first_batch_waits_for_a_part_of_the_first_shard():
    options = dataclasses.replace(OPTIONS, window=100, batch_size=64)
    known = ShardCounts(10)
    plan = EpochPlan(options, known, 0, 0, 1)
    (first,) = plan.missing()
    known.at_least(first, 200)
    assert plan.missing() == []
    assert set(plan.take(64).shard.tolist()) == {first}
    assert plan.finished() == []
