"""From what a user names to the list of shards, with sizes and with what indexes say about them."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import escape
from typing import NamedTuple
from urllib.parse import quote

from streamload.dataset.index import DatasetIndex, IndexedShard, check_shard
from streamload.dataset.urls import Urls, expand_urls
from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError
from streamload.fetch.foreign_lookup import ForeignLookup
from streamload.fetch.index_lookup import IndexLookup
from streamload.fetch.shard_names import (
    WEB,
    folder_and_name,
    is_shard_name,
    refuse_repetitions,
    refuse_unknown_compression,
    shard_name,
)
from streamload.fetch.storage import UNKNOWN_BYTES, ShardInfo, Storage, is_pattern, protocol_of, without_secrets
from streamload.fetch.storage_errors import close_matches
from streamload.fetch.storages import Storages

__all__ = ["IndexLookup", "Listing", "Shard", "find_shards", "list_shards"]

_log = logging.getLogger("streamload")


class Shard(NamedTuple):
    """One shard of a dataset; a tuple, because hundreds of thousands of them go to the feeder at once.

    Attributes:
        url: where it lies; an absolute path where it is local.
        name: the last component of the url, by which an index knows it.
        bytes: its size; `UNKNOWN_BYTES` where only reading tells it.
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

    A remote folder costs one request for its index, and one listing where it has none; what an index says of a remote
    shard is taken from it, and a shard that was changed since shows when it is read. Web servers cannot list: the
    sizes of their shards are `UNKNOWN_BYTES` where no index has them.

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
        DatasetIndexError: an index is broken, or does not belong to its shards.
    """
    storages = Storages() if storages is None else storages
    indexes = IndexLookup(index, storages)
    finder = _Finder(storages, indexes)
    shards = tuple(_shard(found) for found in finder.find(urls))
    counts: list[int | None] = []
    index_of: list[str | None] = []
    used: dict[str, DatasetIndex] = {}
    for shard in shards:
        known = indexes.of_folder(shard.folder)
        entry = indexes.entry_of(shard.folder, shard.name)
        index_of.append(known.folder if known is not None and entry is not None else None)
        counts.append(None if entry is None else entry.samples)
        if known is not None and entry is not None:
            if shard.bytes != UNKNOWN_BYTES:
                check_shard(entry, shard.bytes, shard.url, shard.etag)
            used[known.folder] = known
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


def find_shards(urls: Urls, storages: Storages | None = None) -> list[str]:
    """The shards that `urls` names, by what lies there alone: no index is read, a folder stands for its tar files.

    Raises:
        TypeError, ValueError, ShardNotFoundError, StorageError: as `list_shards`, except that a shard that is named
            without a pattern is not looked for.
    """
    return _Finder(Storages() if storages is None else storages, None).names(urls)


class _Finder:
    """From names to shards, with few requests: an index or one listing for each remote folder, none for each shard."""

    def __init__(self, storages: Storages, indexes: IndexLookup | None) -> None:
        self._storages = storages
        self._indexes = indexes
        self._listed: dict[str, Sequence[ShardInfo]] = {}

    def promised(self, shards: Sequence[Shard]) -> dict[str, int]:
        """What other tools' indexes beside some shards say of their counts, by url; costs no listing of its own.

        Raises:
            DatasetIndexError, ShardFormatError: as `ForeignLookup.counts`.
        """
        foreign = ForeignLookup(self._storages)
        by_folder: dict[str, list[Shard]] = {}
        for shard in shards:
            by_folder.setdefault(shard.folder, []).append(shard)
        found: dict[str, int] = {}
        for folder, inside in by_folder.items():
            counts = foreign.counts(folder, {shard.name: shard.bytes for shard in inside}, self._listed.get(folder))
            found |= {shard.url: counts[shard.name] for shard in inside if shard.name in counts}
        return found

    def find(self, urls: Urls) -> list[ShardInfo]:
        """What is known of the shards that `urls` names, in order; see `find_shards` for the errors."""
        found: list[ShardInfo | str] = []
        for url in expand_urls(urls):
            found += self._resolve(url)
        refuse_repetitions([url if isinstance(url, str) else url.url for url in found])
        named = self._look_up([url for url in found if isinstance(url, str)])
        return [named[url] if isinstance(url, str) else self._looked_at(url) for url in found]

    def names(self, urls: Urls) -> list[str]:
        """The urls of the shards alone; those that are named are not looked at."""
        found = [match for url in expand_urls(urls) for match in self._resolve(url)]
        names = [url if isinstance(url, str) else url.url for url in found]
        refuse_repetitions(names)
        return names

    def _looked_at(self, found: ShardInfo) -> ShardInfo:
        """A match; `info` says what is wrong with a local one that has no size."""
        if found.bytes == UNKNOWN_BYTES and self._storages.is_local(found.url):
            return self._storages.for_url(found.url).info(found.url)
        return found

    def _resolve(self, url: str) -> Sequence[ShardInfo | str]:
        """The shards that one expanded url stands for; those that are named are looked at later, together."""
        storage = self._storages.for_url(url)
        url = storage.absolute(url)
        refuse_unknown_compression(url)
        local = self._storages.is_local(url)
        if local and storage.is_folder(url):
            return self._in_local_folder(storage, url.rstrip("/"))
        if is_pattern(url):
            matches = storage.list(url) if local else self._matching(storage, url)
            if not matches:
                raise ShardNotFoundError("no file matches this pattern; check the path and the pattern", url=url)
            for match in matches:
                refuse_unknown_compression(match.url)
            return matches
        if not local and not is_shard_name(shard_name(url)):
            return self._in_remote_folder(storage, url.rstrip("/"))
        return [url]

    def _matching(self, storage: Storage, pattern: str) -> Sequence[ShardInfo]:
        """What matches remotely. A folder without a pattern in its own name is listed whole, for what lies beside."""
        folder, name = folder_and_name(pattern)
        if is_pattern(folder) or "::" in pattern or name.startswith(".") or protocol_of(pattern) in WEB:
            return storage.list(pattern)
        wanted = re.compile(fnmatch.translate(name)).match
        return [found for found in self._in_folder(storage, folder) if wanted(shard_name(found.url))]

    def _in_folder(self, storage: Storage, folder: str) -> Sequence[ShardInfo]:
        if folder not in self._listed:
            self._listed[folder] = storage.list(f"{escape(folder)}/*")
        return self._listed[folder]

    def _in_local_folder(self, storage: Storage, folder: str) -> Sequence[ShardInfo | str]:
        tars = _shards_in(storage, folder)
        known = self._indexes.of_folder(folder) if self._indexes is not None else None
        if known is not None:
            named = sorted(shard.name for shard in known.shards)
            forgotten = sorted({os.path.basename(tar.url) for tar in tars}.difference(named))
            if forgotten:
                raise DatasetIndexError(
                    f"the folder holds {len(forgotten)} shards that its index does not know, from {forgotten[0]!r} on; "
                    f"add them with `streamload index {folder}`, or name the shards with a pattern",
                    url=folder,
                )
            return [f"{folder}/{name}" for name in named]
        if not tars:
            raise ShardNotFoundError(f"this folder holds no index and no *.tar; {_advice(storage, folder)}", url=folder)
        return tars

    def _in_remote_folder(self, storage: Storage, folder: str) -> Sequence[ShardInfo]:
        known = self._indexes.of_folder(folder) if self._indexes is not None else None
        if known is not None:
            web = protocol_of(folder) in WEB
            return [
                _indexed(f"{folder}/{quote(entry.name) if web else entry.name}", entry)
                for entry in sorted(known.shards, key=lambda entry: entry.name)
            ]
        if protocol_of(folder) in WEB:
            raise ShardNotFoundError(
                "this address holds no index, and a web server does not list its files; name the shards, with braces: "
                "train-{000000..000099}.tar",
                url=without_secrets(folder),
            )
        tars = [found for found in self._in_folder(storage, folder) if is_shard_name(found.url)]
        if tars:
            return tars
        try:
            return [storage.info(folder)]  # a shard with another ending
        except ShardNotFoundError as exc:
            raise ShardNotFoundError(
                f"there is no shard of this name, and as a folder it holds no index and no *.tar ({exc.message})",
                url=without_secrets(folder),
            ) from None

    def _look_up(self, urls: Sequence[str]) -> dict[str, ShardInfo]:
        """What is known of shards that are named one by one."""
        found: dict[str, ShardInfo] = {}
        by_folder: dict[str, list[str]] = {}
        for url in urls:
            if self._storages.is_local(url):
                found[url] = self._storages.for_url(url).info(url)
                continue
            folder, name = folder_and_name(url)
            entry = self._indexes.entry_of(folder, name) if self._indexes is not None else None
            if entry is not None:
                found[url] = _indexed(url, entry)
            else:
                by_folder.setdefault(folder, []).append(url)
        for folder, named in by_folder.items():
            found |= self._look_up_in(folder, named)
        return found

    def _look_up_in(self, folder: str, urls: Sequence[str]) -> dict[str, ShardInfo]:
        """The same for shards of one remote folder without an index, from one listing where there can be one."""
        if protocol_of(folder) in WEB:
            return {url: ShardInfo(url, UNKNOWN_BYTES, 0) for url in urls}
        storage = self._storages.for_url(urls[0])
        if len(urls) == 1:
            return {urls[0]: storage.info(urls[0])}
        try:
            listed = {info.url: info for info in self._in_folder(storage, folder)}
        except StorageError as exc:
            if type(exc) is not StorageError:
                raise
            _log.warning("the sizes of the shards are not known before they are read: %s", exc)
            return {url: ShardInfo(url, UNKNOWN_BYTES, 0) for url in urls}
        found = {}
        for url in urls:
            if url in listed:
                found[url] = listed[url]
            elif shard_name(url).startswith("."):  # which listings leave out
                found[url] = storage.info(url)
            else:
                advice = close_matches(shard_name(url), map(shard_name, listed), folder)
                raise ShardNotFoundError(f"no such shard: {advice}", url=without_secrets(url))
        return found


def _shards_in(storage: Storage, folder: str) -> Sequence[ShardInfo]:
    return [found for found in storage.list(f"{escape(folder)}/*") if is_shard_name(found.url)]


def _indexed(url: str, entry: IndexedShard) -> ShardInfo:
    return ShardInfo(url, entry.bytes, entry.mtime_ns or 0, entry.etag)


def _advice(storage: Storage, folder: str) -> str:
    inside = [match.url for match in storage.list(f"{escape(folder)}/*", folders=True)]
    with_shards = [match for match in inside if _shards_in(storage, match)]
    if with_shards:
        return f"folders in it do: name one of them, such as {with_shards[0]!r}"
    if inside:
        return f"if it is an ImageFolder (one folder a class), pack it first: shardify {folder} DESTINATION"
    return "check the path"


def _shard(found: ShardInfo) -> Shard:
    folder, name = folder_and_name(found.url)
    return Shard(found.url, name, found.bytes, found.mtime_ns, folder, found.etag)
