"""`streamload bench`: measure how fast a StreamLoader reads a dataset on this machine, and what limits it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

import streamload
from streamload.cli.command import INTERRUPTED, Fields, Index, Json, StorageOption, Urls, print_document, print_line
from streamload.cli.shards import tables
from streamload.cli.stats import image_fields
from streamload.errors import CollateError
from streamload.images import RandomResizedCrop
from streamload.index.listing import list_shards
from streamload.pack.output import UsageError, shown_bytes
from streamload.storage.storages import Storages
from streamload.tar.extensions import is_image
from streamload.tar.table import MISSING
from streamload.text import counted


def bench_command(
    urls: Urls,
    *,
    batch_size: Annotated[int, typer.Option(help="Samples per batch.", min=1)] = 64,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: one per core.", min=0)] = None,
    seconds: Annotated[float, typer.Option(help="Stop this long after the first batch.", min=0)] = 10.0,
    batches: Annotated[int | None, typer.Option(help="Stop after this many batches instead.", min=1)] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle, as for training.")] = False,
    fields: Fields = None,
    crop: Annotated[int, typer.Option(help="Pixels of RandomResizedCrop; 0: no crop.", min=0)] = 224,
    raw: Annotated[bool, typer.Option("--no-decode", help="Do not decode the fields.")] = False,
    as_document: Json = False,
    index: Index = None,
    storage_option: StorageOption = None,
) -> None:
    """Read shards with a StreamLoader, epoch after epoch, and report its speed and what limits it.

    Without --fields, those of every sample in the first shard are read. The first batch is timed separately. Ctrl-C
    ends the measurement and reports it.

    Examples:
      streamload bench shards/train --shuffle --batch-size 256
      streamload bench s3://bucket/photos --seconds 60 --workers 8
      streamload bench shards --fields 'jpg;png,cls' --json
    """
    options = dict(storage_option or ())
    chosen = _usual_fields(urls, index, options) if fields is None else tuple(fields.split(","))
    images = [] if raw or not crop else [name for name in chosen if all(map(is_image, name.split(";")))]
    started = time.perf_counter()
    first = last = 0.0
    interrupted = False
    with streamload.StreamLoader(
        urls,
        batch_size,
        shuffle=shuffle,
        fields=chosen,
        decode=not raw,
        transform=dict.fromkeys(images, RandomResizedCrop(crop)) if images else None,
        num_workers="auto" if workers is None else workers,
        index=index,
        storage_options=options,
    ) as loader:
        before = loader.statistics()
        try:
            for last in _arrivals(loader):
                if not first:
                    first, before = last, loader.statistics()
                elif batches is not None and loader.statistics().batches - before.batches >= batches:
                    break
                if batches is None and last - first >= seconds:
                    break
        except KeyboardInterrupt:
            if not first:
                raise
            interrupted = True
        except CollateError as error:
            error.add_note("leave fields out with --fields, or measure without decoding with --no-decode")
            raise
        measured, spent_s = loader.statistics().since(before), last - first
        setup = f"batch_size={batch_size}, {counted(loader.num_workers, 'worker')}, fields {', '.join(chosen)}"
        setup += ", not decoded" if raw else f", RandomResizedCrop({crop})" if images else ""
    result = {
        "loader": setup,
        "first_batch_s": first - started,
        "samples": measured.samples,
        "batches": measured.batches,
        "seconds": spent_s,
        "payload_bytes": measured.payload_bytes,
        "samples_per_s": measured.samples / spent_s if measured.batches else None,
        "payload_bytes_per_s": measured.payload_bytes / spent_s if measured.batches else None,
        "interrupted": interrupted,
        "limited_by": measured.verdict,
        "statistics": measured.as_dict(),
    }
    if as_document:
        print_document(result)
    else:
        print_line(f"{setup}\nfirst batch after {first - started:.2f} s")
        if measured.batches:
            rates = f"{measured.samples / spent_s:,.0f} samples/s, {shown_bytes(measured.payload_bytes / spent_s)}/s"
            size = f"{counted(measured.samples, 'sample')} in {counted(measured.batches, 'batch')}"
            print_line(f"{rates} as stored, measured over {size} and {spent_s:.1f} s after the first batch")
            print_line(f"limited by {measured.verdict}")
        else:
            print_line("nothing else was measured: there was no second batch")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _usual_fields(urls: Sequence[str], index: str | None, storage_options: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields that all samples of the first shard have; image fields are alternatives of each other."""
    storages = Storages(storage_options)
    listing = list_shards(urls, index, storages)
    first = replace(listing, shards=listing.shards[:1], counts=None)
    with tables(first, index, storages) as shards:
        _, table = next(shards)
    groups = [image_fields(table.fields), *([name] for name in table.fields if not is_image(name))]
    common = tuple(";".join(group) for group in groups if group and (table.column(group) != MISSING).all())
    if not common:
        raise UsageError("the samples of the first shard have no field in common; choose some with --fields")
    return common


def _arrivals(loader: streamload.StreamLoader) -> Iterator[float]:
    """Yield the arrival time of each batch, epoch after epoch."""
    while True:
        before = loader.statistics().batches
        for _ in loader:
            yield time.perf_counter()
        if loader.statistics().batches == before:
            raise UsageError("an epoch has no batch; give a smaller --batch-size, or other shards")
