"""From what a user names to the list of shards, with their sizes and their index entries."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamload.errors import without_secrets
from streamload.index.dataset_index import DatasetIndex, check_shard
from streamload.index.finder import Finder
from streamload.index.index_lookup import IndexLookup
from streamload.index.shard_names import folder_and_name
from streamload.storage.protocol import (
    UNKNOWN_BYTES,
    ShardInfo,
)
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls

__all__ = ["Listing", "Shard", "joined_listing", "list_shards"]


class Shard(NamedTuple):
    """One shard of a dataset; a tuple, because hundreds of thousands of them go to the feeder at once.

    Attributes:
        url: where it lies; an absolute path where it is local.
        name: the last component of the url, by which an index knows it.
        bytes: its size; `UNKNOWN_BYTES` where only reading shows it.
        mtime_ns: its time of modification in nanoseconds since the epoch; 0 where it is not known.
        folder: the url without its last component.
        etag: its version in the storage, where it is known.
    """

    url: str
    name: str
    bytes: int
    mtime_ns: int
    folder: str
    etag: str | None = None


_log = logging.getLogger("streamload")


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The shards of a dataset, in their order.

    Attributes:
        shards: at least one shard, none of them twice.
        counts: samples in each shard, or None unless every shard is in an index.
        index_of: for each shard the folder of the index that knows it, or None.
        fields: the fields that the indexes name, each once, in the order in which they come.
    """

    shards: tuple[Shard, ...]
    counts: tuple[int, ...] | None
    index_of: tuple[str | None, ...]
    fields: tuple[str, ...]


def list_shards(
    urls: Urls,
    index: str | os.PathLike[str] | None = None,
    storages: Storages | None = None,
    *,
    indexes_read: dict[str, DatasetIndex] | None = None,
) -> Listing:
    """List the shards that `urls` names, and find the indexes beside them.

    Braces and `::` are expanded in the order in which they are written; the matches of a glob and the shards of a
    folder are sorted. A folder stands for the shards in its index, or for its tar files where it has none.

    A remote folder costs one request for its index, and where it has none one for the mark of an interrupted writer
    and one listing; the entry of a remote shard is trusted, and a shard that has changed is found when it is
    read. Web servers cannot list: the sizes of their shards are `UNKNOWN_BYTES` where no index has them.

    Args:
        urls: a string or path, or a list of them: shards, patterns, folders.
        index: a folder with an index for shards elsewhere: `.streamload` itself or its parent. It replaces the indexes
            beside the shards, and may be remote.
        storages: how remote storage is read; by default without options.
        indexes_read: receives the indexes of some of the shards, by folder, for later use.

    Raises:
        TypeError, ValueError: `urls` is of the wrong kind, names a storage or a compression that is not known, or
            names a shard twice.
        ShardNotFoundError: a shard is missing, or a pattern or a folder stands for nothing.
        StorageError: a shard cannot be looked up.
        DatasetIndexError: an index is broken, or does not belong to its shards; or the writer of the shards was
            interrupted, or is still running.
    """
    storages = Storages() if storages is None else storages
    indexes = IndexLookup(index, storages)
    finder = Finder(storages, indexes)
    shards = tuple(_shard(found) for found in finder.find(urls))
    counts: list[int | None] = []
    index_of: list[str | None] = []
    used: dict[str, DatasetIndex] = {}
    for shard in shards:
        known = indexes.of_folder(shard.folder)
        entry = None if known is None else known.find(shard.name)
        if entry is None:
            indexes.refuse_unfinished(shard.folder, shard.name)
        index_of.append(known.folder if known is not None and entry is not None else None)
        counts.append(None if entry is None else entry.samples)
        if known is not None and entry is not None:
            if shard.bytes != UNKNOWN_BYTES:
                check_shard(entry, shard.bytes, shard.url, shard.etag)
            used[known.folder] = known
    indexes.warn_of_unreadable()
    if indexes_read is not None:
        indexes_read.update(used)
    fields = dict.fromkeys(name for known in used.values() for name in known.fields)
    known_counts = tuple(count for count in counts if count is not None)
    return Listing(shards, known_counts if len(known_counts) == len(shards) else None, tuple(index_of), tuple(fields))


def _shard(found: ShardInfo) -> Shard:
    folder, name = folder_and_name(found.url)
    return Shard(found.url, name, found.bytes, found.mtime_ns, folder, found.etag)


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
