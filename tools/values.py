"""`streamload stats --pixels` and `--field`: what the values of fields are, in one pass that can be interrupted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from streamload_tools.failures import UsageError
from streamload_tools.moments import Moments
from streamload_tools.output import aligned, say
from streamload_tools.progress import open_progress

import streamload
from streamload.decode.decoders import is_image
from streamload.errors import LoaderStateError, ShardNotFoundError
from streamload.images.measured import STATISTICS_NAME
from streamload.index.shard_names import WEB, folder_and_name
from streamload.storage.protocol import protocol_of, without_secrets
from streamload.storage.storages import Storages
from streamload.text import counted, listed

__all__ = ["SAVED_EVERY_S", "FieldValues", "ResultFiles", "as_json", "as_lines", "chosen_fields", "measure_values"]

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
    **options: Any,
) -> dict[str, FieldValues]:
    """Read, decode and measure all samples.

    What is found is saved every ten seconds, and where the pass is interrupted; the next call goes on there. The result
    is the same, bit for bit, for any number of workers, and whether it was interrupted or not.

    Args:
        urls: shards, patterns or folders.
        fields: what to measure; a sample may lack some.
        samples: how many there are.
        files: where what an interrupted pass has found is kept.
        where: a condition that samples have to meet.
        **options: of `StreamLoader`.

    Raises:
        StreamloadError: a sample cannot be read, or its values are not numbers; it names the sample.
    """
    loader = streamload.StreamLoader(
        list(urls),
        _BATCH,
        fields=tuple(f"{name}?" for name in fields),
        transform={name: partial(_values_of, _IMAGE_CHANNELS if is_image(name) else 1) for name in fields},
        collate_fn=partial(_merged, tuple(fields)),
        where=where,
        **options,
    )
    with loader, open_progress("measuring", samples, "samples") as progress:
        meant = {"fields": list(fields), "where": where, "batch": _BATCH}
        found, done = files.begin(loader, meant)
        progress.advance(done, 0)
        kept_s, read_bytes = time.monotonic(), 0
        try:
            for count, values in loader:
                _add(found, values)
                done += count
                progress.advance(count, loader.statistics().payload_bytes - read_bytes)
                read_bytes = loader.statistics().payload_bytes
                if time.monotonic() - kept_s > SAVED_EVERY_S:
                    files.keep(loader, meant, found, done)
                    kept_s = time.monotonic()
        except BaseException:
            if done:
                files.keep(loader, meant, found, done)
            raise
    return found


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
        loader: streamload.StreamLoader,
        meant: Mapping[str, Any],
        found: Mapping[str, FieldValues],
        samples: int,
    ) -> None:
        """Save what has been found so far."""
        values = {name: value.saved() for name, value in found.items()}
        kept = {"meant": meant, "samples": samples, "loader": loader.state_dict(), "values": values}
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
