"""From what a user names to the list of shards, with their sizes and their index entries."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from streamload.errors import DatasetIndexError, without_secrets
from streamload.index.dataset_index import DatasetIndex, check_shard
from streamload.index.finder import Finder
from streamload.index.index_lookup import IndexLookup
from streamload.index.shard_names import folder_and_name
from streamload.storage.download import Pin
from streamload.storage.protocol import (
    UNKNOWN_BYTES,
    ShardInfo,
)
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls, expand_urls
from streamload.tar.decompression import without_compression
from streamload.text import counted


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


class Sidecars(NamedTuple):
    """Shards that hold more fields of the samples in other shards, matched by their keys.

    Attributes:
        shards: each in an index.
        index_of: for each the folder of its index.
        owners: for each the number of the shard whose samples it has fields of.
        fields: those that it has, in all.
    """

    shards: tuple[Shard, ...] = ()
    index_of: tuple[str, ...] = ()
    owners: tuple[int, ...] = ()
    fields: tuple[str, ...] = ()


_NO_SIDECARS = Sidecars()


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The shards of a dataset, in their order.

    Attributes:
        shards: at least one shard, none of them twice.
        counts: samples in each shard, or None unless every shard is in an index.
        index_of: for each shard the folder of the index that knows it, or None.
        fields: the fields that the indexes name, each once, in the order in which they come; with those of sidecars.
        sidecars: shards that hold more of their fields. They are numbered behind `shards`, and are in no order.
    """

    shards: tuple[Shard, ...]
    counts: tuple[int, ...] | None
    index_of: tuple[str | None, ...]
    fields: tuple[str, ...]
    sidecars: Sidecars = _NO_SIDECARS

    @property
    def numbered(self) -> tuple[Shard, ...]:
        """All shards that samples have fields in, by number."""
        return self.shards + self.sidecars.shards

    def shard(self, number: int) -> Shard:
        """One of them."""
        count = len(self.shards)
        return self.shards[number] if number < count else self.sidecars.shards[number - count]

    def pin(self, number: int) -> Pin:
        """The version that every answer for one of them must be of, as far as it is known."""
        shard = self.shard(number)
        total_bytes = None if shard.bytes == UNKNOWN_BYTES else shard.bytes
        return Pin(total_bytes, shard.etag, indexed=self.index_folder(number) is not None)

    def index_folder(self, number: int) -> str | None:
        """The folder of the index that knows one of them, or None."""
        count = len(self.shards)
        return self.index_of[number] if number < count else self.sidecars.index_of[number - count]

    def owner(self, number: int) -> int:
        """The shard whose samples one of them has fields of: mostly itself."""
        count = len(self.shards)
        return number if number < count else self.sidecars.owners[number - count]


