"""Which shards rows lie in; asked for every task, so it takes no step of Python for each row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["by_shard", "shards_of"]

_SORTED_BY_RADIX = np.iinfo(np.uint16).max
"""Up to here NumPy's stable sort takes a fraction of the time."""

_WORTH_COUNTING = 4


def by_shard(shards: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The rows of each shard, ascending.

    Args:
        shards: int64[n], each row's shard.
    """
    small = len(shards) > 0 and int(shards.max()) <= _SORTED_BY_RADIX
    order = np.argsort(shards.astype(np.uint16) if small else shards, kind="stable")
    edges = np.flatnonzero(np.diff(shards[order])) + 1
    for rows in np.split(order, edges):
        if len(rows):
            yield int(shards[rows[0]]), rows


def shards_of(shards: NDArray[np.int64]) -> list[int]:
    """Each shard that some row lies in, once, ascending.

    Args:
        shards: int64[n], each row's shard.
    """
    counted = len(shards) and int(shards.max()) < _WORTH_COUNTING * len(shards)
    found: list[int] = (np.flatnonzero(np.bincount(shards)) if counted else np.unique(shards)).tolist()
    return found
