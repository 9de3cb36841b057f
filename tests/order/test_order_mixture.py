"""Mixtures: exact shares in every block, and rows as a slow reading of the definition has them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from order_oracle import interleaved, key_of, option_sets, plan_batches, releases, shuffled, word

from streamload.order.mixing import BlockShares
from streamload.order.options import OrderOptions
from streamload.order.plan import MixturePlan
from streamload.order.runs import dataset_sequences
from streamload.order.sampling import Mixed
from streamload.order.shard_counts import ShardCounts
from streamload.order.share import slice_of_rank

OPTIONS = OrderOptions(seed=5, shuffle=True, window=30, lanes=2, batch_size=4, drop_last=False, pad=False)


def of_weights(weights: list[float]) -> tuple[float, ...]:
    return tuple(weight / sum(weights) for weight in weights)


weight_lists = st.lists(st.one_of(st.sampled_from([1.0, 2.0, 0.1, 0.7]), st.floats(0.01, 100)), min_size=1, max_size=6)


# -- shares --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(weight_lists, st.integers(1, 60), st.integers(1, 3000))
def test_every_block_is_exact_and_so_is_the_sum(weights: list[float], block: int, size: int) -> None:
    shares = of_weights(weights)
    made = BlockShares(shares, block, size)
    full, rest = divmod(size, block)
    ends = made.before(np.arange(full + 2))
    samples = np.array([block] * full + [rest])[:, np.newaxis]
    blocks = np.diff(ends, axis=0)
    assert not ends[0].any()
    assert (blocks.sum(axis=1, keepdims=True) == samples).all()
    assert (np.abs(blocks - np.array(shares) * samples) < 1 + 1e-6).all()
    assert made.sizes.tolist() == ends[-1].tolist()
    numbers = np.arange(full + 1)[:, np.newaxis]
    exact = np.array(shares) * numbers * block
    assert (np.abs(ends[:-1] - exact) < 3.5 + numbers / 4096).all(), "it never runs away"


def test_simple_shares_come_back_to_zero_each_period() -> None:
    made = BlockShares((0.7, 0.3), 32, 32 * 100)
    for blocks in range(0, 100, 5):
        assert made.before(np.array([blocks])).tolist() == [[blocks * 112 // 5, blocks * 48 // 5]]
    assert made.sizes.tolist() == [2240, 960]


# -- the slow reading ----------------------------------------------------------------------------------------------


def slow_order(options: OrderOptions, counts: list[int], epoch: int) -> list[tuple[int, int, int]]:
    """The epoch's order as (lane, shard, sample)."""
    mixed, size = options.sampling, 0
    assert isinstance(mixed, Mixed)
    size = mixed.epoch_size or sum(counts)
    shares = BlockShares(mixed.shares, mixed.block, size)
    outputs = [
        slow_dataset(options, mixed, counts, epoch, dataset, n) for dataset, n in enumerate(shares.sizes.tolist())
    ]
    key = key_of(options.seed, epoch, "mixture")
    order = []
    for block in range(-(-size // mixed.block)):
        start, end = (shares.before(np.array([number]))[0].tolist() for number in (block, block + 1))
        turns = [dataset for dataset in range(len(end)) for _ in range(end[dataset] - start[dataset])]
        turns = [turns[i] for i in sorted(range(len(turns)), key=lambda i: (word(key, i, block), i))]
        for dataset in turns:
            order.append(outputs[dataset][start[dataset]])
            start[dataset] += 1
    return order


def slow_dataset(
    options: OrderOptions, mixed: Mixed, counts: list[int], epoch: int, dataset: int, size: int
) -> list[tuple[int, int, int]]:
    """What an epoch has of a dataset, in the order in which its turns come, as (lane, shard, sample)."""
    own = counts[mixed.edges[dataset] : mixed.edges[dataset + 1]]
    total, sequence = sum(own), []
    for number in range(epoch * size // total, (epoch * size + size) // total + 1):
        shards = shuffled(options, len(own), number, f"shards of dataset {dataset}")
        done = number - epoch * size // total
        sequence += [(shard + mixed.edges[dataset], sample, done) for shard in shards for sample in range(own[shard])]
    sequence = sequence[epoch * size % total :][:size]
    key = key_of(options.seed, epoch, "window")

    def draw(row: tuple[int, int, int]) -> float:
        shard, sample, done = row
        return (word(key, sample, shard, done) >> 11) / 2**53

    return [(lane, *row[:2]) for lane, _, row in interleaved(options, sequence, draw)]


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[OrderOptions, list[int]]:
    datasets = draw(st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any), min_size=1, max_size=4))
    counts = [count for dataset in datasets for count in dataset]
    edges = tuple(np.cumsum([0, *map(len, datasets)]).tolist())
    weights = draw(st.lists(st.sampled_from([1.0, 0.3, 2.5]), min_size=len(datasets), max_size=len(datasets)))
    size = draw(st.one_of(st.none(), st.integers(1, 150)))
    mixed = Mixed(edges, of_weights(weights), draw(st.integers(1, 20)), size)
    return draw(option_sets(sampling=mixed)), counts


@settings(deadline=None)
@given(mixtures(), st.data())
def test_the_plan_is_the_definition_at_any_rank_and_start(
    case: tuple[OrderOptions, list[int]], data: st.DataObject
) -> None:
    options, counts = case
    epoch, world_size = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4))
    order = slow_order(options, counts, epoch)
    start = data.draw(st.integers(0, len(order)))
    size = options.batch_size * world_size
    for rank in range(world_size):
        plan = MixturePlan(options, ShardCounts.of(counts), epoch, rank, world_size, start=start)
        expected = []
        for first in range(start, len(order), size):
            rows = sorted(order[first : first + size], key=lambda row: row[0])
            end = first + len(rows)
            if len(rows) < size and options.drop_last:
                break
            while options.pad and len(rows) % world_size:
                rows.append(order[(len(rows) - (end - first)) % len(order)])
            own = slice_of_rank(len(rows), rank, world_size, pad=False)
            if own:
                expected.append((end, [rows[row][1:] for row in own]))
        assert plan_batches(plan, data.draw(st.integers(1, 100))) == expected


