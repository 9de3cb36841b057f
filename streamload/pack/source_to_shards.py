"""One run of `shardify`: from a local source to shards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np

from streamload.errors import without_secrets
from streamload.pack.output import UsageError, say, shown_bytes, shown_time
from streamload.pack.planning import (
    estimated_spans,
    measured_positions,
    planned_parts,
    sample_bytes,
    shard_spans,
)
from streamload.pack.resizing import Resizing
from streamload.pack.run import Pool, Start, pack_into
from streamload.pack.sources.kinds import SourceOptions, open_source
from streamload.pack.sources.loading import file_versions, meaning_of
from streamload.pack.sources.source import (
    ARRAY_FIELDS,
    COLUMNS_FIELD,
    ArrayRow,
    Source,
    SourceError,
    SourceSample,
    is_image,
)
from streamload.pack.tasks import (
    PackFiles,
    Record,
    Target,
    Task,
    digest_of,
    measure,
    shard_name,
    too_large,
)
from streamload.tar.extensions import KIND_OF, Kind
from streamload.tar.header_writer import END_OF_ARCHIVE
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted

_FAULTS_SHOWN = 20
_FIELDS_SHOWN = 8
_SMALL_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack a source; see the command's options of the same names.

    Attributes:
        shuffle: shuffle the samples.
        seed: seed of the shuffle and of the splits.
        fractions: the share of each split, or None.
        resizing: how to resize images, or None.
    """

    shuffle: bool
    seed: int
    fractions: dict[str, float] | None
    resizing: Resizing | None


def source_to_shards(
    source: str, source_options: SourceOptions, options: PackOptions, target: Target, start: Start
) -> dict[str, Any] | None:
    """Pack a source.

    Returns:
        What was written, as a JSON object; None if an earlier run has done all of it.

    Raises:
        UsageError: source, destination and options do not fit together, or there are shards already.
        ValueError: files are bad, which were printed, or none is left to pack.
        StreamloadError, OSError: something cannot be read or written.
    """
    began = time.monotonic()
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
        start = replace(start, workers=1)
    for note in found.notes:
        say(f"note: {note}")
    packing = _Packing(found, options, target)
    records = pack_into(
        target,
        start,
        packing.plan,
        packing.check,
        label="packing",
        unit=f"{found.noun}s",
        splits=list(options.fractions or found.parts or [""]),
        classes=found.classes,
    )
    if records is None:
        return None
    by_split: dict[str, list[Record]] = {}
    for record in records:
        if record.shards:
            by_split.setdefault(record.split, []).append(record)
    figures = _figures(records)
    return {
        "destination": without_secrets(target.dest),
        **figures,
        "content_bytes": sum(int(shard.table.member_size.sum()) for record in records for shard in record.shards),
        "splits": {split: _figures(some) for split, some in by_split.items() if split},
        "classes": None if found.classes is None else len(found.classes),
        "fields": _stored_fields(records, found),
        "left_out": len(found.samples) - figures["samples"],
        "seconds": time.monotonic() - began,
    }


def _refuse_resizing(samples: Sequence[SourceSample]) -> None:
    """Refuse to resize arrays, what holds no image, or several, of which one may be a mask."""
    fields = [[member.field for member in sample.members if member.field is not None] for sample in samples]
    if any(sum(map(is_image, names)) > 1 for names in fields):
        raise UsageError("--resize is for one image in each sample, and there are several, of which one may be a mask")
    known = {name for names in fields for name in names}
    if not known.isdisjoint(ARRAY_FIELDS) or (known and not any(map(is_image, known))):
        raise UsageError("--resize is for images, and the source holds other files, such as arrays")


