"""A slow and obviously right reading of the order's definition: Python integers, lists and sorted()."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamload.order.options import OrderOptions
from streamload.order.plan import EpochPlan, RowBlock
from streamload.order.randomness import CounterDraws, as_uniforms
from streamload.order.runs import shards_in_order
from streamload.order.shard_counts import ShardCounts

MASK = 2**64 - 1
Row = TypeVar("Row")


def philox(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 as in the paper."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2E7470EE14C6C93, c[2] * 0xCA5A826395121157
        c = [(p1 >> 64) ^ c[1] ^ k0, p1 & MASK, (p0 >> 64) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return c


def key_of(seed: int, epoch: int, purpose: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"streamload order 1|{seed}|{epoch}|{purpose}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def word(key: tuple[int, int], index: int, second: int = 0, third: int = 0) -> int:
    """NumPy steps the counter before it draws, hence the one."""
    return philox([index // 4 + 1, second, third, 0], key)[index % 4]


@functools.lru_cache(maxsize=100_000)
def uniform(key: tuple[int, int], shard: int, sample: int) -> float:
    return (word(key, sample, shard) >> 11) / 2**53


def drawn(key: NDArray[np.uint64], shard: int, first: int, count: int) -> NDArray[np.float64]:
    """The library's draws of the samples `first` to `first + count` of a shard."""
    return as_uniforms(CounterDraws(key).words(shard, first, count))


def lane_outputs(draws: list[float], window: int) -> list[int]:
    return sorted(range(len(draws)), key=lambda p: (p + draws[p] * window, p))


def shuffled(options: OrderOptions, n_shards: int, epoch: int, purpose: str = "shards") -> list[int]:
    key = key_of(options.seed, epoch, purpose)
    return (
        sorted(range(n_shards), key=lambda shard: (word(key, shard), shard)) if options.shuffle else [*range(n_shards)]
    )


def interleaved(options: OrderOptions, line: Sequence[Row], draw: Callable[[Row], float]) -> list[tuple[int, int, Row]]:
    """Rows as (lane, number in lane, row): each lane's in the order of keys, and the lanes in turn."""
    n, lanes = len(line), []
    for lane in range(options.lanes):
        own = line[lane * n // options.lanes : (lane + 1) * n // options.lanes]
        order = lane_outputs([draw(row) for row in own], options.window) if options.shuffle else range(len(own))
        lanes.append([own[p] for p in order])
    longest = max(map(len, lanes))
    return [(lane, i, own[i]) for i in range(longest) for lane, own in enumerate(lanes) if i < len(own)]


def epoch_order(options: OrderOptions, counts: list[int], epoch: int) -> list[tuple[int, int, int, int]]:
    """The whole order as (lane, number in lane, shard, sample in shard)."""
    line = [(shard, sample) for shard in shuffled(options, len(counts), epoch) for sample in range(counts[shard])]
    key = key_of(options.seed, epoch, "window")
    return [(lane, i, *row) for lane, i, row in interleaved(options, line, lambda row: uniform(key, *row))]


def keys_on_one_lane(options: OrderOptions, counts: list[int]) -> tuple[list[int], list[float]]:
    """For epoch 0 and a single lane: the shards in their order, and the key of each position of their line."""
    order = shards_in_order(options, len(counts), 0).tolist()
    key = key_of(options.seed, 0, "window")
    sequence = [(shard, sample) for shard in order for sample in range(counts[shard])]
    return order, [
        p + (uniform(key, *row) * options.window if options.shuffle else 0) for p, row in enumerate(sequence)
    ]


def rank_batches(
    options: OrderOptions, order: list[tuple[int, int, int, int]], rank: int, world_size: int, start: int = 0
) -> list[tuple[int, list[tuple[int, int]]]]:
    """One rank's batches as (position after it, rows)."""
    batches = []
    size = options.batch_size * world_size
    for first in range(start, len(order), size):
        rows = sorted(order[first : first + size])
        end = first + len(rows)
        if len(rows) < size and options.drop_last:
            break
        filler = 0
        while options.pad and len(rows) % world_size:
            rows.append(order[filler % len(order)])
            filler += 1
        share, extra = divmod(len(rows), world_size)
        sizes = [share + 1] * extra + [share] * (world_size - extra)
        before = sum(sizes[:rank])
        own = rows[before : before + sizes[rank]]
        if own:
            batches.append((end, [row[2:] for row in own]))
    return batches


def block_rows(block: RowBlock) -> list[tuple[int, int]]:
    return list(zip(block.shard.tolist(), block.sample.tolist(), strict=True))


def plan_batches(
    plan: EpochPlan, max_rows: int = 64, reveal: Callable[[int], None] | None = None
) -> list[tuple[int, list[tuple[int, int]]]]:
    """What a plan gives, in the oracle's form; `reveal` makes a shard's count known when it is missing."""
    batches = []
    while True:
        while reveal is not None and (missing := plan.missing(2)):
            for shard in missing:
                reveal(shard)
        if (block := plan.take(max_rows)) is None:
            break
        edges = block.batch_edges.tolist()
        assert len(edges) == len(block.ends) + 1
        assert edges[0] == 0
        assert edges[-1] == len(block.shard) == len(block.sample)
        assert len(edges) == 2 or edges[-1] <= max_rows
        rows = block_rows(block)
        batches += [(end, rows[a:b]) for a, b, end in zip(edges[:-1], edges[1:], block.ends.tolist(), strict=True)]
    assert plan.take(max_rows) is None
    return batches


def releases(
    plan: EpochPlan, counts: list[int], *, pad: bool
) -> tuple[list[set[tuple[int, int]]], list[list[int]], list[list[list[int]]]]:
    """Of each block: its rows, the shards that are finished after it, and each shard's samples that are not passed.

    No shard is named twice as finished, or comes after that, but to fill up the last batch.
    """
    blocks, gone, left = [], [], []
    while (block := plan.take(1)) is not None:
        blocks.append(set(block_rows(block)))
        gone.append(plan.finished())
        left.append([[s for a, b in plan.unpassed(shard) for s in range(a, b)] for shard in range(len(counts))])
    gone.append(plan.finished())
    named = [shard for shards in gone for shard in shards]
    assert len(named) == len(set(named))
    assert pad or {shard for rows in blocks for shard, _ in rows} <= set(named)
    for at in range(len(blocks)):
        later = set().union(*blocks[at + 1 : len(blocks) - pad])
        assert not {shard for shard, _ in later} & {shard for shards in gone[: at + 1] for shard in shards}
    return blocks, gone, left


def rank_plan(
    options: OrderOptions, counts: list[int], rank: int, world_size: int, start: int = 0, epoch: int = 0
) -> EpochPlan:
    return EpochPlan(options, ShardCounts.of(counts), epoch, rank, world_size, start=start)


def lanes_read(plan: EpochPlan) -> list[int]:
    """The lanes of which a plan has made the shuffled stream."""
    return sorted(plan.interleavings[0].streams)


@st.composite
def option_sets(draw: st.DrawFn, **fixed: object) -> OrderOptions:
    values: dict[str, object] = {
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.sampled_from([True, True, True, False])),
        "window": draw(st.integers(0, 200)),
        "lanes": draw(st.integers(1, 8)),
        "batch_size": draw(st.integers(1, 20)),
        "drop_last": draw(st.booleans()),
        "pad": draw(st.booleans()),
    }
    return OrderOptions(**(values | fixed))


shard_counts = st.lists(st.one_of(st.just(0), st.integers(0, 50)), min_size=1, max_size=10)
