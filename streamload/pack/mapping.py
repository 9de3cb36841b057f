"""`map_shards`: make a dataset of another one by a function of its samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from mmap import PROT_READ, mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import parse_bytes
from streamload.decode.decoders import decoder_for
from streamload.errors import without_secrets
from streamload.index.dataset_index import is_plain_name
from streamload.index.listing import Listing
from streamload.pack.calling import code_of, pack_calls, samples_in
from streamload.pack.output import UsageError
from streamload.pack.planning import shard_spans
from streamload.pack.tasks import ANY_NAMES, Target, shard_name
from streamload.sampling.mixture import Portion
from streamload.sampling.selection import Selection, Where
from streamload.storage.local_files import LocalStorage
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls
from streamload.tar.decompression import compression_of, decompressed, without_compression
from streamload.tar.scan import scan_shard
from streamload.text import counted
from streamload.trainer.feeder_client import FeederClient, named_places
from streamload.write.shard_writer import check_counts

_MOST_BYTES = 1 << 40
_SHARD_BYTES = 256_000_000

Decode = bool | Mapping[str, Callable[[bytes], Any]]
Sample = dict[str, Any]


class SourceShard(NamedTuple):
    """A shard, as it was listed, and the numbers of the samples to read, int64[n], ascending; None for all."""

    url: str
    bytes: int
    version: tuple[int | None, str | None]
    samples: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"the shard {without_secrets(self.url)!r}"


def _samples_of(shard: SourceShard, decode: Decode, storages: Storages) -> Iterator[Sample]:
    """Read the samples of a shard as dicts of their fields, with "__key__" and "__url__"."""
    decoder = cache(lambda field: decoder_for(field, decode))
    url = without_secrets(shard.url)
    archive = _archive(shard.url, storages)
    table = scan_shard(memoryview(archive), shard.url)
    keys, fields = table.keys(), [table.fields[number] for number in table.member_field.tolist()]
    starts, offsets, sizes = table.sample_start.tolist(), table.member_offset.tolist(), table.member_size.tolist()
    for number in range(len(table)) if shard.samples is None else shard.samples.tolist():
        sample: Sample = {"__key__": keys[number], "__url__": url}
        for member in range(starts[number], starts[number + 1]):
            field, data = fields[member], archive[offsets[member] : offsets[member] + sizes[member]]
            try:
                sample[field] = data if decode is False else decoder(field)(data)
            except Exception as exc:
                exc.add_note(f"in the field {field!r} of sample {keys[number]!r}")
                raise
        yield sample


def _archive(url: str, storages: Storages) -> bytes | mmap:
    """Return a whole shard, decompressed; one that is a local file is mapped."""
    if storages.costs_requests(url) or compression_of(url) is not None:
        content = storages.for_url(url).read_bytes(url, most_bytes=_MOST_BYTES)
        return b"".join(decompressed(url, content))
    with open(LocalStorage().open(url), "rb") as file:
        return mmap(file.fileno(), 0, prot=PROT_READ) if os.fstat(file.fileno()).st_size else b""


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
    """Write a dataset of the results of a function for another dataset's samples, in their order and with their keys.

    Each shard becomes one of the same name (numbered, if shards of different folders share a name), unless `max_bytes`
    or `max_count` cuts them anew: consecutive shards are merged as far as they fit, and a larger one is cut. The bytes,
    resuming, and incomplete destinations are as for `pack`.

    Args:
        function: takes a sample, a dict of its fields' bytes with "__key__" and "__url__"; returns the new sample (with
            the same key unless it has one), yields several, which need keys of their own, or returns None to leave it
            out. With `batch_size` it takes a list of samples, and returns or yields the new ones; as many samples have
            the same keys unless they have others.
        urls: the shards, as for `StreamLoader`.
        destination: a folder or a url; not that of the shards.
        sidecar: write only the new fields, for `StreamLoader(..., join=destination)`: a shard for each shard, and for
            each sample one or None.
        batch_size: maximum number of samples of one shard that the function gets at once.
        decode: as for `TarDataset`; values other than bytes are encoded by their extension when they are written.
        where: the samples to read; as for `StreamLoader`.
        workers: as for `pack`, like all that follow.
        max_bytes: maximum size of a new shard; if `max_count` is given, by default 256 MB.
        max_count: maximum number of samples in a new shard.
        resume: go on with an interrupted run.
        overwrite: first remove existing shards, or an interrupted run.
        storage_options: for the shards and the destination.
        filesystem: an fsspec filesystem to read and write with.
        ray: as for `pack`: a task on the nodes of a Ray cluster for each shard.

    Raises:
        ValueError, StreamloadError, OSError: as for `pack`, and as for `StreamLoader` for the shards.
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
    shards = [SourceShard(shard.url, shard.bytes, (shard.mtime_ns, shard.etag)) for shard in listing.shards]
    if chosen is not None and counts is not None:
        in_each = np.split(chosen, np.cumsum(counts)[:-1])
        shards = [shard._replace(samples=np.flatnonzero(part)) for shard, part in zip(shards, in_each, strict=True)]
        counts = [len(np.flatnonzero(part)) for part in in_each]
    if any(map(storages.is_process_local, {shard.folder for shard in listing.shards})):
        workers = 1
    target = Target(dest, storages, resume=resume, overwrite=overwrite, workers=workers, ray=ray)
    if is_cut:
        most_bytes = parse_bytes("max_bytes", _SHARD_BYTES if max_bytes is None else max_bytes)
        target = replace(target, max_bytes=most_bytes, max_count=max_count)
        sizes = zip([shard.bytes for shard in shards], counts or [0] * len(shards), strict=True)
        cut = [(span, shard_name(number)) for number, span in enumerate(shard_spans(sizes, most_bytes, max_count))]
    else:
        target = replace(target, naming=ANY_NAMES)
        names = [without_compression(shard.name) for shard in listing.shards]
        if len(set(names)) < len(names) or not all(is_plain_name(name) and ANY_NAMES.matches(name) for name in names):
            names = list(map(shard_name, range(len(shards))))
        cut = [((number, number + 1), name) for number, name in enumerate(names)]
    decoders: Any = decode
    if isinstance(decode, Mapping):
        decoders = sorted((field, code_of(each)) for field, each in decode.items())
    pack_calls(
        partial(_mapped, function, sidecar=sidecar, batch_size=batch_size, decode=decode, storages=storages),
        shards,
        target,
        code=[code_of(function), sidecar, batch_size, decoders],
        cut=cut,
        may_be_empty=sidecar,
        are_keys_unique=is_cut,
        label="mapping",
        unit="shards",
    )


