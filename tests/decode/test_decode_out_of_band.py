"""Values of a batch that are no arrays: they come back as they were, and large ones travel in the slot."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from streamload.decode.collate import INLINE_BYTES, InSlot, load_values, store_values
from streamload.memory.slots import HeapSlots

LARGE = [[bytes([n]) * 100_000 for n in range(3)], ["ä" * 70_000, "b", "\ud800"], [{"x": b"y" * 80_000}]]


def stored(values: list[Any], start: int = 0, *, may_use_slot: bool = True) -> tuple[Any, HeapSlots, int]:
    slots = HeapSlots()
    slot = slots.take(start)
    slots.at_least(slot, start)[:] = 7
    return store_values(values, slots, slot, start, may_use_slot=may_use_slot), slots, slot


@pytest.mark.parametrize("start", [0, 64])
def test_large_values_lie_in_the_slot_behind_the_arrays(start: int) -> None:
    where, slots, slot = stored(LARGE, start)
    assert isinstance(where, InSlot)
    assert len(pickle.dumps(where)) < 200
    memory = slots.lease(slot)
    assert where.start == start
    assert where.start + where.size_bytes <= len(memory)
    assert (memory[:start] == 7).all()  # a slot that grows keeps what was written
    assert load_values(where, memory) == LARGE


@pytest.mark.parametrize("values", [[[b"a", b"b"]], [["text"]], [[b"x" * (INLINE_BYTES // 2)]]])
def test_small_values_travel_with_the_message(values: list[Any]) -> None:
    where, slots, slot = stored(values)
    assert isinstance(where, bytes)
    assert load_values(where, slots.lease(slot)) == values


def test_a_slot_that_others_write_to_is_left_alone() -> None:
    where, slots, slot = stored(LARGE, may_use_slot=False)
    assert isinstance(where, bytes)
    assert load_values(where, slots.lease(slot)) == LARGE


def test_what_only_cloudpickle_can_pickle_lies_there_too() -> None:
    def twice(value: int) -> int:
        return 2 * value

    where, slots, slot = stored([twice, b"x" * 100_000])
    assert isinstance(where, InSlot)
    function, data = load_values(where, slots.lease(slot))
    assert (function(4), data) == (8, b"x" * 100_000)