class _Packing:
    """The plan of a source, and what is said of its faulty files."""

    def __init__(self, source: Source, options: PackOptions, target: Target) -> None:
        self._source, self._options, self._target = source, options, target
        self._versions = file_versions(source)

    def plan(self, pool: Pool) -> list[Task]:
        """Cut the samples of each split into tasks."""
        source, options, target = self._source, self._options, self._target
        versions = self._versions
        parts = planned_parts(source, options.fractions, shuffle=options.shuffle, seed=options.seed)
        libraries = ("simplejpeg", "opencv-python-headless", "pillow", "numpy") if options.resizing else ()
        common = [options.resizing, target.max_bytes, target.max_count, *map(version, ("streamload", *libraries))]
        tasks: list[Task] = []
        for split, numbers in parts.items():
            samples = [source.samples[number] for number in numbers]
            works = self._works(samples, {path: size for path, (size, _) in versions.items()}, pool)
            for place, work in enumerate(works):
                content = [(meaning_of(each), [versions[m.path] for m in each.members]) for each in work.samples]
                name = shard_name(place)
                digest = digest_of(split, name, common, content)
                tasks.append(Task(split, name, digest, len(work.samples), work))
        return tasks

    def _works(self, samples: Sequence[SourceSample], size_of: Mapping[str, int], pool: Pool) -> list[PackFiles]:
        """Return the work for each shard of a split."""
        resizing, max_bytes, max_count = self._options.resizing, self._target.max_bytes, self._target.max_count
        assert max_bytes is not None
        sizes = [
            tuple([m.size if isinstance(m, ArrayRow) else size_of[m.path] for m in each.members]) for each in samples
        ]
        if resizing is None:
            stored = list(map(sample_bytes, samples, sizes))
            largest = max(range(len(stored)), key=stored.__getitem__, default=None)
            if largest is not None and stored[largest] + len(END_OF_ARCHIVE) > max_bytes:
                raise too_large(samples[largest].key, stored[largest], max_bytes)
            spans = shard_spans(((size, 1) for size in stored), max_bytes, max_count)
        else:
            some = [PackFiles((samples[n],), (sizes[n],), resizing, True) for n in measured_positions(len(samples))]
            measured = list(pool.results(partial(measure, work, max_bytes) for work in some))
            spans = estimated_spans(len(samples), measured, max_bytes, max_count)
        skips = self._target.skip_bad
        return [PackFiles(tuple(samples[a:b]), tuple(sizes[a:b]), resizing, skips) for a, b in spans]

    def check(self, records: Sequence[Record]) -> None:
        """Print the files that were left out. Raise ValueError if they may not be, or nothing is left."""
        source = self._source
        faults = [fault for record in records for fault in record.faults]
        for fault in faults[:_FAULTS_SHOWN]:
            say(f"{fault.path}: {fault.reason}")
        if len(faults) > _FAULTS_SHOWN:
            say(f"... and {len(faults) - _FAULTS_SHOWN:,} more")
        if faults and not self._target.skip_bad:
            are, s = ("is", "") if len(faults) == 1 else ("are", "s")
            kind = f"no whole image{s}" if source.noun == "image" else "damaged or of another kind"
            raise ValueError(
                f"{len(faults):,} of {counted(len(self._versions), 'file')} {are} {kind}; "
                "repair or remove them, or leave them out with --skip-bad"
            )
        if not any(record.shards for record in records):
            raise ValueError(f"no {source.noun} is left to pack")


def as_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Say what was written, and how to read it."""
    for split, figures in report["splits"].items():
        yield f"{split}: {_counts(figures)}"
    classes = "" if report["classes"] is None else f", {counted(report['classes'], 'class')}"
    left_out = f", {counted(report['left_out'], 'sample')} left out" if report["left_out"] else ""
    yield f"packed {_counts(report)}{classes}, in {shown_time(report['seconds'])}{left_out}"
    samples, fields = report["samples"], report["fields"]
    lacking = [f"{samples - count:,} without {name!r}" for name, count in fields.items() if count < samples]
    if lacking:
        yield f"not every sample has every field: {', '.join(lacking[:_FIELDS_SHOWN])}"
    content, stored = report["content_bytes"], report["bytes"]
    if stored > max(2 * content, _SMALL_BYTES):
        yield (
            f"{shown_bytes(content)} of content became {shown_bytes(stored)}: in a tar each field takes 512 bytes more "
            "and is filled up to 512; store small values together, as one json or npy"
        )
    yield "read it with:"
    splits = sorted(report["splits"], key=lambda split: not split.startswith("train"))
    yield _reading("/".join([report["destination"], *splits[:1]]), fields, samples)


def _stored_fields(records: Sequence[Record], source: Source) -> dict[str, int]:
    """How many samples have each field, or one of several that stand for each other (`jpg;png`); the label last."""
    stored: Counter[str] = Counter()
    for table in (shard.table for record in records for shard in record.shards):
        counts = np.bincount(table.member_field, minlength=len(table.fields))
        stored.update(dict(zip(table.fields, counts.tolist(), strict=True)))
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


def _figures(records: Sequence[Record]) -> dict[str, int]:
    return {
        "shards": sum(len(record.shards) for record in records),
        "samples": sum(len(shard.table) for record in records for shard in record.shards),
        "bytes": sum(shard.info.bytes for record in records for shard in record.shards),
    }


def _counts(figures: Mapping[str, int]) -> str:
    shards, samples = counted(figures["shards"], "shard"), counted(figures["samples"], "sample")
    return f"{shards}, {samples}, {shown_bytes(figures['bytes'])}"
