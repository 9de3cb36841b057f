"""From what a user names to the list of shards, with sizes and with what indexes say about them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from streamload.dataset.index import DatasetIndex, check_shard
from streamload.dataset.urls import Urls
from streamload.fetch.listing.finder import Finder
from streamload.fetch.listing.index_lookup import IndexLookup
from streamload.fetch.listing.shard import Shard
from streamload.fetch.listing.shard_names import (
    folder_and_name,
)
from streamload.fetch.storage.protocol import (
    UNKNOWN_BYTES,
    ShardInfo,
)
from streamload.fetch.storage.storages import Storages

__all__ = ["Listing", "list_shards"]

_log = logging.getLogger("streamload")


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The shards of a dataset, in their order.

    Attributes:
        shards: at least one shard, none of them twice.
        counts: samples in each shard, or None unless every shard is in an index.
        index_of: for each shard the folder of the index that knows it, or None.
        fields: the fields that the indexes name, each once, in the order in which they come.
        promised: for each shard that no index of ours knows the samples in it by another tool's index, or None; empty
            where there are no such promises. Whoever reads the shard holds it to its promise.
        indexed: for each shard the samples in it by our index, or None; empty where `promised` is.
    """

    shards: tuple[Shard, ...]
    counts: tuple[int, ...] | None
    index_of: tuple[str | None, ...]
    fields: tuple[str, ...]
    promised: tuple[int | None, ...] = ()
    indexed: tuple[int | None, ...] = ()

    @property
    def expected_counts(self) -> tuple[int, ...] | None:
        """Samples in each shard by our indexes or by other tools', or None unless all are known."""
        if self.counts is not None or not self.promised:
            return self.counts
        merged = [
            known if known is not None else promise for known, promise in zip(self.indexed, self.promised, strict=True)
        ]
        found = tuple(count for count in merged if count is not None)
        return found if len(found) == len(merged) else None


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
    and one listing; what an index says of a remote shard is taken from it, and a shard that was changed since shows
    when it is read. Web servers cannot list: the sizes of their shards are `UNKNOWN_BYTES` where no index has them.

    Args:
        urls: a string or path, or a list of them: shards, patterns, folders.
        index: a folder with an index for shards that lie elsewhere: `.streamload` itself or the folder around it. It
            is asked instead of the indexes beside the shards. It may be remote.
        storages: how remote storage is read; by default without options.
        indexes_read: takes the indexes that know some of the shards, by folder, for whoever needs them afterwards.

    Raises:
        TypeError, ValueError: `urls` is of the wrong kind, names a storage or a compression that is not known, or
            names a shard twice.
        ShardNotFoundError: a shard is missing, or a pattern or a folder stands for nothing.
        StorageError: a shard cannot be looked at.
        DatasetIndexError: an index is broken, or does not belong to its shards; or whoever wrote the shards was
            interrupted, or is still at work.
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
        entry = indexes.entry_of(shard.folder, shard.name)
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
    sure = tuple(count for count in counts if count is not None)
    if len(sure) == len(shards):
        return Listing(shards, sure, tuple(index_of), tuple(fields))
    promised = finder.promised([shard for shard, count in zip(shards, counts, strict=True) if count is None])
    if not promised:
        return Listing(shards, None, tuple(index_of), tuple(fields))
    promises = tuple(promised.get(shard.url) for shard in shards)
    return Listing(shards, None, tuple(index_of), tuple(fields), promises, tuple(counts))


def _shard(found: ShardInfo) -> Shard:
    folder, name = folder_and_name(found.url)
    return Shard(found.url, name, found.bytes, found.mtime_ns, folder, found.etag)