@settings(deadline=None)
@given(mixtures())
def test_nothing_that_was_let_go_of_comes_again(case: tuple[OrderOptions, list[int]]) -> None:
    options, counts = case
    options = dataclasses.replace(options, pad=False)
    known = ShardCounts.of(counts)
    plan = MixturePlan(options, known, 1, 0, 1)
    assert isinstance(options.sampling, Mixed)
    _, lines = dataset_sequences(options, options.sampling, known, 1)
    has_repeats = {shard for sequence in lines if sequence.has_repeats for shard in sequence.order.tolist()}
    blocks, gone, left = releases(plan, counts, pad=options.pad)
    for at in range(len(blocks)):
        later = set().union(*blocks[at + 1 :])
        assert all(sample in left[at][shard] for shard, sample in later if shard not in has_repeats)
    assert set(plan.shards_ahead()) == {shard for shards in gone for shard in shards}


def test_a_part_is_kept_for_a_window_and_not_longer() -> None:
    counts = [100] * 30
    mixed = Mixed((0, 20, 30), (0.3, 0.7), 50, 4000)
    options = dataclasses.replace(OPTIONS, lanes=1, sampling=mixed)
    plan = MixturePlan(options, ShardCounts.of(counts), 1, 0, 1)
    _, sequences = dataset_sequences(options, mixed, ShardCounts.of(counts), 1)
    taken: Counter[int] = Counter()
    while (block := plan.take(50)) is not None:
        taken.update((block.shard >= mixed.edges[1]).astype(int).tolist())
        for dataset, sequence in enumerate(sequences):
            begun = taken[dataset]
            held = 0
            for shard in range(*mixed.edges[dataset : dataset + 2]):
                places = sequence.places_of(shard)
                if places and any(start <= begun for start, _ in places):
                    held += sum(end - start for start, end in plan.unpassed(shard))
            assert held <= 100 + 2 * 30 + 100
