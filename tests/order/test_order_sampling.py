"""Epochs drawn by weight, cut from passes, or named by a sampler, against slow readings of their definitions."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_oracle import (
    block_rows,
    interleaved,
    key_of,
    option_sets,
    plan_batches,
    rank_batches,
    releases,
    shard_counts,
    shuffled,
    word,
)

from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan
from streamload.order.runs import sequence_of_epoch
from streamload.order.sampling import Sampled, Sampling, Stretched, Weighted
from streamload.order.shard_counts import ShardCounts

OPTIONS = OrderOptions(seed=5, shuffle=True, window=30, lanes=2, batch_size=4, drop_last=False, pad=False)
Row = tuple[int, int]


# -- the slow reading ----------------------------------------------------------------------------------------------


def slow_line(options: OrderOptions, counts: list[int], epoch: int, numbers: list[int]) -> list[tuple[Row, Row]]:
    """The epoch's line as (shard, sample) with what keys its draw: (number within the shard, pass)."""
    sampling = options.sampling
    everything = [(shard, sample) for shard, count in enumerate(counts) for sample in range(count)]
    if isinstance(sampling, Sampled):
        return [(everything[number], (0, 0)) for number in numbers]
    if isinstance(sampling, Weighted):
        repeats = dict(zip(everything, sampling.repeats(options.seed, epoch).tolist(), strict=True))
        sequence = []
        for shard in shuffled(options, len(counts), epoch):
            draws = [(shard, sample) for sample in range(counts[shard]) for _ in range(repeats[shard, sample])]
            sequence += [(row, (number, 0)) for number, row in enumerate(draws)]
        return sequence
    assert isinstance(sampling, Stretched)
    selected = np.ones(len(everything), bool) if sampling.selected is None else sampling.selected
    kept: list[list[Row]] = [[] for _ in counts]
    for row, is_selected in zip(everything, selected, strict=True):
        kept[row[0]] += [row] * bool(is_selected)
    first, total = epoch * sampling.epoch_size, sum(map(len, kept))
    endless, number = [], first // total
    while len(endless) < first % total + sampling.epoch_size:
        done = number - first // total
        for shard in shuffled(options, len(counts), number):
            endless += [(row, (place, done)) for place, row in enumerate(kept[shard])]
        number += 1
    return endless[first % total :][: sampling.epoch_size]


def slow_order(options: OrderOptions, line: list[tuple[Row, Row]], epoch: int) -> list[tuple[int, int, int, int]]:
    key = key_of(options.seed, epoch, "window")

    def draw(keyed: tuple[Row, Row]) -> float:
        row, (number, done) = keyed
        return (word(key, number, row[0], done) >> 11) / 2**53

    return [(lane, number, *row) for lane, number, (row, _) in interleaved(options, line, draw)]


@st.composite
def chosen(draw: st.DrawFn) -> tuple[OrderOptions, list[int], list[int]]:
    """Options with a choice, the counts of a dataset that is not empty, and a sampler's numbers."""
    counts = draw(shard_counts.filter(any))
    total = sum(counts)
    size = draw(st.integers(1, 3 * total))
    numbers: list[int] = []
    sampling: Sampling
    match draw(st.sampled_from(["stretched", "weighted", "sampled"])):
        case "stretched":
            selected = draw(st.none() | st.lists(st.booleans(), min_size=total, max_size=total).filter(any))
            sampling = Stretched(size, None if selected is None else np.array(selected))
        case "weighted":
            groups = draw(st.integers(1, 4))
            group = draw(st.lists(st.integers(0, groups - 1), min_size=total, max_size=total))
            weight = [float(draw(st.sampled_from([0, 0.3, 1, 7]))) for _ in range(groups)]
            weight[group[0]] = 2.0
            sampling = Weighted(np.array(group, np.uint8), np.array(weight), size)
        case _:
            sampling = Sampled()
            numbers = draw(st.lists(st.integers(0, total - 1), max_size=2 * total))
    options = draw(option_sets(sampling=sampling))
    if isinstance(sampling, Sampled):
        options = dataclasses.replace(options, shuffle=False, lanes=1)
    return options, counts, numbers


# -- plans ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(chosen(), st.data())
def test_the_plan_is_the_definition_at_any_rank_and_start(
    case: tuple[OrderOptions, list[int], list[int]], data: st.DataObject
) -> None:
    options, counts, numbers = case
    epoch, world_size = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world_size - 1))
    order = slow_order(options, slow_line(options, counts, epoch, numbers), epoch)
    start = data.draw(st.integers(0, len(order)))
    known = ShardCounts.of(counts)
    plan = EpochPlan(options, known, epoch, rank, world_size, start=start, numbers=np.array(numbers, np.int64))
    expected = rank_batches(options, order, rank, world_size, start)
    assert plan_batches(plan, data.draw(st.integers(1, 100))) == expected