def list_shards(
    urls: Urls,
    index: str | os.PathLike[str] | None = None,
    storages: Storages | None = None,
    join: Sequence[Urls] = (),
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
        join: sidecars: datasets with an index that have a shard for each shard: of the same name, or in its place.
        indexes_read: receives the indexes of some of the shards, by folder, for later use.

    Raises:
        TypeError, ValueError: `urls` is of the wrong kind, names a storage or a compression that is not known, or
            names a shard twice; or a sidecar does not belong to the shards.
        ShardNotFoundError: a shard is missing, or a pattern or a folder stands for nothing.
        StorageError: a shard cannot be looked up.
        DatasetIndexError: an index is broken, or does not belong to its shards; or the writer of the shards was
            interrupted, or is still running; or a sidecar has no index.
    """
    storages = Storages() if storages is None else storages
    listing = _listed(urls, index, storages, indexes_read)
    for sidecar in join:
        listing = _with_sidecar(listing, _listed(sidecar, None, storages, indexes_read), sidecar)
    return listing


def _listed(
    urls: Urls,
    index: str | os.PathLike[str] | None,
    storages: Storages,
    indexes_read: dict[str, DatasetIndex] | None,
) -> Listing:
    indexes = IndexLookup(index, storages)
    finder = Finder(storages, indexes)
    shards = _shards(finder.find(urls))
    counts: list[int | None] = []
    index_of: list[str | None] = []
    used: dict[str, DatasetIndex] = {}
    for shard in shards:
        known = indexes.of_folder(shard.folder)
        number = None if known is None else known.number(shard.name)
        if known is None or number is None:
            indexes.refuse_unfinished(shard.folder, shard.name)
            index_of.append(None)
            counts.append(None)
            continue
        index_of.append(known.folder)
        counts.append(known.shards.samples[number])
        entries = known.shards  # by columns: an entry is made only to be complained about
        same_version = shard.etag == entries.etags[number] or None in (shard.etag, entries.etags[number])
        if shard.bytes != UNKNOWN_BYTES and not (same_version and shard.bytes == entries.sizes[number]):
            check_shard(entries[number], shard.bytes, shard.url, shard.etag)
        used[known.folder] = known
    indexes.warn_of_unreadable()
    if indexes_read is not None:
        indexes_read.update(used)
    fields = dict.fromkeys(name for known in used.values() for name in known.fields)
    known_counts = tuple(count for count in counts if count is not None)
    return Listing(shards, known_counts if len(known_counts) == len(shards) else None, tuple(index_of), tuple(fields))


def _with_sidecar(listing: Listing, other: Listing, named: Urls) -> Listing:
    """The listing, joined with one more sidecar."""
    shown = f"join={without_secrets(', '.join(expand_urls(named)))!r}"
    folders = tuple(folder for folder in other.index_of if folder is not None)
    if len(folders) < len(other.shards):
        raise DatasetIndexError(
            f"{shown} has no index, which says where its fields lie; make one with `streamload index`",
            url=other.shards[other.index_of.index(None)].url,
        )
    twice = next((field for field in other.fields if field in listing.fields), None)
    if twice is not None:
        raise ValueError(f"{shown} has the field {twice!r}, which the shards have too; a sidecar holds other fields")
    numbers = _matched(listing.shards, other.shards, shown)
    before = listing.sidecars
    sidecars = Sidecars(
        before.shards + tuple(other.shards[number] for number in numbers),
        before.index_of + tuple(folders[number] for number in numbers),
        before.owners + tuple(range(len(listing.shards))),
        before.fields + other.fields,
    )
    return replace(listing, fields=listing.fields + other.fields, sidecars=sidecars)


def _matched(shards: Sequence[Shard], others: Sequence[Shard], shown: str) -> list[int]:
    """For each shard the number of its sidecar's: the one of the same name, or as many in the same order."""
    names = [without_compression(shard.name) for shard in shards]
    numbers = {without_compression(shard.name): number for number, shard in enumerate(others)}
    if len(set(names)) == len(names) and len(numbers) == len(others) and numbers.keys() >= set(names):
        return [numbers[name] for name in names]
    if len(names) == len(others):
        return list(range(len(names)))
    lacking = next((name for name in names if name not in numbers), names[0])
    raise ValueError(
        f"{shown} has {counted(len(others), 'shard')} for {len(names):,}, and none that is called {lacking!r}; a "
        "sidecar has a shard of the same name for each, or as many in the same order, as `streamload map --sidecar` "
        "writes them"
    )


def _shards(found: Iterable[ShardInfo]) -> tuple[Shard, ...]:
    """The shards with their folders, each of which is one object: so it is held, and sent to the feeder, once."""
    folders: dict[str, str] = {}
    shards = []
    for url, size, mtime_ns, etag in found:
        folder, name = folder_and_name(url)
        shards.append(Shard(url, name, size, mtime_ns, folders.setdefault(folder, folder), etag))
    return tuple(shards)


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
    firsts = accumulate((len(listing.shards) for listing in listings), initial=0)
    owners = [first + owner for first, one in zip(firsts, listings, strict=False) for owner in one.sidecars.owners]
    sidecars = Sidecars(
        tuple(shard for listing in listings for shard in listing.sidecars.shards),
        tuple(folder for listing in listings for folder in listing.sidecars.index_of),
        tuple(owners),
        tuple(dict.fromkeys(name for listing in listings for name in listing.sidecars.fields)),
    )
    return Listing(shards, counts, index_of, fields, sidecars)
