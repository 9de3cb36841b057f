"""The commands that read shards: `streamload ls`, `index`, `verify`, `stats` and `bench`."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial, reduce
from glob import escape
from threading import Event, Lock
from typing import Annotated, Any, TypeVar

import numpy as np
import typer
from numpy.typing import NDArray

import streamload
from streamload.cli import command
from streamload.errors import CollateError, SampleError, ShardNotFoundError, StreamloadError, without_secrets
from streamload.images import RandomResizedCrop
from streamload.images.operations import STATISTICS_NAME
from streamload.index.dataset import KEY, LABEL, Dataset, ReadShard, differences, read_shard, scan_local, update_columns
from streamload.index.dataset_index import INDEX_FOLDER, DatasetIndex, IndexedShard, IndexFolder, pack_table
from streamload.index.listing import Listing, Shard, ShardFinder, find_shards, folder_and_name, list_shards, shard_name
from streamload.pack.run import Pool, Progress, UsageError, ray_pool, say, shown_bytes
from streamload.sampling.expression import CLASS_NAME, FRACTION
from streamload.storage.download import Pin
from streamload.storage.protocol import UNKNOWN_BYTES, WEB, protocol_of
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of
from streamload.tar.extensions import is_image
from streamload.tar.header_chain import LINK, MISSING_END
from streamload.tar.scan import MISSING, ShardTable
from streamload.text import counted, listed
from streamload.workers.launchers import available_processors

OnBytes = Callable[[int], None]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_READ_TOGETHER = 512
_LONGEST_STRING = 256
_DECODED_TOGETHER = 64
_LABELS_SHOWN = 20
_CHANNELS = ("red", "green", "blue")
# Per channel: the number of pixels, the sum of their values, the sum of the squares, the minimum and the maximum.
_NO_PIXELS = np.array([[0] * 3, [0] * 3, [0] * 3, [255] * 3, [0] * 3])
_BATCH_SIZE, _CROP = 64, 224


def ls_command(
    urls: command.Urls,
    *,
    samples: Annotated[bool, typer.Option("--samples", help="List every sample with its fields.")] = False,
    as_document: command.Json = False,
    index: command.Index = None,
    workers: command.Workers = None,
    storage_option: command.StorageOption = None,
) -> None:
    """List shards with their size, samples and fields, or every sample.

    Shards without an index are read.

    Examples:
      streamload ls shards/train
      streamload ls s3://bucket/photos --samples
      streamload ls shards --json
    """
    storages = Storages(dict(storage_option or ()))
    listing = list_shards(urls, index, storages)
    names = [shard.name for shard in listing.shards]
    if as_document or len(set(names)) < len(names):
        names = [without_secrets(shard.url) for shard in listing.shards]
    total_bytes = total_samples = 0
    with tables(listing, storages, workers) as results:
        shards = zip(names, results, strict=True)
        rows = ((url, key, fields) for url, (_, table) in shards for key, fields in _samples(table))
        if samples and as_document:
            command.print_array({"url": url, "key": key, "fields": fields} for url, key, fields in rows)
        elif samples:
            for url, key, fields in rows:
                sizes = (f"{name} {size:,} B" for name, size in fields.items())
                command.print_line("  ".join((url, key, *sizes)).replace("\n", "\\n"))
        elif as_document:
            command.print_array(
                {"url": url, "bytes": size, "samples": len(table), "fields": table.fields}
                for url, (size, table) in shards
            )
        else:
            lines = [("SHARD", "BYTES", "SAMPLES", "FIELDS")]
            for url, (size, table) in shards:
                lines.append((url, f"{size:,}", f"{len(table):,}", " ".join(table.fields)))
                total_bytes += size
                total_samples += len(table)
            counts = f"{counted(len(names), 'shard')}, {counted(total_samples, 'sample')}"
            command.print_table(lines, numbers=2)
            command.print_line(f"{counts}, {shown_bytes(total_bytes)}")


def _samples(table: ShardTable) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the key of each sample with the sizes of its fields in bytes."""
    starts, sizes, numbers = table.sample_start.tolist(), table.member_size.tolist(), table.member_field.tolist()
    for sample, key in enumerate(table.keys()):
        members = range(starts[sample], starts[sample + 1])
        yield key, {table.fields[numbers[member]]: sizes[member] for member in members}


