"""Several listings as one."""

from __future__ import annotations

from collections.abc import Sequence

from streamload.errors import without_secrets
from streamload.index.listing import Listing

__all__ = ["joined_listing"]


def joined_listing(listings: Sequence[Listing]) -> Listing:
    """The shards of several listings, one listing after the other.

    Raises:
        ValueError: a shard is in two of them.
    """
    shards = tuple(shard for listing in listings for shard in listing.shards)
    seen: set[str] = set()
    for shard in shards:
        if shard.url in seen:
            url = without_secrets(shard.url)
            raise ValueError(f"the shard {url!r} belongs to two datasets; name it in one of them")
        seen.add(shard.url)
    index_of = tuple(folder for listing in listings for folder in listing.index_of)
    fields = tuple(dict.fromkeys(name for listing in listings for name in listing.fields))
    counts = None
    if all(listing.counts is not None for listing in listings):
        counts = tuple(count for listing in listings for count in listing.counts or ())
    return Listing(shards, counts, index_of, fields)
