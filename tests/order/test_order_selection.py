"""Orders of a selection: those of a dataset that holds the selected samples alone, shard by shard."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from order_oracle import plan_batches

from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan
from streamload.order.sampling import Stretched
from streamload.order.shard_counts import ShardCounts

IntPairs = list[tuple[int, int]]


def rows_of(options: OrderOptions, counts: list[int], epoch: int, rank: int = 0, world_size: int = 1) -> IntPairs:
    plan = EpochPlan(options, ShardCounts.of(counts), epoch, rank, world_size)
    return [row for _, rows in plan_batches(plan) for row in rows]


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    counts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    chosen = draw(st.lists(st.booleans(), min_size=sum(counts), max_size=sum(counts)))
    return (counts, chosen) if any(chosen) else ([*counts, 1], [*chosen, True])


@given(
    selection=selections(),
    shuffle=st.booleans(),
    window=st.integers(1, 20),
    lanes=st.integers(1, 3),
    epoch=st.integers(0, 2),
    world_size=st.integers(1, 3),
)
def test_an_epoch_is_that_of_the_selected_samples_alone(
    selection: tuple[list[int], list[bool]], shuffle: bool, window: int, lanes: int, epoch: int, world_size: int
) -> None:
    counts, chosen = selection
    ends = np.cumsum(counts)
    numbers = [np.flatnonzero(chosen[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    plain = OrderOptions(7, shuffle, window, lanes, 2, False, False)
    selecting = OrderOptions(7, shuffle, window, lanes, 2, False, False, Stretched(sum(chosen), np.array(chosen)))
    got: IntPairs = []
    for rank in range(world_size):
        mine = rows_of(selecting, counts, epoch, rank, world_size)
        alone = rows_of(plain, list(map(len, numbers)), epoch, rank, world_size)
        assert mine == [(shard, int(numbers[shard][sample])) for shard, sample in alone]
        got += mine
    assert sorted(got) == [(shard, int(sample)) for shard, samples in enumerate(numbers) for sample in samples]
