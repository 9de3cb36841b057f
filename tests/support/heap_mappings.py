"""What a worker's heap does with a large value; in a module that imports little, as workers do without torch."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray


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
