"""Run `shardify`: pack a local source into shards."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import without_secrets
from streamload.pack.run import (
    Append,
    Fault,
    Pool,
    Record,
    Target,
    Task,
    UsageError,
    digest_of,
    estimated_spans,
    numbered,
    pack_into,
    say,
    shard_spans,
    shown_bytes,
    shown_time,
)
from streamload.pack.sources.arrays import ARRAYS_EXTENSIONS, closing_arrays, row_content, rows_of_arrays
from streamload.pack.sources.folders import samples_of_folder, walk
from streamload.pack.sources.loading import Resizing, load
from streamload.pack.sources.source import (
    ARRAY_FIELDS,
    COLUMNS_FIELD,
    SPLIT_NAME,
    Source,
    SourceOptions,
    SourceSample,
    is_data,
    is_image,
    kind_of,
)
from streamload.pack.sources.table import TABLE_EXTENSIONS, files_by_id, open_table, samples_of_table
from streamload.storage.errors import close_matches
from streamload.tar.extensions import KIND_OF, Kind
from streamload.tar.header_chain import BLOCK_BYTES
from streamload.tar.header_writer import END_OF_ARCHIVE, member_header
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted
from streamload.write.shard_writer import too_large

_ORDER, _SPLIT = 0, 1  # the purposes of random streams
_NO_LABEL = -(1 << 63)
_USTAR_NAME_BYTES = 100
_LONG_NAME_BLOCKS = 3  # in the header of a longer name
_FIELDS_SHOWN = 8
_SMALL_BYTES = 1_000_000
_LABELS_NAMES = ("labels.json", *(f"labels{extension}" for extension in TABLE_EXTENSIONS))
_COLUMNS = {"path_column", "text_column", "label_column", "labels_as_names", "keep_columns", "split_column"}


@closing_arrays()
def source_to_shards(
    source: str,
    options: SourceOptions,
    target: Target,
    *,
    shuffle: bool,
    seed: int,
    fractions: Mapping[str, float] | None,
    resizing: Resizing | None,
) -> dict[str, Any] | None:
    """Pack a source with the options of `shardify`.

    Returns:
        A report for JSON; None if the run to resume was already complete.

    Raises:
        UsageError: the options do not fit the source or the destination, or the destination holds shards.
        ValueError: files are faulty (each is printed), a sample is too large, or no samples are left.
        StreamloadError, OSError: something cannot be read or written.
    """
    began = time.monotonic()
    opened = open_source(source, options)
    if resizing is not None:
        _refuse_resizing(opened.samples)
    if fractions is not None and opened.parts is not None:
        parts = ", ".join(opened.parts)
        raise UsageError(f"{source!r} is already divided into {parts}; leave out --split, or pack one of them")
    for note in opened.notes:
        say(f"note: {note}")
    files = len({member.path for sample in opened.samples for member in sample.members})
    planned: Mapping[str, Sequence[int]] = opened.parts or {"": range(len(opened.samples))}
    if fractions is not None:
        planned = split_by_class([sample.label for sample in opened.samples], fractions, seed)
    if shuffle:
        orders = {name: permutation(len(part), seed).tolist() for name, part in planned.items()}
        planned = {name: [part[at] for at in orders[name]] for name, part in planned.items()}
    records = pack_into(
        target,
        partial(_plan, opened, target, planned, resizing),
        partial(_report_faults, files, target.skip_bad),
        label="packing",
        unit="samples",
        splits=list(planned),
        classes=opened.classes,
    )
    if records is None:
        return None
    figures = _figures(records)
    splits = dict.fromkeys(record.split for record in records if record.split and record.shards)
    return {
        "destination": without_secrets(target.dest),
        **figures,
        "content_bytes": sum(int(shard.table.member_size.sum()) for record in records for shard in record.shards),
        "splits": {split: _figures([each for each in records if each.split == split]) for split in splits},
        "classes": None if opened.classes is None else len(opened.classes),
        "fields": _stored_fields(records, figures["samples"]),
        "left_out": len(opened.samples) - figures["samples"],
        "seconds": time.monotonic() - began,
    }


def open_source(source: str, options: SourceOptions) -> Source:
    """List the samples of a source.

    Raises OSError; UsageError if the source cannot be packed, or an option has no effect on its kind.
    """
    for path in filter(None, (source, options.labels)):
        if not os.path.exists(path):
            folder, name = os.path.split(path.rstrip("/"))
            names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
            raise UsageError(f"{path!r} does not exist; {close_matches(name, names, folder or '.')}")
    if not os.path.isdir(source):
        if source.lower().endswith(TABLE_EXTENSIONS):
            _refuse_useless_options(options, "a table", {*_COLUMNS, "classes"})
            return samples_of_table(open_table(source), options)
        if source.lower().endswith(ARRAYS_EXTENSIONS):
            _refuse_useless_options(options, "a file of arrays", {"label_column", "labels_as_names", "classes"})
            return rows_of_arrays(source, options)
        raise UsageError(
            f"{source!r} is a file; give the folder that holds one folder for each class, a .csv, .tsv, .jsonl or "
            ".parquet with a sample in each row, or a .npz, .npy or .pt of rows"
        )
    tree = walk(source, follow_links=options.follow_symlinks)
    labels, beside = options.labels, tree.inside("")[1]
    if labels is None and options.stems is None and any(map(is_data, beside)):
        labels = next((os.path.join(source, name) for name in _LABELS_NAMES if name in beside), None)
    if labels is not None:
        accepted = {"labels", "follow_symlinks", "labels_as_names", "classes"}
        is_table = labels.lower().endswith(TABLE_EXTENSIONS)
        _refuse_useless_options(options, "a folder with labels by ID", accepted | _COLUMNS if is_table else accepted)
        return files_by_id(tree, labels, options)
    if options.stems:
        _refuse_useless_options(options, "files that share a stem", {"stems", "follow_symlinks"})
    _refuse_useless_options(options, "a folder", {"stems", "follow_symlinks", "classes"})
    return samples_of_folder(tree, options.classes, by_stem=options.stems)


def _refuse_useless_options(options: SourceOptions, kind: str, accepted: set[str]) -> None:
    changed = [each.name for each in dataclass_fields(options) if getattr(options, each.name) != each.default]
    if useless := [f"--{name.replace('_', '-')}" for name in changed if name not in accepted]:
        raise UsageError(f"{' and '.join(useless)} would have no effect on {kind} (the kind of SOURCE); leave it out")


def _refuse_resizing(samples: Sequence[SourceSample]) -> None:
    fields = [[member.field for member in sample.members if member.field is not None] for sample in samples]
    known = {name for names in fields for name in names}
    others = not known.isdisjoint(ARRAY_FIELDS) or (known and not any(map(is_image, known)))
    if others or any(sum(map(is_image, names)) > 1 for names in fields):
        raise UsageError("--resize is for images, one per sample; the source has other data, such as masks or arrays")


def _plan(
    source: Source, target: Target, parts: Mapping[str, Sequence[int]], resizing: Resizing | None, pool: Pool
) -> list[Task]:
    """Return the tasks. Their shards are as full as allowed, or filled by an estimate if images are resized."""
    max_bytes, max_count = target.max_bytes, target.max_count
    assert max_bytes is not None
    libraries = ("simplejpeg", "opencv-python-headless", "pillow", "numpy") if resizing else ()
    common = [resizing, max_bytes, max_count, *map(version, ("streamload", *libraries))]
    tasks: list[Task] = []
    for split, numbers in parts.items():
        samples = tuple([source.samples[number] for number in numbers])
        if resizing is None:
            sizes = list(map(sample_bytes, samples))
            for sample, size in zip(samples, sizes, strict=True):
                if size + len(END_OF_ARCHIVE) > max_bytes:
                    raise too_large(sample.key, size, max_bytes)
            spans = shard_spans(((size, 1) for size in sizes), max_bytes, max_count)
        else:
            spans = estimated_spans(pool, [PackFiles((sample,), resizing) for sample in samples], max_bytes, max_count)
        for (first, end), name in numbered(spans):
            some = samples[first:end]
            digest = digest_of(split, name, common, [sample.meaning() for sample in some])
            tasks.append(Task(split, name, digest, end - first, PackFiles(some, resizing)))
    return tasks


def sample_bytes(sample: SourceSample) -> int:
    """Return a sample's size in a shard, with headers and padding; an estimate for long names and non-ASCII keys."""
    sizes = [(member.field or "", max(0, member.size)) for member in sample.members]
    sizes += [(field, len(value)) for field, value in sample.values]
    if sample.label is not None:
        sizes.append((LABEL_FIELD, len(str(sample.label))))
    total = 0
    for field, size in sizes:
        is_short = len(sample.key) + 1 + len(field) <= _USTAR_NAME_BYTES and sample.key.isascii()
        total += (1 if is_short else _LONG_NAME_BLOCKS) * BLOCK_BYTES + size + -size % BLOCK_BYTES
    return total


