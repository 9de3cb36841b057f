"""List the shards of urls, with their sizes and indexes. Parse shard names, and mark unfinished folders."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from streamload.errors import DatasetIndexError, ShardNotFoundError, StorageError, StreamloadError, without_secrets
from streamload.index.dataset_index import (
    INDEX_FILE,
    INDEX_FOLDER,
    MOST_INDEX_BYTES,
    DatasetIndex,
    NotAnIndexError,
    locked_folder,
    read_if_there,
)
from streamload.limits import SMALL_REQUESTS
from streamload.storage.download import Pin
from streamload.storage.errors import missing_error
from streamload.storage.protocol import UNKNOWN_BYTES, WEB, ShardInfo, Storage, escaped, is_pattern, protocol_of
from streamload.storage.storages import Storages, Urls, expand_urls
from streamload.tar.decompression import without_compression
from streamload.text import counted

PACKING_FOLDER = ".streamload-packing"  # in a destination, for the records of an unfinished packing run
SHARDIFY, SHARD_WRITER = "shardify", "ShardWriter"

_MARK_FILE = ".streamload-unfinished.json"
_MOST_MARK_BYTES = 1 << 20
_ADVICE = {
    SHARDIFY: "a `shardify`, `pack` or `map` into this folder was interrupted, or is still running; run it again with "
    "--resume (resume=True) to go on, or with --overwrite (overwrite=True) to start over",
    SHARD_WRITER: "a ShardWriter was interrupted, or is still running; write the shards again with overwrite=True, or "
    "remove the folder",
}
# Maximum number of subfolders to inspect: in a bucket each costs a request, and an ImageFolder may have thousands.
_MOST_SUBFOLDERS = 16
_SHARD = re.compile(r"\.(?:tar|tar\.(?:gz|bz2|xz|zst|zstd)|tgz|tbz2?|txz|tzst)\Z", re.IGNORECASE)
_UNKNOWN_COMPRESSION = re.compile(r"\.(?:tar\.(?:z|lz|lz4|lzo|lzma|lrz|br|sz|7z|zip|rar)|taz|tlz)\Z", re.IGNORECASE)
# `normpath` changes an absolute path only at these places.
_UNTIDY = re.compile(r"//|/\.|/\Z")
_NUMBER = re.compile(r"%0?(\d*)d")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_log = logging.getLogger("streamload")


def list_shards(
    urls: Urls,
    index: str | os.PathLike[str] | None = None,
    storages: Storages | None = None,
    join: Sequence[Urls] = (),
) -> Listing:
    """List the shards of `urls`, and find the indexes beside them.

    Braces and `::` are expanded in order; the matches of a glob and the shards of a folder are sorted. A folder stands
    for the shards in its index, or for its tar files if it has no index.

    A remote folder costs one request for its index, and without an index two more: for the mark of an interrupted
    writer, and for a listing. Index entries of remote shards are trusted until the shards are read. Web servers cannot
    list: without an index the sizes of their shards are `UNKNOWN_BYTES`.

    Args:
        urls: a string or path, or a list of them: shards, patterns, folders.
        index: the folder of an index elsewhere, `.streamload` or its parent, instead of the indexes beside the shards.
        storages: for remote shards; by default without options.
        join: sidecars, indexed datasets whose shards match those of `urls` by name, or else by position.

    Raises:
        TypeError, ValueError: `urls` has the wrong type, an unknown storage or compression, or a repeated shard; or a
            sidecar does not match the shards.
        ShardNotFoundError: a shard is missing, or a pattern or folder matches nothing.
        StorageError: a shard cannot be looked up.
        ShardChangedError: a shard differs from its entry in the index.
        DatasetIndexError: an index is broken, incomplete, or missing for `index` or a sidecar; or the shards are
            unfinished.
    """
    storages = Storages() if storages is None else storages
    collects = gc.isenabled()
    gc.disable()  # in a large program, garbage collection takes a third of the time of a very long listing
    try:
        listing = _listed(urls, index, storages)
        for sidecar in join:
            listing = _with_sidecar(listing, _listed(sidecar, None, storages), sidecar)
    finally:
        if collects:
            gc.enable()
    return listing


def _listed(urls: Urls, index: str | os.PathLike[str] | None, storages: Storages) -> Listing:
    finder = ShardFinder(index, storages)
    folders: dict[str, tuple[str, DatasetIndex | None]] = {}  # shards of a folder share one string, pickled once
    shards: list[Shard] = []
    counts: list[int] = []
    for url, size, mtime_ns, etag in finder.find(urls):
        folder, name = folder_and_name(url)
        if folder not in folders:
            folders[folder] = folder, finder.index_of(folder)
        folder, folder_index = folders[folder]
        entry = None if folder_index is None else folder_index.find(name)
        if folder_index is None or entry is None:
            finder.refuse_unfinished(folder, name)
            shards.append(Shard(url, name, size, mtime_ns, folder, etag))
            continue
        if size != UNKNOWN_BYTES and (size, etag) != (entry.bytes, entry.etag):
            Pin(entry.bytes, entry.etag, indexed=True).check(url, size, etag)
        shards.append(Shard(url, entry.name, size, mtime_ns, folder, etag, folder_index.folder))
        counts.append(entry.samples)
    for exc in finder.unreadable.values():
        _log.warning("continuing without an index that cannot be read: %s", exc)
    used = dict.fromkeys(shard.index_folder for shard in shards if shard.index_folder is not None)
    indexes = {folder: finder.indexes[folder] for folder in used}
    fields = tuple(dict.fromkeys(name for each in indexes.values() for name in each.fields))
    known_counts = tuple(counts) if len(counts) == len(shards) else None
    return Listing(tuple(shards), known_counts, fields, indexes=indexes)


def _with_sidecar(listing: Listing, other: Listing, urls: Urls) -> Listing:
    shown = f"join={without_secrets(', '.join(expand_urls(urls)))!r}"
    unindexed = next((shard for shard in other.shards if shard.index_folder is None), None)
    if unindexed is not None:
        raise DatasetIndexError(
            f"{shown} has no index, which a sidecar needs; make one with `streamload index`", url=unindexed.url
        )
    shared = next((name for name in other.fields if name in listing.fields), None)
    if shared is not None:
        raise ValueError(f"{shown} has the field {shared!r}, which the shards have too; a sidecar needs other fields")
    numbers = _matched(listing.shards, other.shards, shown)
    return replace(
        listing,
        fields=listing.fields + other.fields,
        sidecars=listing.sidecars + tuple(other.shards[number] for number in numbers),
        owners=listing.owners + tuple(range(len(numbers))),
        sidecar_fields=listing.sidecar_fields + other.fields,
        indexes={**listing.indexes, **other.indexes},
    )


def _matched(shards: Sequence[Shard], others: Sequence[Shard], shown: str) -> list[int]:
    names = [without_compression(shard.name) for shard in shards]
    numbers = {without_compression(shard.name): number for number, shard in enumerate(others)}
    if len(set(names)) == len(names) and len(numbers) == len(others) and numbers.keys() >= set(names):
        return [numbers[name] for name in names]
    if len(names) == len(others):
        return list(range(len(names)))
    lacking = next((name for name in names if name not in numbers), names[0])
    raise ValueError(
        f"{shown} has {counted(len(others), 'shard')}, but {lacking!r}, one of {len(names):,}, has no unique match; a "
        "sidecar needs as many shards, of the same names or in order, as `streamload map --sidecar` writes them"
    )


def joined_listing(listings: Sequence[Listing]) -> Listing:
    """Concatenate listings. Raises ValueError if a shard occurs in two of them."""
    shards = tuple(shard for listing in listings for shard in listing.shards)
    refuse_repetitions([shard.url for shard in shards])
    all_counted = all(listing.counts is not None for listing in listings)
    counts = tuple(count for listing in listings for count in listing.counts or ()) if all_counted else None
    firsts = accumulate((len(listing.shards) for listing in listings), initial=0)
    return Listing(
        shards,
        counts,
        tuple(dict.fromkeys(name for listing in listings for name in listing.fields)),
        tuple(sidecar for listing in listings for sidecar in listing.sidecars),
        tuple(first + owner for first, listing in zip(firsts, listings, strict=False) for owner in listing.owners),
        tuple(dict.fromkeys(name for listing in listings for name in listing.sidecar_fields)),
        dict(chain.from_iterable(listing.indexes.items() for listing in listings)),
    )


def find_shards(urls: Urls, storages: Storages | None = None) -> list[str]:
    """Return the shards of `urls`, ignoring indexes: a folder stands for its tar files.

    Raises what `list_shards` raises; shards named without a pattern are not looked up.
    """
    finder = ShardFinder(None, storages, uses_indexes=False)
    shards = [match.url for match in finder.matches(urls)]
    for url in shards:
        finder.refuse_unfinished(*folder_and_name(url))
    return shards


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """The shards of a dataset, in order.

    Attributes:
        shards: at least one shard, each once.
        counts: the number of samples of each shard; None unless every shard is in an index.
        fields: the fields in any index, in the order of first appearance.
        sidecars: indexed shards with more fields of the same keys, numbered after `shards`.
        owners: the number of each sidecar's shard.
        sidecar_fields: the fields of all sidecars.
        indexes: the indexes, by their own folders.
    """

    shards: tuple[Shard, ...]
    counts: tuple[int, ...] | None
    fields: tuple[str, ...]
    sidecars: tuple[Shard, ...] = ()
    owners: tuple[int, ...] = ()
    sidecar_fields: tuple[str, ...] = ()
    indexes: Mapping[str, DatasetIndex] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling columns is four times as fast as pickling each shard.
        columns = [tuple(zip(*shards, strict=True)) for shards in (self.shards, self.sidecars)]
        return _from_columns, (columns, self.counts, self.fields, self.owners, self.sidecar_fields, self.indexes)

    @property
    def numbered(self) -> tuple[Shard, ...]:
        """Return all shards and sidecars."""
        return self.shards + self.sidecars

    @property
    def folders(self) -> list[str]:
        """Return the folders of all shards and their indexes."""
        numbered = self.numbered
        indexes = [shard.index_folder for shard in numbered if shard.index_folder is not None]
        return list(dict.fromkeys([*(shard.folder for shard in numbered), *indexes]))

    def shard(self, number: int) -> Shard:
        """Return a shard or sidecar."""
        count = len(self.shards)
        return self.shards[number] if number < count else self.sidecars[number - count]

    def pin(self, number: int) -> Pin:
        """Return the version of a shard that its storage must deliver."""
        shard = self.shard(number)
        total_bytes = None if shard.bytes == UNKNOWN_BYTES else shard.bytes
        return Pin(total_bytes, shard.etag, indexed=shard.index_folder is not None)

    def owner(self, number: int) -> int:
        """Return the number of a sidecar's shard; for a shard, its own number."""
        count = len(self.shards)
        return number if number < count else self.owners[number - count]


