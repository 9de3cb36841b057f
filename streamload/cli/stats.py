"""`streamload stats` and `bench`: measure the sizes and colours of a dataset, and the speed of reading it."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import streamload
from streamload.cli import command
from streamload.cli.shards import tables
from streamload.errors import CollateError, without_secrets
from streamload.images import RandomResizedCrop
from streamload.images.operations import STATISTICS_NAME
from streamload.index.listing import list_shards
from streamload.pack.output import Progress, UsageError, shown_bytes
from streamload.storage.protocol import WEB, protocol_of
from streamload.storage.storages import Storages
from streamload.tar.extensions import is_image
from streamload.tar.scan import MISSING, ShardTable
from streamload.text import counted, listed

_LABELS_SHOWN = 20
_BATCH_SIZE, _CROP = 64, 224
_CHANNELS = ("red", "green", "blue")
# By channel: the number of pixels, the sums of their values and of the squares, the least, the greatest.
_NO_PIXELS = np.array([[0] * 3, [0] * 3, [0] * 3, [255] * 3, [0] * 3])


def stats_command(
    urls: command.Urls,
    *,
    pixels: Annotated[bool, typer.Option("--pixels", help="Measure the channels of all images.")] = False,
    output: Annotated[str | None, typer.Option(help="Save --pixels to this .json, not beside the shards.")] = None,
    as_document: command.Json = False,
    index: command.Index = None,
    workers: command.Workers = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Report the number and the sizes of shards, samples, fields and labels.

    Shards without an index are read. --pixels decodes all images and saves mean, deviation, least and greatest by
    channel in statistics.json, which images.Normalize.of reads.

    Examples:
      streamload stats shards/train
      streamload stats shards/train --json
      streamload stats shards/train --pixels
    """
    options = dict(storage_option or ())
    storages = Storages(options)
    listing = list_shards(urls, index, storages)
    folders = sorted({shard.folder for shard in listing.shards})
    if output is not None and not pixels:
        raise UsageError("--output is for the result of --pixels; give --pixels too")
    if output is not None and not output.endswith(".json"):
        raise UsageError(f"--output {without_secrets(output)!r} must end in .json")
    if pixels and output is None:
        if len(folders) > 1 or protocol_of(folders[0]) in WEB:
            raise UsageError("shards of several folders, or on a web server, need --output FILE.json for --pixels")
        output = f"{folders[0].rstrip('/')}/{STATISTICS_NAME}"
    with tables(listing, storages, workers, labels=True, label="reading") as shards:
        result = _counts(shards)
    if output is not None:
        reading = {"index": index, "num_workers": workers or "auto", "storage_options": options}
        result["pixels"] = _measured(urls, list(result["fields"]), result["samples"], reading)
        storages.for_url(output).write(output, json.dumps(result["pixels"], indent=2).encode())
    if as_document:
        command.print_document(result)
        return
    _print(result)
    if output is not None:
        command.print_line(f"saved in {without_secrets(output)}")


def _counts(shards: Iterable[tuple[int, ShardTable]]) -> dict[str, Any]:
    """Add up the tables of all shards."""
    stored_bytes = unlabelled = 0
    shard_samples: list[int] = []
    fields: dict[str, dict[str, int]] = {}
    labels: Counter[int] = Counter()
    for shard_bytes, table in shards:
        stored_bytes += shard_bytes
        shard_samples.append(len(table))
        for number, name in enumerate(table.fields):
            sizes = table.member_size[table.member_field == number]
            if len(sizes):
                field = fields.setdefault(name, {"samples": 0, "bytes": 0, "min_bytes": 1 << 62, "max_bytes": 0})
                field["samples"] += len(sizes)
                field["bytes"] += int(sizes.sum())
                field["min_bytes"] = min(field["min_bytes"], int(sizes.min()))
                field["max_bytes"] = max(field["max_bytes"], int(sizes.max()))
        if table.labels is None:
            unlabelled += len(table)
        else:
            labels.update(table.labels.tolist())
    return {
        "shards": len(shard_samples),
        "samples": sum(shard_samples),
        "bytes": stored_bytes,
        "samples_per_shard": {"min": min(shard_samples), "max": max(shard_samples)},
        "fields": fields,
        "labels": [{"label": label, "samples": count} for label, count in labels.most_common()],
        "samples_of_shards_without_labels": unlabelled,
    }


