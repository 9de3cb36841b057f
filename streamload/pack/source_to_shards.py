"""One run of `shardify`: from a local source to published shards at a destination that may be remote."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import typer

from streamload.errors import without_secrets
from streamload.pack.failures import UsageError
from streamload.pack.output import say, shown_bytes, shown_time
from streamload.pack.packing import PackOptions, pack
from streamload.pack.publishing import Part
from streamload.pack.remote_staging import RemoteStaging
from streamload.pack.sources.kinds import SourceOptions, open_source
from streamload.pack.sources.listing import Listing, list_files
from streamload.pack.sources.loading import Fault
from streamload.pack.sources.source import (
    ARRAY_FIELDS,
    COLUMNS_FIELD,
    Source,
    SourceError,
    SourceSample,
    is_image,
    other_kinds_advice,
)
from streamload.pack.staging import Run, Staging, is_being_published, open_staging
from streamload.pack.targets import Place, Start, check_destination, check_places, refuse_shards
from streamload.tar.extensions import KIND_OF, Kind
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted

_FAULTS_SHOWN = 20
_FIELDS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Packed:
    """What a run has packed and published.

    Attributes:
        dest: the destination.
        parts: those that have shards, at least one.
        classes: the number of classes; None if there are none.
        fields: how many samples have each field, or one of several that stand for each other (`jpg;png`).
        left_out: number of samples, or of files that are one each, that are not in the shards.
        noun: which of the two.
        seconds: duration.
    """

    dest: str
    parts: Sequence[Part]
    classes: int | None
    fields: Mapping[str, int]
    left_out: int
    noun: str
    seconds: float


def source_to_shards(
    source: str, source_options: SourceOptions, options: PackOptions, place: Place, start: Start
) -> Packed | None:
    """Pack a source, and publish its shards; None if an earlier run has done all of it.

    Raises:
        UsageError: source, destination and options do not fit together, or there are shards already.
        typer.Exit: files are bad, or none is left to pack, which is reported; nothing is published.
        StorageError, OSError: something cannot be read or written.
    """
    began = time.monotonic()
    dest = place.dest
    check_places(source, dest, remote=place.storage is not None)
    try:
        found = open_source(source, source_options)
    except SourceError as exc:
        raise UsageError(str(exc)) from exc
    if options.resizing is not None:
        _refuse_resizing(found.samples)
    if options.fractions is not None and found.parts is not None:
        raise UsageError(
            f"{source!r} is divided into {', '.join(found.parts)} already; leave out --split, or give one of them"
        )
    if found.in_memory:
        options = replace(options, workers=1)
    for note in found.notes:
        say(f"note: {note}")
    splits = list(options.fractions or found.parts or [""])
    remembered = _remembered(source, options)
    if not check_destination(place, splits, start, remembered):
        return None
    listing = list_files(found)
    run = Run(dest, remembered, listing, start.resume, start.overwrite, options.sync)
    if place.storages is None:
        staging = Staging(place.staging_folder(), run)
    else:
        staging = RemoteStaging(place.staging_folder(), run, place.storages, splits)
    with open_staging(staging):
        if start.resume and not staging.resumed:
            say("note: there is no unfinished run to resume; packing from the start")
        if place.storage is None and not is_being_published(dest):  # another may have published meanwhile
            refuse_shards(place, splits, start)
        parts = staging.half_published()
        if parts is None:
            parts = _packed(found, listing, options, staging)
        staging.publish(parts, found.classes)
    written = _not_empty(parts)
    return Packed(
        dest,
        written,
        None if found.classes is None else len(found.classes),
        _stored_fields(written, found),
        len(found.samples) - sum(part.samples for part in written),
        "sample" if found.noun == "sample" else "file",
        time.monotonic() - began,
    )


def _refuse_resizing(samples: Sequence[SourceSample]) -> None:
    """Refuse to resize arrays, what holds no image, or several, of which one may be a mask."""
    fields = [[member.field for member in sample.members if member.field is not None] for sample in samples]
    if any(sum(map(is_image, names)) > 1 for names in fields):
        raise UsageError("--resize is for one image in each sample, and there are several, of which one may be a mask")
    known = {name for names in fields for name in names}
    if not known.isdisjoint(ARRAY_FIELDS) or (known and not any(map(is_image, known))):
        raise UsageError("--resize is for images, and the source holds other files, such as arrays")


def _packed(found: Source, listing: Listing, options: PackOptions, staging: Staging) -> list[Part]:
    """The parts, at least one of them with shards; otherwise the command ends."""
    parts, faults = pack(found, listing, options, staging)
    _report_faults(faults)
    if faults and not options.skip_bad:
        staging.abandon()
        are, s = ("is", "") if len(faults) == 1 else ("are", "s")
        kind = f"no whole image{s}" if found.noun == "image" else "damaged or of another kind"
        advice = _advice(found, faults) or "repair or remove them"
        say(
            f"error: {len(faults):,} of {counted(len(listing.paths), 'file')} {are} {kind}, so nothing was published; "
            f"{advice}, or leave them out with --skip-bad"
        )
        raise typer.Exit(1)
    if not _not_empty(parts):
        staging.abandon()
        kinds = _advice(found, faults)
        say(f"error: no {found.noun} is left to pack, so nothing was published{f'; {kinds}' if kinds else ''}")
        raise typer.Exit(1)
    return parts


def _advice(found: Source, faults: Sequence[Fault]) -> str | None:
    """How to pack files of kinds that do not belong in this source, if there are any among the faults."""
    refused = {member.path for sample in found.samples for member in sample.members if member.field is None}
    return other_kinds_advice([fault.path for fault in faults if fault.path in refused])


def _not_empty(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.shards]


def _remembered(source: str, options: PackOptions) -> dict[str, Any]:
    """Everything besides the files that the bytes of the shards depend on, by the users' names."""
    remembered: dict[str, Any] = {
        "SOURCE": os.path.realpath(source),
        "--max-bytes": options.max_bytes,
        "--max-count": options.max_count,
        "--shuffle": options.shuffle,
        "--seed": options.seed,
        # Pairs, since their order matters and dictionaries of any order are equal.
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


def _report_faults(faults: Sequence[Fault]) -> None:
    """Print the files that cannot be packed, only the first of them if there are many."""
    for fault in faults[:_FAULTS_SHOWN]:
        say(f"{fault.path}: {fault.reason}")
    if len(faults) > _FAULTS_SHOWN:
        say(f"... and {len(faults) - _FAULTS_SHOWN:,} more")


def as_json(packed: Packed) -> dict[str, Any]:
    """The figures as a JSON object."""
    return {
        "destination": without_secrets(packed.dest),
        **_figures(packed.parts),
        "splits": {part.name: _figures([part]) for part in packed.parts if part.name},
        "classes": packed.classes,
        "fields": packed.fields,
        "left_out": packed.left_out,
        "seconds": packed.seconds,
    }


def as_lines(packed: Packed) -> Iterator[str]:
    """What was written, and how to read it."""
    parts, number = packed.parts, packed.classes
    for part in parts:
        if part.name:
            yield f"{part.name}: {_counts([part])}"
    classes = "" if number is None else f", {number:,} {'class' if number == 1 else 'classes'}"
    left_out = f", {counted(packed.left_out, packed.noun)} left out" if packed.left_out else ""
    yield f"packed {_counts(parts)}{classes}, in {shown_time(packed.seconds)}{left_out}"
    samples = sum(part.samples for part in parts)
    lacking = [f"{samples - count:,} without {name!r}" for name, count in packed.fields.items() if count < samples]
    if lacking:
        yield f"not every sample has every field: {', '.join(lacking[:_FIELDS_SHOWN])}"
    folder = os.path.join(packed.dest, parts[0].name) if parts[0].name else packed.dest
    yield "read it with:"
    yield _reading(without_secrets(folder), packed.fields, samples)


def _stored_fields(parts: Sequence[Part], source: Source) -> dict[str, int]:
    """How many samples have each field, or one of several that stand for each other (`jpg;png`); the label last."""
    stored: Counter[str] = Counter()
    for part in parts:
        for shard in part.shards:
            if shard.table is not None:
                counts = np.bincount(shard.table.member_field, minlength=len(shard.table.fields))
                stored.update(dict(zip(shard.table.fields, counts.tolist(), strict=True)))
    groups = [set(group) & stored.keys() for group in source.fields or ()]
    rest = stored.keys() - {LABEL_FIELD, COLUMNS_FIELD} - set().union(*groups)
    # What --resize has made a JPEG of is not called as its file any more; there is one image in a sample then.
    place = next((group for group in groups if any(map(is_image, group))), None)
    if place is None:
        groups.insert(0, rest)
    else:
        place |= rest
    names = [";".join(sorted(group, key=lambda name: (name != "jpg", name))) for group in groups if group]
    fields = {name: sum(stored[field] for field in name.split(";")) for name in names}
    return fields | ({LABEL_FIELD: stored[LABEL_FIELD]} if LABEL_FIELD in stored else {})


def _reading(folder: str, fields: Mapping[str, int], samples: int) -> str:
    """Lines of Python that read what makes batches: fields of all samples, text of some; a single image is cropped."""
    chosen = [name for name, count in fields.items() if count == samples]
    where = ""
    if not chosen:
        chosen = list(fields)[:1]
        where = f", where='\"{chosen[0]}\"'" if ";" not in chosen[0] else ""
    chosen += [f"{name}?" for name in fields if name not in chosen and KIND_OF.get(name) is Kind.TEXT]
    chosen = chosen[:_FIELDS_SHOWN]
    images = [name for name in chosen if all(map(is_image, name.split(";")))]
    lines = ["  from streamload import StreamLoader"]
    transform = ""
    if len(images) == 1:
        lines.append("  from streamload.images import RandomResizedCrop")
        transform = f', transform={{"{images[0]}": RandomResizedCrop(224)}}'
    listed = ", ".join(f'"{name}"' for name in chosen) + "," * (len(chosen) == 1)
    lines.append(f"  StreamLoader({folder!r}, batch_size=64, shuffle=True, fields=({listed}){where}{transform})")
    return "\n".join(lines)


def _figures(parts: Sequence[Part]) -> dict[str, int]:
    return {
        "shards": sum(len(part.shards) for part in parts),
        "samples": sum(part.samples for part in parts),
        "bytes": sum(part.bytes for part in parts),
    }


def _counts(parts: Sequence[Part]) -> str:
    shards, samples, size_bytes = _figures(parts).values()
    return f"{counted(shards, 'shard')}, {counted(samples, 'sample')}, {shown_bytes(size_bytes)}"
