"""The trainer's side of slots: maps them, lends their memory to the user, and notes when nobody views it any more."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from streamload.memory.mapped import Bytes, map_memory

__all__ = ["SlotReader"]


class SlotReader:
    """Lends the memory of delivered slots, and notes when the last view of one has died.

    It holds no descriptors: those of its process belong to the training program.

    Args:
        on_map: called with every newly mapped memory when it is lent for the first time (to page-lock it).
    """

    def __init__(self, on_map: Callable[[Bytes], None] | None = None) -> None:
        self._memory: dict[int, Bytes] = {}
        self._new: set[int] = set()
        self._leases: dict[int, weakref.ref[Bytes]] = {}
        self._on_map = on_map
        self.released: list[int] = []
        """The slots whose last view has died since the feeder was told last; the caller empties it."""

    def add(self, slot: int, descriptor: int) -> None:
        """Map all of a slot that was not known yet, or has grown; the descriptor stays the caller's."""
        self._memory[slot] = map_memory(descriptor, os.fstat(descriptor).st_size, writable=True)
        self._new.add(slot)

    def lend(self, slot: int) -> Bytes:
        """The slot's memory for one batch; when this array and all views of it are gone, the slot is `released`."""
        memory = self._memory[slot]
        if slot in self._new:
            self._new.remove(slot)
            if self._on_map is not None:
                self._on_map(memory)
        # A memoryview in between gives this loan an identity of its own: NumPy would otherwise let views of it refer to
        # the mapped array directly, and the loan would seem to end at once.
        lease = np.frombuffer(memory.data, np.uint8)
        self._leases[slot] = weakref.ref(lease, partial(_end_lease, slot, self._leases, self.released))
        return lease

    def drop(self, slots: Sequence[int]) -> None:
        """Forget slots that the feeder has given away; what the user still views stays valid."""
        for slot in slots:
            self._memory.pop(slot, None)
            self._new.discard(slot)

    def close(self) -> None:
        """Forget every slot; what the user still views stays valid."""
        self._memory.clear()
        self._new.clear()


def _end_lease(slot: int, leases: dict[int, weakref.ref[Bytes]], released: list[int], _: object) -> None:
    """A plain reference costs a third of `weakref.finalize`, once for every batch."""
    del leases[slot]
    released.append(slot)
