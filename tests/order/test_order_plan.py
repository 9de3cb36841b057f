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
from streamload.order.runs import SampleSequence, sequence_of_epoch, shards_in_order
from streamload.order.shard_counts import ShardCounts

OPTIONS = OrderOptions(seed=5, shuffle=True, window=30, lanes=2, batch_size=4, drop_last=False, pad=True)
ONE_LANE = dataclasses.replace(OPTIONS, window=100, lanes=1)
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


def test_a_start_beyond_the_end_is_refused_when_the_end_is_known():
    known = ShardCounts(2)
    plan = EpochPlan(ONE_LANE, known, 0, 0, 1, start=50)
    known.set(0, 10)
    known.set(1, 10)
    with pytest.raises(LoaderStateError, match="position 50 lies outside the epoch's 20 samples"):
        plan.missing()


def test_what_is_finalized_ahead_is_bounded(monkeypatch):
    drawn, draw = [], SampleSequence.uniforms
    monkeypatch.setattr(
        SampleSequence, "uniforms", lambda self, first, count: drawn.append(count) or draw(self, first, count)
    )
    options = dataclasses.replace(ONE_LANE, window=1_200_000, batch_size=4)
    known = ShardCounts(3)
    for shard in shards_in_order(options, 3, 0).tolist()[:2]:
        known.set(shard, 600_000)
    plan = EpochPlan(options, known, 0, 0, 1)
    block = plan.take(400_000)
    assert len(block.shard) >= 65_536
    assert sum(drawn) < 600_000


# -- what a plan has passed ------------------------------------------------------------------------------------------


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


# -- shards of which only the first samples are known ----------------------------------------------------------------


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
    options = dataclasses.replace(ONE_LANE, window=100, batch_size=64)
    known = ShardCounts(10)
    plan = EpochPlan(options, known, 0, 0, 1)
    (first,) = plan.missing()
    known.at_least(first, 200)
    assert plan.missing() == []
    assert set(plan.take(64).shard.tolist()) == {first}
    assert plan.finished() == []
