"""`map_shards`: a dataset made of another one by a function of its samples."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from importlib.metadata import version
from itertools import islice
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from streamload.arguments import parse_bytes
from streamload.decode.decoders import decoder_for
from streamload.errors import without_secrets
from streamload.index.dataset_index import is_plain_name
from streamload.index.listing import Listing
from streamload.pack.calling import call_tasks, check_counts, check_samples, code_of
from streamload.pack.output import UsageError
from streamload.pack.planning import shard_spans
from streamload.pack.ray_pool import pickled_by_value
from streamload.pack.run import Start, pack_into
from streamload.pack.tasks import ANY_NAMES, Target, digest_of, samples_in, shard_name
from streamload.sampling.mixture import Portion
from streamload.sampling.selection import Selection, Where
from streamload.storage.local_files import LocalStorage
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls
from streamload.tar.decompression import compression_of, decompressed, without_compression
from streamload.tar.scan import scan_file, scan_shard
from streamload.tar.table import ShardTable
from streamload.text import counted
from streamload.trainer.feeder_client import FeederClient, named_places

_MOST_BYTES = 1 << 40

Decode = bool | Mapping[str, Callable[[bytes], Any]]
Read = Callable[[int, int], bytes]
"""Gives so many bytes from a place on."""


class SourceShard(NamedTuple):
    """A shard to read.

    Attributes:
        url: the shard.
        samples: int64[n], the numbers of those to read, ascending; None for all.
    """

    url: str
    samples: NDArray[np.int64] | None

    def __repr__(self) -> str:
        return f"the shard {without_secrets(self.url)!r}"


def samples_of(shard: SourceShard, decode: Decode, storages: Storages) -> Iterator[dict[str, Any]]:
    """The samples as dicts of their fields, with "__key__" and "__url__".

    Args:
        shard: the shard.
        decode: as for `TarDataset`.
        storages: where it lies.

    Raises:
        StorageError, ShardFormatError: it cannot be read, or is damaged.
        Exception: what a decoder raises, with a note that names the sample and the field.
    """
    decoder = cache(lambda field: decoder_for(field, decode))
    url = without_secrets(shard.url)
    with _opened(shard.url, storages) as (table, read):
        keys = table.keys()
        offsets, sizes, fields = table.member_offset.tolist(), table.member_size.tolist(), table.member_field.tolist()
        starts = table.sample_start.tolist()
        for number in range(len(table)) if shard.samples is None else shard.samples.tolist():
            sample: dict[str, Any] = {"__key__": keys[number], "__url__": url}
            for member in range(starts[number], starts[number + 1]):
                field, data = table.fields[fields[member]], read(sizes[member], offsets[member])
                try:
                    sample[field] = data if decode is False else decoder(field)(data)
                except Exception as exc:
                    exc.add_note(f"in the field {field!r} of sample {keys[number]!r}")
                    raise
            yield sample


@contextmanager
def _opened(url: str, storages: Storages) -> Iterator[tuple[ShardTable, Read]]:
    if storages.costs_requests(url):
        content = storages.for_url(url).read_bytes(url, most_bytes=_MOST_BYTES)
    else:
        with open(LocalStorage().open(url), "rb") as file:
            if compression_of(url) is None:
                descriptor = file.fileno()
                yield scan_file(descriptor, os.fstat(descriptor).st_size, url), partial(os.pread, descriptor)
                return
            content = file.read()
    archive = b"".join(decompressed(url, content))
    yield scan_shard(memoryview(archive), url), lambda size, start: archive[start : start + size]


_SHARD_BYTES = 256_000_000
Sample = dict[str, Any]


def map_shards(
    function: Callable[[Any], Any],
    urls: Urls,
    destination: str | os.PathLike[str],
    *,
    sidecar: bool = False,
    batch_size: int | None = None,
    decode: Decode = False,
    where: Where | None = None,
    workers: int | None = None,
    max_bytes: int | str | None = None,
    max_count: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    ray: str | None = None,
) -> None:
    """Write a dataset of what a function makes of another one's samples, in their order and with their keys.

    Each shard becomes one new shard of the same name (numbered, if two shards of different folders share a name),
    unless `max_bytes` or `max_count` says how they are cut anew, which merges small ones: consecutive shards become one
    as far as they fit in it, and one that exceeds it is cut. What `pack` promises holds: the same bytes for any number
    of workers and after a kill and `resume=True`, and every reader refuses the destination until everything is done.

    Args:
        function: takes a sample, a dict of its fields' bytes with "__key__" and "__url__"; gives the new sample (which
            has the same key if it names none), yields several, which then need keys of their own, or gives None to
            leave it out. With `batch_size` it takes a list of samples, and gives or yields the new ones; if there are
            as many, they have the same keys if they name none.
        urls: the shards, as `StreamLoader` takes them.
        destination: a folder or a url; not that of the shards.
        sidecar: write only the fields that samples did not have, for `StreamLoader(..., join=destination)`: a shard for
            each shard, and for each sample one or None.
        batch_size: samples of one shard that the function gets at once, at most.
        decode: as for `TarDataset`; values that are no bytes are encoded by their extension when they are written.
        where: which samples are read; as for `StreamLoader`.
        workers: as for `pack`, like all that follow.
        max_bytes: no new shard is larger; if `max_count` is given, by default 256 MB.
        max_count: no new shard has more samples.
        resume: go on with an interrupted run.
        overwrite: remove the shards that are there, or an interrupted run, first.
        storage_options: of the shards and the destination.
        filesystem: an fsspec filesystem to read and write with, as for `StreamLoader`.
        ray: as for `pack`: a task on the nodes of a Ray cluster for each shard.

    Raises:
        ValueError, StreamloadError, OSError: as `pack`, and as `StreamLoader` for the shards.
    """
    check_counts(batch_size=batch_size, workers=workers, max_count=max_count)
    is_cut = max_bytes is not None or max_count is not None
    if sidecar and is_cut:
        raise UsageError("a sidecar has a shard for each shard; leave out max_bytes and max_count")
    storages = Storages(storage_options, filesystem)
    dest = os.fspath(destination).rstrip("/") or "/"
    with closing(FeederClient(storages, named_places([Portion(urls, 1.0)]))) as client:
        listing = client.list_shards(urls, None)
        _refuse_source(dest, listing, storages)
        chosen = None if where is None else client.select(Selection(where), listing)
        counts = listing.counts if chosen is None else client.counts(listing)
    shards = list(_source_shards(listing, chosen, counts))
    most_bytes = parse_bytes("max_bytes", _SHARD_BYTES if max_bytes is None else max_bytes)
    if is_cut:
        target = Target(dest, storages, max_bytes=most_bytes, max_count=max_count)
        sizes = [
            (shard.bytes, 0 if counts is None else counts[number] if each.samples is None else len(each.samples))
            for number, (shard, each) in enumerate(zip(listing.shards, shards, strict=True))
        ]
        spans = shard_spans(sizes, most_bytes, max_count)
        names = [shard_name(number) for number in range(len(spans))]
    else:
        names = _names(listing)
        target = Target(dest, storages, ANY_NAMES)
        spans = [(number, number + 1) for number in range(len(names))]
    mapped = partial(_mapped, function, sidecar=sidecar, batch_size=batch_size, decode=decode, storages=storages)
    function_bytes = pickled_by_value(mapped) if ray is not None else cloudpickle.dumps(mapped)
    inputs = [pickle.dumps(shard) for shard in shards]
    versions = [(shard.bytes, shard.mtime_ns, shard.etag) for shard in listing.shards]
    decoders: Any = decode
    if isinstance(decode, Mapping):
        decoders = sorted((field, code_of(each)) for field, each in decode.items())
    code = digest_of(
        code_of(function), sidecar, batch_size, decoders, version("streamload"), is_cut, most_bytes, max_count
    )
    tasks = call_tasks(function_bytes, code, inputs, versions, names=names, spans=spans, may_be_empty=sidecar)
    check = partial(check_samples, len(shards), is_unique=is_cut)
    if any(map(storages.is_process_local, {shard.folder for shard in listing.shards})):
        workers = 1
    begin = Start(resume, overwrite, workers, ray)
    pack_into(target, begin, lambda _: tasks, check, label="mapping", unit="shards")


def _refuse_source(destination: str, listing: Listing, storages: Storages) -> None:
    def place(url: str) -> str:
        return os.path.realpath(storages.for_url(url).absolute(url))  # of a url it keeps what tells it from others

    target = place(destination)
    if any(place(folder) == target for folder in {shard.folder for shard in listing.shards}):
        raise ValueError(f"the destination {destination!r} is the folder of the shards; give another one")


def _names(listing: Listing) -> list[str]:
    """What the shards are called that are made of each one: as that; numbered where two would have one name."""
    names = [without_compression(shard.name) for shard in listing.shards]
    if len(set(names)) == len(names) and all(map(is_plain_name, names)) and all(map(ANY_NAMES.matches, names)):
        return names
    return [shard_name(number) for number in range(len(names))]


def _source_shards(
    listing: Listing, chosen: NDArray[np.bool_] | None, counts: Sequence[int] | None
) -> Iterator[SourceShard]:
    end = 0
    for number, shard in enumerate(listing.shards):
        if chosen is None or counts is None:
            yield SourceShard(shard.url, None)
            continue
        start, end = end, end + counts[number]
        yield SourceShard(shard.url, np.flatnonzero(chosen[start:end]))


def _mapped(
    function: Callable[[Any], Any],
    shard: SourceShard,
    *,
    sidecar: bool,
    batch_size: int | None,
    decode: Decode,
    storages: Storages,
) -> Iterator[Any]:
    samples = samples_of(shard, decode, storages)
    while batch := list(islice(samples, batch_size or 1)):
        try:
            result = function(batch[0] if batch_size is None else batch)
            if not sidecar:
                yield from _with_keys(batch, list(samples_in(result)))
            elif batch_size is None and (result is None or isinstance(result, Mapping)):
                yield from _new_fields(batch, [result])
            else:
                yield from _new_fields(batch, list(samples_in(result)))
        except Exception as exc:
            exc.add_note(f"sample {batch[0]['__key__']!r}" + (" and those after it" if len(batch) > 1 else ""))
            raise


def _with_keys(batch: Sequence[Sample], results: Sequence[Any]) -> Iterator[Any]:
    """Yield what a function gives; a new sample without a key gets that of the sample that it is made of."""
    one_each = len(results) == len(batch)
    for number, sample in enumerate(results):
        if isinstance(sample, Mapping):
            new = {name: value for name, value in sample.items() if name != "__url__"}
            if one_each or len(batch) == 1:
                new.setdefault("__key__", batch[number if one_each else 0]["__key__"])
            yield new
        elif sample is not None:
            yield sample  # the caller says what is wrong with it


def _new_fields(batch: Sequence[Sample], results: Sequence[Any]) -> Iterator[Sample]:
    """Yield the new fields alone, under the keys of the samples that they belong to."""
    if len(results) != len(batch):
        raise ValueError(
            f"it gave {counted(len(results), 'sample')} for {len(batch)}; for a sidecar it gives one for each, or None "
            "in its place"
        )
    for before, sample in zip(batch, results, strict=True):
        if sample is None:
            continue
        if not isinstance(sample, Mapping):
            raise TypeError(f"it gave a value of type {type(sample).__name__}; give a dict, or None")
        key = before["__key__"]
        if sample.get("__key__", key) != key:
            raise ValueError(f"it gave the key {sample['__key__']!r} for {key!r}; in a sidecar keys stay as they are")
        new = {name: value for name, value in sample.items() if not name.startswith("__")}
        for name in before.keys() & new.keys():
            value = new.pop(name)
            if value is not before[name] and not (isinstance(value, bytes) and value == before[name]):
                raise ValueError(f"the samples have a field {name!r} already; give the new one a name of its own")
        yield {"__key__": key, **new}