def _from_columns(columns: Sequence[Any], counts: Any, fields: Any, *rest: Any) -> Listing:
    shards, sidecars = (tuple(map(Shard._make, zip(*each, strict=True))) for each in columns)
    return Listing(shards, counts, fields, sidecars, *rest)


class Shard(NamedTuple):
    """One shard of a dataset; a tuple, because there may be hundreds of thousands.

    Attributes:
        url: an absolute path if local.
        name: the name in an index.
        bytes: the size; `UNKNOWN_BYTES` if unknown until it is read.
        mtime_ns: nanoseconds since 1970; 0 if unknown.
        folder: the url without its last component.
        etag: the version in the storage, if known.
        index_folder: the folder of its index, or None.
    """

    url: str
    name: str
    bytes: int
    mtime_ns: int
    folder: str
    etag: str | None = None
    index_folder: str | None = None


class ShardFinder:
    """Find shards with few requests per folder: the index, or a listing and the mark of an interrupted writer.

    Args:
        elsewhere: the folder of one index for all shards; None to look beside the shards.
        uses_indexes: read indexes beside the shards.

    Attributes:
        indexes: the indexes that were read, by their own folders.
        unreadable: the errors of unreadable indexes, by the shards' folder.

    Raises:
        DatasetIndexError, StorageError: the index in `elsewhere` is missing, broken or unreadable.
    """

    def __init__(
        self,
        elsewhere: str | os.PathLike[str] | None = None,
        storages: Storages | None = None,
        *,
        uses_indexes: bool = True,
    ) -> None:
        self.indexes: dict[str, DatasetIndex] = {}
        self.unreadable: dict[str, StreamloadError] = {}
        self._storages = Storages() if storages is None else storages
        self._uses_indexes = uses_indexes
        self._indexes: dict[str, DatasetIndex | None] = {}
        self._unfinished: dict[str, Sequence[UnfinishedSet]] = {}
        self._elsewhere: DatasetIndex | None = None
        if elsewhere is not None:
            place = os.fspath(elsewhere).rstrip("/")
            self._elsewhere = self._read(place or "/") or self._read(f"{place}/{INDEX_FOLDER}")
            if self._elsewhere is None:
                shown = without_secrets(os.fspath(elsewhere))
                raise DatasetIndexError(
                    f"index={shown!r} holds no index.json; `streamload index SHARDS --output {shown}` writes one"
                )

    def index_of(self, folder: str) -> DatasetIndex | None:
        """Return the index for the shards in a folder; None if it is missing or in `unreadable`.

        Raises:
            DatasetIndexError: the index is broken.
            StorageError: the storage cannot be reached.
        """
        if self._elsewhere is not None or not self._uses_indexes:
            return self._elsewhere
        if folder not in self._indexes:
            try:
                index = self._read(f"{folder.rstrip('/')}/{INDEX_FOLDER}")
            except (NotAnIndexError, StorageError) as exc:
                if type(exc) not in (NotAnIndexError, StorageError):
                    raise
                self.unreadable[folder] = exc  # without list permission, requests for missing objects are refused too
                index = None
            self._indexes[folder] = index
        return self._indexes[folder]

    def _read(self, folder: str) -> DatasetIndex | None:
        storage = self._storages.for_url(folder)
        folder = storage.absolute(folder)
        content = read_if_there(storage, f"{folder}/{INDEX_FILE}", MOST_INDEX_BYTES)
        if content is not None:
            self.indexes[folder] = DatasetIndex.from_json(content, folder)
        return self.indexes.get(folder)

    def refuse_unfinished(self, folder: str, name: str | None = None) -> None:
        """Raise DatasetIndexError if the writer of a shard, or of a whole folder, was interrupted or is running.

        Do not call this for shards that an index beside them lists: those are complete, since entries are written after
        their shards and removed before them.

        Raises:
            DatasetIndexError: the shards are unfinished, or their mark is damaged.
            StorageError: the storage cannot be reached.
        """
        if folder not in self._unfinished:
            try:
                self._unfinished[folder] = read_mark(self._storages.for_url(folder), folder)
            except StorageError as exc:
                if type(exc) is not StorageError:
                    raise
                self._unfinished[folder] = ()  # without list permission, requests for missing objects are refused
        for unfinished in self._unfinished[folder]:
            if name is None or unfinished.shards.matches(name):
                raise unfinished_error(unfinished, folder)

    def find(self, urls: Urls) -> list[ShardInfo]:
        """Return the shards of `urls`, in order; raise like `list_shards`."""
        matches = self.matches(urls)
        looked_up = self._look_up([match.url for match in matches if match.bytes == UNKNOWN_BYTES])
        return [looked_up.get(match.url, match) for match in matches] if looked_up else matches

    def matches(self, urls: Urls) -> list[ShardInfo]:
        """Return the shards of `urls`; those that must be looked up have `UNKNOWN_BYTES`."""
        expanded = expand_urls(urls)
        matches = [match for url in expanded for match in self._resolve(url)]
        if len(expanded) > 1:
            refuse_repetitions([match.url for match in matches])
        return matches

    def _resolve(self, url: str) -> Sequence[ShardInfo]:
        storage = self._storages.for_url(url)
        url = storage.absolute(url)
        refuse_unknown_compression(url)
        costly = self._storages.costs_requests(url)
        if not costly and storage.is_folder(url):
            return self._in_folder(storage, url.rstrip("/"))
        if is_pattern(url):
            matches = storage.list(url)
            if not matches:
                raise ShardNotFoundError("no file matches this pattern; check the path and the pattern", url=url)
            for match in matches:
                refuse_unknown_compression(match.url)
            return matches
        if costly and not is_shard_name(shard_name(url)):
            return self._in_folder(storage, url.rstrip("/"))
        return [ShardInfo(url, UNKNOWN_BYTES, 0)]

    def _in_folder(self, storage: Storage, folder: str) -> Sequence[ShardInfo]:
        index, web = self.index_of(folder), protocol_of(folder) in WEB
        if index is not None and self._storages.costs_requests(folder):
            pairs = [(f"{folder}/{quote(entry.name) if web else entry.name}", entry) for entry in sorted(index.shards)]
            return [ShardInfo(url, entry.bytes, 0, entry.etag) for url, entry in pairs]
        if index is None:
            self.refuse_unfinished(folder)  # before listing, since a writer may remove the mark meanwhile
        if web:
            unreadable = self.unreadable.get(folder)
            why = "" if unreadable is None else f" that can be read ({unreadable.message})"
            raise ShardNotFoundError(
                f"this address holds no index{why}, and a web server does not list its files; name the shards, with "
                "braces: train-{000000..000099}.tar",
                url=folder,
            ) from unreadable
        shards = shards_in(storage, folder)
        if not shards:  # read even without `uses_indexes`, to name missing shards
            index = index or self._read(f"{folder}/{INDEX_FOLDER}")
        if index is not None:
            return self._as_indexed(folder, shards, index)
        if shards:
            return shards
        if storage.is_folder(folder):
            advice = folder_advice(storage, folder)
            raise ShardNotFoundError(f"this folder holds no index and no *.tar; {advice}", url=folder)
        return [storage.info(folder)]  # a shard without a usual ending

    def _as_indexed(self, folder: str, shards: Sequence[ShardInfo], index: DatasetIndex) -> Sequence[ShardInfo]:
        listed = {info.url.rpartition("/")[2]: info for info in shards}
        names = sorted(entry.name for entry in index.shards)
        if unindexed := sorted(listed.keys() - set(names)):
            for name in unindexed:
                self.refuse_unfinished(folder, name)
            raise DatasetIndexError(
                f"the folder holds {counted(len(unindexed), 'shard')} that its index does not list, such as "
                f"{unindexed[0]!r}; add them with `streamload index {folder}`, or name the "
                "shards with a pattern",
                url=folder,
            )
        missing = [name for name in names if name not in listed and not name.startswith(".")]
        if missing:
            drop = f"drop it from the index with `streamload index {folder}`" if shards else f"remove {INDEX_FOLDER}"
            raise ShardNotFoundError(
                f"this shard does not exist, but its index names it; restore it, or {drop}",
                url=f"{folder}/{missing[0]}",
            )
        # Listings omit hidden shards.
        return [listed.get(name) or ShardInfo(f"{folder}/{name}", UNKNOWN_BYTES, 0) for name in names]

    def _look_up(self, urls: Sequence[str]) -> dict[str, ShardInfo]:
        infos: dict[str, ShardInfo] = {}
        by_folder: dict[str, list[str]] = {}
        for url in urls:
            folder, name = folder_and_name(url)
            if not self._storages.costs_requests(url):
                infos[url] = self._storages.for_url(url).info(url)
                continue
            index = self.index_of(folder)
            if index is not None and (entry := index.find(name)) is not None:
                infos[url] = ShardInfo(url, entry.bytes, 0, entry.etag)
            elif protocol_of(folder) not in WEB:
                by_folder.setdefault(folder, []).append(url)
        alone: list[str] = []
        for folder, folder_urls in by_folder.items():
            listed: dict[str, ShardInfo] = {}
            if len(folder_urls) > 1:
                try:
                    listed = {info.url: info for info in self._storages.for_url(folder).list(f"{escaped(folder)}/*")}
                except StorageError as exc:
                    if type(exc) is not StorageError:  # read permission may exist without list permission
                        raise
            for url in folder_urls:
                if url in listed:
                    infos[url] = listed[url]
                elif listed and not shard_name(url).startswith("."):  # listings omit hidden shards
                    raise missing_error(url, shard_name(url), map(shard_name, listed), folder)
                else:
                    alone.append(url)
        return infos | shard_infos(alone, self._storages)


