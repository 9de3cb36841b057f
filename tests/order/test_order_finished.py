import dataclasses

import order_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan
from streamload.order.runs import shards_in_order
from streamload.order.shard_counts import ShardCounts

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
    plan = EpochPlan(options, known, 0, rank, world_size, start=start)
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
