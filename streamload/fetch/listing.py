"""From what a user names to the list of shards, with sizes and with what indexes say about them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from glob import escape
from typing import NamedTuple

from streamload.dataset.index import INDEX_FILE, INDEX_FOLDER, DatasetIndex, IndexedShard, check_shard
from streamload.dataset.urls import Urls, expand_urls
from streamload.errors import DatasetIndexError, ShardNotFoundError
from streamload.fetch.local_storage import storage_for
from streamload.fetch.storage import Storage, is_pattern

__all__ = ["IndexLookup", "Listing", "Shard", "find_shards", "list_shards"]

_COMPRESSED = re.compile(r"\.(?:tgz|tbz2?|txz|tzst|tar\.(?:gz|bz2|xz|zst|zstd|lz4|lzma|br))\Z", re.IGNORECASE)


class Shard(NamedTuple):
    """One shard of a dataset; a tuple, because hundreds of thousands of them go to the feeder at once.

    Attributes:
        url: where it lies; an absolute path where it is local.
        name: the last component of the url, by which an index knows it.
        bytes: its size.
        mtime_ns: its time of modification in nanoseconds since the epoch.
        folder: the url without its last component.
        etag: the version of the object where the storage has one and the listing says it.
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
    """

    shards: tuple[Shard, ...]
    counts: tuple[int, ...] | None
    index_of: tuple[str | None, ...]
    fields: tuple[str, ...]


def list_shards(urls: Urls, index: str | os.PathLike[str] | None = None) -> Listing:
    """List the shards that `urls` names, and find the indexes beside them.

    Braces and `::` are expanded in the order in which they are written; the matches of a glob and the shards of a
    folder are sorted. A folder stands for the shards in its index, or for its `*.tar` where it has none.

    Args:
        urls: a string or path, or a list of them: shards, patterns, folders.
        index: a folder with an index for shards that lie elsewhere: `.streamload` itself or the folder around it. It
            is asked instead of the indexes beside the shards.

    Raises:
        TypeError, ValueError: `urls` is of the wrong kind, names remote storage or a compressed shard, or names a
            shard twice.
        ShardNotFoundError: a shard is missing, or a pattern or a folder stands for nothing.
        StorageError: a shard cannot be looked at.
        DatasetIndexError: an index is broken, or does not belong to its shards.
    """
    indexes = IndexLookup(index)
    shards = tuple(_shard(url) for url in _find(urls, indexes))
    counts: list[int] = []
    index_of: list[str | None] = []
    used: dict[str, DatasetIndex] = {}
    for shard in shards:
        known = indexes.of_folder(shard.folder)
        entry = indexes.entry_of(shard.folder, shard.name)
        index_of.append(known.folder if known is not None and entry is not None else None)
        if known is not None and entry is not None:
            check_shard(entry, shard.bytes, shard.url)
            counts.append(entry.samples)
            used[known.folder] = known
    fields = dict.fromkeys(name for known in used.values() for name in known.fields)
    return Listing(shards, tuple(counts) if len(counts) == len(shards) else None, tuple(index_of), tuple(fields))


def find_shards(urls: Urls) -> list[str]:
    """The shards that `urls` names, by what lies there alone: no index is read, a folder stands for its `*.tar`.

    Raises:
        TypeError, ValueError, ShardNotFoundError, StorageError: as `list_shards`, except that a shard that is named
            without a pattern is not looked for.
    """
    return _find(urls, None)


def _find(urls: Urls, indexes: IndexLookup | None) -> list[str]:
    found: list[str] = []
    for url in expand_urls(urls):
        found += _resolve(url, indexes)
    _refuse_repetitions(found)
    return found


class IndexLookup:
    """The indexes of the folders that shards lie in, each read once."""

    def __init__(self, elsewhere: str | os.PathLike[str] | None = None) -> None:
        """Prepare to look beside the shards, or read the one index that lies elsewhere.

        Raises:
            DatasetIndexError: there is none where `elsewhere` says, or it is broken.
        """
        self._by_folder: dict[str, DatasetIndex | None] = {}
        self._entries: dict[str, dict[str, IndexedShard]] = {}
        self._elsewhere = None if elsewhere is None else _index_elsewhere(os.fspath(elsewhere))

    def of_folder(self, folder: str) -> DatasetIndex | None:
        """The index for the shards in a folder, or None. Raises DatasetIndexError where it is broken."""
        if self._elsewhere is not None:
            return self._elsewhere
        if folder not in self._by_folder:
            holds_one = os.path.exists(os.path.join(folder, INDEX_FOLDER, INDEX_FILE))
            self._by_folder[folder] = DatasetIndex.load(os.path.join(folder, INDEX_FOLDER)) if holds_one else None
        return self._by_folder[folder]

    def entry_of(self, folder: str, name: str) -> IndexedShard | None:
        """What the index for a folder says of one shard, or None. Raises DatasetIndexError where it is broken."""
        index = self.of_folder(folder)
        if index is None:
            return None
        if index.folder not in self._entries:
            self._entries[index.folder] = {entry.name: entry for entry in index.shards}
        return self._entries[index.folder].get(name)


def _index_elsewhere(index: str) -> DatasetIndex:
    storage_for(index)
    for folder in (index, os.path.join(index, INDEX_FOLDER)):
        if os.path.exists(os.path.join(folder, INDEX_FILE)):
            return DatasetIndex.load(folder)
    raise DatasetIndexError(
        f"index={index!r} holds no index.json; write one there with `streamload index SHARDS --output {index}`"
    )


def _resolve(url: str, indexes: IndexLookup | None) -> list[str]:
    """The shards that one expanded url stands for."""
    storage = storage_for(url)
    url = storage.absolute(url)
    _refuse_compressed(url)
    if storage.is_folder(url):
        return _in_folder(storage, url.rstrip("/"), indexes)
    if is_pattern(url):
        matches = [match.url for match in storage.list(url)]
        if not matches:
            raise ShardNotFoundError("no file matches this pattern; check the path and the pattern", url=url)
        for match in matches:
            _refuse_compressed(match)
        return matches
    return [url]


def _in_folder(storage: Storage, folder: str, indexes: IndexLookup | None) -> list[str]:
    tars = [tar.url for tar in storage.list(f"{escape(folder)}/*.tar")]
    known = indexes.of_folder(folder) if indexes is not None else None
    if known is not None:
        named = sorted(shard.name for shard in known.shards)
        forgotten = sorted({os.path.basename(tar) for tar in tars}.difference(named))
        if forgotten:
            raise DatasetIndexError(
                f"the folder holds {len(forgotten)} shards that its index does not know, from {forgotten[0]!r} on; add "
                f"them with `streamload index {folder}`, or name the shards with a pattern",
                url=folder,
            )
        return [f"{folder}/{name}" for name in named]
    if not tars:
        raise ShardNotFoundError(f"this folder holds no index and no *.tar; {_advice(storage, folder)}", url=folder)
    return tars


def _advice(storage: Storage, folder: str) -> str:
    packed = [match.url for match in storage.list(f"{escape(folder)}/*") if _COMPRESSED.search(match.url)]
    if packed:
        return f"compressed shards such as {os.path.basename(packed[0])!r} are not supported yet; decompress them"
    inside = [match.url for match in storage.list(f"{escape(folder)}/*", folders=True)]
    with_shards = [match for match in inside if storage.list(f"{escape(match)}/*.tar")]
    if with_shards:
        return f"folders in it do: name one of them, such as {with_shards[0]!r}"
    if inside:
        return f"if it is an ImageFolder (one folder a class), pack it first: shardify {folder} DESTINATION"
    return "check the path"


def _refuse_compressed(url: str) -> None:
    if _COMPRESSED.search(url):
        raise ValueError(f"urls names {url!r}, but compressed shards are not supported yet; decompress them")


def _refuse_repetitions(found: list[str]) -> None:
    plain = [os.path.normpath(url) for url in found]
    if len(set(plain)) == len(plain):
        return
    seen: set[str] = set()
    for path in plain:
        if path in seen:
            raise ValueError(
                f"urls names the shard {path!r} twice, which would give each of its samples twice; remove one of them "
                "(to see samples more often, iterate more often)"
            )
        seen.add(path)


def _shard(url: str) -> Shard:
    found = storage_for(url).info(url)
    folder, _, name = found.url.rpartition("/")
    return Shard(found.url, name, found.bytes, found.mtime_ns, folder or "/", found.etag)
