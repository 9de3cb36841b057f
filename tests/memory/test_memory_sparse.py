"""Sparse memory: it grows, and what is freed is free."""

from __future__ import annotations

import mmap
import os

import pytest

from streamload.fetch.fetched_shard import SparseMemory
from streamload.memory.mapped import map_memory

PAGE = mmap.PAGESIZE


def taken_bytes(memory: SparseMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="pages are freed on Linux only")
def test_only_whole_pages_between_the_places_are_freed() -> None:
    memory = SparseMemory(10 * PAGE + 100)
    memory.write(0, b"y" * memory.size_bytes)
    memory.free(PAGE + 1, 5 * PAGE - 1)
    assert taken_bytes(memory) == 9 * PAGE
    memory.free(9 * PAGE, memory.size_bytes)
    assert taken_bytes(memory) == 7 * PAGE, "the last page of all is whole though the memory ends in it"
    seen = map_memory(memory.descriptor, memory.size_bytes, writable=False)
    assert seen[: 2 * PAGE].all()
    assert not seen[2 * PAGE : 4 * PAGE].any()
    assert seen[4 * PAGE : 9 * PAGE].all()
    assert not seen[9 * PAGE :].any()
    memory.close()


def test_memory_of_unknown_size_grows_and_keeps_what_it_has() -> None:
    memory = SparseMemory(None)
    before = memory.size_bytes
    memory.write(0, b"begin")
    memory.free(PAGE, 2 * PAGE)
    memory.write(before - 2, b"across")
    assert memory.size_bytes >= 2 * before
    memory.write(5 * memory.size_bytes, b"far")
    seen = map_memory(memory.descriptor, memory.size_bytes, writable=False)
    assert bytes(seen[:5]) == b"begin"
    assert bytes(seen[before - 2 : before + 4]) == b"across"
    memory.free(0, memory.size_bytes)
    assert taken_bytes(memory) == 0
    memory.close()
