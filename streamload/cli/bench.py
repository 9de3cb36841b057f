"""`streamload bench`: measure how fast a StreamLoader reads a dataset on this machine, and what limits it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

import streamload
from streamload.cli.arguments import Index, Json, StorageOption, Urls, parse_storage_options
from streamload.decode.decoders import is_image
from streamload.errors import CollateError
from streamload.images import RandomResizedCrop
from streamload.index.listing import IndexLookup, list_shards
from streamload.pack.failures import UsageError, reported_errors
from streamload.pack.output import print_document, print_line, shown_bytes
from streamload.pack.reading import Reader, tables
from streamload.statistics import Statistics
from streamload.storage.storages import Storages
from streamload.tar.table import MISSING
from streamload.text import counted


def bench_command(
    urls: Urls,
    *,
    batch_size: Annotated[int, typer.Option(metavar="N", help="Samples per batch.", min=1)] = 64,
    loader_workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Worker processes. Default: one per core.", min=0)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop after this time, in seconds. Default: 10.", min=0)
    ] = None,
    batches: Annotated[int | None, typer.Option(metavar="N", help="Stop after this number of batches.", min=1)] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle, as for training.")] = False,
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS",
            help="Fields to read, such as 'jpg;png,cls'. Default: those of every sample in the first shard.",
        ),
    ] = None,
    crop: Annotated[
        int, typer.Option(metavar="PIXELS", help="Output size of RandomResizedCrop in pixels; 0: no crop.", min=0)
    ] = 224,
    raw: Annotated[bool, typer.Option("--no-decode", "--raw", help="Do not decode the fields.")] = False,
    as_document: Json = False,
    index: Index = None,
    storage_option: StorageOption = None,
) -> None:
    """Read shards with a StreamLoader, epoch after epoch, and report its speed and what limits it.

    The first batch is timed separately. Ctrl-C ends the measurement and reports it.

    Examples:
      streamload bench shards/train --shuffle --batch-size 256
      streamload bench s3://bucket/photos --seconds 60 --workers 8
      streamload bench shards --fields 'jpg;png,cls' --json
    """
    with reported_errors():
        result, what = _bench(
            urls,
            None if fields is None else fields.split(","),
            _Limits(10.0 if seconds is None and batches is None else seconds, batches),
            decode=not raw,
            crop=crop,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers="auto" if loader_workers is None else loader_workers,
            index=index,
            storage_options=parse_storage_options(storage_option),
        )
        if as_document:
            print_document(_bench_json(result, what))
        for line in () if as_document else _bench_lines(result, what):
            print_line(line)
        if result.interrupted:
            raise typer.Exit(130)


@dataclass(frozen=True, slots=True)
class _Limits:
    """When to stop: this many seconds or batches after the first batch, whichever comes first; None is no limit."""

    seconds: float | None
    batches: int | None


@dataclass(frozen=True, slots=True)
class _Result:
    """A measurement; the first batch is not part of it.

    Attributes:
        samples: how many were delivered.
        batches: how many were delivered.
        payload_bytes: size of the fields that were read, as stored.
        seconds: duration.
        first_batch_s: time from before the loader was created to its first batch.
        passes: epochs started.
        interrupted: Ctrl-C ended it.
        statistics: the loader's, from its start.
    """

    samples: int
    batches: int
    payload_bytes: int
    seconds: float
    first_batch_s: float
    passes: int
    interrupted: bool
    statistics: Statistics


def _bench(
    urls: Sequence[str],
    fields: Sequence[str] | None,
    limits: _Limits,
    *,
    decode: bool,
    crop: int,
    **options: Any,
) -> tuple[_Result, str]:
    """Read with a StreamLoader, epoch after epoch, until a limit is reached or Ctrl-C.

    Args:
        urls: shards, patterns or folders.
        fields: the fields to read; None is `usual_fields`.
        limits: when to stop.
        decode: False keeps the bytes.
        crop: size in pixels for RandomResizedCrop, since images rarely have one size; 0 is no crop.
        **options: StreamLoader's.

    Returns:
        The measurement, and a description of the loader.

    Raises:
        StreamloadError, ValueError: the loader's.
        KeyboardInterrupt: Ctrl-C before there was a batch.
    """
    started = time.perf_counter()
    chosen = usual_fields(urls, options["index"], options["storage_options"]) if fields is None else tuple(fields)
    images = [name for name in chosen if all(map(is_image, name.split(";")))] if decode and crop else []
    transform = dict.fromkeys(images, RandomResizedCrop(crop)) if images else None
    if fields is None:
        started = time.perf_counter()  # finding the fields is not the loader's work
    with streamload.StreamLoader(list(urls), fields=chosen, decode=decode, transform=transform, **options) as loader:
        result = _measure(loader, limits, started)
        what = f"fields {', '.join(chosen)}{'' if decode else ', not decoded'}"
        what += f", {' and '.join(images)} by RandomResizedCrop({crop})" if images else ""
        workers = counted(loader.num_workers, "worker")
        return result, f"batch_size={loader.batch_size}, {workers}, {what}"


def usual_fields(urls: Sequence[str], index: str | None, storage_options: dict[str, Any]) -> tuple[str, ...]:
    """The fields that every sample of the first shard has; image fields are alternatives of each other.

    The shard is read if it has no index.

    Raises:
        UsageError: its samples have no field in common.
        StreamloadError: the shard or its index cannot be read.
    """
    storages = Storages(storage_options)
    listing = list_shards(list(urls), index, storages)
    first = replace(listing, shards=listing.shards[:1], counts=None)
    ((_, table),) = tables(first, IndexLookup(index, storages), Reader(storages, 1))
    images = sorted(filter(is_image, table.fields))
    others = [(name,) for name in table.fields if name not in images]
    found = [group for group in (tuple(images), *others) if group and (table.column(group) != MISSING).all()]
    if not found:
        raise UsageError("the samples of the first shard have no field in common; choose some with --fields")
    return tuple(";".join(group) for group in found)


def _bench_json(result: _Result, what: str) -> dict[str, Any]:
    """The result as a JSON object; the rates are None without a second batch."""
    return {
        "loader": what,
        "first_batch_s": result.first_batch_s,
        "samples": result.samples,
        "batches": result.batches,
        "passes": result.passes,
        "payload_bytes": result.payload_bytes,
        "seconds": result.seconds,
        "samples_per_s": result.samples / result.seconds if result.batches else None,
        "payload_bytes_per_s": result.payload_bytes / result.seconds if result.batches else None,
        "interrupted": result.interrupted,
        "limited_by": result.statistics.verdict,
        "statistics": result.statistics.as_dict(),
    }


def _bench_lines(result: _Result, what: str) -> Iterator[str]:
    """The result as text."""
    yield what
    yield f"first batch after {result.first_batch_s:.2f} s"
    if not result.batches:
        yield "nothing else was measured: there was no second batch"
        return
    stored = shown_bytes(result.payload_bytes / result.seconds)
    batch_ms = 1000 * result.seconds / result.batches
    yield f"{result.samples / result.seconds:,.0f} samples/s, {stored}/s as stored, {batch_ms:.2f} ms a batch"
    yield (
        f"measured over {counted(result.samples, 'sample')} in {counted(result.batches, 'batch')} "
        f"of {counted(result.passes, 'pass')} and {result.seconds:.1f} s; the first batch is not counted"
    )
    yield f"limited by {result.statistics.verdict}"


def _measure(loader: streamload.StreamLoader, limits: _Limits, started: float) -> _Result:
    first = last = 0.0
    before = loader.statistics()
    passes, interrupted = 0, False
    try:
        for number, now in _batches(loader):
            passes, last = number, now
            if not first:
                first, before = now, loader.statistics()
            elif limits.batches is not None and loader.statistics().batches - before.batches >= limits.batches:
                break
            if limits.seconds is not None and now - first >= limits.seconds:
                break
    except KeyboardInterrupt:
        if not first:
            raise KeyboardInterrupt("there was no batch yet") from None
        interrupted = True
    except CollateError as error:
        error.add_note("leave fields out with --fields, or measure without decoding with --no-decode")
        raise
    after = loader.statistics()
    return _Result(
        samples=after.samples - before.samples,
        batches=after.batches - before.batches,
        payload_bytes=after.payload_bytes - before.payload_bytes,
        seconds=last - first,
        first_batch_s=first - started,
        passes=passes,
        interrupted=interrupted,
        statistics=after,
    )


def _batches(loader: streamload.StreamLoader) -> Iterator[tuple[int, float]]:
    """The epoch and the arrival time of each batch, epoch after epoch without end."""
    number = 0
    while True:
        number += 1
        empty = True
        for _ in loader:
            empty = False
            yield number, time.perf_counter()
        if empty:
            raise UsageError("an epoch has no batch; give a smaller --batch-size, or other shards")
