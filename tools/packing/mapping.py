"""`map_shards`: a dataset made of another one by a function of its samples, packed as `pack` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from streamload_tools.packing.calling import check_counts, pack

import streamload
from streamload.index.finder import find_shards
from streamload.index.shard_names import folder_and_name
from streamload.storage.local_storage import local_path
from streamload.storage.storages import Storages
from streamload.storage.urls import Urls

__all__ = ["map_shards"]

Decode = bool | Mapping[str, Callable[[bytes], Any]]
Sample = dict[str, Any]


def map_shards(
    function: Callable[[Any], Any],
    urls: Urls,
    destination: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    decode: Decode = False,
    where: str | None = None,
    workers: int | None = None,
    max_bytes: int | str = 256_000_000,
    max_count: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    sync: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a dataset of what a function makes of another one's samples, in their order and with their keys.

    Shards are cut anew by `max_bytes` and `max_count`, so small ones are merged. What `pack` promises holds: the same
    bytes for any number of workers and after a kill and `resume=True`, and nothing is published before everything is
    done.

    Args:
        function: takes a sample, a dict of its fields' bytes with "__key__" and "__url__"; gives the new sample (which
            has the same key where it names none), yields several, which then need keys of their own, or gives None to
            leave it out. With `batch_size` it takes a list of samples, and gives or yields the new ones.
        urls: the shards, as `TarDataset` takes them; those on a web server or in a bucket need an index.
        destination: a folder or a url; not that of the shards.
        batch_size: samples of one shard that the function gets at once, at most.
        decode: as for `TarDataset`; values that are no bytes are encoded by their extension when they are written.
        where: a condition that samples have to meet; see docs/choosing-samples.md.
        workers: as for `pack`, like all that follow.
        max_bytes: no new shard is larger.
        max_count: no new shard has more samples.
        resume: go on with an interrupted run.
        overwrite: replace the shards that are there, or discard an interrupted run.
        sync: flush everything to the disk.
        storage_options: of the shards and the destination.

    Raises:
        ValueError, StreamloadError, OSError: as `pack` and `TarDataset`.
    """
    check_counts(batch_size=batch_size)
    storages = Storages(storage_options)
    shards = find_shards(urls, storages)
    _refuse_source(os.fspath(destination), shards, storages)
    options = {"decode": decode, "where": where, "storage_options": storage_options}
    pack(
        partial(_mapped, function, batch_size, options),
        shards,
        destination,
        workers=workers,
        max_bytes=max_bytes,
        max_count=max_count,
        resume=resume,
        overwrite=overwrite,
        sync=sync,
        storage_options=storage_options,
    )


def _refuse_source(destination: str, shards: Iterable[str], storages: Storages) -> None:
    def place(url: str) -> str:
        return os.path.realpath(local_path(url)) if storages.is_local(url) else url.rstrip("/")

    target = place(destination)
    if any(place(folder_and_name(shard)[0]) == target for shard in shards):
        raise ValueError(f"the destination {destination!r} is the folder of the shards; give another one")


def _mapped(
    function: Callable[[Any], Any], batch_size: int | None, options: Mapping[str, Any], shard: str
) -> Iterator[Sample]:
    with streamload.TarDataset(shard, **options) as samples:
        if batch_size is None:
            for sample in samples:
                yield from _with_keys(function(sample), sample["__key__"])
            return
        following = iter(samples)
        while batch := list(islice(following, batch_size)):
            yield from _with_keys(function(batch), None)


def _with_keys(made: Sample | Iterable[Sample] | None, key: str | None) -> Iterator[Sample]:
    """Samples as they are written; one that names no key has that of the sample that it is made of."""
    samples: Iterable[Any] = () if made is None else (made,) if isinstance(made, Mapping) else made
    for sample in samples:
        if not isinstance(sample, Mapping):
            yield sample  # whoever writes it says what is wrong
            continue
        new = {name: value for name, value in sample.items() if name != "__url__"}
        if key is not None:
            new.setdefault("__key__", key)
        yield new
