"""A worker's heap keeps what users' functions free: they need it again for the next row."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from make_shards import write_numbers
from numpy.typing import NDArray

from streamload import StreamLoader


class Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`; `hblks` counts the blocks that are mapped one by one."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", *"abcde"))


def mapped_for_one_value(_: bytes) -> NDArray[np.int64]:
    """How many mappings 3 MB take, which are unmapped again when they are freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    before = mallinfo2().hblks
    value = np.ones(3 << 20, np.uint8)
    mapped = mallinfo2().hblks - before
    del value
    return np.full(1, mapped)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="a glibc of 2021 or later only")
def test_values_of_some_megabytes_come_from_the_heap(tmp_path: Path) -> None:
    source = write_numbers(tmp_path / "s", [8])
    with StreamLoader(source, 8, fields=("npy",), decode={"npy": mapped_for_one_value}, num_workers=1) as loader:
        ((mapped,),) = loader
    assert mapped.tolist() == [[0]] * 8
