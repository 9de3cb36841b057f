import dataclasses

import pytest

from streamload.errors import LoaderStateError
from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan
from streamload.order.runs import SampleSequence, shards_in_order
from streamload.order.shard_counts import ShardCounts

OPTIONS = OrderOptions(seed=5, shuffle=True, window=100, lanes=1, batch_size=4, drop_last=False, pad=True)


def test_a_start_beyond_the_end_is_refused_when_the_end_is_known():
    known = ShardCounts(2)
    plan = EpochPlan(OPTIONS, known, 0, 0, 1, start=50)
    known.set(0, 10)
    known.set(1, 10)
    with pytest.raises(LoaderStateError, match="position 50 lies outside the epoch's 20 samples"):
        plan.missing()


def test_what_is_finalized_ahead_is_bounded(monkeypatch):
    drawn, draw = [], SampleSequence.uniforms
    monkeypatch.setattr(
        SampleSequence, "uniforms", lambda self, first, count: drawn.append(count) or draw(self, first, count)
    )
    options = dataclasses.replace(OPTIONS, window=1_200_000, batch_size=4)
    known = ShardCounts(3)
    for shard in shards_in_order(options, 3, 0).tolist()[:2]:
        known.set(shard, 600_000)
    plan = EpochPlan(options, known, 0, 0, 1)
    block = plan.take(400_000)
    assert len(block.shard) >= 65_536
    assert sum(drawn) < 600_000