def index_command(
    urls: command.Urls,
    *,
    output: Annotated[str | None, typer.Option(help="Folder of the index, if not beside the shards.")] = None,
    columns: Annotated[str | None, typer.Option(help="Values for selecting samples, as FIELD:NAME,...")] = None,
    as_document: command.Json = False,
    workers: command.Workers = None,
    ray: command.Ray = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Read shards once and write their index, so that loaders start fast.

    If a shard is damaged, the index is left unchanged. --columns adds values of JSON fields.

    Examples:
      streamload index shards/train
      streamload index s3://bucket/photos --output indexes/photos
      streamload index shards --columns json:aesthetic,json:meta.width
      streamload index s3://bucket/photos --ray auto
    """
    options = dict(storage_option or ())
    sources = [] if columns is None else _parse_columns(columns)
    storages = Storages(options)
    urls = list(find_shards(urls, storages))
    by_index = _by_index(urls, output)
    entries: dict[str, IndexedShard] = {}
    packed: dict[str, tuple[tuple[str, ...], int, int]] = {}  # the fields, and the start and size in the spool
    gone: list[str] = []
    links = 0
    reading = partial(read_whole, storages=storages, every_byte=True)
    with (
        tempfile.TemporaryFile() as spool,  # the tables may not all fit in memory
        nullcontext() if ray is None else ray_pool(ray, workers) as pool,
        map_in_order(reading, urls, workers, pool, "indexing") as reads,
    ):
        for url, read in zip(urls, reads, strict=True):
            _warn_of_missing_end(url, read.table)
            entries[url] = IndexedShard(shard_name(url), read.bytes, len(read.table), read.etag)
            packed[url] = read.table.fields, spool.tell(), spool.write(pack_table(read.table))
            links += read.table.skipped.get(LINK, 0)

        def packed_table(url: str) -> bytes:
            _, start, size = packed[url]
            spool.seek(start)
            return spool.read(size)

        finder = ShardFinder(None, storages)
        indexes: dict[str, DatasetIndex] = {}
        for folder, inside in by_index.items():
            shards = folder_and_name(next(iter(inside.values())))[0]
            dropped = [] if output else _missing_names(shards, finder, storages)
            indexes[folder] = IndexFolder(storages.for_url(folder), folder).update(
                [entries[url] for url in inside.values()],
                {name for url in inside.values() for name in packed[url][0]},
                lambda name, inside=inside: packed_table(inside[name]),  # type: ignore[misc]
                gone=set(dropped).__contains__,
            )
            gone += dropped
    samples = sum(entry.samples for entry in entries.values())
    if not as_document:
        command.print_line(f"indexed {counted(len(urls), 'shard')}, {counted(samples, 'sample')}")
    for folder, inside in by_index.items() if sources else ():
        values = _columns(sources, indexes[folder], inside, options)
        update_columns(storages.for_url(folder), indexes[folder], values)
    if gone:
        shown = f"{counted(len(gone), 'shard')} from the index, such as {gone[0]!r}"
        say(f"note: dropped {shown}, because their files do not exist")
    if links:
        say(
            f"warning: skipped {counted(links, 'link')}, which have no content; if they belong to samples, write the "
            "shards with `tar --hard-dereference -h`"
        )
    if as_document:
        command.print_document({"shards": len(urls), "samples": samples, "skipped_links": links, "dropped": gone})


def _by_index(urls: Sequence[str], output: str | None) -> dict[str, dict[str, str]]:
    """Group shards by the folder of their index; return a dict from names to urls for each folder."""
    by_index: dict[str, dict[str, str]] = {}
    for url in urls:
        folder, name = folder_and_name(url)
        place = output or f"{folder}/{INDEX_FOLDER}"
        if protocol_of(place) in WEB:
            place = without_secrets(place)
            raise UsageError(f"an index cannot be written to {place!r}, a web server; name a folder with --output")
        if by_index.setdefault(place, {}).setdefault(name, url) != url:
            raise UsageError(f"several shards are named {name!r}; index their folders separately")
    return by_index


def _missing_names(folder: str, finder: ShardFinder, storages: Storages) -> list[str]:
    """Return the indexed names whose shards do not exist; [] without a readable index and a listing of the folder."""
    try:
        index = finder.index_of(folder)
        if index is None or protocol_of(folder) in WEB:
            return []
        names = {shard_name(info.url) for info in storages.for_url(folder).list(f"{escape(folder)}/*")}
    except StreamloadError:
        return []
    return [entry.name for entry in index.shards if entry.name not in names and not entry.name.startswith(".")]


def _parse_columns(text: str) -> list[tuple[str, str]]:
    """Parse `json:aesthetic,meta.json:lang` to fields and names (or dotted paths)."""
    columns: list[tuple[str, str]] = []
    for entry in text.split(","):
        field, _, name = entry.strip().partition(":")
        if not (field and name):
            raise UsageError(f"--columns {text!r}: write FIELD:NAME,..., such as json:aesthetic,json:meta.width")
        if name in (KEY, LABEL, CLASS_NAME) or name.split(".")[0] in (FRACTION, "size", "has"):
            raise UsageError(f"--columns {text!r}: {name!r} has a special meaning in conditions; rename the column")
        if any(name == other for _, other in columns):
            raise UsageError(f"--columns {text!r} has a name twice; a column is identified by its name alone")
        columns.append((field, name))
    return columns


def _columns(
    sources: Sequence[tuple[str, str]], index: DatasetIndex, urls: Mapping[str, str], options: dict[str, Any]
) -> dict[str, NDArray[Any]]:
    """Read columns of values for all samples of an index. `urls` maps its shards' names to urls."""
    others = [shard.name for shard in index.shards if shard.name not in urls]
    if others:
        more = f"{counted(len(others), 'more shard')}, such as {others[0]!r}"
        raise UsageError(f"--columns: the index has {more}; name them too")
    fields = list(dict.fromkeys(field for field, _ in sources))
    values: dict[str, list[Any]] = {name: [] for _, name in sources}
    with streamload.StreamLoader(
        [urls[shard.name] for shard in index.shards],
        _READ_TOGETHER,
        fields=tuple(f"{field}?" for field in fields),
        collate_fn=list,
        index=index.folder,
        rank=0,
        world_size=1,
        storage_options=options or None,
    ) as loader:
        for batch in loader:
            for sample in batch:
                decoded = dict(zip(fields, sample, strict=True))
                for field, name in sources:
                    value = decoded[field]
                    for part in name.split("."):
                        value = value.get(part) if isinstance(value, Mapping) else None
                    values[name].append(value)
    return {name: _column(name, column) for name, column in values.items()}


def _column(name: str, values: Sequence[Any]) -> NDArray[Any]:
    """Return values as an array. Missing numbers become NaN, missing strings are empty."""
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        raise UsageError(f"--columns: no sample has a value for {name!r}; check FIELD and NAME")
    if kinds == {str}:
        strings = np.array([value or "" for value in values], np.str_)
        if (longest := strings.dtype.itemsize // 4) > _LONGEST_STRING:
            limit = f"{longest:,} characters; the maximum is {_LONGEST_STRING}"
            raise UsageError(f"--columns: the column {name!r} has strings of {limit}")
        return strings
    if not kinds <= {bool, int, float}:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UsageError(f"--columns: the column {name!r} has values of {shown}; a column holds numbers or strings")
    numbers = np.array([np.nan if value is None else value for value in values])
    if numbers.dtype.kind not in "bif":
        raise UsageError(f"--columns: the column {name!r} has integers beyond 64 bits")
    return numbers


def verify_command(
    urls: command.Urls,
    *,
    decode: Annotated[bool, typer.Option("--decode", help="Also decode the intact shards, on this machine.")] = False,
    as_document: command.Json = False,
    index: command.Index = None,
    workers: command.Workers = None,
    ray: command.Ray = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Read every byte of shards and compare it with the index.

    The exit status is 1 if a fault is found.

    Examples:
      streamload verify shards/train
      streamload verify shards/train --decode
      streamload verify s3://bucket/photos --json
      streamload verify s3://bucket/photos --ray auto
    """
    options = dict(storage_option or ())
    storages = Storages(options)
    urls = list(find_shards(urls, storages))
    finder = ShardFinder(index, storages)
    known = Dataset(Listing(tuple(_shard_in(finder, url) for url in urls), None, (), indexes=finder.indexes), storages)
    intact: list[str] = []
    documents: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()

    def report_faults(faults: Iterable[StreamloadError]) -> None:
        for fault in faults:
            counts["faults"] += 1
            if as_document:
                place = {"url": fault.url, "key": fault.key, "offset": fault.offset}
                documents.append({"kind": type(fault).__name__, "message": fault.message, **place})
            else:
                command.print_line(str(fault))

    read_one = partial(_read_or_error, storages=storages)
    with nullcontext() if ray is None else ray_pool(ray, workers) as pool:
        with map_in_order(read_one, urls, workers, pool, "verifying") as reads:
            for number, (url, read) in enumerate(zip(urls, reads, strict=True)):
                faults = [read] if isinstance(read, StreamloadError) else _faults(number, read, known, finder)
                report_faults(faults)
                if not isinstance(read, StreamloadError) and not faults:
                    intact.append(url)
                    counts["samples"] += len(read.table)
                    counts["unchecked"] += (
                        finder.index_of(folder_and_name(url)[0]) is None and compression_of(url) is None
                    )
        advice = "the index names a shard that does not exist; restore the shard, or drop it from the index with"
        for folder in dict.fromkeys(folder_and_name(url)[0] for url in urls) if index is None else ():
            names = _missing_names(folder, finder, storages)
            report_faults(ShardNotFoundError(f"{advice} `streamload index`", url=f"{folder}/{name}") for name in names)
    if decode and intact:
        with Progress("decoding", counts["samples"], "samples") as progress:
            workers = workers or available_processors()
            report_faults(_undecodable(intact, progress, workers, index, options or None))
    shards, unchecked = counted(len(urls), "shard"), counts["unchecked"]
    if as_document:
        document = {"shards": len(urls), "samples": counts["samples"], "shards_without_checksums": unchecked}
        command.print_document(document | {"faults": documents})
    elif not counts["faults"]:
        advice = "only the headers were checked; run `streamload index` while the shards are known to be intact"
        note = f"; of {counted(unchecked, 'shard')} without an index {advice}" if unchecked else ""
        command.print_line(f"{shards} verified, no damage{note}")
    if counts["faults"]:
        say(f"error: {counted(counts['faults'], 'fault')} in {shards}")
        raise typer.Exit(command.FAILED)


def _shard_in(finder: ShardFinder, url: str) -> Shard:
    """Return a shard, with its index's folder if the index can be read."""
    folder, name = folder_and_name(url)
    index = None
    with suppress(StreamloadError):
        index = finder.index_of(folder)
    return Shard(url, name, UNKNOWN_BYTES, 0, folder, None, None if index is None else index.folder)


def _read_or_error(url: str, on_bytes: OnBytes, *, storages: Storages) -> ReadShard | StreamloadError:
    try:
        return read_whole(url, on_bytes, storages=storages, every_byte=True)
    except StreamloadError as exc:
        return exc


def _faults(number: int, read: ReadShard, known: Dataset, finder: ShardFinder) -> list[StreamloadError]:
    """Return the differences between a shard and its index."""
    shard = known.listing.shard(number)
    _warn_of_missing_end(shard.url, read.table)
    try:
        index = finder.index_of(shard.folder)
        if index is None:
            return []
        entry = index.shard(shard.name)
        Pin(entry.bytes, entry.etag, indexed=True).check(shard.url, read.bytes, read.etag)
        table = known.find(number)
        return [] if table is None else list(differences(shard.url, read.table, table))
    except StreamloadError as exc:
        return [exc]


def _warn_of_missing_end(url: str, table: ShardTable) -> None:
    if MISSING_END in table.skipped:
        say(f"warning: {without_secrets(url)} has no end-of-archive marker; it may have been cut after a member")


def _undecodable(
    urls: Sequence[str], progress: Progress, num_workers: int, index: str | None, storage_options: dict[str, Any] | None
) -> list[SampleError]:
    """Decode every field of every sample; return the errors, of which the last may stand for several."""
    errors: list[SampleError] = []
    logging.getLogger("streamload.samples").disabled = True  # each error is reported below
    with streamload.StreamLoader(
        urls,
        _DECODED_TOGETHER,
        transform=len,  # drops the values
        on_error="skip",
        pad=False,  # leaves out a batch whose samples all failed
        index=index,
        num_workers=num_workers,
        rank=0,
        world_size=1,
        storage_options=storage_options,
    ) as loader:
        try:
            for batch in loader:
                progress.advance(len(batch), 0)
        except SampleError as error:
            if error.key is not None:  # without a key, the error only says that every sample was skipped
                errors.append(error)
        progress.advance(skipped := loader.statistics().skipped_samples, 0)
        errors += loader.skipped
        if more := skipped - len(loader.skipped):
            errors.append(SampleError(f"{counted(more, 'more sample')} cannot be decoded; repair the named ones first"))
    logging.getLogger("streamload.samples").disabled = False
    return errors


def stats_command(
    urls: command.Urls,
    *,
    pixels: Annotated[bool, typer.Option("--pixels", help="Measure the channels of the images.")] = False,
    output: Annotated[str | None, typer.Option(help="Save the result of --pixels in this .json file.")] = None,
    as_document: command.Json = False,
    index: command.Index = None,
    workers: command.Workers = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Report counts and sizes of shards, samples, fields and labels.

    Shards without an index are read. --pixels decodes the images and saves each channel's mean, standard
    deviation, minimum and maximum in statistics.json, which images.Normalize.of reads.

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


def _measured(urls: Sequence[str], fields: Sequence[str], samples: int, reading: dict[str, Any]) -> dict[str, Any]:
    """Measure each channel over all images, scaled to values from 0 to 1."""
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


def _sums_of(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return statistics of one image, in rows as in `_NO_PIXELS`."""
    planes = np.ascontiguousarray(image.reshape(-1, 3).T)
    squares = np.square(planes, dtype=np.uint16).sum(1, dtype=np.int64)
    sums = planes.sum(1, dtype=np.int64)
    return np.array([[planes.shape[1]] * 3, sums, squares, planes.min(1), planes.max(1)], np.int64)


def _sums_of_batch(samples: Sequence[tuple[NDArray[np.int64] | None, ...]]) -> tuple[int, NDArray[np.int64]]:
    return len(samples), reduce(_merged, (sums for each in samples for sums in each if sums is not None), _NO_PIXELS)


def _merged(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([one[:3] + other[:3], np.minimum(one[3:4], other[3:4]), np.maximum(one[4:], other[4:])])


def _print(result: dict[str, Any]) -> None:
    shards, samples = counted(result["shards"], "shard"), counted(result["samples"], "sample")
    command.print_line(f"{shards}, {samples}, {shown_bytes(result['bytes'])}\n")
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
                f"not counted: {counted(unknown, 'sample')} of shards with a cls that is missing or not a whole number"
            )
    if pixels := result.get("pixels"):
        names = ("mean", "std", "min", "max")
        channels = [(channel, *(f"{pixels[name][n]:.4f}" for name in names)) for n, channel in enumerate(_CHANNELS)]
        command.print_line("")
        command.print_table([("CHANNEL", *map(str.upper, names)), *channels], numbers=4)


def bench_command(
    urls: command.Urls,
    *,
    batch_size: Annotated[int, typer.Option(help="Samples per batch.", min=1)] = 64,
    workers: Annotated[int | None, typer.Option(help="Worker processes. Default: one per core.", min=0)] = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure after the first batch.", min=0)] = 10.0,
    batches: Annotated[int | None, typer.Option(help="Batches to measure, instead of seconds.", min=1)] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle, as for training.")] = False,
    fields: command.Fields = None,
    raw: Annotated[bool, typer.Option("--no-decode", help="Do not decode the fields.")] = False,
    as_document: command.Json = False,
    index: command.Index = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Read shards with a StreamLoader, epoch after epoch, and report its speed and what limits it.

    By default, the loader reads only the fields that all samples of the first shard have.

    Examples:
      streamload bench shards/train --shuffle --batch-size 256
      streamload bench s3://bucket/photos --seconds 60 --workers 8
      streamload bench shards --fields 'jpg;png,cls' --json
    """
    options = dict(storage_option or ())
    chosen = _common_fields(urls, index, options) if fields is None else tuple(fields.split(","))
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
    command.print_line(f"{rates} as stored, measured after the first batch, over {size} and {spent_s:.1f} s")
    command.print_line(f"limited by {measured.verdict}")


def _common_fields(urls: Sequence[str], index: str | None, storage_options: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields that all samples of the first shard have, with `image_fields` joined as alternatives."""
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


def image_fields(fields: Iterable[str]) -> list[str]:
    """Return the fields of images; fields such as `mask.png` only if there are no others."""
    images = sorted(filter(is_image, fields))
    return [name for name in images if "." not in name] or images


def _arrivals(loader: streamload.StreamLoader) -> Iterator[float]:
    """Yield the arrival time of each batch, epoch after epoch."""
    while True:
        before = loader.statistics().batches
        for _ in loader:
            yield time.perf_counter()
        if loader.statistics().batches == before:
            raise UsageError("an epoch has no batch; give a smaller --batch-size, or other shards")


def tables(
    listing: Listing, storages: Storages, workers: int | None = None, *, labels: bool = False, label: str = ""
) -> AbstractContextManager[Iterator[tuple[int, ShardTable]]]:
    """Open an iterator over each shard's size in bytes and its table, taken from the index or read from the shard.

    Raises:
        StreamloadError: an index or a shard cannot be read, or is damaged.
    """
    dataset, lock = Dataset(listing, storages), Lock()

    def read(number: int, on_bytes: OnBytes) -> tuple[int, ShardTable]:
        with lock:
            table = dataset.find(number)
        if table is None:
            result = read_whole(dataset.url(number), on_bytes, storages=storages, labels=labels)
            return result.bytes, result.table
        return listing.shard(number).bytes, table

    return map_in_order(read, range(len(listing.shards)), workers, label=label)


def read_whole(url: str, on_bytes: OnBytes, *, storages: Storages, **options: Any) -> ReadShard:
    """Read one shard outside of any event loop, with the options and errors of `read_shard`."""

    async def stream() -> ReadShard:
        own = storages.copy()  # connections belong to the loop that opened them
        try:
            return await read_shard(own.for_url(url), url, on_bytes=on_bytes, **options)
        finally:
            await own.aclose()

    local = scan_local(storages.for_url(url), url, **options)
    if local is not None:
        on_bytes(local.bytes)
    return asyncio.run(stream()) if local is None else local


@contextmanager
def map_in_order(
    function: Callable[[_Item, OnBytes], _Result],
    items: Sequence[_Item],
    workers: int | None = None,
    pool: Pool | None = None,
    label: str = "",
) -> Iterator[Iterator[_Result]]:
    """Call a function for each shard, on threads or in a pool, and open an iterator over the results in order.

    `label` turns progress on. Leaving the context stops calls on threads.
    """
    stopped, counting = Event(), Lock()
    with Progress(label, len(items), "shards") if label else nullcontext() as progress:

        def advance(count_bytes: int, shards: int = 0) -> None:
            if stopped.is_set():
                raise _StoppedError
            if progress is not None:
                with counting:
                    progress.advance(shards, count_bytes)

        def counted_in(results: Iterator[_Result]) -> Iterator[_Result]:
            for result in results:
                advance(0, shards=1)
                yield result

        if pool is not None:
            yield counted_in(pool(partial(function, item, lambda _: None) for item in items))
            return
        with ThreadPoolExecutor(workers or available_processors(), "streamload-reading") as threads:
            try:
                yield counted_in(threads.map(function, items, [advance] * len(items)))
            finally:
                stopped.set()
                threads.shutdown(cancel_futures=True)


class _StoppedError(Exception):
    """Raised to stop a call after another one failed or the user interrupted."""