def shard_infos(urls: Sequence[str], storages: Storages) -> dict[str, ShardInfo]:
    """Look up shards with concurrent requests. Blocks. Raises the first StorageError in the order of `urls`."""
    with ThreadPoolExecutor(SMALL_REQUESTS, "streamload-look") as threads:
        try:
            return dict(zip(urls, threads.map(lambda url: storages.for_url(url).info(url), urls), strict=True))
        finally:
            threads.shutdown(cancel_futures=True)


def shards_in(storage: Storage, folder: str) -> Sequence[ShardInfo]:
    """List the shards in a folder. Raises ValueError for an unsupported compression."""
    shards = []
    for info in storage.list(f"{escaped(folder)}/*"):
        if is_shard_name(info.url):
            shards.append(info)
        else:
            refuse_unknown_compression(info.url)
    return shards


def folder_advice(storage: Storage, folder: str) -> str:
    """Return advice on a folder without shards, by its content."""
    inside = [info.url.rstrip("/") for info in storage.list(f"{escaped(folder)}/*", folders=True)]
    if with_shards := [shard_name(each) for each in inside[:_MOST_SUBFOLDERS] if shards_in(storage, each)]:
        return f"folders in it do: name one of them, such as {', '.join(with_shards)}"
    if not inside:
        return "check the path"
    copy = folder if protocol_of(folder) == "file" else "LOCAL_COPY"
    return f"if it is an ImageFolder (one folder per class), pack it first: shardify {copy} DESTINATION"


