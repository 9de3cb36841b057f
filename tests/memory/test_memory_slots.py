"""Slots: memory goes round, but never before the last view of a batch has died, and never under one that lives."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamload.limits import MOST_KEPT_SLOTS
from streamload.memory.mapped import Bytes
from streamload.memory.slots import MappedSlots, SlotPool, SlotReader


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
    pool.record_taken(1)
    return to_map


def give(pool: SlotPool, reader: SlotReader) -> int:
    """A delivered slot whose descriptor the reader has."""
    slot = pool.take()
    reader.add(slot, pool.descriptors[slot])
    hand_out(pool, slot)
    return slot


@pytest.mark.parametrize(("size_bytes", "kept"), [(10, MOST_KEPT_SLOTS), (64 << 20, 8), (6 << 20, 22)])
def test_many_free_slots_are_not_hoarded(pool: SlotPool, size_bytes: int, kept: int) -> None:
    """Those that a user releases after keeping them."""
    slots = [pool.take() for _ in range(MOST_KEPT_SLOTS)]
    for slot in slots:
        hand_out(pool, slot, size_bytes)
    pool.record_released(slots)
    retired = pool.take_retired()
    assert len(retired) == len(slots) - kept
    again = [pool.take() for _ in range(kept)]
    assert sorted(again + retired) == slots


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


def test_no_python_code_runs_when_a_view_dies(pool: SlotPool, reader: SlotReader) -> None:
    """A Ctrl-C would be raised in it, printed and lost."""
    held, called = reader.lease(give(pool, reader)), list[str]()
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del held
    sys.setprofile(None)
    assert called == []


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
        slot = self.pool.take()
        if slot not in self.known:
            self.filler.add(slot, os.dup(self.pool.descriptors[slot]))
            self.known.add(slot)
        self.made += 1
        size_bytes = 8 * size
        self.filler.at_least(slot, size_bytes)[:size_bytes].view(np.int64)[:] = self.made
        if hand_out(self.pool, slot, size_bytes):
            self.reader.add(slot, self.pool.descriptors[slot])
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
        self.pool.record_released(released)

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
