"""What samples take in memory when they are decoded: measured on some of them, spread over the dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from streamload_tools.output import shown_bytes

import streamload
from streamload.decode.decoders import decoder_for
from streamload.fetch.budget import available_bytes
from streamload.text import counted

__all__ = ["DecodedMemory", "as_json", "as_lines", "decoded_memory"]

_TRIED = 64
_NAMES = ("__key__", "__url__")


@dataclass(frozen=True, slots=True)
class DecodedMemory:
    """What decoded samples take, in bytes.

    Attributes:
        tried: how many samples were decoded.
        fields: the mean of each field over all samples that were decoded, also those without the field.
        refused: what could not be decoded, which counts as it is stored: the error by field.
        batch_size: samples of a batch.
        window: samples of the shuffle window.
        samples: of an epoch.
        stored_bytes: of all samples, as they are stored.
        free_bytes: of this machine's memory.
    """

    tried: int
    fields: dict[str, float]
    refused: dict[str, str]
    batch_size: int
    window: int
    samples: int
    stored_bytes: int
    free_bytes: int

    @property
    def sample_bytes(self) -> float:
        """The mean of a sample."""
        return sum(self.fields.values())


def decoded_memory(
    urls: Sequence[str],
    index: str | None,
    storage_options: Mapping[str, Any] | None,
    *,
    where: str | None = None,
    batch_size: int,
    window: int,
    stored_bytes: int,
) -> DecodedMemory:
    """Read and decode up to 64 samples by the built-in decoders.

    Args:
        urls: shards, patterns or folders.
        index: the folder of the index, if it is not beside the shards.
        storage_options: credentials and the like.
        where: a condition that samples have to meet.
        batch_size: samples of a batch.
        window: samples of the shuffle window.
        stored_bytes: of all samples.

    Raises:
        ValueError: the shards are compressed as a whole, so that samples cannot be chosen.
        StreamloadError: a shard or its index cannot be read.
    """
    sizes: dict[str, float] = {}
    refused: dict[str, str] = {}
    with streamload.TarDataset(
        urls, decode=False, index=index, storage_options=storage_options, where=where
    ) as dataset:
        samples = len(dataset)
        numbers = sorted({int(number) for number in np.linspace(0, samples - 1, min(_TRIED, samples))})
        for number in numbers:
            for field, data in dataset[number].items():
                if field in _NAMES:
                    continue
                try:
                    size = _size(decoder_for(field)(memoryview(data)))
                except (ValueError, ImportError) as error:
                    refused.setdefault(field, f"{type(error).__name__}: {error}")
                    size = len(data)
                sizes[field] = sizes.get(field, 0.0) + size
    return DecodedMemory(
        tried=len(numbers),
        fields={field: size / len(numbers) for field, size in sizes.items()},
        refused=refused,
        batch_size=batch_size,
        window=min(window, samples),
        samples=samples,
        stored_bytes=stored_bytes,
        free_bytes=available_bytes(),
    )


def _size(value: Any) -> int:
    """What a batch's memory holds of a value: the elements of arrays, 8 bytes of a number, the bytes of the rest."""
    if isinstance(value, np.ndarray) or hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 8


def as_json(memory: DecodedMemory) -> dict[str, Any]:
    """All figures as a JSON object."""
    return {
        "samples_tried": memory.tried,
        "fields": memory.fields,
        "not_decoded": memory.refused,
        "sample_bytes": memory.sample_bytes,
        "batch_size": memory.batch_size,
        "batch_bytes": memory.batch_size * memory.sample_bytes,
        "window_samples": memory.window,
        "window_bytes": memory.window * memory.sample_bytes,
        "window_stored_bytes": memory.window * memory.stored_bytes / max(1, memory.samples),
        "epoch_bytes": memory.samples * memory.sample_bytes,
        "free_bytes": memory.free_bytes,
    }


def as_lines(memory: DecodedMemory) -> Iterator[str]:
    """The figures as text."""
    found = as_json(memory)
    fields = ", ".join(f"{name} {shown_bytes(size)}" for name, size in memory.fields.items())
    yield f"decoded, a sample takes {shown_bytes(memory.sample_bytes)} ({fields}), by {counted(memory.tried, 'sample')}"
    for field, error in memory.refused.items():
        yield f"{field} counts as stored, for it needs a decoder of yours: {error}"
    batch, window, stored = (
        shown_bytes(found[name]) for name in ("batch_bytes", "window_bytes", "window_stored_bytes")
    )
    yield f"a batch of {memory.batch_size:,} takes {batch}; images as float32 take four times that"
    yield (
        f"the shuffle window of {counted(memory.window, 'sample')} holds {stored} of remote shards as they are stored; "
        f"decoded it would be {window}"
    )
    fits = "fits into" if found["epoch_bytes"] < memory.free_bytes else "does not fit into"
    yield (
        f"an epoch takes {shown_bytes(memory.stored_bytes)} stored, {shown_bytes(found['epoch_bytes'])} decoded, which "
        f"{fits} the {shown_bytes(memory.free_bytes)} that are free here"
    )
