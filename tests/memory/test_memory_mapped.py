"""Mapped memory: shared through its descriptor, kept by its views, and gone with the last of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mapped_memory import is_mapped

from streamload.memory.mapped import map_memory
from streamload.memory.unnamed import new_memory, raise_descriptor_limit

PAGE_BYTES = 4096

needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at /proc")


def shared_mappings(size_bytes: int) -> int:
    """How many mappings of our memory of just this size there are."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        found += "/memfd:streamload" in line and end - start == size_bytes
    return found


def test_new_memory_is_zeroed_and_of_the_size_requested() -> None:
    descriptor = new_memory(10_000)
    memory = map_memory(descriptor, 10_000, writable=False)
    assert os.fstat(descriptor).st_size == 10_000
    os.close(descriptor)
    assert memory.shape == (10_000,)
    assert memory.dtype == np.uint8
    assert not memory.any()


def test_new_memory_is_not_inherited_by_programs_that_are_started() -> None:
    descriptor = new_memory(1)
    try:
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_all_mappings_of_a_descriptor_show_the_same_bytes() -> None:
    descriptor = new_memory(PAGE_BYTES)
    written = map_memory(descriptor, PAGE_BYTES, writable=True)
    read = map_memory(descriptor, PAGE_BYTES, writable=False)
    os.close(descriptor)
    written[:] = np.arange(PAGE_BYTES) % 251
    assert np.array_equal(read, np.arange(PAGE_BYTES, dtype=np.int64) % 251)


def test_another_process_shares_memory_that_it_was_passed() -> None:
    descriptor = new_memory(3 * PAGE_BYTES)
    memory = map_memory(descriptor, 3 * PAGE_BYTES, writable=True)
    memory[0] = 41
    program = (
        "import sys\n"
        "from streamload.memory.mapped import map_memory\n"
        f"memory = map_memory(int(sys.argv[1]), {3 * PAGE_BYTES}, writable=True)\n"
        "memory[-1] = memory[0] + 1\n"
    )
    subprocess.run([sys.executable, "-c", program, str(descriptor)], pass_fds=(descriptor,), check=True)
    os.close(descriptor)
    assert memory[-1] == 42


def test_a_read_only_mapping_refuses_writes() -> None:
    descriptor = new_memory(PAGE_BYTES)
    memory = map_memory(descriptor, PAGE_BYTES, writable=False)
    os.close(descriptor)
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1


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
    assert shared_mappings(size_bytes) == 0


@needs_proc
def test_a_torch_tensor_keeps_the_mapping_alive() -> None:
    import torch

    size_bytes = 41 * PAGE_BYTES
    descriptor = new_memory(size_bytes)
    tensor = torch.from_numpy(map_memory(descriptor, size_bytes, writable=True))[5:].view(-1)[:3]
    os.close(descriptor)
    gc.collect()
    assert shared_mappings(size_bytes) == 1
    assert tensor.tolist() == [0, 0, 0]
    del tensor
    assert shared_mappings(size_bytes) == 0


@needs_proc
def test_a_mapping_holds_no_descriptor() -> None:
    """A user may keep thousands of batches; Python's own mmap would hold a descriptor for each."""
    before = len(os.listdir("/proc/self/fd"))
    mappings = []
    for _ in range(50):
        descriptor = new_memory(PAGE_BYTES)
        mappings.append(map_memory(descriptor, PAGE_BYTES, writable=True))
        os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == before
    mappings[-1][:] = 1


def test_nothing_to_map_gives_an_empty_array() -> None:
    assert len(map_memory(-1, 0, writable=False)) == 0


def test_a_file_that_is_open_for_reading_only_cannot_be_mapped_writable(tmp_path: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(b"abc")
    with (tmp_path / "shard.tar").open("rb") as file:
        assert map_memory(file.fileno(), 3, writable=False).tobytes() == b"abc"
        with pytest.raises(OSError, match="cannot map 3 bytes: Permission denied") as caught:
            map_memory(file.fileno(), 3, writable=True)
    assert caught.value.errno == 13


def test_a_closed_descriptor_cannot_be_mapped() -> None:
    descriptor = new_memory(1)
    os.close(descriptor)
    with pytest.raises(OSError, match="cannot map 1 bytes: Bad file descriptor"):
        map_memory(descriptor, 1, writable=False)


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


def test_mapping_something_at_the_limit_of_descriptors_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptor = new_memory(PAGE_BYTES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 1, hard))
        memory = map_memory(descriptor, PAGE_BYTES, writable=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(descriptor)
    memory[0] = 1


def test_the_descriptor_limit_is_raised_to_the_hard_one() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
