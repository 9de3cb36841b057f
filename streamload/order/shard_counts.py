"""Record the number of samples in each shard, as far as known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from streamload.text import counted

IntArray = NDArray[np.int64]

UNKNOWN = -1
ENDLESS = 1 << 62
"""The end of a range whose end is unknown."""

# Up to this ratio of maximum to number of values, `bincount` is faster than sorting.
_WORTH_COUNTING = 4


class ShardCounts:
    """The number of samples in each shard, by its number in the listing; set as shards are scanned.

    Attributes:
        values: int64[n_shards], -1 if unknown; a read-only view that `set` updates.
        changes: incremented with each count or bound, so that waiting plans can continue.
    """

    def __init__(self, n_shards: int) -> None:
        self._values = np.full(n_shards, UNKNOWN, np.int64)
        self._n_unknown = n_shards
        self.values: IntArray = self._values.view()
        self.values.flags.writeable = False
        self._least: dict[int, int] = {}
        self.changes = 0

    @classmethod
    def of(cls, counts: Iterable[int]) -> ShardCounts:
        """Create counts that are all known, for example from an index."""
        known = np.fromiter(counts, np.int64)
        counts_of_all = cls(len(known))
        counts_of_all._values[:] = known
        counts_of_all._n_unknown = 0
        return counts_of_all

    def __len__(self) -> int:
        return len(self._values)

    def set(self, shard: int, count: int) -> None:
        """Record the count of a scanned shard. Idempotent.

        Raises:
            ValueError: a different count is already recorded, or more samples were found.
        """
        known = int(self._values[shard])
        if known not in (UNKNOWN, count) or count < self.least(shard):
            raise ValueError(f"shard {shard} cannot hold {counted(count, 'sample')}: other counts were found before")
        self._values[shard] = count
        self.changes += 1
        self._n_unknown -= known == UNKNOWN
        self._least.pop(shard, None)

    def at_least(self, shard: int, count: int) -> None:
        """Record a lower bound for a shard of unknown count.

        Raises:
            ValueError: a higher bound is already recorded, or the shard has fewer samples.
        """
        known = int(self._values[shard])
        if known == UNKNOWN and count >= self.least(shard):
            self._least[shard] = count
            self.changes += 1
        elif count < 0 or count > known:
            raise ValueError(f"shard {shard} cannot hold {counted(count, 'sample')} or more")

    def least(self, shard: int) -> int:
        """Return the number of samples found so far in a shard of unknown count; 0 if the count is known."""
        return self._least.get(shard, 0)

    @property
    def complete(self) -> bool:
        """Return True if all counts are known."""
        return self._n_unknown == 0


def distinct(numbers: IntArray) -> IntArray:
    """Return the distinct values of non-negative integers, ascending.

    Replaces `np.unique`, which imports `numpy.ma`: 20 ms in each process.
    """
    if len(numbers) and int(numbers.max()) < _WORTH_COUNTING * len(numbers):
        return np.flatnonzero(np.bincount(numbers))
    ascending = np.sort(numbers)
    return np.concatenate((ascending[:1], ascending[1:][np.diff(ascending) > 0]))
