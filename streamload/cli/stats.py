"""`streamload stats`: the sizes of a dataset and of its fields, and the mean colours of its images."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import streamload
from streamload.cli.arguments import Index, Json, StorageOption, Urls, Where, Workers, parse_storage_options
from streamload.decode.decoders import is_image
from streamload.errors import without_secrets
from streamload.images.measured import STATISTICS_NAME
from streamload.index.listing import IndexLookup, Listing, list_shards
from streamload.index.shard_names import WEB, folder_and_name
from streamload.pack.failures import UsageError, reported_errors
from streamload.pack.output import aligned, print_document, print_line, shown_bytes
from streamload.pack.progress import open_progress
from streamload.pack.reading import Reader, tables
from streamload.storage.protocol import protocol_of
from streamload.storage.storages import Storages
from streamload.text import counted, listed
from streamload.workers.launchers import available_processors

_LABELS_SHOWN = 20
_BATCH = 64
# By channel: the number of pixels, the sums of their values and of the squares of these, the least, the greatest.
_NO_PIXELS = np.array([[0] * 3, [0] * 3, [0] * 3, [255] * 3, [0] * 3])


def stats_command(
    urls: Urls,
    *,
    pixels: Annotated[
        bool, typer.Option("--pixels", help="Also decode all images: mean, deviation, least and greatest by channel.")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.json",
            help="Where --pixels saves its result. Default: statistics.json beside the shards.",
            show_default=False,
        ),
    ] = None,
    as_document: Json = False,
    where: Where = None,
    index: Index = None,
    workers: Workers = None,
    storage_option: StorageOption = None,
) -> None:
    """Report the number and the sizes of shards, samples, fields and labels.

    The numbers come from the index; shards without an index are read. With --pixels all images are read and decoded
    once; the result is saved as JSON, which images.Normalize.of reads.

    Examples:
      streamload stats shards/train
      streamload stats shards/train --where 'label == 3' --json
      streamload stats shards/train --pixels
    """
    with reported_errors():
        options = parse_storage_options(storage_option)
        storages = Storages(options)
        listing = list_shards(urls, index, storages)
        url = _output_url(output, listing) if pixels else None
        if output is not None and not pixels:
            raise UsageError("--output is for the result of --pixels; give --pixels too")
        reader = Reader(storages, workers or available_processors())
        found = _counts(listing, IndexLookup(index, storages), reader, where)
        if url is not None:
            found["pixels"] = _measured(
                urls,
                list(found["fields"]),
                found["samples"],
                where=where,
                index=index,
                num_workers="auto" if workers is None else workers,
                storage_options=options,
            )
            storages.for_url(url).write(url, json.dumps(found["pixels"], indent=2).encode())
        if as_document:
            print_document(found)
            return
        for line in _lines(found):
            print_line(line)
        if url is not None:
            print_line(f"saved in {without_secrets(url)}")


def _output_url(output: str | None, listing: Listing) -> str:
    if output is None:
        folders = {folder_and_name(shard.url)[0] for shard in listing.shards}
        if len(folders) > 1 or protocol_of(min(folders)) in WEB:
            why = "lie in several folders" if len(folders) > 1 else "lie on a web server"
            raise UsageError(f"the shards {why}; give --output FILE.json for the result of --pixels")
        return f"{folders.pop().rstrip('/')}/{STATISTICS_NAME}"
    if not output.endswith(".json"):
        raise UsageError(f"--output {without_secrets(output)!r} must end in .json")
    return output


def _counts(listing: Listing, lookup: IndexLookup, reader: Reader, where: str | None) -> dict[str, Any]:
    """Add up the tables of all shards, with progress on standard error.

    Raises:
        StreamloadError: an index or a shard cannot be read, or is damaged.
    """
    stored_bytes = unlabelled = 0
    shard_samples: list[int] = []
    fields: dict[str, dict[str, int]] = {}
    labels: Counter[int] = Counter()
    with open_progress("reading", len(listing.shards), "shards") as progress:
        for shard_bytes, table in tables(listing, lookup, reader, labels=True, where=where, advance=progress.advance):
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


def _measured(urls: Sequence[str], fields: Sequence[str], samples: int, **options: Any) -> dict[str, Any]:
    """Decode all images once, and measure their channels; values are from 0 to 1.

    Masks and the like (`mask.png`) are not measured beside fields without a dot.

    Raises:
        UsageError: there are no images.
        StreamloadError: a sample cannot be read or decoded.
    """
    images = sorted(filter(is_image, fields))
    images = [name for name in images if "." not in name] or images
    if not images:
        raise UsageError(f"no field holds images; there are {listed(fields)}")
    total = _NO_PIXELS.astype(object)  # Python's integers, which do not overflow
    with (
        streamload.StreamLoader(
            urls,
            _BATCH,
            fields=tuple(f"{name}?" for name in images),
            transform=dict.fromkeys(images, _sums_of),
            collate_fn=_sums_of_batch,
            rank=0,
            world_size=1,
            **options,
        ) as loader,
        open_progress("measuring", samples, "samples") as progress,
    ):
        for delivered, sums in loader:
            progress.advance(delivered, 0)
            total = _merged(total, sums)
    count = total[0, 0]
    if not count:
        raise UsageError(f"no sample has one of the fields {listed(images)}")
    deviation = [math.sqrt(count * squares - added * added) / count for added, squares in total[1:3].T]
    return {
        "fields": images,
        "pixels": count,
        "mean": [added / count / 255 for added in total[1]],
        "std": [each / 255 for each in deviation],
        "min": [least / 255 for least in total[3]],
        "max": [greatest / 255 for greatest in total[4]],
    }


def _sums_of(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return what `_merged` adds up of one image, by channel: pixels, values, squares; and the least and greatest."""
    planes = np.ascontiguousarray(image.reshape(-1, 3).T)
    squares = np.square(planes, dtype=np.uint16).sum(1, dtype=np.int64)
    sums = planes.sum(1, dtype=np.int64)
    return np.array([[planes.shape[1]] * 3, sums, squares, planes.min(1), planes.max(1)], np.int64)