def write_mark(storage: Storage, folder: str, shards: ShardNaming, writer: str | None) -> None:
    """Mark shards as incomplete before `writer` changes them, or as complete if `writer` is None. Idempotent.

    Raises:
        StorageError: the mark cannot be read or written.
        DatasetIndexError: an existing mark is damaged.
    """
    with locked_folder(folder):
        before, url = read_mark(storage, folder), f"{folder.rstrip('/')}/{_MARK_FILE}"
        sets = [each for each in before if each.shards != shards]
        if writer is not None:
            sets.append(UnfinishedSet(shards, writer))
        if sets:
            storage.write(url, json.dumps([asdict(each) for each in sets]).encode("ascii"))
        elif before:
            storage.delete(url)


def read_mark(storage: Storage, folder: str) -> Sequence[UnfinishedSet]:
    """Return the unfinished sets in a folder or url.

    Raises:
        DatasetIndexError: the mark is damaged.
        StorageError: the storage cannot be read.
    """
    url = f"{folder.rstrip('/')}/{_MARK_FILE}"
    content = read_if_there(storage, url, _MOST_MARK_BYTES)
    if content is None:
        return ()
    try:
        return [UnfinishedSet(ShardNaming(**entry["shards"]), str(entry["writer"])) for entry in json.loads(content)]
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise DatasetIndexError(
            "this mark of an interrupted writer is damaged; remove it, and write incomplete shards again",
            url=url,
        ) from exc


