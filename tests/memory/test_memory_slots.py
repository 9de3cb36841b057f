"""Slots: memory goes round, but never before the last view of a batch has died, and never under one that lives."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamload.limits import MOST_KEPT_SLOTS
from streamload.memory import slots
from streamload.memory.mapped import Bytes
from streamload.memory.slots import (
    HeapSlots,
    MappedSlots,
    SlotPool,
    SlotReader,
    round_up,
)
from streamload.memory.unnamed import new_memory


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool()
    yield pool
    pool.close()


@pytest.fixture
def reader() -> Iterator[SlotReader]:
    reader = SlotReader()
    yield reader
    reader.close()


def hand_out(pool: SlotPool, slot: int, size_bytes: int = 10) -> bool:
    """Announce a slot, and have the loop take its batch; whether the descriptor must go with it."""
    to_map = pool.announce(slot, size_bytes)
    pool.note_taken(1)
    return to_map


def give(pool: SlotPool, reader: SlotReader, size_bytes: int = 100) -> int:
    """A delivered slot whose descriptor the reader has."""
    slot = pool.take(size_bytes)
    reader.add(slot, pool.descriptor(slot))
    hand_out(pool, slot)
    return slot


@pytest.mark.parametrize(("size", "unit", "rounded"), [(0, 64, 64), (1, 64, 64), (64, 64, 64), (65, 64, 128)])
def test_sizes_are_rounded_up(size: int, unit: int, rounded: int) -> None:
    assert round_up(size, unit) == rounded


# -- the maker -----------------------------------------------------------------------------------------------------


def test_a_slot_is_used_again_only_after_it_was_released(pool: SlotPool) -> None:
    first = pool.take(10)
    hand_out(pool, first)
    second = pool.take(10)
    hand_out(pool, second)
    assert second != first
    pool.note_released([first])
    assert pool.take(10) == first
    assert pool.take(10) not in (first, second)


def test_the_slot_that_has_been_free_longest_is_used_first(pool: SlotPool) -> None:
    """A copy on a stream that no fence covers has the most time then."""
    slots = [pool.take(10) for _ in range(5)]
    for slot in slots:
        hand_out(pool, slot)
    for slot in slots:
        pool.note_released([slot])
    assert [pool.take(10) for _ in slots] == slots


def test_a_new_slot_has_the_size_requested(pool: SlotPool) -> None:
    assert os.fstat(pool.descriptor(pool.take(100_000))).st_size >= 100_000


def test_a_released_slot_that_was_not_acknowledged_is_not_free(pool: SlotPool) -> None:
    slot = pool.take(10)
    pool.note_released([slot])
    assert pool.take(10) != slot


def test_a_slot_that_waits_for_the_loop_is_neither_free_nor_discarded(pool: SlotPool) -> None:
    slots = [pool.take(10) for _ in range(2 * MOST_KEPT_SLOTS)]
    for slot in slots:
        pool.announce(slot, 10)
    pool.note_released(slots)
    assert pool.take_retired() == []
    assert pool.take(10) not in slots
    pool.note_taken(1)
    pool.note_released(slots)
    assert pool.take(10) == slots[0], "they are taken in the order in which they were announced"


def test_a_slot_released_twice_is_given_out_once(pool: SlotPool) -> None:
    slot = pool.take(10)
    hand_out(pool, slot)
    pool.note_released([slot, slot])
    assert pool.take(10) == slot
    assert pool.take(10) != slot


def test_a_user_who_keeps_batches_gets_the_oldest_slots_for_good(pool: SlotPool) -> None:
    slots = []
    for _ in range(MOST_KEPT_SLOTS + 36):
        slots.append(pool.take(10))
        hand_out(pool, slots[-1])
    assert len(set(slots)) == len(slots)
    retired = pool.take_retired()
    assert retired == slots[:36]
    assert pool.take_retired() == []
    pool.note_released(retired)
    assert not {pool.take(10) for _ in range(40)} & set(slots), "what was given away never comes back"


@pytest.mark.parametrize(("size_bytes", "kept"), [(10, MOST_KEPT_SLOTS), (64 << 20, 8), (6 << 20, 22)])
def test_many_free_slots_are_not_hoarded(pool: SlotPool, size_bytes: int, kept: int) -> None:
    """Those that a user releases after keeping them."""
    slots = [pool.take(size_bytes) for _ in range(MOST_KEPT_SLOTS)]
    for slot in slots:
        hand_out(pool, slot)
    pool.note_released(slots)
    retired = pool.take_retired()
    assert len(retired) == len(slots) - kept
    again = [pool.take(size_bytes) for _ in range(kept)]
    assert sorted(again + retired) == slots


@pytest.mark.parametrize(("limit", "in_flight", "kept"), [(256, 64, 32), (512, 128, 64)])
def test_slots_take_their_share_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, limit: int, in_flight: int, kept: int
) -> None:
    monkeypatch.setattr(slots, "descriptor_limit", lambda: limit)
    pool = SlotPool()
    assert pool.most_in_flight == in_flight
    leased = [pool.take(10) for _ in range(kept + 5)]
    for slot in leased:
        hand_out(pool, slot)
    assert pool.take_retired() == leased[:5]
    pool.close()


def test_as_many_slots_stay_free_as_are_in_flight(pool: SlotPool) -> None:
    """Large ones that come back together are wanted again at once."""
    in_flight, back = [pool.take(8 << 20) for _ in range(60)], [pool.take(8 << 20) for _ in range(50)]
    for slot in back:
        hand_out(pool, slot)
    pool.note_released(back)
    assert pool.take_retired() == []
    assert sorted(pool.take(8 << 20) for _ in back) == back
    assert not set(back) & set(in_flight)


def test_a_discarded_slot_is_never_used_again_and_has_no_descriptor(pool: SlotPool) -> None:
    slot = pool.take(10)
    descriptor = pool.descriptor(slot)
    pool.discard(slot)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert pool.take_retired() == [slot]
    pool.note_released([slot])
    assert pool.take(10) != slot


def test_a_discarded_free_slot_is_not_given_out(pool: SlotPool) -> None:
    free = pool.take(10)
    hand_out(pool, free)
    pool.note_released([free])
    assert pool.take(10) == free
    pool.discard(free)
    assert pool.take(10) != free


def test_closing_the_pool_twice_is_fine() -> None:
    pool = SlotPool()
    pool.take(10)
    pool.close()
    pool.close()


# -- the fillers ---------------------------------------------------------------------------------------------------


def test_memory_grows_for_everyone_who_maps_the_slot(pool: SlotPool) -> None:
    slot = pool.take(100)
    fillers = [MappedSlots(), MappedSlots()]
    for filler in fillers:
        filler.add(slot, os.dup(pool.descriptor(slot)))
    small = fillers[0].at_least(slot, 100)
    small[:100] = 5
    large = fillers[1].at_least(slot, 1_000_000)
    large[999_999] = 6
    grown = fillers[0].at_least(slot, 1_000_000)
    assert (grown[:100] == 5).all()
    assert grown[999_999] == 6
    assert (small[:100] == 5).all(), "a view from before it grew stays valid"
    grown[0] = 7
    assert small[0] == 7
    for filler in fillers:
        filler.close()


def test_memory_that_is_large_enough_is_mapped_once(pool: SlotPool) -> None:
    slot = pool.take(5000)
    filler = MappedSlots()
    filler.add(slot, os.dup(pool.descriptor(slot)))
    assert filler.at_least(slot, 5000) is filler.at_least(slot, 17)
    filler.close()


def test_a_slot_is_never_made_smaller(pool: SlotPool) -> None:
    slot = pool.take(100_000)
    filler = MappedSlots()
    filler.add(slot, os.dup(pool.descriptor(slot)))
    assert len(filler.at_least(slot, 10)) >= 100_000
    filler.close()


def test_views_of_a_dropped_slot_stay_valid(pool: SlotPool) -> None:
    slot = pool.take(100)
    filler = MappedSlots()
    filler.add(slot, os.dup(pool.descriptor(slot)))
    memory = filler.at_least(slot, 100)
    filler.drop(slot)
    filler.drop(slot)
    memory[0] = 1
    with pytest.raises(KeyError):
        filler.at_least(slot, 100)


def test_a_slot_that_is_added_again_is_the_new_one() -> None:
    filler = MappedSlots()
    for mark in (1, 2):
        filler.add(0, new_memory(10))
        assert filler.at_least(0, 10)[0] == 0
        filler.at_least(0, 10)[0] = mark
    filler.close()


def test_the_trainer_is_to_map_a_slot_again_only_where_it_has_grown(pool: SlotPool) -> None:
    slot = pool.take(10)
    found = []
    for size_bytes in (10, 10, 5, 5000, 10, 5000):
        found.append(hand_out(pool, slot, size_bytes))
        pool.note_released([slot])
        assert pool.take(10) == slot
    assert found == [True, False, False, True, False, False]


def test_the_pool_knows_how_much_memory_all_slots_take(pool: SlotPool) -> None:
    slots = [pool.take(5000), pool.take(10)]
    assert pool.held_bytes() == 8192 + 4096
    hand_out(pool, slots[1], 20_000)  # whoever filled it has made it larger
    assert pool.held_bytes() == 8192 + 20_480
    pool.note_released(slots)
    assert pool.take(30_000) == slots[1], "as large as that it will be"
    assert pool.held_bytes() == 8192 + 32_768
    pool.discard(slots[1])
    assert pool.held_bytes() == 8192
    pool.close()
    assert pool.held_bytes() == 0


# -- the reader ----------------------------------------------------------------------------------------------------


def views_of(lease: Bytes) -> dict[str, Any]:
    """What a user may hold of a batch, in many forms, each derived in another way."""
    import torch

    tensor = torch.from_numpy(lease[:64].view(np.float32))
    return {
        "the loan": lease,
        "a slice": lease[10:20],
        "a view of another dtype": lease[:80].view(np.int64),
        "a reshaped part": lease[:64].view(np.float32).reshape(4, 4)[1],
        "a transposed part": lease[:64].reshape(8, 8).T[2:4],
        "a scalar's memory": lease[:8].view(np.int64)[0, ...],
        "a memoryview": memoryview(lease)[3:9],
        "a tensor": tensor,
        "a row of a tensor": tensor.reshape(4, 4)[2],
        "a tensor of another dtype": tensor.view(torch.bfloat16)[3],
        "a detached tensor": tensor.detach().unsqueeze(0).permute(1, 0),
        "an array of a tensor": tensor[2:].numpy(),
        "an iterator over a tensor": iter(tensor.reshape(4, 4).unbind()),
    }


VIEWS = list(views_of(np.zeros(4096, np.uint8)))


@pytest.mark.parametrize("kind", VIEWS)
def test_a_slot_is_released_when_the_last_view_dies_and_not_before(
    pool: SlotPool, reader: SlotReader, kind: str
) -> None:
    slot = give(pool, reader)
    held = views_of(reader.lease(slot))[kind]
    gc.collect()
    assert reader.take_released() == ()
    assert held is not None
    del held
    gc.collect()
    assert reader.take_released() == (slot,)


def test_each_loan_of_a_slot_is_released_on_its_own(pool: SlotPool, reader: SlotReader) -> None:
    slot = give(pool, reader)
    for round_number in range(1, 4):
        batch = reader.lease(slot)
        assert reader.take_released() == ()
        del batch
        assert reader.take_released() == (slot,)


def test_a_lease_has_at_least_the_size_requested_and_shows_what_was_written(pool: SlotPool, reader: SlotReader) -> None:
    slot = give(pool, reader)
    filler = MappedSlots()
    filler.add(slot, os.dup(pool.descriptor(slot)))
    filler.at_least(slot, 100)[:3] = 1, 2, 3
    assert reader.lease(slot)[:3].tolist() == [1, 2, 3]
    filler.at_least(slot, 50_000)[49_999] = 9
    assert hand_out(pool, slot, 50_000), "it has grown, so it must be mapped again"
    reader.add(slot, pool.descriptor(slot))
    lease = reader.lease(slot)
    assert len(lease) >= 50_000
    assert lease[49_999] == 9
    filler.close()


def test_slots_are_released_in_order_once_their_fence_is_open(pool: SlotPool) -> None:
    open_fences: set[int] = set()
    fences: list[list[int]] = []
    held: dict[int, Bytes] = {}

    def fence() -> Any:
        number = len(fences)
        fences.append(sorted(held))
        return lambda: number in open_fences

    reader = SlotReader(fence=fence)
    slots = [give(pool, reader) for _ in range(4)]
    held.update({slot: reader.lease(slot) for slot in slots})
    assert reader.take_released() == ()
    assert fences == [], "no tensor has died"
    del held[slots[1]], held[slots[0]]
    assert reader.take_released() == ()
    assert fences == [slots[2:]], "set up after both have died"
    del held[slots[3]]
    open_fences.add(1)
    assert reader.take_released() == ()
    open_fences.add(0)
    assert reader.take_released() == (slots[1], slots[0], slots[3])
    held.clear()
    reader.close()


def test_new_memory_is_announced_once_for_each_mapping(pool: SlotPool) -> None:
    mapped: list[int] = []
    reader = SlotReader(lambda memory: mapped.append(memory.nbytes))
    slots = [give(pool, reader), give(pool, reader)]
    for _ in range(3):
        for slot in slots:
            reader.lease(slot)
    assert mapped == [4096, 4096]
    os.ftruncate(pool.descriptor(slots[0]), 12_288)
    reader.add(slots[0], pool.descriptor(slots[0]))
    for _ in range(2):
        reader.lease(slots[0])
    assert mapped == [4096, 4096, 12288]
    reader.close()


def test_the_reader_holds_no_descriptor(pool: SlotPool, reader: SlotReader) -> None:
    folder = "/proc/self/fd"
    if not os.path.exists(folder):
        pytest.skip("looks at /proc")
    slots = [pool.take(100) for _ in range(5)]
    before = len(os.listdir(folder))
    for slot in slots:
        reader.add(slot, pool.descriptor(slot))
    assert len(os.listdir(folder)) == before


def test_what_the_user_views_survives_drop_and_close(pool: SlotPool) -> None:
    reader = SlotReader()
    slots = [give(pool, reader), give(pool, reader)]
    batches = [reader.lease(slot) for slot in slots]
    for number, batch in enumerate(batches):
        batch[:100] = number + 1
    reader.drop([slots[0]])
    reader.close()
    pool.close()
    assert [int(batch[:100].sum()) for batch in batches] == [100, 200]


def test_the_memory_of_a_dropped_slot_goes_with_its_last_view(pool: SlotPool, reader: SlotReader) -> None:
    maps = "/proc/self/maps"
    if not os.path.exists(maps):
        pytest.skip("looks at /proc")
    slot = give(pool, reader, 77 * 4096)
    batch = reader.lease(slot)
    address = f"{batch.ctypes.data:x}-"
    reader.drop([slot])
    with open(maps) as file:
        assert any(line.startswith(address) for line in file)
    del batch
    with open(maps) as file:
        assert not any(line.startswith(address) for line in file)


# -- everything together -------------------------------------------------------------------------------------------


class RoundTrips(RuleBasedStateMachine):
    """Batches are made, delivered, kept, viewed and dropped in any order; what is kept never changes."""

    @initialize()
    def start(self) -> None:
        self.pool, self.reader, self.filler = SlotPool(), SlotReader(), MappedSlots()
        self.known: set[int] = set()
        self.kept: list[tuple[int, Any]] = []
        self.made = 0

    @rule(size=st.integers(1, 9000))
    def make(self, size: int) -> None:
        slot = self.pool.take(100)
        if slot not in self.known:
            self.filler.add(slot, os.dup(self.pool.descriptor(slot)))
            self.known.add(slot)
        self.made += 1
        size_bytes = 8 * size
        self.filler.at_least(slot, size_bytes)[:size_bytes].view(np.int64)[:] = self.made
        if hand_out(self.pool, slot, size_bytes):
            self.reader.add(slot, self.pool.descriptor(slot))
        retired = self.pool.take_retired()
        for gone in retired:
            self.filler.drop(gone)
        self.known.difference_update(retired)
        self.kept.append((self.made, self.reader.lease(slot)[:size_bytes].view(np.int64)))
        self.reader.drop(retired)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop_one(self, data: st.DataObject) -> None:
        self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def keep_a_part(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.kept) - 1))
        mark, view = self.kept[number]
        self.kept[number] = mark, view[len(view) // 2 :]

    @rule()
    def tell_the_pool(self) -> None:
        released = self.reader.take_released()
        self.pool.note_released(released)

    @invariant()
    def kept_batches_are_as_they_were(self) -> None:
        for mark, view in getattr(self, "kept", ()):
            assert (view == mark).all()

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for part in (self.pool, self.reader, self.filler):
                part.close()


TestRoundTrips = RoundTrips.TestCase
TestRoundTrips.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)


# -- without processes ---------------------------------------------------------------------------------------------


def test_heap_slots_are_new_each_time_and_handed_over() -> None:
    slots = HeapSlots()
    first, second = slots.take(10), slots.take(10)
    assert first != second
    slots.at_least(first, 10)[:] = 1
    assert len(slots.at_least(second, 1000)) == 1000
    batch = slots.lease(first)
    assert batch.tolist() == [1] * 10
    assert not slots.announce(first, 10)
    slots.note_released([first])
    slots.discard(second)
    slots.discard(second)
    assert slots.take(10) not in (first, second)
    assert slots.take_retired() == []
    with pytest.raises(LookupError, match="slot 0 is heap memory"):
        slots.descriptor(0)
    slots.close()
