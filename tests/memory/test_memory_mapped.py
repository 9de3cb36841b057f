"""Mapped memory: shared through its descriptor, kept by its views, and gone with the last of them."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from streamload.fetch.fetcher import SparseMemory
from streamload.memory.mapped import map_memory
from streamload.memory.unnamed import new_memory

PAGE_BYTES = 4096

needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at /proc")


def is_mapped(address: int) -> bool:
    """Whether some mapping of this process holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def test_a_read_only_mapping_is_read_only_for_the_processor_too() -> None:
    """Otherwise a library that ignores NumPy's flag could write into a user's shard."""
    program = (
        "import ctypes, os\n"
        "from streamload.memory.mapped import map_memory\n"
        "from streamload.memory.unnamed import new_memory\n"
        "memory = map_memory(new_memory(4096), 4096, writable=False)\n"
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
        "ctypes.memset(memory.ctypes.data, 1, 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -11


@needs_proc
def test_views_keep_the_mapping_alive_and_the_last_one_ends_it() -> None:
    size_bytes = 37 * PAGE_BYTES
    descriptor = new_memory(size_bytes)
    memory = map_memory(descriptor, size_bytes, writable=True)
    os.close(descriptor)
    memory[-8:] = 7
    address = memory.ctypes.data
    views = [memory[-8:].view(np.int64), memory.reshape(37, -1)[36], memoryview(memory)[-1:]]
    del memory
    gc.collect()
    assert views[0][0] == 0x0707070707070707
    while views:
        assert is_mapped(address)
        views.pop()
    assert not is_mapped(address)


def test_memory_without_memfd_is_an_unlinked_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS. That nothing stays in the temporary folder is what the name of the descriptor shows."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptor = new_memory(5000)
    memory = map_memory(descriptor, 5000, writable=True)
    again = map_memory(descriptor, 5000, writable=False)
    os.close(descriptor)
    memory[4999] = 9
    assert again[4999] == 9
    assert list(tmp_path.iterdir()) == []


# -- sparse memory ---------------------------------------------------------------------------------------------------

PAGE = mmap.PAGESIZE


def taken_bytes(memory: SparseMemory) -> int:
    return os.fstat(memory.descriptor).st_blocks * 512


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="pages are freed on Linux only")
def test_the_pages_of_a_range_are_freed() -> None:
    memory = SparseMemory(10 * PAGE + 100)
    memory.write(0, b"y" * memory.size_bytes)
    memory.free(2 * PAGE, 4 * PAGE)
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