@settings(deadline=None)
@given(chosen(), st.integers(1, 3))
def test_released_samples_do_not_return_and_all_are_released_at_the_end(
    case: tuple[OrderOptions, list[int], list[int]], world_size: int
) -> None:
    options, counts, numbers = case
    options = dataclasses.replace(options, pad=options.pad and not options.drop_last)
    rank = world_size - 1
    plan = EpochPlan(options, ShardCounts.of(counts), 1, rank, world_size, numbers=np.array(numbers, np.int64))
    sequence = sequence_of_epoch(options, ShardCounts.of(counts), 1, np.array(numbers, np.int64))
    blocks, _, left = releases(plan, counts, pad=options.pad)
    for at in range(len(blocks)):
        later = set().union(*blocks[at + 1 : len(blocks) - options.pad])
        if isinstance(options.sampling, Sampled):
            assert not any(left[at]), "anything may come again at any time, and not everything can be kept"
        elif not sequence.has_repeats:
            assert all(sample in left[at][shard] for shard, sample in later)
    assert all(not plan.unpassed(shard) for shard in range(len(counts)))


def test_a_part_is_kept_for_a_window_and_not_longer() -> None:
    """So that what is pinned of remote shards has the bound that the loader's check of the budget assumes."""
    counts = [100] * 20
    begun = 0
    group = (np.arange(2000) % 20 == 7).astype(np.uint8)
    for sampling in (Weighted(group, np.array([1 / 1900, 1 / 100]), 2000), Stretched(3000)):
        options = dataclasses.replace(OPTIONS, lanes=1, sampling=sampling)
        plan = EpochPlan(options, ShardCounts.of(counts), 2, 0, 1)
        sequence = sequence_of_epoch(options, ShardCounts.of(counts), 2)
        runs: dict[int, list[tuple[int, int]]] = {}
        left: dict[int, set[int]] = {}
        while (block := plan.take(50)) is not None:
            for shard, sample in block_rows(block):
                if any(start <= begun and end > begun + 80 for start, end in runs.get(shard, [])):
                    assert sample in left[shard]
            begun = int(block.ends[-1])
            runs = {shard: sequence.places_of(shard) or [] for shard in range(20)}
            left = {shard: {s for a, b in plan.unpassed(shard) for s in range(a, b)} for shard in range(20)}
            assert sum(len(left[s]) for s in runs if any(a <= begun for a, _ in runs[s])) <= 100 + 30 + 50 + 30


# -- weights -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_draws_are_exact_by_group_and_even_within_it(data: st.DataObject) -> None:
    group = np.array(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=60)), np.uint8)
    weight = np.array([data.draw(st.floats(0, 50)) for _ in range(4)])
    weight[group[0]] = data.draw(st.floats(0.5, 50))
    size, seed = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 5))
    sampling = Weighted(group, weight, size)
    sizes = np.bincount(group, minlength=4)
    shares = weight * sizes / (weight * sizes).sum() * size
    total = np.zeros(len(group), np.int64)
    for epoch in range(4):
        repeats = sampling.repeats(seed, epoch)
        assert repeats.sum() == size
        total += repeats
        assert (np.abs(np.bincount(group, repeats, minlength=4) - shares) < 1 + 1e-6).all()
        for number in range(4):
            own = repeats[group == number]
            assert own.max(initial=0) - own.min(initial=own.max(initial=0)) <= 2
            assert weight[number] > 0 or not own.any()


def test_over_epochs_all_samples_of_a_label_come_equally_often() -> None:
    group = (np.arange(2000) % 20 == 7).astype(np.uint8)
    sampling = Weighted(group, 1 / np.bincount(group), 2000)
    for epochs in (1, 2, 19):
        total = sum(sampling.repeats(3, epoch).astype(np.int64) for epoch in range(epochs))
        for label in range(2):
            assert np.ptp(total[group == label]) <= 1
    assert np.ptp(total[group == 0]) == 0


@pytest.mark.exhaustive
def test_weights_that_all_differ_are_met_in_the_mean() -> None:
    weight = np.arange(1, 101, dtype=np.float64)
    sampling = Weighted(np.arange(100, dtype=np.uint8), weight, 100)
    repeats = np.array([sampling.repeats(0, epoch) for epoch in range(2000)], np.int64)
    expected = weight / weight.sum() * 100
    assert (np.abs(repeats - expected) < 1).all()
    assert np.abs(repeats.mean(axis=0) - expected).max() < 0.06


def test_which_samples_are_drawn_depends_on_seed_and_epoch() -> None:
    sampling = Weighted(np.zeros(50, np.uint8), np.ones(1), 20)
    assert sampling.repeats(1, 2).tolist() == sampling.repeats(1, 2).tolist()
    assert sampling.repeats(1, 2).tolist() != sampling.repeats(2, 2).tolist()
    assert sampling.repeats(1, 2).tolist() != sampling.repeats(1, 3).tolist()


@pytest.mark.parametrize("drawn_by", ["weights", "where"])
def test_an_epoch_of_drawn_samples_takes_a_few_bytes_for_each(drawn_by: str) -> None:
    n_samples, n_shards = 1_000_000, 1_000
    sampling: Sampling = Stretched(n_samples // 2, np.arange(n_samples) % 2 == 0)
    if drawn_by == "weights":
        sampling = Weighted((np.arange(n_samples) % 3).astype(np.uint8), np.array([1.0, 2.0, 0.5]), n_samples)
    counts = ShardCounts.of([n_samples // n_shards] * n_shards)
    tracemalloc.start()
    try:
        plan = EpochPlan(dataclasses.replace(OPTIONS, sampling=sampling), counts, 1, 0, 1)
        assert plan.take(100) is not None
        held_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 3 * n_samples
    assert peak_bytes < 10 * n_samples


# -- stretches -----------------------------------------------------------------------------------------------------
