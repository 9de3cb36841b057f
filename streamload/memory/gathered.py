"""Scattered bytes of a file, read into one piece of memory: for processes that must not map what others may cut."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from streamload.memory.mapped import Bytes

# Reading as many unwanted bytes takes no longer than another call: both take a microsecond or two.
_GAP_BYTES = 16 << 10

# Before the first place, since numbers are read with some bytes before them.
_LEAD_BYTES = 64


def read_fully(descriptor: int, target: memoryview, start: int) -> int:
    """Fill `target` with the bytes of a place; returns how many, fewer where the file ends before.

    Raises:
        OSError: the storage cannot read them.
    """
    done = 0
    while done < len(target):  # the kernel gives at most 2 GiB at once
        count = os.preadv(descriptor, [target[done:]], start + done)
        if count == 0:
            break
        done += count
    return done


def gather(
    descriptor: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Bytes, NDArray[np.int64]] | None:
    """Read n places of a file; neighbours are read together.

    Args:
        descriptor: of the file.
        offsets: int64[n], where each place begins; n is 1 at least.
        sizes: int64[n], its bytes.

    Returns:
        Memory of the caller's own, and where each place begins in it, int64[n]; None where the file ends before one
        of them does.

    Raises:
        OSError: the storage cannot read them.
    """
    order = np.argsort(offsets, kind="stable")
    starts = offsets[order]
    ends = np.maximum.accumulate(starts + sizes[order])
    begins_run = np.append(True, starts[1:] > ends[:-1] + _GAP_BYTES)
    first = np.flatnonzero(begins_run)
    run_starts, run_ends = starts[first], ends[np.append(first[1:], len(starts)) - 1]
    edges = _LEAD_BYTES + np.concatenate(([0], np.cumsum(run_ends - run_starts)))
    memory = np.empty(int(edges[-1]), np.uint8)
    view, preadv = memoryview(memory.data), os.preadv
    for start, begin, end in zip(run_starts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        count = preadv(descriptor, [view[begin:end]], start)
        if (
            count < end - begin
            and count + read_fully(descriptor, view[begin + count : end], start + count) < end - begin
        ):
            return None
    places = np.empty_like(offsets)
    places[order] = starts + np.repeat(edges[:-1] - run_starts, np.diff(np.append(first, len(starts))))
    return memory, places
