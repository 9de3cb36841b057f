"""Next uses where an epoch is not every sample once: about those of the plans, in this epoch and the next."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from streamload.fetch.cache.next_use import OrderNextUse, numbers_by_key
from streamload.fetch.cache.shard_identity import ShardIdentity
from streamload.order.layout import ShardCounts
from streamload.order.mixture_plan import MixturePlan
from streamload.order.options import OrderOptions
from streamload.order.plan import RankPlan
from streamload.order.sampling import Mixed, Sampled, Sampling, Stretched, Weighted

OPTIONS = OrderOptions(seed=3, shuffle=True, window=0, lanes=1, batch_size=1, drop_last=False, pad=False)
COUNTS = [100] * 20
SAMPLINGS: dict[str, tuple[Sampling, int]] = {
    "short epochs": (Stretched(700), 700),
    "long epochs": (Stretched(4500), 4500),
    "weights": (Weighted((np.arange(2000) < 500).astype(np.uint8), np.array([1.0, 3.0]), 2000), 2000),
    "mixture": (Mixed((0, 5, 20), (0.5, 0.5), 50, None), 2000),
}


def known_uses(options: OrderOptions, epoch: int) -> OrderNextUse:
    urls = [f"s3://bucket/{shard}.tar" for shard in range(20)]
    return OrderNextUse(numbers_by_key(urls), options, np.array(COUNTS), epoch)


def name_of(shard: int) -> str:
    return ShardIdentity(f"s3://bucket/{shard}.tar", "x", 5).file_name


def rows(options: OrderOptions, epoch: int) -> list[int]:
    plan = MixturePlan if isinstance(options.sampling, Mixed) else RankPlan
    block = plan(options, ShardCounts.of(COUNTS), epoch, 0, 1).take(10**9)
    assert block is not None
    shards: list[int] = block.shard.tolist()
    return shards


@pytest.mark.parametrize("which", SAMPLINGS)
def test_the_next_use_is_about_where_the_plan_comes_to_the_shard(which: str) -> None:
    sampling, size = SAMPLINGS[which]
    options = dataclasses.replace(OPTIONS, sampling=sampling)
    present, following = rows(options, 2), rows(options, 3)
    known = known_uses(options, 2)
    for shard in range(20):
        if shard in present:
            assert abs(known.position(name_of(shard)) - present.index(shard)) <= 60
        after = known_uses(options, 2)
        after.advance(size - 1)
        if shard in following:
            assert abs(after.position(name_of(shard)) - size - following.index(shard)) <= 60


def test_of_a_samplers_next_uses_nothing_is_known() -> None:
    known = known_uses(dataclasses.replace(OPTIONS, sampling=Sampled()), 0)
    assert known.position(name_of(3)) == float("inf")
