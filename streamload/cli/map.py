"""`streamload map`: a dataset made of another one by a function of a module."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from streamload.cli.command import Json, Ray, StorageOption, Where, Workers, print_document, print_line, reported_errors
from streamload.errors import without_secrets
from streamload.index.listing import list_shards
from streamload.pack.output import UsageError, shown_bytes
from streamload.pack.packing import map_shards
from streamload.storage.protocol import escaped
from streamload.storage.storages import Storages
from streamload.text import counted


def map_command(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="MODULE:FUNCTION, here or installed.")],
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Shards, a pattern or a folder.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="A folder or a url for the new shards.")],
    *,
    sidecar: Annotated[bool, typer.Option("--sidecar", help="Write only new fields, for join= of a loader.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="Pass lists of at most this many samples.", min=1)] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Cut shards anew, none larger than this.")] = None,
    max_count: Annotated[int | None, typer.Option(help="Cut shards anew, none with more samples.", min=1)] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Pass decoded fields instead of bytes.")] = False,
    where: Where = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the shards in DEST.")] = False,
    as_document: Json = False,
    workers: Workers = None,
    ray: Ray = None,
    storage_option: StorageOption = None,
) -> None:
    """Write what a function makes of each sample: a new sample, several, or None to leave it out.

    A sample is a dict of its fields' bytes with "__key__". Keys and order are kept; each shard becomes one of its name,
    unless --max-bytes or --max-count cuts them anew. Nothing is published before everything is done.

    Examples:
      streamload map filters:large_enough shards/train shards/large
      streamload map embed:vectors shards/train vectors --sidecar --batch-size 64
      streamload map filters:large_enough shards/train shards/large --resume
      streamload map filters:large_enough s3://bucket/train s3://bucket/large --ray auto
    """
    options = dict(storage_option or ())
    with reported_errors("run the same command with --resume to go on"):
        map_shards(
            _loaded(function),
            source,
            dest,
            sidecar=sidecar,
            batch_size=batch_size,
            decode=decode,
            where=where,
            workers=workers,
            max_bytes=max_bytes,
            max_count=max_count,
            resume=resume,
            overwrite=overwrite,
            storage_options=options,
            ray=ray,
        )
    listing = list_shards(escaped(dest), None, Storages(options))
    shards, samples = len(listing.shards), sum(listing.counts or ())
    size = sum(shard.bytes for shard in listing.shards)
    if as_document:
        print_document({"shards": shards, "samples": samples, "bytes": size})
    else:
        counts = f"{counted(shards, 'shard')}, {counted(samples, 'sample')}, {shown_bytes(size)}"
        print_line(f"{without_secrets(dest)}: {counts}")


def _loaded(named: str) -> Callable[[Any], Any]:
    module_name, _, name = named.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[[Any], Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise UsageError(
            f"{named!r} cannot be imported ({exc}); write MODULE:FUNCTION, such as filters:large_enough for a function "
            "in filters.py, of a module that lies here or is installed"
        ) from exc
    if not callable(function):
        raise UsageError(f"{named!r} is not a function; write MODULE:FUNCTION")
    return function
