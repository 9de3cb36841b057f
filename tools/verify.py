"""Whether shards are whole, and whether they are what their index says: every byte is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from glob import escape
from typing import NamedTuple

import numpy as np
from streamload_tools.reading import Reader

from streamload.errors import (
    DatasetIndexError,
    ShardFormatError,
    ShardNotFoundError,
    StorageError,
    StreamloadError,
)
from streamload.index.class_names import CLASSES_FILE, read_class_names
from streamload.index.dataset_index import check_shard
from streamload.index.index_lookup import IndexLookup
from streamload.index.shard_names import WEB, folder_and_name, shard_name
from streamload.storage.protocol import protocol_of
from streamload.storage.storages import Storages
from streamload.tar.decompression import is_compressed
from streamload.tar.table import ShardTable
from streamload.text import counted

__all__ = [
    "Checked",
    "check",
    "class_names",
    "differences",
    "missing_names",
    "missing_shards",
    "without_checksums",
]


class Checked(NamedTuple):
    """A shard that was read from end to end.

    Attributes:
        samples: how many are in it.
        damages: what is wrong with it.
    """

    samples: int
    damages: Sequence[StreamloadError]


def check(url: str, lookup: IndexLookup, reader: Reader, classes: Sequence[str] | None) -> Checked:
    """Read one shard from end to end; what is wrong with it.

    Args:
        url: the shard.
        lookup: where the index is found, if there is one.
        reader: reads it.
        classes: the names of the classes by number, as `classes.json` beside it has them, or None.
    """
    folder, name = folder_and_name(url)
    try:
        read = reader.read(url)
    except StreamloadError as exc:
        return Checked(0, [exc])
    found: list[StreamloadError] = [] if classes is None else list(_nameless_labels(url, read.table, classes))
    try:
        index = lookup.of_folder(folder)
        if index is not None:
            check_shard(index.shard(name), read.bytes, url, read.etag)
            known = lookup.table_of(folder, name)
            found += () if known is None else differences(url, read.table, known)
    except StreamloadError as exc:
        found.append(exc)
    return Checked(len(read.table), found)


def class_names(folders: Iterable[str], storages: Storages) -> tuple[dict[str, tuple[str, ...]], list[StreamloadError]]:
    """The names of the classes in the `classes.json` of each folder that has one, and what is wrong with these files.

    Where it may not be read, it is taken for one that is not there. A name that stands for two labels is wrong.
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
    """The first name that comes twice."""
    first: dict[str, int] = {}
    for label, name in enumerate(names):
        if first.setdefault(name, label) != label:
            yield DatasetIndexError(f"the name {name!r} stands for two labels, {first[name]} and {label}", url=url)
            return


def _nameless_labels(url: str, table: ShardTable, classes: Sequence[str]) -> Iterator[StreamloadError]:
    """The first label that has no name, and how many there are."""
    if table.labels is None:
        return
    nameless = np.flatnonzero((table.labels < 0) | (table.labels >= len(classes)))
    if len(nameless):
        first = int(nameless[0])
        more = f" (and {counted(len(nameless) - 1, 'more sample')})" if len(nameless) > 1 else ""
        yield DatasetIndexError(
            f"the label {int(table.labels[first])}{more} has no name in {CLASSES_FILE}, which names "
            f"{len(classes):,}; pack the shards again with one numbering (`shardify --classes`), or correct the file",
            url=url,
            key=table.key(first),
        )


def missing_names(folder: str, lookup: IndexLookup, storages: Storages) -> list[str]:
    """The names of shards that the index beside the shards of a folder has and that are not there.

    Web servers do not tell; and where the index or the folder cannot be read, nothing is known.
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


def missing_shards(shards: Sequence[str], lookup: IndexLookup, storages: Storages) -> Iterator[StreamloadError]:
    """The shards that the indexes beside some shards name and that are not there."""
    for folder in dict.fromkeys(folder_and_name(url)[0] for url in shards):
        for name in missing_names(folder, lookup, storages):
            yield ShardNotFoundError(
                "the index names this shard, but it is not there; restore it, or drop it from the index with "
                "`streamload index`",
                url=f"{folder}/{name}",
            )


def without_checksums(shards: Sequence[str], lookup: IndexLookup) -> int:
    """How many of these shards neither an index nor their compression has checksums of, for what is in the files."""
    return sum(not is_compressed(url) and lookup.of_folder(folder_and_name(url)[0]) is None for url in shards)


def differences(url: str, table: ShardTable, known: ShardTable) -> Iterator[StreamloadError]:
    """What a shard's own table and the one in the index disagree about."""
    rebuild = "restore the shard, or rebuild the index with `streamload index` if the shard is right"
    same_places = (
        table.fields == known.fields
        and np.array_equal(table.member_offset, known.member_offset)
        and np.array_equal(table.member_size, known.member_size)
        and np.array_equal(table.member_field, known.member_field)
        and np.array_equal(table.sample_start, known.sample_start)
        and np.array_equal(table.key_bytes, known.key_bytes)
        and np.array_equal(table.key_start, known.key_start)
    )
    if not same_places:
        yield DatasetIndexError(f"the index names other samples than the shard holds; {rebuild}", url=url)
        return
    if known.member_crc32 is not None and table.member_crc32 is not None:
        for member in np.flatnonzero(table.member_crc32 != known.member_crc32).tolist():
            sample = int(np.searchsorted(table.sample_start, member, side="right")) - 1
            field = table.fields[int(table.member_field[member])]
            yield ShardFormatError(
                f"the bytes of field {field!r} differ from those that were indexed (crc32); {rebuild}",
                url=url,
                key=table.key(sample),
                offset=int(table.member_offset[member]),
            )
    if known.labels is not None and not (table.labels is not None and np.array_equal(table.labels, known.labels)):
        yield DatasetIndexError(f"the index has other labels than the shard; {rebuild}", url=url)
