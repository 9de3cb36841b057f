"""Write a dataset with a user's function: `pack` calls it for inputs, `map_shards` for another dataset's samples."""

from __future__ import annotations

import inspect
import os
import pickle
import reprlib
import tokenize
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from itertools import islice
from mmap import PROT_READ, mmap
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from streamload.arguments import parse_bytes
from streamload.decode.decoders import decoder_for
from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.index.dataset_index import is_plain_name
from streamload.index.listing import Listing
from streamload.pack.run import (
    SHARDS,
    Append,
    Fault,
    Pool,
    Record,
    Span,
    Target,
    Task,
    UsageError,
    digest_of,
    estimated_spans,
    numbered,
    pack_into,
    pickled_by_value,
    shard_spans,
)
from streamload.sampling.arguments import Portion
from streamload.sampling.expression import Selection, Where
from streamload.storage.local_files import open_regular
from streamload.storage.storages import Storages, Urls
from streamload.tar.decompression import compression_of, decompressed, without_compression
from streamload.tar.scan import scan_shard
from streamload.text import counted
from streamload.trainer.feeder_link import FeederClient, named_places
from streamload.write.shard_writer import check_counts, checked_key, label_of, sample_members

Decode = bool | Mapping[str, Callable[[bytes], Any]]
Sample = dict[str, Any]

_MOST_SOURCE_BYTES = 1 << 40  # no limit in practice
_SHARD_BYTES = 256_000_000
_SHOWN = reprlib.Repr()
_SHOWN.maxother = 200


def pack(
    function: Callable[[Any], Any],
    inputs: Iterable[Any],
    destination: str | os.PathLike[str],
    *,
    workers: int | None = None,
    max_bytes: int | str = 256_000_000,
    max_count: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    ray: str | None = None,
) -> None:
    """Call a function for each input, and pack the returned samples, in order, into shards with an index.

    Readers refuse the destination until it is complete. Equal samples give equal bytes for any number of workers. After
    an interruption, the same call with `resume=True` gives the same bytes; it keeps finished shards if their inputs and
    the function's own source are unchanged. The function is called twice for some inputs, to estimate how many fill a
    shard.

    Args:
        function: takes an input; returns a sample as for `ShardWriter.write`, yields samples, or returns None. It is
            pickled for the workers, even from `__main__`.
        inputs: picklable values: paths, rows of a table, numbers. All are held in memory.
        destination: a folder or a url.
        workers: number of processes; None is one per core, or four tasks per core with `ray`.
        max_bytes: maximum size of a shard; a number of bytes, or "256MB".
        max_count: maximum number of samples in a shard.
        resume: continue an interrupted run.
        overwrite: first remove existing shards, or an interrupted run.
        storage_options: as for `StreamLoader`.
        filesystem: an fsspec filesystem to write with, as for `StreamLoader`.
        ray: a Ray cluster's address, or "auto" (RAY_ADDRESS or this machine's). Input files and a local destination
            must be on a file system that all nodes share. `workers` is the number of tasks at once.

    Raises:
        StreamloadError: the function fails or returns an invalid sample (the message names the input), or a process
            died.
        ClusterError: the cluster does not exist, or a node differs from this machine.
        ValueError: there is no sample, samples of two shards share a key, or the destination cannot be used.
        OSError: a file cannot be read or written.
    """
    check_counts(workers=workers, max_count=max_count)
    target = Target(
        os.fspath(destination).rstrip("/") or "/",
        Storages(storage_options, filesystem),
        max_bytes=parse_bytes("max_bytes", max_bytes),
        max_count=max_count,
        resume=resume,
        overwrite=overwrite,
        workers=workers,
        ray=ray,
    )
    _pack_calls(function, list(inputs), target, code=_code_of(function))


