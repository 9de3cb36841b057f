"""`streamload ls`: the shards of a dataset, or all samples; on its own because each command has a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from streamload.cli.arguments import Index, Json, StorageOption, Urls, Where, Workers, parse_storage_options
from streamload.errors import without_secrets
from streamload.index.listing import IndexLookup, Listing, list_shards
from streamload.pack.failures import reported_errors
from streamload.pack.output import aligned, print_array, print_line, shown_bytes
from streamload.pack.reading import Reader, tables
from streamload.storage.storages import Storages
from streamload.tar.table import ShardTable
from streamload.text import counted
from streamload.workers.launchers import available_processors


def ls_command(
    urls: Urls,
    *,
    samples: Annotated[bool, typer.Option("--samples", help="List every sample with its fields.")] = False,
    as_document: Json = False,
    where: Where = None,
    index: Index = None,
    workers: Workers = None,
    storage_option: StorageOption = None,
) -> None:
    """List shards with their size, samples and fields, or every sample. Shards without an index are read.

    With --where the size is that of the fields of the samples that meet it. With --json it is an array of objects, a
    shard or a sample a line.

    Examples:
      streamload ls shards/train
      streamload ls s3://bucket/photos --samples --where 'label == 3'
      streamload ls shards --json
    """
    with reported_errors():
        storages = Storages(parse_storage_options(storage_option))
        listing = list_shards(urls, index, storages)
        reader = Reader(storages, workers or available_processors())
        found = tables(listing, IndexLookup(index, storages), reader, where=where)
        if where is not None:
            found = ((int(table.member_size.sum()), table) for _, table in found)
        if as_document:
            shown = _samples_json if samples else _shard_json
            urls_shown = [without_secrets(shard.url) for shard in listing.shards]
            print_array(item for url, shard in zip(urls_shown, found, strict=True) for item in shown(url, *shard))
            return
        names = _shown_names(listing)
        if samples:
            for name, (_, table) in zip(names, found, strict=True):
                for line in _sample_lines(name, table):
                    print_line(line)
            return
        rows = [("SHARD", "BYTES", "SAMPLES", "FIELDS")]
        total_bytes = total_samples = 0
        for name, (shard_bytes, table) in zip(names, found, strict=True):
            rows.append((name, f"{shard_bytes:,}", f"{len(table):,}", " ".join(table.fields)))
            total_bytes += shard_bytes
            total_samples += len(table)
        for line in aligned(rows, numbers=2):
            print_line(line)
        print_line(
            f"{counted(len(listing.shards), 'shard')}, {counted(total_samples, 'sample')}, {shown_bytes(total_bytes)}"
        )


def _shown_names(listing: Listing) -> list[str]:
    """The names of the shards, or their urls if shards in several folders have one name."""
    names = [shard.name for shard in listing.shards]
    return names if len(set(names)) == len(names) else [without_secrets(shard.url) for shard in listing.shards]


def _shard_json(url: str, shard_bytes: int, table: ShardTable) -> Iterator[dict[str, Any]]:
    yield {"url": url, "bytes": shard_bytes, "samples": len(table), "fields": list(table.fields)}


def _samples_json(url: str, _: int, table: ShardTable) -> Iterator[dict[str, Any]]:
    for key, fields in _samples(table):
        yield {"url": url, "key": key, "fields": dict(fields)}


def _sample_lines(name: str, table: ShardTable) -> Iterator[str]:
    for key, fields in _samples(table):
        sizes = "  ".join(f"{field} {size:,}" for field, size in fields)
        yield f"{name}  {key}  {sizes}".replace("\n", "\\n")


def _samples(table: ShardTable) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """The key of each sample, and its fields with their sizes in bytes."""
    starts, sizes, numbers = table.sample_start.tolist(), table.member_size.tolist(), table.member_field.tolist()
    for sample, key in enumerate(table.keys()):
        members = range(starts[sample], starts[sample + 1])
        yield key, [(table.fields[numbers[member]], sizes[member]) for member in members]
