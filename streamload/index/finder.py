"""From what a user names to existing shards: braces, globs, folders and single shards, in their order."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import NoReturn, Self
from urllib.parse import quote

from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError, without_secrets
from streamload.index.dataset_index import DatasetIndex
from streamload.index.index_lookup import IndexLookup
from streamload.index.shard_names import (
    WEB,
    folder_and_name,
    is_shard_name,
    refuse_repetitions,
    refuse_unknown_compression,
    shard_name,
)
from streamload.index.unfinished import PACKING, SHARDIFY_ADVICE, STAGING
from streamload.limits import SMALL_REQUESTS
from streamload.storage.errors import close_matches
from streamload.storage.local_storage import local_path
from streamload.storage.protocol import UNKNOWN_BYTES, ShardInfo, Storage, escaped, is_pattern, protocol_of
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls, chain_links, expand_urls
from streamload.text import counted


def look_at(urls: Sequence[str], storages: Storages) -> dict[str, int]:
    """The size of each shard in bytes, by concurrent requests, one for each shard. It blocks.

    Raises:
        ShardNotFoundError, StorageError: the request for one fails; of several, the first of `urls`.
    """
    with InfoRequests(storages, urls) as requests:
        return {url: requests.info(url).bytes for url in urls}


class InfoRequests:
    """Requests for information on shards, at most `SMALL_REQUESTS` at a time; the `with` block starts them.

    Its end waits for those in flight, and drops the others.

    Args:
        storages: where the shards lie.
        urls: the shards, in the order of the requests.
    """

    def __init__(self, storages: Storages, urls: Iterable[str]) -> None:
        self._storages = storages
        self._urls = urls
        self._answers: dict[str, Future[ShardInfo]] = {}

    def __enter__(self) -> Self:
        self._threads = ThreadPoolExecutor(SMALL_REQUESTS, "streamload-look")
        self._answers = {url: self._threads.submit(self._look, url) for url in self._urls}
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def info(self, url: str) -> ShardInfo:
        """The answer for one of the shards; it blocks. Raises what `Storage.info` raises."""
        return self._answers[url].result()

    def _look(self, url: str) -> ShardInfo:
        return self._storages.for_url(url).info(url)


_log = logging.getLogger("streamload")

# The name of an uncompressed shard.
_PLAIN_NAME = re.compile(r"[\w-]+\.tar")


def find_shards(urls: Urls, storages: Storages | None = None) -> list[str]:
    """The shards that `urls` names, by what lies there alone: no index is read, a folder stands for its tar files.

    Raises:
        TypeError, ValueError, ShardNotFoundError, StorageError: as `list_shards`, except that a shard named
            without a pattern is not looked up.
        DatasetIndexError: the writer of the shards was interrupted, or is still running.
    """
    storages = Storages() if storages is None else storages
    lookup = IndexLookup(None, storages)
    try:
        found = Finder(storages, None).names(urls)
    except ShardNotFoundError as exc:
        if exc.url is not None:
            lookup.refuse_unfinished(exc.url)
        raise
    for url in found:
        lookup.refuse_unfinished(*folder_and_name(url))
    return found


class Finder:
    """From names to shards, with few requests: an index or one listing for each remote folder, none for each shard."""

    def __init__(self, storages: Storages, indexes: IndexLookup | None) -> None:
        self._storages = storages
        self._indexes = indexes
        self._listed: dict[str, Sequence[ShardInfo]] = {}
        self._plain_folders: set[str] = set()

    def find(self, urls: Urls) -> list[ShardInfo]:
        """The shards that `urls` names, in order; see `find_shards` for the errors."""
        found: list[ShardInfo | str] = []
        for url in expand_urls(urls):
            found += self._resolve(url)
        refuse_repetitions([url if isinstance(url, str) else url.url for url in found])
        try:
            named = self._look_up([url for url in found if isinstance(url, str)])
        except ShardNotFoundError as exc:
            raise self._counted(urls, exc) from None
        return [named[url] if isinstance(url, str) else self._looked_at(url) for url in found]

    def names(self, urls: Urls) -> list[str]:
        """The urls of the shards alone; those named one by one are not looked up."""
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
        """The shards that one expanded url stands for; those named one by one are looked up later, together."""
        folder, _, name = url.rpartition("/")
        if folder in self._plain_folders and _PLAIN_NAME.fullmatch(name):
            return [url]  # the fast path for long lists
        storage = self._storages.for_url(url)
        written, url = url, storage.absolute(url)
        refuse_unknown_compression(url)
        local = self._storages.is_local(url)
        if local and storage.is_folder(url):
            return self._in_local_folder(storage, url.rstrip("/"))
        if is_pattern(url):
            matches = storage.list(url)
            if not matches:
                raise ShardNotFoundError("no file matches this pattern; check the path and the pattern", url=url)
            for match in matches:
                refuse_unknown_compression(match.url)
            return matches
        if not local and not is_shard_name(shard_name(url)):
            return self._in_remote_folder(storage, url.rstrip("/"))
        if not local and url == written and _PLAIN_NAME.fullmatch(name) and "::" not in url and "?" not in url:
            self._plain_folders.add(folder)
        return [url]

    def _in_folder(self, storage: Storage, folder: str) -> Sequence[ShardInfo]:
        if folder not in self._listed:
            self._listed[folder] = storage.list(f"{escaped(folder)}/*")
        return self._listed[folder]

    def _known(self, folder: str) -> DatasetIndex | None:
        """The index of a folder that stands for all of its shards; without one, they must be complete."""
        known = None if self._indexes is None else self._indexes.of_folder(folder)
        if known is None and self._indexes is not None:
            self._indexes.refuse_unfinished(folder)  # before listing, since a writer may be running
        return known

    def _in_local_folder(self, storage: Storage, folder: str) -> Sequence[ShardInfo | str]:
        known = self._known(folder)
        tars = shards_in(storage, folder)
        if known is not None and self._indexes is not None:
            found = {tar.url.rpartition("/")[2]: tar for tar in tars}
            named = sorted(known.shards.names)
            forgotten = sorted(found.keys() - set(named))
            for name in forgotten:
                self._indexes.refuse_unfinished(folder, name)
            if forgotten:
                raise DatasetIndexError(
                    f"the folder holds {counted(len(forgotten), 'shard')} that its index does not know, from "
                    f"{forgotten[0]!r} on; add them with `streamload index {folder}`, or name the "
                    "shards with a pattern",
                    url=folder,
                )
            return [found.get(name, f"{folder}/{name}") for name in named]
        if not tars:
            raise ShardNotFoundError(
                f"this folder holds no index and no *.tar; {folder_advice(storage, folder)}", url=folder
            )
        return tars

    def _in_remote_folder(self, storage: Storage, folder: str) -> Sequence[ShardInfo]:
        known = self._known(folder)
        if known is not None:
            web, entries = protocol_of(folder) in WEB, known.shards
            columns = zip(entries.names, entries.sizes, entries.mtimes_ns, entries.etags, strict=True)
            return [
                ShardInfo(f"{folder}/{_quoted(name) if web else name}", size, mtime_ns or 0, etag)
                for name, size, mtime_ns, etag in sorted(columns, key=itemgetter(0))
            ]
        if protocol_of(folder) in WEB:
            self._refuse_web_folder(folder)
        tars = [found for found in self._in_folder(storage, folder) if is_shard_name(found.url)]
        if tars:
            return tars
        try:
            return [storage.info(folder)]  # a shard with another ending
        except StorageError as exc:
            raise _no_shards(storage, folder, exc) from None

    def _refuse_web_folder(self, folder: str) -> NoReturn:
        """Raise the error for a folder on a web server of which no index could be read."""
        braces = "name the shards, with braces: train-{000000..000099}.tar"
        unreadable = None if self._indexes is None else self._indexes.why_unreadable(folder)
        if unreadable is None:
            why = f"this address holds no index, and a web server does not list its files; {braces}"
            raise ShardNotFoundError(why, url=folder)
        raise StorageError(
            f"the index of this folder cannot be read: {unreadable.message}. If it has none (some servers refuse what "
            f"is not there), {braces}",
            url=folder,
        ) from unreadable

    def _look_up(self, urls: Sequence[str]) -> dict[str, ShardInfo]:
        """Look up shards that are named one by one."""
        found: dict[str, ShardInfo] = {}
        by_folder: dict[str, list[str]] = {}
        for url in urls:
            folder, name = folder_and_name(url)
            if folder not in self._plain_folders and self._storages.is_local(url):
                found[url] = self._local(url, folder, name)
                continue
            entry = self._indexes.entry_of(folder, name) if self._indexes is not None else None
            if entry is not None:
                found[url] = ShardInfo(url, entry.bytes, entry.mtime_ns or 0, entry.etag)
            else:
                by_folder.setdefault(folder, []).append(url)
        alone = {
            folder: named[0]
            for folder, named in by_folder.items()
            if len(named) == 1 and protocol_of(folder) not in WEB
        }
        with InfoRequests(self._storages, alone.values()) as requests:
            for folder, named in by_folder.items():
                if folder in alone:
                    found[alone[folder]] = requests.info(alone[folder])
                else:
                    found |= self._look_up_in(folder, named)
        return found

    def _local(self, url: str, folder: str, name: str) -> ShardInfo:
        try:
            return self._storages.for_url(url).info(url)
        except ShardNotFoundError:
            if self._indexes is None or self._indexes.entry_of(folder, name) is None:
                raise
            raise ShardNotFoundError(
                "no such shard, though the index beside it names it; restore it, or drop it from the index with "
                f"`streamload index {without_secrets(folder)}`",
                url=url,
            ) from None

    def _counted(self, urls: Urls, error: ShardNotFoundError) -> ShardNotFoundError:
        """The error for the first missing shard; if braces name it among existing ones, with their number."""
        for item in [urls] if isinstance(urls, str | os.PathLike) else urls:
            pattern = os.fspath(item)
            if "{" not in pattern:
                continue
            expanded = [self._storages.for_url(url).absolute(url) for url in expand_urls(pattern)]
            named = [url for url in expanded if not is_pattern(url)]
            if error.url in [without_secrets(url) for url in named]:
                listed = {info.url for infos in self._listed.values() for info in infos}
                return braces_error(pattern, len(named), sum(self._exists(url, listed) for url in named), error)
        return error

    def _exists(self, url: str, listed: Collection[str]) -> bool:
        """Whether a shard is there, by the index or the listing of its folder where it is remote."""
        if self._storages.is_local(url):
            return os.path.exists(local_path(url))
        known = None if self._indexes is None else self._indexes.entry_of(*folder_and_name(url))
        return known is not None or url in listed

    def _look_up_in(self, folder: str, urls: Sequence[str]) -> dict[str, ShardInfo]:
        """The same for several shards of a remote folder without an index, from one listing where there can be one."""
        *caches, place = chain_links(folder)
        if protocol_of(place) in WEB and not any("://" in cache for cache in caches):
            return self._beside_index(folder, urls)
        storage = self._storages.for_url(urls[0])
        try:
            listed = {info.url: info for info in self._in_folder(storage, folder)}
        except StorageError as exc:
            if type(exc) is not StorageError:
                raise
            first = storage.info(urls[0])  # those who may not list may still read; otherwise this raises
            _log.warning("the sizes of the shards are not known before they are read: %s", exc)
            return {urls[0]: first} | {url: ShardInfo(url, UNKNOWN_BYTES, 0) for url in urls[1:]}
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

    def _beside_index(self, folder: str, urls: Sequence[str]) -> dict[str, ShardInfo]:
        """The same on a web server: of a folder with an index, the few shards that it lacks are requested."""
        unknown = {url: ShardInfo(url, UNKNOWN_BYTES, 0) for url in urls}
        if self._indexes is None or self._indexes.of_folder(folder) is None:
            return unknown
        try:
            with InfoRequests(self._storages, urls) as requests:
                return {url: requests.info(url) for url in urls}
        except StorageError as exc:
            if type(exc) is not StorageError:
                raise
            return unknown  # the server refuses requests for headers; shards may still be read


def _quoted(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) and name.isascii() else quote(name)


def _no_shards(storage: Storage, folder: str, error: StorageError) -> StorageError:
    """The error for a remote url that is no shard, as `error` says, and in which none lie."""
    if storage.is_folder(folder):
        advice = folder_advice(storage, folder)
        return ShardNotFoundError(f"this folder holds no index and no *.tar; {advice}", url=without_secrets(folder))
    if not isinstance(error, ShardNotFoundError):
        return error
    return ShardNotFoundError(
        f"there is no shard of this name, and as a folder it holds no index and no *.tar ({error.message})",
        url=without_secrets(folder),
    )


# Subfolders: remotely each costs a request, and an ImageFolder may have thousands.
_MOST_LOOKED_INTO = 16


def shards_in(storage: Storage, folder: str) -> Sequence[ShardInfo]:
    """The shards that lie in a folder, by one listing of it."""
    return [found for found in storage.list(f"{escaped(folder)}/*") if is_shard_name(found.url)]


def folder_advice(storage: Storage, folder: str) -> str:
    """Advice on a folder without shards, by what lies in it."""
    if _is_being_packed(storage, folder):
        return SHARDIFY_ADVICE
    inside = [found.url.rstrip("/") for found in storage.list(f"{escaped(folder)}/*", folders=True)]
    with_shards = next((each for each in inside[:_MOST_LOOKED_INTO] if shards_in(storage, each)), None)
    if with_shards is not None:
        every = f"{without_secrets(folder)}/**/*.tar"
        return f"folders in it do: name one of them, such as {without_secrets(with_shards)!r}, or all: {every!r}"
    if inside and protocol_of(folder) == "file":
        return f"if it is an ImageFolder (one folder a class), pack it first: shardify {folder} DESTINATION"
    if inside:
        return (
            "if it is an ImageFolder (one folder a class), pack it first, from a local copy: shardify COPY "
            f"{without_secrets(folder)}-shards"
        )
    return "check the path"


def _is_being_packed(storage: Storage, folder: str) -> bool:
    if protocol_of(folder) == "file":
        return storage.is_folder(f"{folder}/{STAGING}")
    try:
        return storage.info(f"{folder}/{PACKING}").bytes > 0
    except StorageError:
        return False


def braces_error(pattern: str, named: int, there: int, error: ShardNotFoundError) -> ShardNotFoundError:
    """The error for the first missing shard of those that braces stand for, of which some are there."""
    if not there:
        return error  # it is the name that is wrong, not the numbers
    return ShardNotFoundError(
        f"no such shard: {without_secrets(pattern)!r} names {counted(named, 'shard')}, and {there:,} of them exist; "
        "this is the first that is missing. Check the numbers in the braces, or name the folder",
        url=error.url,
    )