def _pack_calls(
    function: Callable[[Any], Any],
    inputs: Sequence[Any],
    target: Target,
    *,
    code: object,
    spans: Sequence[tuple[Span, str]] | None = None,
    unique: bool = True,
    may_be_empty: bool = False,
) -> None:
    """Pack the samples of each input. If keys must be `unique`, raise ValueError for a key that two shards have.

    `code` identifies the function and its options; `spans` names the new shard of each span of inputs, or is None to
    estimate the spans.
    """
    pickled = [pickle.dumps(value) for value in inputs]
    function_bytes = pickled_by_value(function) if target.ray is not None else cloudpickle.dumps(function)
    code = digest_of(code, version("streamload"), target.max_bytes, target.max_count)

    def plan(pool: Pool) -> list[Task]:
        named_spans = spans
        if named_spans is None:
            works = [PackCalls(function_bytes, (value,), number) for number, value in enumerate(pickled)]
            named_spans = numbered(estimated_spans(pool, works, target.max_bytes, target.max_count))
        tasks = []
        for (first, end), name in named_spans:
            digest = digest_of(name, code, pickled[first:end], list(map(_file_of, inputs[first:end])))
            work = PackCalls(function_bytes, tuple(pickled[first:end]), first)
            tasks.append(Task("", name, digest, end - first, work, may_be_empty))
        return tasks

    def check(records: Sequence[Record]) -> None:
        tables = [shard.table for record in records for shard in record.shards]
        if not tables:
            raise ValueError(f"the function returned no sample for {counted(len(pickled), unit[:-1])}")
        seen: set[str] = set()
        for table in tables if unique else ():
            for key in table.keys():  # noqa: SIM118
                if key in seen:
                    raise ValueError(f"two samples have the key {key!r}; give each its own")
                seen.add(key)

    label, unit = ("packing", "inputs") if spans is None else ("mapping", "shards")
    pack_into(target, plan, check, label=label, unit=unit)


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
    """Call a function for each sample of a dataset, and write the results as a dataset in the same order.

    Each shard keeps its name (`a.tar` for `a.tar.gz`); all are numbered if names repeat or lack `.tar`. A shard without
    results is written only with `sidecar`. With `max_bytes` or `max_count`, consecutive shards are merged as far as
    they fit, larger ones are split, and all are numbered. Determinism and resuming are as for `pack`.

    Args:
        function: takes a sample, a dict of its fields' bytes (with `decode`, values), "__key__" and "__url__". Returns
            the new sample, with the old key unless it has another; yields several, each with a key; or returns None to
            drop the sample. With `batch_size` it takes a list of samples, and returns or yields new ones; if there are
            equally many, new samples without a key keep the old keys.
        urls: the shards, as for `StreamLoader`.
        destination: a folder or a url, other than that of the shards.
        sidecar: write only new fields, for `StreamLoader(..., join=destination)`, in shards of the same names; the
            function returns one sample or None for each sample.
        batch_size: maximum number of samples for each call of the function, all of one shard.
        decode: True, False, or a mapping from extensions to functions of bytes; values other than bytes are encoded by
            their extension for writing.
        where: the samples to read; as for `StreamLoader`.
        workers: as for `pack`.
        max_bytes: maximum size of a new shard; by default 256 MB if `max_count` is given.
        max_count: maximum number of samples in a new shard.
        resume: continue an interrupted run.
        overwrite: first remove existing shards, or an interrupted run.
        storage_options: for the shards and the destination.
        filesystem: an fsspec filesystem to read and write with.
        ray: as for `pack`, with a task for each shard.

    Raises:
        ValueError, StreamloadError, OSError: as for `pack`, and as for `StreamLoader` for the shards.
    """
    check_counts(batch_size=batch_size, workers=workers, max_count=max_count)
    resizes = max_bytes is not None or max_count is not None
    if sidecar and resizes:
        raise UsageError("a sidecar mirrors the dataset's shards; leave out max_bytes and max_count")
    storages = Storages(storage_options, filesystem)
    dest = os.fspath(destination).rstrip("/") or "/"
    with closing(FeederClient(storages, named_places([Portion(urls, 1.0)]))) as client:
        listing = client.list_shards(urls, None)
        _refuse_source(dest, listing, storages)
        chosen = None if where is None else client.select(Selection(where), listing)
        counts = listing.counts if chosen is None else client.counts(listing)
    shards = [SourceShard(shard.url, shard.bytes, (shard.mtime_ns, shard.etag)) for shard in listing.shards]
    if chosen is not None and counts is not None:
        in_each = list(map(np.flatnonzero, np.split(chosen, np.cumsum(counts)[:-1])))
        shards = [shard._replace(samples=samples) for shard, samples in zip(shards, in_each, strict=True)]
        counts = list(map(len, in_each))
    if any(map(storages.is_process_local, {shard.folder for shard in listing.shards})):
        workers = 1
    target = Target(dest, storages, resume=resume, overwrite=overwrite, workers=workers, ray=ray)
    if resizes:
        most_bytes = parse_bytes("max_bytes", _SHARD_BYTES if max_bytes is None else max_bytes)
        target = replace(target, max_bytes=most_bytes, max_count=max_count)
        sizes = zip([shard.bytes for shard in shards], counts or [0] * len(shards), strict=True)
        spans = numbered(shard_spans(sizes, most_bytes, max_count))
    else:
        spans = numbered([(number, number + 1) for number in range(len(shards))])
        names = [without_compression(shard.name) for shard in listing.shards]
        if len(set(names)) == len(names) and all(is_plain_name(name) and SHARDS.matches(name) for name in names):
            spans = [(span, name) for (span, _), name in zip(spans, names, strict=True)]
    decoders: Any = decode
    if isinstance(decode, Mapping):
        decoders = sorted((field, _code_of(each)) for field, each in decode.items())
    _pack_calls(
        partial(mapped_samples, function, sidecar=sidecar, batch_size=batch_size, decode=decode, storages=storages),
        shards,
        target,
        code=[_code_of(function), sidecar, batch_size, decoders],
        spans=spans,
        unique=resizes,
        may_be_empty=sidecar,
    )


def _refuse_source(destination: str, listing: Listing, storages: Storages) -> None:
    urls = [destination, *{shard.folder for shard in listing.shards}]
    # `realpath` shortens urls too, all in the same way.
    target, *sources = [os.path.realpath(storages.for_url(url).absolute(url)) for url in urls]
    if target in sources:
        raise UsageError(f"the destination {destination!r} is the folder of the shards; give another one")


