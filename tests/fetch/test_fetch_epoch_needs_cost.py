"""What an epoch keeps of fetched shards: as long as it may use it, and at no cost for what has not moved."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
from lines_run import lines_of

from streamload.fetch.epoch_needs import EpochNeeds
from streamload.fetch.parts import PART_BYTES, part_key
from streamload.fetch.window import PartWindow
from streamload.tar.table import ShardTable

PART_SAMPLES = 4


def table_of(parts: int) -> ShardTable:
    """A shard whose samples fill its parts, four each."""
    samples = PART_SAMPLES * parts
    size = PART_BYTES // PART_SAMPLES
    return ShardTable(
        shard_bytes=parts * PART_BYTES,
        fields=("bin",),
        member_offset=np.arange(samples, dtype=np.int64) * size,
        member_size=np.full(samples, size, np.int64),
        member_field=np.zeros(samples, np.uint16),
        sample_start=np.arange(samples + 1, dtype=np.int64),
        key_bytes=np.zeros(samples, np.uint8),
        key_start=np.arange(samples + 1, dtype=np.int64),
    )


class Epoch:
    """The parts of an epoch over some shards; `passed` says how many samples of each are behind it."""

    def __init__(self, shards: int, parts: int) -> None:
        self.tables = [table_of(parts) for _ in range(shards)]
        self.samples = PART_SAMPLES * parts
        self.passed = [0] * shards
        self.window = PartWindow(1 << 60)
        fetcher: Any = SimpleNamespace(
            window=self.window, notify=lambda: None, begin_epoch=lambda _: None, end_epoch=lambda _: None
        )
        plan: Any = SimpleNamespace(unpassed=self.unpassed)
        tables: Any = SimpleNamespace(
            at_hand=self.tables.__getitem__,
            is_growing=lambda _: False,
            owner=lambda shard: shard,
            stretches=lambda _, samples: samples,
        )
        self.parts = EpochNeeds(fetcher, plan, tables)

    def unpassed(self, shard: int) -> list[tuple[int, int]]:
        return [(self.passed[shard], self.samples)] if self.passed[shard] < self.samples else []

    def use(self, *keys: int) -> None:
        """Schedule a batch, and make it."""
        self.parts.plan_batches([list(keys)])
        for key in keys:
            if not self.window.is_present(key):
                self.window.admit(key, PART_BYTES)
                self.window.arrive(key, PART_BYTES)
        self.parts.start(keys)
        self.parts.finish(keys)

    def needed_parts(self) -> int:
        return self.window.bytes_kept_from_next() // PART_BYTES


def test_a_part_is_kept_until_the_plan_has_passed_it() -> None:
    epoch = Epoch(shards=2, parts=3)
    keys = [part_key(shard, number) for shard in range(2) for number in range(3)]
    epoch.use(*keys)
    assert epoch.needed_parts() == 6
    for passed, needed in ((PART_SAMPLES - 1, 6), (PART_SAMPLES, 5), (2 * PART_SAMPLES + 1, 4), (3 * PART_SAMPLES, 3)):
        epoch.passed[0] = passed
        epoch.parts.advance()
        assert epoch.needed_parts() == needed
    epoch.use(keys[0], keys[3])
    assert epoch.needed_parts() == 3, "the first is passed, and not kept again"
    epoch.parts.close()
    assert epoch.needed_parts() == 0


def test_going_on_costs_nothing_for_parts_of_shards_in_which_nothing_has_moved() -> None:
    """With a wide window thousands of parts are kept, and the plan goes on several times a second."""

    def cost(parts: int) -> int:
        epoch = Epoch(shards=5, parts=parts)
        epoch.use(*(part_key(shard, number) for shard in range(5) for number in range(parts)))
        epoch.parts.advance()
        return lines_of(epoch.parts.advance)

    assert cost(200) < 2 * cost(2)


def test_a_batch_whose_parts_are_kept_already_costs_little() -> None:
    epoch = Epoch(shards=1, parts=50)
    keys = [part_key(0, number) for number in range(50)]
    epoch.parts.plan_batches([keys])
    epoch.parts.plan_batches([keys])
    first = lines_of(lambda: epoch.parts.start(keys))
    assert lines_of(lambda: epoch.parts.start(keys)) < 0.8 * first


def test_no_table_is_held_for_a_shard_that_is_passed() -> None:
    """Where rows are planned far ahead, parts are passed before they are used."""
    epoch = Epoch(shards=1, parts=2)
    held = sys.getrefcount(epoch.tables[0])
    epoch.passed[0] = PART_SAMPLES
    epoch.use(part_key(0, 0))
    epoch.passed[0] = epoch.samples
    epoch.parts.advance()
    left = sys.getrefcount(epoch.tables[0])
    assert left == held