@dataclass(frozen=True, slots=True)
class UnfinishedSet:
    """An incomplete set of shards: their names, and `SHARDIFY` or `SHARD_WRITER`."""

    shards: ShardNaming
    writer: str


def unfinished_error(unfinished: UnfinishedSet, folder: str) -> DatasetIndexError:
    """Return the error for reading an unfinished set."""
    advice = _ADVICE.get(unfinished.writer, "their writer was interrupted, or is still running; write them again")
    return DatasetIndexError(
        f"the shards in this folder are not complete: {advice}. (To read the existing shards anyway, "
        f"remove {_MARK_FILE} from the folder)",
        url=folder,
    )


@dataclass(frozen=True, slots=True)
class ShardNaming:
    """A form of names, such as `shard-%06d.tar` with at least `digits` digits, or `*.tar` if `digits` is None."""

    before: str
    digits: int | None
    after: str

    def name(self, number: int) -> str:
        """Return a shard's name by its number."""
        return f"{self.before}{number:0{self.digits}d}{self.after}"

    def matches(self, name: str) -> bool:
        """Return True if a name has this form."""
        number = name[len(self.before) : len(name) - len(self.after)]
        if name != f"{self.before}{number}{self.after}":
            return False
        if self.digits is None:
            return not name.startswith(".")
        return len(number) >= max(1, self.digits) and number.isascii() and number.isdigit()