def _sums_of_batch(samples: Sequence[tuple[NDArray[np.int64] | None, ...]]) -> tuple[int, NDArray[np.int64]]:
    return len(samples), reduce(_merged, (sums for each in samples for sums in each if sums is not None), _NO_PIXELS)


def _merged(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([one[:3] + other[:3], np.minimum(one[3:4], other[3:4]), np.maximum(one[4:], other[4:])])


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    least, greatest = found["samples_per_shard"].values()
    shards, samples = counted(found["shards"], "shard"), counted(found["samples"], "sample")
    size = shown_bytes(found["bytes"])
    yield f"{shards} with {least:,} to {counted(greatest, 'sample')} each; {samples}, {size}"
    yield ""
    rows: list[tuple[str, ...]] = [("FIELD", "SAMPLES", "BYTES", "MEAN", "MIN", "MAX")]
    for name, field in found["fields"].items():
        sizes = (field["bytes"], field["bytes"] / field["samples"], field["min_bytes"], field["max_bytes"])
        rows.append((name, f"{field['samples']:,}", *map(shown_bytes, sizes)))
    yield from aligned(rows, numbers=len(rows[0]) - 1)
    if found["labels"]:
        yield ""
        shown = found["labels"][:_LABELS_SHOWN]
        rows = [("LABEL", "SAMPLES"), *((str(each["label"]), f"{each['samples']:,}") for each in shown)]
        yield from aligned(rows, numbers=1)
        if len(found["labels"]) > len(shown):
            yield f"and {counted(len(found['labels']) - len(shown), 'more label')}"
        if unknown := found["samples_of_shards_without_labels"]:
            yield f"not counted: {counted(unknown, 'sample')} of shards in which not every cls is a whole number"
    if "pixels" in found:
        yield ""
        names = ("mean", "std", "min", "max")
        rows = [("CHANNEL", *map(str.upper, names))]
        for channel, title in enumerate(("red", "green", "blue")):
            rows.append((title, *(f"{found['pixels'][name][channel]:.4f}" for name in names)))
        yield from aligned(rows, numbers=len(names))
