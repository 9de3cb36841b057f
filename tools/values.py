"""`streamload stats --pixels` and `--field`: what the values of fields are, in one pass that can be interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from streamload_tools.failures import UsageError
from streamload_tools.moments import Moments
from streamload_tools.output import aligned, say
from streamload_tools.progress import open_progress
from streamload_tools.ray_pool import ON_A_NODE, RayPool

import streamload
from streamload.decode.decoders import is_image
from streamload.errors import LoaderStateError, ShardNotFoundError
from streamload.images.measured import STATISTICS_NAME
from streamload.index.shard_names import WEB, folder_and_name
from streamload.storage.protocol import protocol_of, without_secrets
from streamload.storage.storages import Storages
from streamload.text import counted, listed

__all__ = [
    "SAVED_EVERY_S",
    "FieldValues",
    "Nodes",
    "ResultFiles",
    "as_json",
    "as_lines",
    "chosen_fields",
    "measure_values",
]

_BATCH = 64
"""Partial results are merged in the order of the batches, so how large they are must not depend on the machine."""
_IMAGE_CHANNELS = 3
"""Whatever is stored, images are decoded to red, green and blue."""
SAVED_EVERY_S = 10.0
_MOST_SAVED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class FieldValues:
    """What the values of a field are.

    Attributes:
        samples: how many have the field.
        type: of its values, as NumPy names it; "mixed" if not all are of one.
        moments: of all values; of images by channel.
    """

    samples: int
    type: str
    moments: Moments

    def merged(self, other: Self) -> Self:
        """That of the samples of both."""
        same = self.type if self.type == other.type else "mixed"
        return type(self)(self.samples + other.samples, same, self.moments.merged(other.moments))

    def saved(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {"samples": self.samples, "type": self.type, "moments": self.moments.as_json()}

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> Self:
        """What was saved."""
        return cls(saved["samples"], saved["type"], Moments.from_json(saved["moments"]))


Measured = tuple[int, Mapping[str, FieldValues], int]
"""Of one batch: the samples, what their fields hold, and the bytes that were read for it."""


def chosen_fields(there_are: Sequence[str], named: Sequence[str], *, pixels: bool) -> tuple[str, ...]:
    """The fields to measure.

    Args:
        there_are: all fields of the dataset.
        named: those that the user names.
        pixels: also all that hold images.

    Raises:
        UsageError: there is no such field, or no image.
    """
    for name in named:
        if name not in there_are:
            raise UsageError(f"no sample has a field {name!r}; there are {listed(there_are)}")
    images = [name for name in there_are if is_image(name)] if pixels else []
    if pixels and not images:
        raise UsageError(f"no field holds images; there are {listed(there_are)}: name those with numbers by --field")
    return tuple(dict.fromkeys([*images, *named]))


def measure_values(
    urls: Sequence[str],
    fields: Sequence[str],
    samples: int,
    *,
    files: ResultFiles,
    where: str | None,
    nodes: Nodes | None = None,
    **options: Any,
) -> dict[str, FieldValues]:
    """Read, decode and measure all samples.

    What is found is saved every ten seconds, and where the pass is interrupted; the next call goes on there. The result
    is the same, bit for bit, for any number of workers or nodes, and whether it was interrupted or not.

    Args:
        urls: shards, patterns or folders.
        fields: what to measure; a sample may lack some.
        samples: how many there are.
        files: where what an interrupted pass has found is kept.
        where: a condition that samples have to meet.
        nodes: does it on a cluster.
        **options: of `StreamLoader`.

    Raises:
        StreamloadError: a sample cannot be read, or its values are not numbers; it names the sample.
    """
    options = {"where": where, **options}
    loader = _loader(urls, fields, options)
    with loader, open_progress("measuring", samples, "samples") as progress:
        meant = {"fields": list(fields), "where": where, "batch": _BATCH}
        found, done = files.begin(loader, meant)
        progress.advance(done, 0)
        state = loader.state_dict()
        kept_s = time.monotonic()
        batches = _measured(loader) if nodes is None else nodes.measured(fields, options, done)
        try:
            for count, values, read_bytes in batches:
                _add(found, values)
                done += count
                progress.advance(count, read_bytes)
                if time.monotonic() - kept_s > SAVED_EVERY_S:
                    files.keep(state | {"position": done}, meant, found, done)
                    kept_s = time.monotonic()
        except BaseException:
            if done:
                files.keep(state | {"position": done}, meant, found, done)
            raise
    return found


def _loader(urls: Sequence[str], fields: Sequence[str], options: Mapping[str, Any]) -> streamload.StreamLoader:
    return streamload.StreamLoader(
        list(urls),
        _BATCH,
        fields=tuple(f"{name}?" for name in fields),
        transform={name: partial(_values_of, _IMAGE_CHANNELS if is_image(name) else 1) for name in fields},
        collate_fn=partial(_merged, tuple(fields)),
        **options,
    )


def _measured(loader: streamload.StreamLoader) -> Iterator[Measured]:
    read_bytes = 0
    for count, values in loader:
        before, read_bytes = read_bytes, loader.statistics().payload_bytes
        yield count, values, read_bytes - before


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a cluster, of which each task measures about a shard.

    A task gives what it has found batch by batch, in the batches of the whole pass, so that they are merged as one
    machine merges them.

    Attributes:
        pool: runs the tasks.
        shards: in order, each with the number of its samples.
    """

    pool: RayPool
    shards: Sequence[tuple[str, int]]

    def measured(self, fields: Sequence[str], options: Mapping[str, Any], start: int) -> Iterator[Measured]:
        """What is found in each batch from a position on."""
        options = {**options, **ON_A_NODE}
        calls = (
            partial(_measured_on_a_node, urls, fields, options, skipped, batches)
            for urls, skipped, batches in self.stretches(start)
        )
        for found in self.pool.results(calls):
            yield from found

    def stretches(self, start: int) -> Iterator[tuple[list[str], int, int]]:
        """For each task: the shards that its batches lie in, the samples of the first to skip, and how many batches."""
        ends = np.cumsum([count for _, count in self.shards])
        samples = int(ends[-1])
        size = max(1, samples // len(self.shards) // _BATCH) * _BATCH
        while start < samples:
            end = min(start + size, samples)
            first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, end, "left"))
            urls = [url for url, count in self.shards[first : last + 1] if count]
            before = int(ends[first]) - self.shards[first][1]
            yield urls, start - before, -(-(end - start) // _BATCH)
            start = end


def _measured_on_a_node(
    urls: Sequence[str],
    fields: Sequence[str],
    options: Mapping[str, Any],
    skipped: int,
    batches: int,
    _: Callable[[int, int], None],
) -> list[Measured]:
    with _loader(urls, fields, options) as loader:
        loader.load_state_dict(loader.state_dict() | {"position": skipped})
        return list(islice(_measured(loader), batches))


class ResultFiles:
    """The files of a pass: what it has found, as JSON and as a picture, and while it runs what it has found so far.

    Args:
        output: the JSON file; None is `statistics.json` beside the shards.
        urls: the shards.
        storages: their storages.

    Raises:
        UsageError: nothing can be written beside the shards, or the name does not end in `.json`.
    """

    def __init__(self, output: str | None, urls: Sequence[str], storages: Storages) -> None:
        if output is None:
            folders = sorted({folder_and_name(url)[0] for url in urls})
            if len(folders) > 1 or protocol_of(folders[0]) in WEB:
                why = "lie in several folders" if len(folders) > 1 else "lie on a web server"
                raise UsageError(f"the shards {why}; say by --output FILE.json where to save what is found")
            output = f"{folders[0].rstrip('/')}/{STATISTICS_NAME}"
        if not output.endswith(".json"):
            raise UsageError(f"--output {without_secrets(output)!r} must end in .json")
        folder, slash, name = output.rpartition("/")
        self.url = output
        self.picture_url = f"{output.removesuffix('.json')}.png"
        self._unfinished_url = f"{folder}{slash}.{name}.unfinished"
        self._storage = storages.for_url(output)

    def begin(self, loader: streamload.StreamLoader, meant: Mapping[str, Any]) -> tuple[dict[str, FieldValues], int]:
        """Have the loader go on where a pass was interrupted; what that had found, and in how many samples.

        Args:
            loader: at the start of its first epoch.
            meant: what the pass is to find; what one with other wishes has found is no use.
        """
        with suppress(ShardNotFoundError, LoaderStateError, ValueError, KeyError):
            kept = json.loads(self._storage.read_bytes(self._unfinished_url, most_bytes=_MOST_SAVED_BYTES))
            if kept["meant"] == meant:
                found = {name: FieldValues.load(values) for name, values in kept["values"].items()}
                loader.load_state_dict(kept["loader"])
                say(f"going on behind {counted(kept['samples'], 'sample')}, where a run was interrupted")
                return found, kept["samples"]
        return {}, 0

    def keep(
        self,
        state: Mapping[str, Any],
        meant: Mapping[str, Any],
        found: Mapping[str, FieldValues],
        samples: int,
    ) -> None:
        """Save what has been found so far, and the loader's state behind that."""
        values = {name: value.saved() for name, value in found.items()}
        kept = {"meant": meant, "samples": samples, "loader": dict(state), "values": values}
        self._storage.write(self._unfinished_url, json.dumps(kept).encode())

    def publish(self, document: Mapping[str, Any], picture: bytes) -> None:
        """Write the results."""
        self._storage.write(self.picture_url, picture)
        self._storage.write(self.url, json.dumps(document, indent=2).encode())
        self._storage.delete(self._unfinished_url)


def _values_of(channels: int, value: Any) -> FieldValues:
    """What a worker finds in one value."""
    array = np.asarray(value)
    return FieldValues(1, str(array.dtype), Moments.of(array.reshape(-1, channels)))


def _merged(fields: Sequence[str], samples: list[tuple[Any, ...]]) -> tuple[int, dict[str, FieldValues]]:
    """What a worker finds in a batch."""
    found: dict[str, FieldValues] = {}
    for values in samples:
        _add(found, {name: value for name, value in zip(fields, values, strict=True) if value is not None})
    return len(samples), found


def _add(found: dict[str, FieldValues], values: Mapping[str, FieldValues]) -> None:
    for name, value in values.items():
        found[name] = found[name].merged(value) if name in found else value


def as_json(values: Mapping[str, FieldValues]) -> dict[str, Any]:
    """All of it as a JSON object."""
    return {
        name: {
            "samples": field.samples,
            "type": field.type,
            "channels": [_channel_json(field.moments, channel) for channel in range(field.moments.channels)],
        }
        for name, field in values.items()
    }


def _channel_json(moments: Moments, channel: int) -> dict[str, Any]:
    is_empty = not moments.count[channel]
    return {
        "count": int(moments.count[channel]),
        "not_finite": int(moments.not_finite[channel]),
        "mean": None if is_empty else float(moments.mean[channel]),
        "std": None if is_empty else float(moments.std[channel]),
        "min": None if is_empty else float(moments.least[channel]),
        "max": None if is_empty else float(moments.most[channel]),
        "histogram": None if is_empty else _histogram_json(moments, channel),
    }


def _histogram_json(moments: Moments, channel: int) -> dict[str, Any]:
    width = float(np.ldexp(1.0, int(moments.exponent[channel])))
    bins: NDArray[np.int64] = np.trim_zeros(moments.bins[channel], "b")
    return {"first": float(moments.first[channel]) * width, "width": width, "counts": bins.tolist()}


def as_lines(values: Mapping[str, FieldValues]) -> Iterator[str]:
    """The figures as text."""
    rows: list[tuple[str, ...]] = [("VALUES OF", "SAMPLES", "NUMBERS", "MEAN", "STD", "MIN", "MAX")]
    for name, field in values.items():
        moments = field.moments
        for channel in range(moments.channels):
            title = name if moments.channels == 1 else f"{name} [{channel}]"
            figures: tuple[Any, ...] = ("", "", "", "")
            if moments.count[channel]:
                columns = (moments.mean, moments.std, moments.least, moments.most)
                figures = tuple(f"{column[channel]:.6g}" for column in columns)
            rows.append((title, f"{field.samples:,}", f"{moments.count[channel]:,}", *figures))
    yield from aligned(rows, numbers=len(rows[0]) - 1)
    for name, field in values.items():
        if not_finite := int(field.moments.not_finite.sum()):
            yield f"{name}: {counted(not_finite, 'value')} not counted, which are NaN or infinite"
