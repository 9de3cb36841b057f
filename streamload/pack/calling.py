"""Pack the results of a user's function, called for inputs or samples. Worker processes import little else."""

from __future__ import annotations

import os
import pickle
import reprlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from mmap import PROT_READ, mmap
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from streamload.decode.decoders import decoder_for
from streamload.errors import StorageError, StreamloadError, without_secrets
from streamload.pack.run import Append, Fault
from streamload.storage.local_files import open_regular
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of, decompressed
from streamload.tar.scan import scan_shard
from streamload.text import counted
from streamload.write.shard_writer import checked_key, label_of, sample_members

_MOST_BYTES = 1 << 40
_SHOWN = reprlib.Repr()
_SHOWN.maxother = 200

Decode = bool | Mapping[str, Callable[[bytes], Any]]
Sample = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PackCalls:
    """Pack the samples that a user's function makes of inputs. All attributes are pickled."""

    function: bytes
    inputs: tuple[bytes, ...]
    first: int

    def __call__(self, append: Append) -> Sequence[Fault]:
        """Append the samples; a StreamloadError names the input if the function fails or a sample is invalid."""
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
        raise TypeError(f"it gave a value of type {type(result).__name__}; give a dict, yield dicts, or give None")
    return result


def _failed_input(number: int, value: object, exc: Exception) -> StreamloadError:
    notes = "".join(f" ({note})" for note in getattr(exc, "__notes__", ()))
    ours = os.path.dirname(os.path.dirname(__file__))
    frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if not frame.filename.startswith(ours)]
    where = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return StreamloadError(
        f"input {number} ({_SHOWN.repr(value)}) cannot be packed: {type(exc).__name__}: {exc}{notes}{where}; correct "
        "the function or the input, or give None for inputs to leave out"
    )


class SourceShard(NamedTuple):
    """A listed shard, and the samples to read, ascending, int64[n]; None for all."""

    url: str
    bytes: int
    version: tuple[int | None, str | None]
    samples: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"the shard {without_secrets(self.url)!r}"


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
        content = storages.for_url(url).read_bytes(url, most_bytes=_MOST_BYTES)
        return b"".join(decompressed(url, content))
    with open(open_regular(url)[0], "rb") as file:
        return mmap(file.fileno(), 0, prot=PROT_READ) if os.fstat(file.fileno()).st_size else b""


def mapped_samples(
    function: Callable[[Any], Any],
    shard: SourceShard,
    *,
    sidecar: bool,
    batch_size: int | None,
    decode: Decode,
    storages: Storages,
) -> Iterator[Any]:
    """Yield a function's results for a shard's samples; exceptions get a note that names the sample."""
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
    """Yield a function's results; a new sample without a key gets that of its source."""
    one_each = len(results) == len(batch)
    for number, sample in enumerate(results):
        if isinstance(sample, Mapping) and "__key__" not in sample and (one_each or len(batch) == 1):
            yield {**sample, "__key__": batch[number if one_each else 0]["__key__"]}
        elif sample is not None:
            yield sample  # if it is not a sample, refused later


def _new_fields(batch: Sequence[Sample], results: Sequence[Any]) -> Iterator[Sample]:
    if len(results) != len(batch):
        samples = counted(len(results), "sample")
        raise ValueError(f"it gave {samples} for {len(batch)}; for a sidecar it gives one for each, or None")
    for before, sample in zip(batch, results, strict=True):
        if sample is None:
            continue
        key = before["__key__"]
        if not isinstance(sample, Mapping) or sample.get("__key__", key) != key:
            raise ValueError(f"it gave {_SHOWN.repr(sample)} for {key!r}; a sidecar takes dicts with the same keys")
        new = {name: value for name, value in sample.items() if not name.startswith("__")}
        for name in before.keys() & new.keys():
            value = new.pop(name)
            if value is not before[name] and not (isinstance(value, bytes) and value == before[name]):
                raise ValueError(f"the samples have a field {name!r} already; give the new one a name of its own")
        yield {"__key__": key, **new}