def _refuse_source(destination: str, listing: Listing, storages: Storages) -> None:
    def place(url: str) -> str:
        return os.path.realpath(storages.for_url(url).absolute(url))  # of a url it keeps what tells it from others

    target = place(destination)
    if any(place(folder) == target for folder in {shard.folder for shard in listing.shards}):
        raise ValueError(f"the destination {destination!r} is the folder of the shards; give another one")


def _mapped(
    function: Callable[[Any], Any],
    shard: SourceShard,
    *,
    sidecar: bool,
    batch_size: int | None,
    decode: Decode,
    storages: Storages,
) -> Iterator[Any]:
    samples = _samples_of(shard, decode, storages)
    while batch := list(islice(samples, batch_size or 1)):
        try:
            result = function(batch[0] if batch_size is None else batch)
            is_one = batch_size is None and isinstance(result, Mapping | None)
            results = [result] if is_one else list(samples_in(result))
            yield from (_new_fields if sidecar else _with_keys)(batch, results)
        except Exception as exc:
            exc.add_note(f"sample {batch[0]['__key__']!r}" + (" and those after it" if len(batch) > 1 else ""))
            raise


def _with_keys(batch: Sequence[Sample], results: Sequence[Any]) -> Iterator[Any]:
    """Yield the results of a function; a new sample without a key gets that of its source."""
    one_each = len(results) == len(batch)
    for number, sample in enumerate(results):
        if isinstance(sample, Mapping):
            new = {name: value for name, value in sample.items() if name != "__url__"}
            if one_each or len(batch) == 1:
                new.setdefault("__key__", batch[number if one_each else 0]["__key__"])
            yield new
        elif sample is not None:
            yield sample  # refused later


def _new_fields(batch: Sequence[Sample], results: Sequence[Any]) -> Iterator[Sample]:
    """Yield the new fields alone, under the keys of their samples."""
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