def _print(result: dict[str, Any]) -> None:
    least, greatest = result["samples_per_shard"].values()
    shards, samples = counted(result["shards"], "shard"), counted(result["samples"], "sample")
    size = shown_bytes(result["bytes"])
    each = f"{least:,} to " * (least < greatest) + counted(greatest, "sample") + " each" * (result["shards"] > 1)
    command.print_line(f"{shards} with {each}; {samples}, {size}\n")
    rows: list[tuple[str, ...]] = [("FIELD", "SAMPLES", "BYTES", "MEAN", "MIN", "MAX")]
    for name, field in result["fields"].items():
        sizes = (field["bytes"], field["bytes"] / field["samples"], field["min_bytes"], field["max_bytes"])
        rows.append((name, f"{field['samples']:,}", *map(shown_bytes, sizes)))
    command.print_table(rows, numbers=5)
    if labels := result["labels"]:
        shown = [(str(each["label"]), f"{each['samples']:,}") for each in labels[:_LABELS_SHOWN]]
        command.print_line("")
        command.print_table([("LABEL", "SAMPLES"), *shown], numbers=1)
        if len(labels) > len(shown):
            command.print_line(f"and {counted(len(labels) - len(shown), 'more label')}")
        if unknown := result["samples_of_shards_without_labels"]:
            command.print_line(
                f"not counted: {counted(unknown, 'sample')} of shards in which not every cls is a whole number"
            )
    if pixels := result.get("pixels"):
        names = ("mean", "std", "min", "max")
        channels = [(channel, *(f"{pixels[name][n]:.4f}" for name in names)) for n, channel in enumerate(_CHANNELS)]
        command.print_line("")
        command.print_table([("CHANNEL", *map(str.upper, names)), *channels], numbers=4)


def _measured(urls: Sequence[str], fields: Sequence[str], samples: int, reading: dict[str, Any]) -> dict[str, Any]:
    """Measure the channels of all images, for values from 0 to 1."""
    images = image_fields(fields)
    if not images:
        raise UsageError(f"no field holds images; the fields are: {listed(fields) or 'none'}")
    total = _NO_PIXELS.astype(object)  # Python's integers, which do not overflow
    with (
        streamload.StreamLoader(
            urls,
            _BATCH_SIZE,
            fields=tuple(f"{name}?" for name in images),
            transform=dict.fromkeys(images, _sums_of),
            collate_fn=_sums_of_batch,
            rank=0,
            world_size=1,
            **reading,
        ) as loader,
        Progress("measuring", samples, "samples") as progress,
    ):
        for count, sums in loader:
            progress.advance(count, 0)
            total = _merged(total, sums)
    pixels, added, squares, least, greatest = total
    return {
        "fields": images,
        "pixels": pixels[0],
        "mean": [value / pixels[0] / 255 for value in added],
        "std": [math.sqrt(pixels[0] * s - a * a) / pixels[0] / 255 for a, s in zip(added, squares, strict=True)],
        "min": [value / 255 for value in least],
        "max": [value / 255 for value in greatest],
    }


def image_fields(fields: Iterable[str]) -> list[str]:
    """Return the fields of images: `mask.png` and the like only if there is no other."""
    images = sorted(filter(is_image, fields))
    return [name for name in images if "." not in name] or images