def parse_split(text: str) -> dict[str, float]:
    """Parse splits such as `train=0.9,val=0.1`. Raises UsageError if malformed, or if the sum of fractions is not 1."""
    fractions: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        name, _, number = part.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1
        if not SPLIT_NAME.fullmatch(name) or not 0 <= fraction <= 1 or name in fractions:
            advice = "as in train=0.9,val=0.1, with fractions from 0 to 1 and different names"
            raise UsageError(f"--split: {part!r} must be NAME=FRACTION, {advice}")
        fractions[name] = fraction
    if not math.isclose(total := sum(fractions.values()), 1, abs_tol=1e-6):
        raise UsageError(f"--split: the fractions add up to {total:g}, but must add up to 1")
    return fractions


def permutation(count: int, seed: int, label: int = 0, purpose: int = _ORDER) -> NDArray[np.int64]:
    """Return a permutation, int64[count], that depends only on the arguments; by default that of `--shuffle`.

    Philox's raw output is stable between versions of NumPy.
    """
    key = np.array([seed, 0x5348415244494659], np.uint64)
    raw = np.random.Philox(key=key, counter=np.array([0, 0, label, purpose], np.uint64)).random_raw(count)
    return np.argsort(raw, kind="stable")


def split_by_class(labels: Sequence[int | None], fractions: Mapping[str, float], seed: int) -> dict[str, list[int]]:
    """Return ascending positions in `labels` for each split, chosen at random within each class.

    Each split with a nonzero fraction gets at least one sample of every class that has enough samples.
    """
    chosen: dict[str, list[int]] = {name: [] for name in fractions}
    by_class: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        by_class.setdefault(_NO_LABEL if label is None else label, []).append(position)
    ends = np.cumsum([*fractions.values()]) / sum(fractions.values())
    is_wanted = np.array([*fractions.values()]) > 0
    for label, members in by_class.items():
        shares = np.diff(np.floor(ends * len(members) + 0.5).astype(np.int64), prepend=0)
        while len(members) >= is_wanted.sum() and (lacking := is_wanted & (shares == 0)).any():
            shares[shares.argmax()] -= 1
            shares[lacking.argmax()] += 1
        shuffled = np.array(members)[permutation(len(members), seed, label % 2**64, _SPLIT)]
        for name, some in zip(fractions, np.split(shuffled, np.cumsum(shares)[:-1]), strict=True):
            chosen[name] += some.tolist()
    return {name: sorted(positions) for name, positions in chosen.items()}


