"""What a plan has passed: no sample of it is in a later block, and everything is passed in the end."""

import order_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan
from streamload.order.runs import sequence_of_epoch, shards_in_order
from streamload.order.shard_counts import ShardCounts


def blocks_of(plan, max_rows, known, counts, step=None):
    """Counts become known when they are missing: as a whole, or the first one's by so many samples more."""
    while True:
        while missing := plan.missing():
            if step is not None and known.least(missing[0]) + step < counts[missing[0]]:
                known.at_least(missing[0], known.least(missing[0]) + step)
                continue
            for shard in missing[:1] if step else missing:
                known.set(shard, counts[shard])
        block = plan.take(max_rows)
        if block is None:
            return
        yield block


@settings(deadline=None)
@given(oracle.option_sets(), oracle.shard_counts, st.integers(1, 9), st.integers(1, 60), st.booleans(), st.data())
def test_no_sample_occurs_after_it_was_passed(options, counts, world_size, max_rows, counts_known, data):
    rank = data.draw(st.integers(0, world_size - 1))
    start = data.draw(st.integers(0, sum(counts)))
    known = ShardCounts.of(counts) if counts_known else ShardCounts(len(counts))
    plan = EpochPlan(options, known, 0, rank, world_size, start=start)
    passed = set()
    n_samples = sum(counts)
    step = data.draw(st.none() | st.integers(1, 5)) if options.lanes == 1 else None
    for block in blocks_of(plan, max_rows, known, counts, step):
        rows = set(zip(block.shard.tolist(), block.sample.tolist(), strict=True))
        if not (options.pad and block.ends[-1] == n_samples):  # rows that fill up the last batch come from the start
            assert not rows & passed
        for shard, count in enumerate(counts):
            unpassed = plan.unpassed(shard)
            passed |= {(shard, sample) for sample in range(count) if not any(a <= sample < b for a, b in unpassed)}
    assert all(plan.unpassed(shard) == [] for shard in range(len(counts)))


@pytest.mark.parametrize("start", [0, 130])
@pytest.mark.parametrize("counts_known", [True, False])
def test_with_one_lane_all_before_the_first_sample_to_come_is_passed(start, counts_known):
    """Else up to half a window more would be held, for which nobody has planned the memory."""
    counts = [100] * 10
    options = OrderOptions(seed=1, shuffle=True, window=50, lanes=1, batch_size=10, drop_last=False, pad=True)
    known = ShardCounts.of(counts) if counts_known else ShardCounts(len(counts))
    plan = EpochPlan(options, known, 0, 0, 1, start=start)
    sequence = sequence_of_epoch(options, ShardCounts.of(counts), 0)
    places = {shard: sequence.places_of(shard)[0][0] for shard in range(10)}
    blocks, passed = [], []
    for block in blocks_of(plan, 30, known, counts):
        blocks.append([places[shard] + row for shard, row in zip(block.shard.tolist(), block.sample.tolist())])
        starts = [places[shard] + a for shard in range(10) for a, _ in plan.unpassed(shard)]
        passed.append(min(starts, default=1000))
    yet_to_come = [min((p for block in blocks[at + 1 :] for p in block), default=1000) for at in range(len(blocks))]
    assert passed == yet_to_come


@pytest.mark.parametrize(("lanes", "world_size"), [(1, 1), (1, 3), (4, 2), (4, 4), (6, 4)])
def test_shards_are_named_at_most_two_windows_late(lanes, world_size):
    """Counted in numbers of a lane: a sample moves by a window, and a shard is named a window later at most."""
    options = OrderOptions(seed=5, shuffle=True, window=30, lanes=lanes, batch_size=5, drop_last=False, pad=True)
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
