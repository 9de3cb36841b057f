"""What an epoch keeps: parts that a later row may need, no longer than that, and nothing after its end."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from streamload.fetch.epoch_needs import EpochNeeds
from streamload.fetch.fetcher import Fetcher
from streamload.fetch.parts import PART_BYTES, part_key, shard_and_number
from streamload.fetch.window import PartWindow
from streamload.index.tables import Tables
from streamload.order.plan import RankPlan
from streamload.tar.table import ShardTable

HALF = PART_BYTES // 2


def table_of(*places: tuple[int, int]) -> ShardTable:
    """Samples of one member each, by offset and size."""
    count = len(places)
    return ShardTable(
        shard_bytes=3 * PART_BYTES,
        fields=("bin",),
        member_offset=np.array([offset for offset, _ in places], np.int64),
        member_size=np.array([size for _, size in places], np.int64),
        member_field=np.zeros(count, np.uint16),
        sample_start=np.arange(count + 1),
        key_bytes=np.zeros(0, np.uint8),
        key_start=np.zeros(count + 1, np.int64),
    )


class Parts:
    """A fetcher by which every part that is planned is there as soon as it is notified."""

    def __init__(self) -> None:
        self.window = PartWindow(100 * PART_BYTES)
        self.notified_times = 0
        self.epochs: list[EpochNeeds] = []

    def notify(self) -> None:
        self.notified_times += 1
        while (key := self.window.next_missing()) is not None:
            self.come(key)

    def come(self, key: int) -> None:
        self.window.admit(key, PART_BYTES)
        self.window.arrive(key, PART_BYTES)
        for epoch in self.epochs:
            epoch.on_arrival(shard_and_number(key)[0], key)

    def begin_epoch(self, epoch: EpochNeeds) -> None:
        self.epochs.append(epoch)

    def end_epoch(self, epoch: EpochNeeds) -> None:
        if epoch in self.epochs:
            self.epochs.remove(epoch)


class Position:
    """A plan that knows only which samples of each shard are yet to come."""

    def __init__(self, **unpassed: list[tuple[int, int]]) -> None:
        self.left = {int(name[1:]): pieces for name, pieces in unpassed.items()}

    def unpassed(self, shard: int) -> list[tuple[int, int]]:
        return self.left.get(shard, [])


class Known:
    def __init__(self, *tables: ShardTable | None, counted: bool = True) -> None:
        self.tables = tables
        self.counted = counted

    def at_hand(self, shard: int) -> ShardTable | None:
        return self.tables[shard]

    def is_growing(self, shard: int) -> bool:
        return not self.counted or self.tables[shard] is None

    def owner(self, shard: int) -> int:
        return shard

    def stretches(self, _shard: int, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return samples


def epoch_of(parts: Parts, plan: Position, tables: Known) -> EpochNeeds:
    return EpochNeeds(cast("Fetcher", parts), cast("RankPlan", plan), cast("Tables", tables))


def needed(parts: Parts, *numbers: int) -> list[bool]:
    return [parts.window.is_needed(part_key(0, number)) for number in numbers]


def keys(*numbers: int) -> list[int]:
    return [part_key(0, number) for number in numbers]


TABLE = table_of((512, HALF), (HALF + 1024, PART_BYTES), (2 * PART_BYTES + 512, HALF))
"""The first sample lies in part 0, the second one in parts 0 and 1, the third one in part 2."""


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ([(0, 3)], [True, True, True]),
        ([(1, 2)], [True, True, False]),
        ([(2, 3)], [False, False, True]),
        ([(0, 1)], [True, False, False]),
        ([], [False, False, False]),
    ],
)
def test_parts_are_kept_as_long_as_a_later_row_may_need_them(left: list[tuple[int, int]], kept: list[bool]) -> None:
    parts, plan = Parts(), Position(s0=[(0, 3)])
    epoch = epoch_of(parts, plan, Known(TABLE))
    epoch.plan_batches([keys(0, 1, 2)])
    assert needed(parts, 0, 1, 2) == [True] * 3, "a batch is planned that needs them"
    epoch.start(keys(0, 1, 2))
    plan.left[0] = left
    epoch.advance()
    assert needed(parts, 0, 1, 2) == [True] * 3, "the batch holds them"
    epoch.finish(keys(0, 1, 2))
    assert needed(parts, 0, 1, 2) == kept
    epoch.close()
    epoch.close()
    assert needed(parts, 0, 1, 2) == [False] * 3


def test_what_is_passed_when_it_is_used_is_held_for_the_batch_alone() -> None:
    parts = Parts()
    epoch = epoch_of(parts, Position(s0=[(2, 3)]), Known(TABLE))
    epoch.plan_batches([keys(0, 2)])
    epoch.start(keys(0, 2))
    epoch.finish(keys(0, 2))
    assert needed(parts, 0, 2) == [False, True]
    assert parts.notified_times


def test_the_end_of_a_shard_that_is_not_known_whole_is_kept() -> None:
    parts = Parts()
    begun = table_of((512, HALF), (HALF + 1024, 100))
    epoch = epoch_of(parts, Position(s0=[(5, 6)]), Known(begun, counted=False))
    epoch.plan_batches([keys(0)])
    epoch.start(keys(0))
    epoch.finish(keys(0))
    assert needed(parts, 0) == [True], "samples that are not found yet may lie in it"


def test_a_shard_without_a_table_is_kept_until_it_is_passed() -> None:
    parts, plan = Parts(), Position(s0=[(0, 1)])
    epoch = epoch_of(parts, plan, Known(None))
    epoch.plan_batches([keys(0)])
    epoch.start(keys(0))
    epoch.finish(keys(0))
    assert needed(parts, 0) == [True]
    plan.left.clear()
    epoch.advance()
    assert needed(parts, 0) == [False]


def test_what_comes_of_a_shard_that_is_being_scanned_is_kept_and_of_no_other() -> None:
    parts = Parts()
    epoch = epoch_of(parts, Position(s0=[(0, 3)], s1=[(0, 3)]), Known(TABLE, TABLE))
    epoch.keep(0, scan=5)
    first, second = part_key(0, 0), part_key(1, 0)
    parts.come(first)
    parts.come(second)
    assert list(parts.window.evictable()) == [second, first], "what is kept makes room last"
    epoch.close()
    assert parts.epochs == []
    parts.window.hold([second])
    parts.window.release([second])
    assert list(parts.window.evictable()) == [first, second], "now it depends on the last use only"


def test_what_comes_once_more_when_the_plan_is_behind_it_is_not_kept() -> None:
    """No step of the plan would ever release it, if that waits for the room."""
    parts = Parts()
    epoch = epoch_of(parts, Position(), Known(TABLE, None))
    epoch.keep(0, scan=0)
    key = part_key(0, 0)
    parts.window.plan([key])
    parts.come(key)
    parts.window.cancel([key])
    parts.window.request(part_key(1, 0), scan=1)
    assert list(parts.window.evictable()) == [key]


def test_a_part_is_behind_an_epoch_that_is_in_the_middle_of_its_shard() -> None:
    epoch = epoch_of(Parts(), Position(s0=[(1, 3)], s1=[]), Known(TABLE, TABLE))
    assert [epoch.is_behind(0, number) for number in range(3)] == [False, False, False]
    epoch = epoch_of(Parts(), Position(s0=[(2, 3)], s1=[]), Known(TABLE, TABLE))
    assert [epoch.is_behind(0, number) for number in range(3)] == [True, True, False]
    assert not epoch.is_behind(1, 0), "it may have come to this shard, or not"
