"""Reuse slots, each the memory of one batch.

`SlotPool` allocates slots in the feeder, workers fill them, and `SlotReader` leases them to the user in the trainer.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np

from streamload.limits import (
    FREE_SLOTS_BYTES,
    LEAST_FREE_SLOTS,
    MOST_FREE_SLOTS,
    MOST_KEPT_SLOTS,
    SLOTS_IN_FLIGHT_SHARE,
    SLOTS_KEPT_SHARE,
)
from streamload.memory.mapped import Bytes, map_memory
from streamload.memory.unnamed import descriptor_limit, new_memory

ALIGNMENT_BYTES = 64
"""Alignment of the values in a slot."""

_PAGE_BYTES = 4096


def round_up(size_bytes: int, unit_bytes: int = _PAGE_BYTES) -> int:
    """Round up to a multiple of `unit_bytes`, at least one unit."""
    return max(1, -(-size_bytes // unit_bytes)) * unit_bytes


class MappedSlots:
    """Map the slots that this process fills."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._memory: dict[int, Bytes] = {}

    def add(self, slot: int, descriptor: int) -> None:
        """Add a slot and take ownership of its descriptor."""
        self.drop(slot)
        self._descriptors[slot] = descriptor

    def at_least(self, slot: int, size_bytes: int) -> Bytes:
        """Return a slot's memory, enlarged to at least `size_bytes`."""
        memory = self._memory.get(slot)
        if memory is None or len(memory) < size_bytes:
            descriptor = self._descriptors[slot]
            current_bytes = os.fstat(descriptor).st_size
            if current_bytes < size_bytes:
                current_bytes = round_up(size_bytes)
                os.ftruncate(descriptor, current_bytes)
            memory = self._memory[slot] = map_memory(descriptor, current_bytes, writable=True)
        return memory

    def drop(self, slot: int) -> None:
        """Forget a slot; views of its memory stay valid."""
        self._memory.pop(slot, None)
        descriptor = self._descriptors.pop(slot, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Forget every slot."""
        for slot in list(self._descriptors):
            self.drop(slot)


class SlotPool:
    """Allocate slots and track their use.

    A slot's life: `take` (workers fill it), `announce` (its batch is sent to the trainer), `record_taken` (the loop has
    the batch), `record_released` (no view is left; the slot is free again). Workers and the trainer get duplicates of
    its descriptor; the trainer closes its duplicate after mapping.

    A user who keeps batches keeps their slots; after `MOST_KEPT_SLOTS` (fewer if descriptors are scarce) the pool
    forgets the oldest.

    Args:
        descriptors: the limit of open descriptors; 0 for this process's limit.

    Attributes:
        descriptors: the descriptors by slot; owned by the pool.
        most_in_flight: the maximum number of slots whose batches the loop has not taken.
    """

    def __init__(self, descriptors: int = 0) -> None:
        limit = descriptors or descriptor_limit()
        self.most_in_flight = max(2, limit // SLOTS_IN_FLIGHT_SHARE)
        self._most_free = min(MOST_FREE_SLOTS, self.most_in_flight)
        self._most_kept = min(MOST_KEPT_SLOTS, limit // SLOTS_KEPT_SHARE)
        self.descriptors: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # the number of bytes that the trainer has mapped, by slot; -1 if unmapped
        self._free: deque[int] = deque()
        self._announced: deque[int] = deque()
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._numbers = itertools.count()
        self._retired: list[int] = []

    def take(self) -> int:
        """Return a free slot, or a new one, which its worker enlarges."""
        if self._free:
            return self._free.popleft()  # the one freed first: a user's CUDA stream may still copy from the others
        slot = next(self._numbers)
        self.descriptors[slot] = new_memory(_PAGE_BYTES)
        self._sizes[slot] = -1
        return slot

    def announce(self, slot: int, size_bytes: int) -> bool:
        """Record that a batch is sent to the trainer; return True if the descriptor must be sent with it."""
        self._announced.append(slot)
        if size_bytes <= self._sizes[slot]:
            return False
        self._sizes[slot] = round_up(size_bytes)  # a lower bound, since the trainer maps the whole file
        return True

    def record_taken(self, batches: int) -> None:
        """Record that the trainer has taken a number of announced batches."""
        for _ in range(batches):
            slot = self._announced.popleft()
            self._kept[slot] = None
            if len(self._kept) > self._most_kept:
                self.discard(next(iter(self._kept)))

    def record_released(self, slots: Sequence[int]) -> None:
        """Record that the trainer has no views of these slots left."""
        for slot in slots:
            if slot in self._kept:  # a discarded slot belongs to the trainer alone
                del self._kept[slot]
                self.put_back(slot)

    def put_back(self, slot: int) -> None:
        """Free a slot for reuse, or discard it if enough are free."""
        count = len(self._free)
        in_flight = len(self.descriptors) - count - len(self._kept)  # this many slots will be needed again
        is_cheap = count < in_flight or count * self._sizes[slot] < FREE_SLOTS_BYTES
        if count < LEAST_FREE_SLOTS or (count < self._most_free and is_cheap):
            self._free.append(slot)
        else:
            self.discard(slot)

    def discard(self, slot: int) -> None:
        """Forget a slot; its mappings stay."""
        self._kept.pop(slot, None)
        os.close(self.descriptors.pop(slot))
        del self._sizes[slot]
        self._retired.append(slot)

    def take_retired(self) -> list[int]:
        """Return the slots discarded since the last call."""
        retired, self._retired = self._retired, []
        return retired

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()
        self._free.clear()
        self._kept.clear()


class _Lease(weakref.ref[Bytes]):
    """A reference to the memory of a leased slot."""

    __slots__ = ("slot",)
    slot: int


class SlotReader:
    """Lease the memory of slots to the user, and detect when the last view of a slot is gone.

    Args:
        on_map: called with newly mapped memory, to page-lock it.
        fence: returns a function that returns True once all reads queued on devices are done.
    """

    def __init__(
        self,
        on_map: Callable[[Bytes], None] | None = None,
        fence: Callable[[], Callable[[], bool]] | None = None,
    ) -> None:
        self._memory: dict[int, Bytes] = {}
        self._leases: dict[int, _Lease] = {}
        self._on_map = on_map
        self._fence = fence
        self._ended: deque[_Lease] = deque()
        self._fenced: deque[tuple[Callable[[], bool], list[int]]] = deque()
        self._collecting = Lock()

    def add(self, slot: int, descriptor: int) -> None:
        """Map a slot that is new or has grown; the caller closes the descriptor."""
        self._memory[slot] = memory = map_memory(descriptor, os.fstat(descriptor).st_size, writable=True)
        if self._on_map is not None:
            self._on_map(memory)

    def lease(self, slot: int) -> Bytes:
        """Return a slot's memory for one batch; the slot is free when all views of it are gone."""
        # Made through a memoryview: otherwise the base of views would be the mapped array, and the lease would end.
        lease = np.frombuffer(self._memory[slot].data, np.uint8)
        # The callback is no Python function: a Ctrl-C during one would be printed and lost.
        reference = self._leases[slot] = _Lease(lease, self._ended.append)
        reference.slot = slot
        return lease

    def take_released(self) -> tuple[int, ...]:
        """Return the slots that became free, oldest first: their views are gone, and earlier device copies are done."""
        with self._collecting:
            ended = [self._leases.pop(self._ended.popleft().slot).slot for _ in range(len(self._ended))]
            if self._fence is None:
                return tuple(ended)
            if ended:
                self._fenced.append((self._fence(), ended))
            released: list[int] = []
            while self._fenced and self._fenced[0][0]():
                released += self._fenced.popleft()[1]
            return tuple(released)

    def drop(self, slots: Sequence[int]) -> None:
        """Forget slots; views stay valid."""
        for slot in slots:
            self._memory.pop(slot, None)

    def close(self) -> None:
        """Forget every slot; views stay valid."""
        self._memory.clear()