def _report_faults(files: int, skip_bad: bool, records: Sequence[Record]) -> None:
    faults = [fault for record in records for fault in record.faults]
    for path, reason in faults:
        say(f"{path}: {reason}")
    if faults and not skip_bad:
        raise ValueError(
            f"{len(faults):,} of {counted(files, 'file')} {'is' if len(faults) == 1 else 'are'} damaged or of an "
            "unexpected type; repair or remove them, or leave them out with --skip-bad"
        )
    if not any(record.shards for record in records):
        raise ValueError("no samples are left to pack")


@dataclass(frozen=True, slots=True)
class PackFiles:
    """Pack files, or rows of arrays, into one shard."""

    samples: tuple[SourceSample, ...]
    resizing: Resizing | None

    def __call__(self, append: Append) -> Sequence[Fault]:
        """Append each sample whose files are all intact; return the faults of the other samples."""
        faults: list[Fault] = []
        for sample in self.samples:
            fields: list[tuple[str, bytes]] = []
            sample_faults: list[Fault] = []
            for member in sample.members:
                try:
                    field = member.field or ""
                    is_first = sample is self.samples[0]
                    data = load(member) if member.array is None else row_content(member, check=is_first)
                    if self.resizing is not None and is_image(field):
                        field, data = self.resizing(field, data)
                    fields.append((field, data))
                except ValueError as exc:
                    sample_faults.append((member.path, str(exc)))
            faults += sample_faults
            if not sample_faults:
                fields += [] if sample.label is None else [(LABEL_FIELD, b"%d" % sample.label)]
                fields += sample.values
                headed = [(field, member_header(f"{sample.key}.{field}", len(data)), data) for field, data in fields]
                append(sample.key, headed, sample.label)
        return faults