def _sums_of(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the rows of `_NO_PIXELS` for one image."""
    planes = np.ascontiguousarray(image.reshape(-1, 3).T)
    squares = np.square(planes, dtype=np.uint16).sum(1, dtype=np.int64)
    sums = planes.sum(1, dtype=np.int64)
    return np.array([[planes.shape[1]] * 3, sums, squares, planes.min(1), planes.max(1)], np.int64)


def _sums_of_batch(samples: Sequence[tuple[NDArray[np.int64] | None, ...]]) -> tuple[int, NDArray[np.int64]]:
    measured = (sums for each in samples for sums in each if sums is not None)
    return len(samples), reduce(_merged, measured, _NO_PIXELS)


def _merged(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([one[:3] + other[:3], np.minimum(one[3:4], other[3:4]), np.maximum(one[4:], other[4:])])


def bench_command(
    urls: command.Urls,
    *,
    batch_size: Annotated[int, typer.Option(help="Samples per batch.", min=1)] = 64,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: one per core.", min=0)] = None,
    seconds: Annotated[float, typer.Option(help="Stop this long after the first batch.", min=0)] = 10.0,
    batches: Annotated[int | None, typer.Option(help="Stop after this many batches instead.", min=1)] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle, as for training.")] = False,
    fields: command.Fields = None,
    raw: Annotated[bool, typer.Option("--no-decode", help="Do not decode the fields.")] = False,
    as_document: command.Json = False,
    index: command.Index = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Read shards with a StreamLoader, epoch after epoch, and report its speed and what limits it.

    Without --fields, the fields of all samples in the first shard are read.

    Examples:
      streamload bench shards/train --shuffle --batch-size 256
      streamload bench s3://bucket/photos --seconds 60 --workers 8
      streamload bench shards --fields 'jpg;png,cls' --json
    """
    options = dict(storage_option or ())
    chosen = _usual_fields(urls, index, options) if fields is None else tuple(fields.split(","))
    images = [] if raw else [name for name in chosen if all(map(is_image, name.split(";")))]
    started = time.perf_counter()
    with streamload.StreamLoader(
        urls,
        batch_size,
        shuffle=shuffle,
        fields=chosen,
        decode=not raw,
        transform=dict.fromkeys(images, RandomResizedCrop(_CROP)) if images else None,
        num_workers="auto" if workers is None else workers,
        index=index,
        storage_options=options,
    ) as loader:
        arrivals = _arrivals(loader)
        try:
            first = next(arrivals)
            before = loader.statistics()
            for count, last in enumerate(arrivals, 1):
                if count == batches or (batches is None and last - first >= seconds):
                    break
        except CollateError as error:
            error.add_note("leave fields out with --fields, or measure without decoding with --no-decode")
            raise
        measured, spent_s = loader.statistics().since(before), last - first
        setup = f"batch_size={batch_size}, {counted(loader.num_workers, 'worker')}, fields {', '.join(chosen)}"
        setup += ", not decoded" if raw else f", RandomResizedCrop({_CROP})" if images else ""
    if as_document:
        command.print_document(
            {
                "loader": setup,
                "first_batch_s": first - started,
                "samples": measured.samples,
                "batches": measured.batches,
                "seconds": spent_s,
                "payload_bytes": measured.payload_bytes,
                "samples_per_s": measured.samples / spent_s,
                "payload_bytes_per_s": measured.payload_bytes / spent_s,
                "limited_by": measured.verdict,
                "statistics": measured.as_dict(),
            }
        )
        return
    command.print_line(f"{setup}\nfirst batch after {first - started:.2f} s")
    rates = f"{measured.samples / spent_s:,.0f} samples/s, {shown_bytes(measured.payload_bytes / spent_s)}/s"
    size = f"{counted(measured.samples, 'sample')} in {counted(measured.batches, 'batch')}"
    command.print_line(f"{rates} as stored, measured over {size} and {spent_s:.1f} s after the first batch")
    command.print_line(f"limited by {measured.verdict}")


def _usual_fields(urls: Sequence[str], index: str | None, storage_options: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields of all samples in the first shard; image fields are alternatives."""
    storages = Storages(storage_options)
    listing = list_shards(urls, index, storages)
    first = replace(listing, shards=listing.shards[:1], counts=None)
    with tables(first, storages) as shards:
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
