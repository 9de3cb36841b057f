"""`map_shards`: a dataset made of another one by a function of its samples, packed as `pack` does."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.decoders import decoder_for
from streamload.errors import without_secrets
from streamload.index.dataset_index import is_plain_name
from streamload.index.listing import Listing
from streamload.pack.calling import check_counts, naming_arguments, pack_inputs
from streamload.pack.failures import UsageError
from streamload.pack.publishing import ANY_NAMES, NAMES
from streamload.pack.sources.listing import Listing as InputListing
from streamload.sampling.mixture import Portion
from streamload.sampling.selection import Selection, Where
from streamload.storage.local_storage import local_path, storage_for
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls
from streamload.tar.decompression import Decompressor, compression_of, without_compression
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
    if not storages.is_local(url):
        content = storages.for_url(url).read_bytes(url, most_bytes=_MOST_BYTES)
    else:
        with open(storage_for(url).open(url), "rb") as file:
            if compression_of(url) is None:
                descriptor = file.fileno()
                yield scan_file(descriptor, os.fstat(descriptor).st_size, url), partial(os.pread, descriptor)
                return
            content = file.read()
    archive = _decompressed(url, content)
    yield scan_shard(memoryview(archive), url), lambda size, start: archive[start : start + size]


def _decompressed(url: str, content: bytes) -> bytes:
    compression = compression_of(url)
    if compression is None:
        return content
    decompressor = Decompressor(compression, url)
    pieces = list(decompressor.feed(content))
    decompressor.finish()
    return b"".join(pieces)


_SHARD_BYTES = 256_000_000
Sample = dict[str, Any]


@naming_arguments
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
    sync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    ray: str | None = None,
) -> None:
    """Write a dataset of what a function makes of another one's samples, in their order and with their keys.

    Each shard becomes one new shard of the same name (numbered, where two shards of different folders share a name),
    unless `max_bytes` or `max_count` says how they are cut anew, which merges small ones. What `pack` promises holds:
    the same bytes for any number of workers and after a kill and `resume=True`, and nothing is published before
    everything is done.

    Args:
        function: takes a sample, a dict of its fields' bytes with "__key__" and "__url__"; gives the new sample (which
            has the same key where it names none), yields several, which then need keys of their own, or gives None to
            leave it out. With `batch_size` it takes a list of samples, and gives or yields the new ones; if there are
            as many, they have the same keys where they name none.
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
        overwrite: replace the shards that are there (unless they are cut anew, all `.tar` files in the destination), or
            discard an interrupted run.
        sync: flush everything to the disk.
        storage_options: of the shards and the destination.
        ray: as for `pack`: a task on the nodes of a Ray cluster for each shard.

    Raises:
        ValueError, StreamloadError, OSError: as `pack`, and as `StreamLoader` for the shards.
    """
    check_counts(batch_size=batch_size, workers=workers, max_count=max_count)
    is_cut = max_bytes is not None or max_count is not None
    if sidecar and is_cut:
        raise UsageError("--sidecar writes a shard for each shard; leave out --max-bytes and --max-count")
    storages = Storages(storage_options)
    with closing(FeederClient(storages, named_places([Portion(urls, 1.0)]))) as client:
        listing = client.list_shards(urls, None)
        _refuse_source(os.fspath(destination), listing, storages)
        chosen = None if where is None else client.select(Selection(where), listing)
        counts = listing.counts if chosen is None else client.counts(listing)
    inputs = [pickle.dumps(shard) for shard in _source_shards(listing, chosen, counts)]
    pack_inputs(
        partial(_mapped, partial(_only_new if sidecar else _kept, function), batch_size, decode, storage_options),
        inputs,
        _as_inputs(listing, inputs),
        destination,
        workers=workers,
        max_bytes=_SHARD_BYTES if max_bytes is None else max_bytes,
        max_count=max_count,
        resume=resume,
        overwrite=overwrite,
        sync=sync,
        storages=storages,
        ray=ray,
        names=None if is_cut else _names(listing),
        may_be_empty=sidecar,
    )


def _refuse_source(destination: str, listing: Listing, storages: Storages) -> None:
    def place(url: str) -> str:
        return os.path.realpath(local_path(url)) if storages.is_local(url) else url.rstrip("/")

    target = place(destination)
    if any(place(folder) == target for folder in {shard.folder for shard in listing.shards}):
        raise ValueError(f"the destination {destination!r} is the folder of the shards; give another one")


def _names(listing: Listing) -> list[str]:
    """What the shards are called that are made of each one: as that; numbered where two would have one name."""
    names = [without_compression(shard.name) for shard in listing.shards]
    if len(set(names)) == len(names) and all(map(is_plain_name, names)) and all(map(ANY_NAMES.matches, names)):
        return names
    return [NAMES.name(number) for number in range(len(names))]


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


def _as_inputs(listing: Listing, inputs: Sequence[bytes]) -> InputListing:
    """The shards as a run remembers them, with sizes, times and versions, so that one that has changed is noticed."""
    shards = listing.shards
    versions = hashlib.sha256("\0".join(shard.etag or "" for shard in shards).encode())
    for content in inputs:
        versions.update(content)
    return InputListing(
        [shard.url for shard in shards],
        np.array([shard.bytes for shard in shards], np.int64),
        np.array([shard.mtime_ns for shard in shards], np.int64),
        versions.digest(),
    )


Function = Callable[[Any], Any]
"""Of a sample or of a list of samples."""


def _mapped(
    made: Callable[[Any, Sequence[Sample]], Iterable[Any]],
    batch_size: int | None,
    decode: Decode,
    storage_options: Mapping[str, Any] | None,
    shard: SourceShard,
) -> Iterator[Any]:
    samples = samples_of(shard, decode, Storages(storage_options))
    while batch := list(islice(samples, batch_size or 1)):
        given = batch[0] if batch_size is None else batch
        try:
            yield from made(given, batch)
        except Exception as exc:
            exc.add_note(f"sample {batch[0]['__key__']!r}" + (" and those after it" if len(batch) > 1 else ""))
            raise


def _kept(function: Function, given: Any, batch: Sequence[Sample]) -> Iterator[Any]:
    """What a function makes; new samples that name no key have that of the one that they are made of."""
    made = _as_list(function(given))
    one_each = len(made) == len(batch)
    for number, sample in enumerate(made):
        if isinstance(sample, Mapping):
            new = {name: value for name, value in sample.items() if name != "__url__"}
            if one_each or len(batch) == 1:
                new.setdefault("__key__", batch[number if one_each else 0]["__key__"])
            yield new
        elif sample is not None:
            yield sample  # whoever writes it says what is wrong


def _only_new(function: Function, given: Any, batch: Sequence[Sample]) -> Iterator[Sample]:
    """The new fields alone, under the keys of the samples that they belong to."""
    made = _as_list(function(given), of_one=given is not batch)
    if len(made) != len(batch):
        raise ValueError(
            f"it gave {counted(len(made), 'sample')} for {len(batch)}; for a sidecar it gives one for each, or None in "
            "its place"
        )
    for before, sample in zip(batch, made, strict=True):
        if sample is None:
            continue
        if not isinstance(sample, Mapping):
            raise TypeError(f"it gave a value of type {type(sample).__name__}; give a dict, or None")
        key = before["__key__"]
        if sample.get("__key__", key) != key:
            raise ValueError(f"it gave the key {sample['__key__']!r} for {key!r}; in a sidecar keys stay as they are")
        new = {name: value for name, value in sample.items() if not name.startswith("__")}
        for name in before.keys() & new.keys():
            if not _is_same(new.pop(name), before[name]):
                raise ValueError(f"the samples have a field {name!r} already; give the new one a name of its own")
        yield {"__key__": key, **new}


def _is_same(value: object, before: object) -> bool:
    return value is before or (isinstance(value, bytes) and value == before)


def _as_list(made: Any, *, of_one: bool = False) -> list[Any]:
    """What a function has given or yields, as a list; of one sample None is one too."""
    if isinstance(made, Mapping) or (of_one and made is None):
        return [made]
    if made is None:
        return []
    if not isinstance(made, Iterable) or isinstance(made, str | bytes):
        raise TypeError(f"it gave a value of type {type(made).__name__}; give a dict, yield dicts, or give None")
    return list(made)