def destination_of(pattern_or_folder: str | os.PathLike[str], prefix: str) -> tuple[str, ShardNaming]:
    """Return a writer's folder and names: from a path with one `%06d` and `.tar`, or from a folder and a prefix.

    Raises:
        TypeError, ValueError: the argument is empty or not a path, the pattern is hidden or has no or several `%06d`,
            or the prefix is not a visible name.
    """
    path = os.fspath(pattern_or_folder) if isinstance(pattern_or_folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise TypeError(f"pattern_or_folder must be a non-empty string or path, not {pattern_or_folder!r}")
    folder, name = os.path.split(path)
    if not name.endswith(".tar"):
        if not prefix or prefix.startswith(".") or "/" in prefix or _CONTROL.search(prefix):
            raise ValueError(f"prefix must be a visible file name without '/', not {prefix!r}")
        return path, ShardNaming(f"{prefix}-", 6, ".tar")
    numbers = list(_NUMBER.finditer(name))
    if len(numbers) != 1 or name.startswith("."):
        raise ValueError(
            f"pattern_or_folder is {path!r}; a pattern needs exactly one %06d for the shard's number, "
            "as in 'out/train-%06d.tar', and must not be hidden"
        )
    number = numbers[0]
    return folder or ".", ShardNaming(name[: number.start()], int(number[1] or 0), name[number.end() :])


def folder_and_name(url: str) -> tuple[str, str]:
    """Split a shard's url into its folder and its name in an index."""
    web = ("%" in url or "?" in url) and protocol_of(url) in WEB
    folder, _, name = (url.split("?", 1)[0] if web else url).rpartition("/")
    return folder or "/", unquote(name) if web else name


def shard_name(url: str) -> str:
    """Return a shard's name in an index."""
    return folder_and_name(url)[1]


def is_shard_name(name: str) -> bool:
    """Return True for names of tar archives, compressed or not."""
    return name.endswith(".tar") or _SHARD.search(name) is not None


def refuse_unknown_compression(url: str) -> None:
    """Raise ValueError for an unsupported compression."""
    if not url.endswith(".tar") and _UNKNOWN_COMPRESSION.search(url):
        raise ValueError(
            f"urls names {without_secrets(url)!r}, but shards compressed this way are not supported; decompress them, "
            "or use gz, zst, xz or bz2"
        )


def refuse_repetitions(urls: Sequence[str]) -> None:
    """Raise ValueError if a shard is named twice."""
    paths = [os.path.normpath(url) if url.startswith("/") and _UNTIDY.search(url) else url for url in urls]
    if len(set(paths)) == len(paths):
        return
    path = next(path for path, number in Counter(paths).items() if number > 1)
    raise ValueError(
        f"urls names the shard {without_secrets(path)!r} twice, which would give each of its samples twice; "
        "name it once (to see samples more often, iterate more often)"
    )
