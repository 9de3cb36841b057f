"""Which shards have to be fetched, and the options for fetching them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from streamload.index.listing import Listing
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of


class Fetching(NamedTuple):
    """How a feeder fetches shards.

    Attributes:
        storages: where shards lie.
        budget_bytes: for fetched bytes.
        cache_folder: for a disk cache; None for none.
        cache_bytes: how large that may get.
        expands: a share of the budget is kept for the values that fields expand to.
    """

    storages: Storages
    budget_bytes: int
    cache_folder: str | None
    cache_bytes: int
    expands: bool = False


def is_all_local(urls: Iterable[str], storages: Storages) -> bool:
    """Return True if urls can be read without waiting for a server."""
    return all(map(storages.is_local, urls))


def waits_for_index(listing: Listing, storages: Storages) -> bool:
    """Return True if reading some index of a listing waits for a server."""
    return not is_all_local(
        {shard.index_folder for shard in listing.numbered if shard.index_folder is not None}, storages
    )


def fetched_shards(listing: Listing, storages: Storages) -> frozenset[int]:
    """Return the numbers of shards and sidecars that workers cannot open: remote ones, and compressed ones."""
    here = {folder: storages.is_local(f"{folder}/") for folder in {shard.folder for shard in listing.numbered}}
    return frozenset(
        number
        for number, shard in enumerate(listing.numbered)
        if not here[shard.folder] or compression_of(shard.url) is not None
    )
