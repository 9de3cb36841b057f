"""Shares of a rank's batches: taken in turn they are the rank's, wherever the pass begins."""

from __future__ import annotations

import dataclasses

import numpy as np
import order_oracle as oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan, MixturePlan
from streamload.order.sampling import Mixed, Sampled, Stretched, Weighted
from streamload.order.shard_counts import ShardCounts
from streamload.order.share import Share

Batches = list[tuple[int, list[tuple[int, int]]]]


def in_turn(parts: list[Batches]) -> Batches:
    """Those of several shares of batches."""
    merged = sorted((batch for part in parts for batch in part), key=lambda batch: batch[0])
    for number, part in enumerate(parts):
        assert merged[number :: len(parts)] == part
    return merged


of = st.integers(1, 5)


@settings(deadline=None)
@given(oracle.option_sets(), oracle.shard_counts, st.integers(1, 3), of, st.integers(1, 100), st.data())
def test_shares_are_the_oracles_batches(options, counts, world_size, of, max_rows, data):
    order = oracle.epoch_order(options, counts, 0)
    start = data.draw(st.integers(0, len(order)))
    known = data.draw(st.booleans())
    for rank in range(world_size):
        parts = []
        for number in range(of):
            held = ShardCounts.of(counts) if known else ShardCounts(len(counts))
            share = Share(number, of)
            plan = EpochPlan(options, held, 0, rank, world_size, start=start, share=share)
            parts.append(oracle.plan_batches(plan, max_rows, lambda shard, held=held: held.set(shard, counts[shard])))
            assert all(rows for _, rows in parts[-1]), "a share without rows has no batch"
        expected = oracle.rank_batches(options, order, rank, world_size, start)
        assert in_turn(parts) == expected


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("kind", ["weights", "selection", "epoch_size", "sampler", "mixture"])
def test_shares_of_sampled_epochs_are_the_whole_plan(kind: str, lanes: int) -> None:
    counts, total = [13, 0, 22, 5, 40, 7], 87
    numbers = np.random.default_rng(1).integers(0, total, 61)
    groups = np.random.default_rng(2).integers(0, 4, total).astype(np.uint8)
    sampling = {
        "weights": Weighted(groups, np.array([0.0, 1.0, 2.5, 4.0]), 70),
        "selection": Stretched(int((groups > 1).sum()), groups > 1),
        "epoch_size": Stretched(31),
        "sampler": Sampled(),
        "mixture": Mixed((0, 3, 6), (0.75, 0.25), 6, 75),
    }[kind]
    options = OrderOptions(3, kind != "sampler", 9, 1 if kind == "sampler" else lanes, 4, False, False, sampling)

    def plan(options: OrderOptions, rank: int, world_size: int, start: int, share: Share) -> EpochPlan:
        known = ShardCounts.of(counts)
        if kind == "mixture":
            return MixturePlan(options, known, 2, rank, world_size, start=start, share=share)
        return EpochPlan(options, known, 2, rank, world_size, start=start, numbers=numbers, share=share)

    for pad, drop_last in ((False, False), (True, False), (False, True)):
        options = dataclasses.replace(options, pad=pad, drop_last=drop_last)
        for rank, world_size, of, start in ((0, 1, 3, 0), (0, 1, 2, 17), (1, 2, 5, 8), (2, 3, 4, 0), (2, 3, 3, 20)):
            whole = oracle.plan_batches(plan(options, rank, world_size, start, Share()))
            shares = [Share(number, of) for number in range(of)]
            parts = [oracle.plan_batches(plan(options, rank, world_size, start, share), 9) for share in shares]
            assert whole or drop_last
            assert in_turn(parts) == whole
