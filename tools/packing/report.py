"""What `shardify` says of what it found and what it did."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer
from streamload_tools.failures import say
from streamload_tools.packing.publishing import Part
from streamload_tools.sizes import counted, shown_bytes, shown_time
from streamload_tools.sources.loading import Fault
from streamload_tools.sources.source import ARRAY_FIELDS, Source

from streamload.errors import without_secrets

__all__ = ["report_faults", "report_notes", "report_result"]

_FAULTS_SHOWN = 20


def report_notes(source: Source) -> None:
    """What was skipped, and what looks like a mistake."""
    for note in source.notes:
        say(f"note: {note}")


def report_faults(faults: Sequence[Fault]) -> None:
    """Name the files that cannot be packed, the first of them only if there are many."""
    for fault in faults[:_FAULTS_SHOWN]:
        say(f"{fault.path}: {fault.reason}")
    if len(faults) > _FAULTS_SHOWN:
        say(f"... and {len(faults) - _FAULTS_SHOWN:,} more")


def report_result(parts: Sequence[Part], dest: str, source: Source, skipped: int, seconds: float) -> None:
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