def as_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Format a report as text: the shards, and the code that reads them."""
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
            f"{shown_bytes(content)} of content became {shown_bytes(stored)}: tar adds 512 bytes to each field and "
            "pads it to a multiple of 512; store small values together, as one json or npy"
        )
    # A table's columns in json may hold nulls or mixed types, which cannot be batched.
    unbatchable = COLUMNS_FIELD if fields.keys() - {COLUMNS_FIELD, LABEL_FIELD} else None
    chosen = [name for name, count in fields.items() if count == samples and name != unbatchable]
    where = ""
    if not chosen:
        chosen = list(fields)[:1]
        where = f", where='\"{chosen[0]}\"'" if ";" not in chosen[0] else ""
    chosen += [f"{name}?" for name in fields if name not in chosen and KIND_OF.get(name) is Kind.TEXT]
    chosen = chosen[:_FIELDS_SHOWN]
    images = [name for name in chosen if is_image(name.partition(";")[0])]
    transform = f', transform={{"{images[0]}": RandomResizedCrop(224)}}' if len(images) == 1 else ""
    split = min(report["splits"], key=lambda split: not split.startswith("train"), default="")
    folder = f"{report['destination']}/{split}".rstrip("/")
    names = ", ".join(f'"{name}"' for name in chosen) + "," * (len(chosen) == 1)
    yield "read it with:\n  from streamload import StreamLoader"
    if transform:
        yield "  from streamload.images import RandomResizedCrop"
    yield f"  StreamLoader({folder!r}, batch_size=64, shuffle=True, fields=({names}){where}{transform})"


def _stored_fields(records: Sequence[Record], samples: int) -> dict[str, int]:
    """Count the samples that have each field, the label last; alternatives count as one field (`jpg;png`)."""
    stored: Counter[str] = Counter()
    for table in (shard.table for record in records for shard in record.shards):
        counts = np.bincount(table.member_field, minlength=len(table.fields))
        stored.update(dict(zip(table.fields, counts.tolist(), strict=True)))
    alternatives: dict[str, list[str]] = {}
    for name in sorted(stored, key=lambda name: (name == LABEL_FIELD, name != "jpg")):
        prefix, dot, _ = name.rpartition(".")
        alternatives.setdefault(f"{prefix}{dot}{kind_of(f'x.{name}')}", []).append(name)
    fields: dict[str, int] = {}
    for names in alternatives.values():
        total = sum(stored[name] for name in names)
        fields |= {";".join(names): total} if total <= samples else {name: stored[name] for name in names}
    return fields


def _figures(records: Sequence[Record]) -> dict[str, int]:
    return {
        "shards": sum(len(record.shards) for record in records),
        "samples": sum(len(shard.table) for record in records for shard in record.shards),
        "bytes": sum(shard.info.bytes for record in records for shard in record.shards),
    }


def _counts(figures: Mapping[str, int]) -> str:
    shards, samples = counted(figures["shards"], "shard"), counted(figures["samples"], "sample")
    return f"{shards}, {samples}, {shown_bytes(figures['bytes'])}"
