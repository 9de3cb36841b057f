"""`streamload verify`: read every byte of shards, and compare it with their index and `classes.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from glob import escape
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

import streamload
from streamload.cli.arguments import Index, Json, Ray, RecordSize, StorageOption, Urls, Workers, parse_storage_options
from streamload.errors import (
    DatasetIndexError,
    SampleError,
    ShardNotFoundError,
    StorageError,
    StreamloadError,
    without_secrets,
)
from streamload.index.class_names import CLASSES_FILE, read_class_names
from streamload.index.dataset_index import check_shard
from streamload.index.listing import IndexLookup, find_shards
from streamload.index.shard_names import WEB, folder_and_name, shard_name
from streamload.index.streamed_table import ReadShard
from streamload.pack.failures import reported_errors
from streamload.pack.output import print_document, print_line, say
from streamload.pack.progress import open_progress
from streamload.pack.ray_pool import ON_A_NODE, RayPool, open_pool
from streamload.pack.reading import Reader, differences
from streamload.storage.protocol import protocol_of
from streamload.storage.storages import Storages
from streamload.tar.decompression import is_compressed
from streamload.tar.header_chain import MISSING_END, RECORD_BYTES
from streamload.tar.table import ShardTable
from streamload.text import counted
from streamload.workers.launchers import available_processors

_DECODED_TOGETHER = 64
_NOTHING = "nothing was verified, because no shard of these names exists; check the path"


def verify_command(
    urls: Urls,
    *,
    decode: Annotated[
        bool, typer.Option("--decode", help="Also decode every field of every sample, as a loader does.")
    ] = False,
    as_document: Json = False,
    index: Index = None,
    record_size: RecordSize = RECORD_BYTES,
    workers: Workers = None,
    ray: Ray = None,
    storage_option: StorageOption = None,
) -> None:
    """Read every byte of shards and compare it with the index. The exit status is 1 if anything is damaged.

    If there is a classes.json, every label must have a name in it.

    Examples:
      streamload verify shards/train
      streamload verify shards/train --decode
      streamload verify s3://bucket/photos --json
      streamload verify s3://bucket/photos --decode --ray auto
    """
    with reported_errors(), open_pool(ray, workers) as pool:
        options = parse_storage_options(storage_option)
        storages, workers = Storages(options), workers or available_processors()
        shards = find_shards(urls, storages)
        lookup = IndexLookup(index, storages)
        reader = Reader(storages, workers, pool, record_size)
        found, whole, samples = _Faults(kept=as_document), list[str](), 0
        classes, faults = _class_names(dict.fromkeys(folder_and_name(url)[0] for url in shards), storages)
        found.add(faults)
        with open_progress("verifying", len(shards), "shards") as progress:
            results = _check_all(shards, reader, lookup, classes, progress.advance, on_nodes=pool is not None)
            for url, result in results:
                found.add(result.damages)
                if not result.damages:
                    whole.append(url)
                    samples += result.samples
        nothing = found.missing == len(shards)
        found.add(_missing_shards(shards, lookup, storages) if index is None else ())
        if decode and whole:
            with open_progress("decoding", samples, "samples") as progress:
                decoding = partial(_undecodable, index=index, storage_options=options)
                found.add(
                    decoding(whole, num_workers=workers, advance=progress.advance)
                    if pool is None
                    else _undecodable_on_nodes(whole, decoding, pool, progress.advance)
                )
        unchecked = sum(not is_compressed(url) and lookup.of_folder(folder_and_name(url)[0]) is None for url in shards)
        if as_document:
            counts = {"shards": len(shards), "samples": samples, "shards_without_checksums": unchecked}
            print_document(counts | {"faults": found.kept})
        if found.number:
            say(f"error: {_NOTHING if nothing else found.counted_in(len(shards))}")
            raise typer.Exit(1)
        if not as_document:
            print_line(f"{counted(len(shards), 'shard')} verified, no damage{_without_index(unchecked)}")


def warn_of_missing_end(url: str, table: ShardTable) -> None:
    """Print a warning if a shard has no end-of-archive marker."""
    if MISSING_END in table.skipped:
        say(f"warning: {without_secrets(url)} has no end-of-archive marker; it may have been cut after a member")


class _Faults:
    """Counts what is wrong, and prints it as it is found, or keeps it for a document."""

    def __init__(self, *, kept: bool) -> None:
        self.number = self.missing = 0
        self.kept: list[dict[str, Any]] | None = [] if kept else None

    def add(self, faults: Iterable[StreamloadError]) -> None:
        """Take them as they come."""
        for fault in faults:
            self.number += 1
            self.missing += isinstance(fault, ShardNotFoundError)
            if self.kept is None:
                print_line(str(fault))
            else:
                place = {"url": fault.url, "key": fault.key, "offset": fault.offset}
                self.kept.append({"kind": type(fault).__name__, "message": fault.message, **place})

    def counted_in(self, shards: int) -> str:
        """`2 faults in 3 shards`."""
        return f"{counted(self.number, 'fault')} in {counted(shards, 'shard')}"


def _without_index(shards: int) -> str:
    if not shards:
        return ""
    return (
        f"; of {counted(shards, 'shard')} without an index only the headers were checked, since there are no checksums "
        "of the content: run `streamload index` while they are known to be intact"
    )


class _Checked(NamedTuple):
    """A shard that was read completely.

    Attributes:
        samples: number of samples.
        damages: what is wrong with it.
    """

    samples: int
    damages: Sequence[StreamloadError]


def _try_reading(reader: Reader, url: str) -> ReadShard | StreamloadError:
    """Read one shard completely; or what is wrong with it."""
    try:
        return reader.read(url)
    except StreamloadError as exc:
        return exc


def _check_all(
    shards: Sequence[str],
    reader: Reader,
    lookup: IndexLookup,
    classes: Mapping[str, Sequence[str]],
    advance: Callable[..., None],
    *,
    on_nodes: bool,
) -> Iterator[tuple[str, _Checked]]:
    """Read all shards and check them, on the threads that read; where nodes read, each would load every index, so here.

    Args:
        shards: their URLs.
        reader: reads them.
        lookup: finds their indexes.
        classes: the names of the classes by folder, where there are any.
        advance: told of each shard.
        on_nodes: nodes of a cluster read.
    """

    def check(url: str, read: ReadShard | StreamloadError) -> _Checked:
        return _check(url, read, lookup, classes.get(folder_and_name(url)[0]))

    if on_nodes:
        for url, read in reader.each(shards, _try_reading, advance):
            yield url, check(url, read)
    else:
        yield from reader.each(shards, lambda own, url: check(url, _try_reading(own, url)), advance)


def _check(url: str, read: ReadShard | StreamloadError, lookup: IndexLookup, classes: Sequence[str] | None) -> _Checked:
    """What is wrong with a shard that was read completely.

    Args:
        url: the shard.
        read: what was read, or why it cannot be.
        lookup: finds its index.
        classes: the names of the classes in the `classes.json` beside it, or None.
    """
    if isinstance(read, StreamloadError):
        return _Checked(0, [read])
    warn_of_missing_end(url, read.table)
    folder, name = folder_and_name(url)
    found: list[StreamloadError] = [] if classes is None else list(_nameless_labels(url, read.table, classes))
    try:
        index = lookup.of_folder(folder)
        if index is not None:
            check_shard(index.shard(name), read.bytes, url, read.etag)
            known = lookup.table_of(folder, name)
            found += () if known is None else differences(url, read.table, known)
    except StreamloadError as exc:
        found.append(exc)
    return _Checked(len(read.table), found)


def _class_names(
    folders: Iterable[str], storages: Storages
) -> tuple[dict[str, tuple[str, ...]], list[StreamloadError]]:
    """The names of the classes in the `classes.json` of each folder that has one, and what is wrong with these files.

    A file without read permission counts as missing. A name of two labels is wrong.
    """
    found: dict[str, tuple[str, ...]] = {}
    wrong: list[StreamloadError] = []
    for folder in folders:
        try:
            names = read_class_names((folder,), storages)
        except DatasetIndexError as exc:
            wrong.append(exc)
        except StorageError:
            continue
        else:
            if names is not None:
                found[folder] = names
                wrong += _names_of_two_labels(names, f"{folder}/{CLASSES_FILE}")
    return found, wrong


def _names_of_two_labels(names: Sequence[str], url: str) -> Iterator[DatasetIndexError]:
    """The first repeated name."""
    first: dict[str, int] = {}
    for label, name in enumerate(names):
        if first.setdefault(name, label) != label:
            yield DatasetIndexError(f"the name {name!r} stands for two labels, {first[name]} and {label}", url=url)
            return


def _nameless_labels(url: str, table: ShardTable, classes: Sequence[str]) -> Iterator[StreamloadError]:
    """The first label without a name, and how many there are."""
    if table.labels is None:
        return
    nameless = np.flatnonzero((table.labels < 0) | (table.labels >= len(classes)))
    if len(nameless):
        first = int(nameless[0])
        more = f" (and {counted(len(nameless) - 1, 'more sample')})" if len(nameless) > 1 else ""
        yield DatasetIndexError(
            f"the label {int(table.labels[first])}{more} has no name in {CLASSES_FILE}, which names "
            f"{len(classes):,}; pack the shards with its numbers (`shardify --classes`), or correct the file",
            url=url,
            key=table.key(first),
        )


def missing_names(folder: str, lookup: IndexLookup, storages: Storages) -> list[str]:
    """The shards in the index of a folder that do not exist.

    None are found on web servers, or where the index or the folder cannot be read.
    """
    try:
        index = lookup.of_folder(folder)
        if index is None or protocol_of(folder) in WEB:
            return []
        listed = storages.for_url(folder).list(f"{escape(folder)}/*")
    except StreamloadError:
        return []
    there = {shard_name(found.url) for found in listed}
    return [entry.name for entry in index.shards if entry.name not in there and not entry.name.startswith(".")]


def _missing_shards(shards: Sequence[str], lookup: IndexLookup, storages: Storages) -> Iterator[StreamloadError]:
    """The shards in the indexes of the shards' folders that do not exist."""
    for folder in dict.fromkeys(folder_and_name(url)[0] for url in shards):
        for name in missing_names(folder, lookup, storages):
            yield ShardNotFoundError(
                "the index names this shard, but it is not there; restore it, or drop it from the index with "
                "`streamload index`",
                url=f"{folder}/{name}",
            )


