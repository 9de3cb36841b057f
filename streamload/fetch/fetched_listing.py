"""Which of the listed shards have to be fetched."""

from __future__ import annotations

from streamload.index.listing import Listing
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of


def fetched_shards(listing: Listing, storages: Storages) -> frozenset[int]:
    """The numbers of shards and sidecars that workers cannot open by themselves: remote ones, and compressed ones."""
    here = {folder: storages.is_local(f"{folder}/") for folder in {shard.folder for shard in listing.numbered}}
    return frozenset(
        number
        for number, shard in enumerate(listing.numbered)
        if not here[shard.folder] or compression_of(shard.url) is not None
    )
