"""Whether shards are whole, and whether they are what their index says: every byte is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from glob import escape

import numpy as np
from streamload_tools.reading import Reader

from streamload.dataset.compressed_names import is_compressed
from streamload.dataset.index import check_shard
from streamload.dataset.table import ShardTable
from streamload.errors import DatasetIndexError, ShardFormatError, ShardNotFoundError, StreamloadError
from streamload.fetch.listing.index_lookup import IndexLookup
from streamload.fetch.listing.shard_names import WEB, folder_and_name, shard_name
from streamload.fetch.storage.protocol import protocol_of
from streamload.fetch.storage.storages import Storages

__all__ = ["damages", "differences", "missing_names", "missing_shards", "without_checksums"]


def damages(url: str, lookup: IndexLookup, reader: Reader) -> list[StreamloadError]:
    """Read one shard from end to end; what is wrong with it.

    Args:
        url: the shard.
        lookup: where the index is found, if there is one.
        reader: reads it.
    """
    folder, name = folder_and_name(url)
    try:
        read = reader.read(url)
        index = lookup.of_folder(folder)
        if index is None:
            return []
        check_shard(index.shard(name), read.bytes, url, read.etag)
        known = lookup.table_of(folder, name)
    except StreamloadError as exc:
        return [exc]
    return [] if known is None else list(differences(url, read.table, known))


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
