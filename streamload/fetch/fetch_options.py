"""How shards are fetched, as the user has chosen it."""

from __future__ import annotations

from typing import NamedTuple

from streamload.storage.storages import Storages


class Fetching(NamedTuple):
    """What a feeder is told of how shards are fetched.

    Attributes:
        storages: where shards lie.
        budget_bytes: what they and the batches may take in memory.
        expands: a share of it is kept for what fields expand to.
        cache_folder: for a disk cache; None for none.
        cache_bytes: how large that may get.
    """

    storages: Storages
    budget_bytes: int
    cache_folder: str | None
    cache_bytes: int
    expands: bool = False