def _file_of(value: object) -> tuple[int, int] | None:
    """If an input is the path of a file, return the file's size and modification time."""
    if isinstance(value, str | os.PathLike) and os.path.isfile(value):
        status = os.stat(value)
        return status.st_size, status.st_mtime_ns
    return None


def _code_of(function: Callable[..., Any]) -> str:
    """Return a digest of a function's own source, which tells a resumed run whether the function changed."""
    if isinstance(function, partial):
        return digest_of(_code_of(function.func), function.args, sorted(function.keywords.items()))
    plain: Any = function if inspect.isroutine(function) else type(function)
    try:
        source = inspect.getsource(plain)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the last two if the file was edited since
        source = ""
    return digest_of(plain.__qualname__, source)


@dataclass(frozen=True, slots=True)
class PackCalls:
    """Call a user's function for the inputs of one shard; the function and each input are pickled."""

    function: bytes
    inputs: tuple[bytes, ...]
    first: int

    def __call__(self, append: Append) -> Sequence[Fault]:
        """Append the samples. Raises StreamloadError, naming the input, if the function fails or a sample is bad."""
        function = cloudpickle.loads(self.function)
        for number, pickled in enumerate(self.inputs, start=self.first):
            value = pickle.loads(pickled)
            try:
                for sample in samples_in(function(value)):
                    key = checked_key(sample)
                    members = sample_members(key, sample)
                    append(key, members, label_of(members))
            except StorageError:
                raise
            except Exception as exc:  # whatever the user's function raises
                raise _failed_input(number, value, exc) from exc
        return ()


def samples_in(result: Any) -> Iterable[Mapping[str, object]]:
    """Return the samples in a function's result: None, one sample, or several. Raises TypeError."""
    if result is None:
        return ()
    if isinstance(result, Mapping):
        return (result,)
    if not isinstance(result, Iterable) or isinstance(result, str | bytes):
        raise TypeError(f"the function returned {type(result).__name__}; return or yield dicts, or return None")
    return result


def _failed_input(number: int, value: object, exc: Exception) -> StreamloadError:
    notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", ()))
    package = os.path.dirname(os.path.dirname(__file__))
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if not frame.filename.startswith(package)]
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return StreamloadError(
        f"input {number} ({_SHOWN.repr(value)}) cannot be packed: {type(exc).__name__}: {exc}{notes}{where}; correct "
        "the function or the input, or return None to leave the input out"
    )


class SourceShard(NamedTuple):
    """A listed shard, and the numbers of the samples to read, ascending int64[n], or None for all."""

    url: str
    bytes: int
    version: tuple[int | None, str | None]
    samples: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"the shard {without_secrets(self.url)!r}"


def mapped_samples(
    function: Callable[[Any], Any],
    shard: SourceShard,
    *,
    sidecar: bool,
    batch_size: int | None,
    decode: Decode,
    storages: Storages,
) -> Iterator[Any]:
    """Yield a function's results for a shard's samples. Exceptions get a note that names the sample."""
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


def _samples_of(shard: SourceShard, decode: Decode, storages: Storages) -> Iterator[Sample]:
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
    if storages.costs_requests(url) or compression_of(url) is not None:
        content = storages.for_url(url).read_bytes(url, most_bytes=_MOST_SOURCE_BYTES)
        return b"".join(decompressed(url, content))
    with open(open_regular(url)[0], "rb") as file:
        return mmap(file.fileno(), 0, prot=PROT_READ) if os.fstat(file.fileno()).st_size else b""


def _with_keys(batch: Sequence[Sample], results: Sequence[Any]) -> Iterator[Any]:
    """Yield a function's results; a new sample without a key gets the key of its source."""
    one_each = len(results) == len(batch)
    for number, sample in enumerate(results):
        if isinstance(sample, Mapping) and "__key__" not in sample and (one_each or len(batch) == 1):
            yield {**sample, "__key__": batch[number if one_each else 0]["__key__"]}
        elif sample is not None:
            yield sample  # refused later if it is not a sample


def _new_fields(batch: Sequence[Sample], results: Sequence[Any]) -> Iterator[Sample]:
    if len(results) != len(batch):
        samples = counted(len(results), "sample")
        raise ValueError(f"the function returned {samples} for {len(batch)}; a sidecar needs one, or None, for each")
    for before, sample in zip(batch, results, strict=True):
        if sample is None:
            continue
        key = before["__key__"]
        if not isinstance(sample, Mapping) or sample.get("__key__", key) != key:
            raise ValueError(f"{_SHOWN.repr(sample)} was returned for {key!r}; return dicts that keep its __key__")
        new = {name: value for name, value in sample.items() if not name.startswith("__")}
        for name in before.keys() & new.keys():
            value = new.pop(name)
            if value is not before[name] and not (isinstance(value, bytes) and value == before[name]):
                raise ValueError(f"the samples already have a field {name!r}; give the new one another name")
        yield {"__key__": key, **new}
