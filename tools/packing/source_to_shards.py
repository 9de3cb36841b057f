"""One run of `shardify`: from a source on this machine to published shards, at a destination that may be remote."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import typer
from streamload_tools.failures import UsageError
from streamload_tools.output import say, shown_bytes, shown_time
from streamload_tools.packing.packing import PackOptions, pack
from streamload_tools.packing.publishing import Part
from streamload_tools.packing.remote_staging import remote_staging
from streamload_tools.packing.staging import Run, Staging, is_being_published, local_staging, open_staging
from streamload_tools.packing.targets import Start, check_local, check_places, check_remote, refuse_shards
from streamload_tools.sources.kinds import SourceOptions, open_source
from streamload_tools.sources.listing import Listing, list_files
from streamload_tools.sources.loading import Fault
from streamload_tools.sources.source import ARRAY_FIELDS, Source, SourceError, other_kinds_advice

from streamload.errors import without_secrets
from streamload.storage.protocol import Storage
from streamload.text import counted

__all__ = ["Place", "source_to_shards"]

_FAULTS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where shards go.

    Attributes:
        dest: a path, or a url without a slash at its end.
        storage: what writes there, if it is remote.
        staging: where shards grow then, or None.
    """

    dest: str
    storage: Storage | None
    staging: str | None


def source_to_shards(
    source: str, source_options: SourceOptions, options: PackOptions, place: Place, start: Start
) -> None:
    """Pack a source and publish its shards, and tell the user what happened.

    Raises:
        UsageError: source, destination and options make no sense together, or shards are in the way.
        typer.Exit: files are bad, or none is left to pack, which was told; nothing is published.
        StorageError, OSError: something cannot be read or written.
    """
    began = time.monotonic()
    dest = place.dest
    check_places(source, dest, remote=place.storage is not None)
    try:
        found = open_source(source, source_options)
    except SourceError as exc:
        raise UsageError(str(exc)) from exc
    if options.resizing is not None and any(file.field in ARRAY_FIELDS for file in found.files):
        raise UsageError("--resize is for images, and the source holds arrays or tensors too")
    if options.fractions is not None and found.parts is not None:
        raise UsageError(
            f"{source!r} is divided into {', '.join(found.parts)} already; leave out --split, or give one of them"
        )
    _report_notes(found)
    splits = list(options.fractions or found.parts or [""])
    if place.storage is None:
        something_to_do = check_local(dest, splits, start)
    else:
        something_to_do = check_remote(place.storage, dest, splits, start)
    if not something_to_do:
        return
    listing = list_files(found)
    run = Run(dest, _remembered(source, options), listing, start.resume, start.overwrite, options.sync)
    remote = place.storage
    staging = local_staging(run) if remote is None else remote_staging(run, remote, splits, place.staging)
    with open_staging(staging):
        if start.resume and not staging.resumed:
            say("note: there is no unfinished run to resume; packing from the start")
        if remote is None and not is_being_published(dest):  # another may have published meanwhile
            refuse_shards(dest, splits, start)
        parts = staging.half_published()
        if parts is None:
            parts, skipped = _packed(found, listing, options, staging)
        else:
            skipped = len(found.files) - sum(part.samples for part in parts)
        staging.publish(parts, found.classes)
    _report_result(_not_empty(parts), dest, found, skipped, time.monotonic() - began)


def _packed(found: Source, listing: Listing, options: PackOptions, staging: Staging) -> tuple[list[Part], int]:
    """The parts, of which at least one holds something, and how many files were left out. Else the command ends."""
    parts, faults = pack(found, listing, options, staging)
    _report_faults(faults)
    if faults and not options.skip_bad:
        staging.abandon()
        are, s = ("is", "") if len(faults) == 1 else ("are", "s")
        kind = f"no whole image{s}" if found.noun == "image" else "damaged or of another kind"
        advice = other_kinds_advice([fault.path for fault in faults]) or "repair or remove them"
        say(
            f"error: {len(faults):,} of {counted(len(found.files), 'file')} {are} {kind}, so nothing was published; "
            f"{advice}, or leave them out with --skip-bad"
        )
        raise typer.Exit(1)
    if not _not_empty(parts):
        staging.abandon()
        kinds = other_kinds_advice([fault.path for fault in faults])
        say(f"error: no {found.noun} is left to pack, so nothing was published{f'; {kinds}' if kinds else ''}")
        raise typer.Exit(1)
    return parts, len(faults)


def _not_empty(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.shards]


def _remembered(source: str, options: PackOptions) -> dict[str, Any]:
    """All that the bytes of the shards depend on beside the files, by the names that users know."""
    remembered: dict[str, Any] = {
        "SOURCE": os.path.realpath(source),
        "--max-bytes": options.max_bytes,
        "--max-count": options.max_count,
        "--shuffle": options.shuffle,
        "--seed": options.seed,
        # Pairs, for the order decides what goes where, and dictionaries are equal in any order.
        "--split": None if options.fractions is None else [list(share) for share in options.fractions.items()],
        "--skip-bad": options.skip_bad,
        "--resize": None if options.resizing is None else options.resizing.size,
        "--quality": None if options.resizing is None else options.resizing.quality,
        "streamload": version("streamload"),
    }
    if options.resizing is not None:
        names = ("simplejpeg", "opencv-python-headless", "pillow", "numpy")
        remembered |= {name: version(name) for name in names}
    return remembered


def _report_notes(source: Source) -> None:
    """What was skipped, and what looks like a mistake."""
    for note in source.notes:
        say(f"note: {note}")


def _report_faults(faults: Sequence[Fault]) -> None:
    """Name the files that cannot be packed, the first of them only if there are many."""
    for fault in faults[:_FAULTS_SHOWN]:
        say(f"{fault.path}: {fault.reason}")
    if len(faults) > _FAULTS_SHOWN:
        say(f"... and {len(faults) - _FAULTS_SHOWN:,} more")


def _report_result(parts: Sequence[Part], dest: str, source: Source, skipped: int, seconds: float) -> None:
    """What was written, and how it is read."""
    for part in parts:
        if part.name:
            typer.echo(f"{part.name}: {_counts([part])}")
    number = len(source.classes or ())
    classes = "" if source.classes is None else f", {number:,} {'class' if number == 1 else 'classes'}"
    left_out = f", {counted(skipped, 'file')} left out" if skipped else ""
    typer.echo(f"packed {_counts(parts)}{classes}, in {shown_time(seconds)}{left_out}")
    tables = [shard.table for part in parts for shard in part.shards if shard.table is not None]
    stored = {name for table in tables for name in table.fields} - {"cls", "json"}
    field = ";".join(sorted(stored, key=lambda name: (name != "jpg", name)))
    folder = os.path.join(dest, parts[0].name) if parts[0].name else dest
    arrays = not stored.isdisjoint(ARRAY_FIELDS.values())
    typer.echo("read it with:")
    typer.echo("  from streamload import StreamLoader")
    if not arrays:
        typer.echo("  from streamload.images import RandomResizedCrop")
    transform = "" if arrays else f', transform={{"{field}": RandomResizedCrop(224)}}'
    where = without_secrets(folder)
    typer.echo(f'  StreamLoader({where!r}, batch_size=64, shuffle=True, fields=("{field}", "cls"){transform})')


def _counts(parts: Sequence[Part]) -> str:
    shards = sum(len(part.shards) for part in parts)
    samples = sum(part.samples for part in parts)
    size = shown_bytes(sum(part.bytes for part in parts))
    return f"{counted(shards, 'shard')}, {counted(samples, 'sample')}, {size}"