def _undecodable_on_nodes(
    shards: Sequence[str],
    decoding: Callable[..., Iterator[SampleError]],
    pool: RayPool,
    advance: Callable[[int, int], None],
) -> Iterator[SampleError]:
    """`_undecodable` with a task for each shard."""
    for found in pool.results((partial(_undecodable_of_shard, decoding, url) for url in shards), advance):
        yield from found


def _undecodable_of_shard(
    decoding: Callable[..., Iterator[SampleError]], url: str, advance: Callable[[int, int], None]
) -> list[SampleError]:
    return list(decoding([url], advance=advance, **ON_A_NODE))


def _undecodable(
    shards: Sequence[str],
    *,
    index: str | None,
    storage_options: Mapping[str, Any],
    advance: Callable[[int, int], None],
    **options: Any,
) -> Iterator[SampleError]:
    """Decode every field of every sample with a StreamLoader; the errors of samples that cannot be decoded.

    Args:
        shards: intact shards.
        index: the folder of their index, if it is not beside them.
        storage_options: the loader's.
        options: others of the loader.
        advance: called with numbers of samples, and 0, as they are decoded.

    Raises:
        StreamloadError: a shard cannot be read, or a sample kills the processes that decode it.
    """
    with streamload.StreamLoader(
        shards,
        _DECODED_TOGETHER,
        transform=_nothing,
        on_error="skip",
        index=index,
        storage_options=storage_options or None,
        **options,
    ) as loader:
        seen, batches = 0, iter(loader)
        while True:
            try:
                batch = next(batches, None)
            except SampleError:  # every one has failed, which a loader refuses; they are named one by one here
                batch = None
            new = loader.statistics().skipped_samples - seen
            advance((0 if batch is None else len(batch)) + new, 0)
            if new:
                yield from loader.skipped[-new:]
                seen += new
            if batch is None:
                return


def _nothing(_: object) -> int:
    return 0
