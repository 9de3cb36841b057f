"""Pinning: memory is page-locked once, for as long as it is mapped, and a refusal costs nothing but speed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from mapped_memory import is_mapped

from streamload.memory.mapped import map_memory
from streamload.memory.slots import SlotPool, SlotReader
from streamload.memory.unnamed import new_memory
from streamload.trainer.page_locked import cuda_registry, pinning


class Registry:
    """Stands in for the CUDA runtime, and writes down what it is asked, and what was mapped at that moment."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.locked: dict[int, int] = {}
        self.log: list[str] = []

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        self.log.append(f"register {size_bytes} {flags} {is_mapped(address)}")
        if self.answer == 0:
            assert address not in self.locked, "registered twice"
            self.locked[address] = size_bytes
        return self.answer

    def unregister(self, address: int) -> int:
        self.log.append(f"unregister {self.locked.pop(address)} {is_mapped(address)}")
        return 0


pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="looks at /proc")


def test_memory_is_locked_until_it_is_unmapped_and_unlocked_before() -> None:
    registry = Registry()
    descriptor = new_memory(8192)
    memory = map_memory(descriptor, 8192, writable=True)
    os.close(descriptor)
    pinning(registry)(memory)
    assert registry.log == ["register 8192 1 True"]
    view = memory[5:]
    del memory
    assert list(registry.locked.values()) == [8192]
    del view
    assert registry.log == ["register 8192 1 True", "unregister 8192 True"]
    assert registry.locked == {}


def test_memory_that_is_refused_stays_as_it_is_and_is_never_unlocked() -> None:
    registry = Registry(answer=2)
    descriptor = new_memory(4096)
    memory = map_memory(descriptor, 4096, writable=True)
    os.close(descriptor)
    pinning(registry)(memory)
    memory[:] = 1
    del memory
    assert registry.log == ["register 4096 1 True"]


def test_each_slot_is_locked_once_however_often_it_goes_round() -> None:
    registry = Registry()
    pool, reader = SlotPool(), SlotReader(pinning(registry))
    known: set[int] = set()
    for _ in range(3):
        for slot in (pool.take(100), pool.take(5000)):
            if slot not in known:
                known.add(slot)
                reader.add(slot, pool.descriptor(slot))
            pool.announce(slot, 100)
            pool.note_taken(1)
            tensor = torch.from_numpy(reader.lease(slot))
            assert tensor.data_ptr() in registry.locked
            del tensor
        pool.note_released(reader.released)
        reader.released.clear()
    assert sorted(registry.locked.values()) == [4096, 8192]
    assert len(registry.log) == 2
    reader.close()
    pool.close()
    assert registry.locked == {}


def test_a_slot_that_grows_is_locked_again() -> None:
    registry = Registry()
    pool, reader = SlotPool(), SlotReader(pinning(registry))
    slot = pool.take(100)
    reader.add(slot, pool.descriptor(slot))
    kept = reader.lease(slot)
    assert list(registry.locked.values()) == [4096]
    os.ftruncate(pool.descriptor(slot), 12_288)
    reader.add(slot, pool.descriptor(slot))
    reader.lease(slot)
    assert list(registry.locked.values()) == [4096, 12288], "the old mapping lives on under the kept batch"
    del kept
    assert list(registry.locked.values()) == [12288]
    reader.close()
    pool.close()
    assert registry.locked == {}


def test_kept_batches_stay_locked_after_everything_was_closed() -> None:
    registry = Registry()
    pool, reader = SlotPool(), SlotReader(pinning(registry))
    slot = pool.take(100)
    reader.add(slot, pool.descriptor(slot))
    batch = torch.from_numpy(reader.lease(slot).view(np.int32))
    reader.close()
    pool.close()
    assert len(registry.locked) == 1
    del batch
    assert registry.locked == {}


def test_where_there_is_no_gpu_there_is_no_registry() -> None:
    if torch.cuda.is_available():
        registry = cuda_registry()
        assert registry is not None
        assert callable(registry.register)
    else:
        assert cuda_registry() is None
