"""The samples of one source shard, local or remote, compressed or not, read from its first to its last."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.decode.decoders import decoder_for
from streamload.errors import without_secrets
from streamload.storage.local_storage import storage_for
from streamload.storage.storages import Storages
from streamload.tar.decompression import Decompressor, compression_of
from streamload.tar.scan import scan_file, scan_shard
from streamload.tar.table import ShardTable

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
