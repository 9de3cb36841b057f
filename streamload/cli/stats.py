"""`streamload stats`: the sizes of a dataset and of its fields, and the mean colours of its images."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import streamload
from streamload.cli import command
from streamload.cli.shards import tables
from streamload.errors import without_secrets
from streamload.images.operations import STATISTICS_NAME
from streamload.index.listing import list_shards
from streamload.pack.output import Progress, UsageError, shown_bytes
from streamload.storage.protocol import WEB, protocol_of
from streamload.storage.storages import Storages
from streamload.tar.extensions import is_image
from streamload.tar.table import ShardTable
from streamload.text import counted, listed

_LABELS_SHOWN = 20
_BATCH_SIZE = 64
_CHANNELS = ("red", "green", "blue")
# By channel: the number of pixels, the sums of their values and of the squares, the least, the greatest.
_NO_PIXELS = np.array([[0] * 3, [0] * 3, [0] * 3, [255] * 3, [0] * 3])


def stats_command(
    urls: command.Urls,
    *,
    pixels: Annotated[bool, typer.Option("--pixels", help="Measure the channels of all images.")] = False,
    output: Annotated[str | None, typer.Option(help="Save --pixels to this .json, not beside the shards.")] = None,
    as_document: command.Json = False,
    where: command.Where = None,
    index: command.Index = None,
    workers: command.Workers = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Report the number and the sizes of shards, samples, fields and labels.

    The numbers come from the index; shards without an index are read. With --pixels all images are decoded once: mean,
    deviation, least and greatest by channel are saved in statistics.json, which images.Normalize.of reads.

    Examples:
      streamload stats shards/train
      streamload stats shards/train --where 'label == 3' --json
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
    with tables(listing, index, storages, workers, labels=True, where=where, label="reading") as shards:
        result = _counts(shards)
    if output is not None:
        reading = {"where": where, "index": index, "num_workers": workers or "auto", "storage_options": options}
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
    command.print_line(f"{shards} with {least:,} to {counted(greatest, 'sample')} each; {samples}, {size}\n")
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
    """Decode all images once and measure their channels, for values from 0 to 1."""
    images = image_fields(fields)
    if not images:
        raise UsageError(f"no field holds images; there are {listed(fields)}")
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
    """Return the fields that hold a sample's image: `mask.png` and the like only if there is no other."""
    images = sorted(filter(is_image, fields))
    return [name for name in images if "." not in name] or images


def _sums_of(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the rows of `_NO_PIXELS` for one image."""
    planes = np.ascontiguousarray(image.reshape(-1, 3).T)
    squares = np.square(planes, dtype=np.uint16).sum(1, dtype=np.int64)
    sums = planes.sum(1, dtype=np.int64)
    return np.array([[planes.shape[1]] * 3, sums, squares, planes.min(1), planes.max(1)], np.int64)


def _sums_of_batch(samples: Sequence[tuple[NDArray[np.int64] | None, ...]]) -> tuple[int, NDArray[np.int64]]:
    return len(samples), reduce(_merged, (sums for each in samples for sums in each if sums is not None), _NO_PIXELS)


def _merged(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([one[:3] + other[:3], np.minimum(one[3:4], other[3:4]), np.maximum(one[4:], other[4:])])
