"""Keeps a disk cache informed of the order of the epochs, so that it evicts what is needed last."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from streamload.fetch.cache.disk_cache import DiskCache
from streamload.fetch.cache.next_use import OrderNextUse, numbers_by_key
from streamload.index.listing import Listing
from streamload.order.options import OrderOptions

__all__ = ["Foresight"]


class Foresight:
    """What a cache knows of the future, from epoch to epoch.

    Args:
        cache: the cache; None if there is none, and then nothing is done.
        listing: the shards.
    """

    def __init__(self, cache: DiskCache | None, listing: Listing) -> None:
        self._cache = cache
        self._listing = listing
        self._numbers: dict[str, int] | None = None
        self._next_use: OrderNextUse | None = None

    def begin(self, options: OrderOptions, counts: NDArray[np.int64], epoch: int, start: int) -> None:
        """An epoch begins at a position of its order."""
        if self._cache is None:
            return
        if self._numbers is None:
            by_key = numbers_by_key(shard.url for shard in self._listing.numbered)  # a sidecar is used with its shard
            self._numbers = {key: self._listing.owner(number) for key, number in by_key.items()}
        self._next_use = OrderNextUse(self._numbers, options, counts, epoch, start=start)
        self._cache.expect(self._next_use)

    def passed(self, number: int) -> None:
        """Every lane has come to this number of its outputs."""
        if self._next_use is not None:
            self._next_use.advance(number)
