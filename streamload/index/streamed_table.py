"""Read a whole shard from any storage, compressed or not, and return its table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from streamload.errors import DatasetIndexError, ShardFormatError, StorageError, StreamloadError
from streamload.storage.download import Pin, download
from streamload.storage.local_files import LocalStorage, open_regular
from streamload.storage.protocol import Storage
from streamload.tar.decompression import Decompressor, compression_of
from streamload.tar.scan import Scanner, ShardTable, scan_file

_TO_THE_END = 1 << 62


class ReadShard(NamedTuple):
    """A shard that was read to its end.

    Attributes:
        bytes: its size.
        etag: its version, if known.
        table: its table.
    """

    bytes: int
    etag: str | None
    table: ShardTable


def scan_local(storage: Storage, url: str, *, every_byte: bool = False, labels: bool = False) -> ReadShard | None:
    """Scan a local uncompressed shard on this thread, with the options of `read_shard`; None for any other shard.

    Only headers and labels are read, unless `every_byte` is set.

    Raises:
        StorageError: the shard cannot be read.
        ShardFormatError: the shard is damaged.
    """
    if not isinstance(storage, LocalStorage) or compression_of(url) is not None:
        return None
    try:
        descriptor, status = open_regular(url)
        with open(descriptor, "rb", buffering=0) as file:
            labels = labels or every_byte
            table = scan_file(file.fileno(), status.st_size, url, crc32=every_byte, labels=labels)
    except OSError as exc:
        raise StorageError(f"the shard cannot be read ({exc.strerror}); check the disk", url=url) from exc
    return ReadShard(status.st_size, None, table)


async def read_shard(
    storage: Storage,
    url: str,
    *,
    every_byte: bool = False,
    labels: bool = False,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> ReadShard:
    """Read a shard strictly, holding a few megabytes of it, or the largest sample of a remote or compressed one.

    Args:
        storage: of the shard.
        url: of the shard.
        every_byte: compute the crc32 of each member, and read the labels.
        labels: read the labels.
        on_bytes: called with the number of bytes on arrival; an exception stops the reading.

    Raises:
        StorageError: the shard cannot be read.
        ShardFormatError: the shard is damaged.
    """
    compression = compression_of(url)
    local = await asyncio.to_thread(scan_local, storage, url, every_byte=every_byte, labels=labels)
    if local is not None:
        return local
    pin = Pin()
    decompressor = None if compression is None else Decompressor(compression, url)
    scanner = Scanner(url, every_byte=every_byte or labels)

    def receive(_: int, piece: bytes) -> None:
        on_bytes(len(piece))
        for decompressed in (piece,) if decompressor is None else decompressor.feed(piece):
            scanner.feed(decompressed)

    await download(storage, url, 0, _TO_THE_END, receive, pin=pin)
    if decompressor is not None and pin.total_bytes != 0:
        decompressor.finish()
    return ReadShard(pin.total_bytes or 0, pin.etag, scanner.finish())


def differences(url: str, table: ShardTable, known: ShardTable) -> Iterator[StreamloadError]:
    """Yield the differences between a shard's own table and its index's."""
    rebuild = "restore the shard, or rebuild the index with `streamload index` if the shard is right"
    columns = ("member_offset", "member_size", "member_field", "sample_start", "key_bytes", "key_start")
    same = (np.array_equal(getattr(table, name), getattr(known, name)) for name in columns)
    if table.fields != known.fields or not all(same):
        yield DatasetIndexError(f"the index lists other samples than the shard contains; {rebuild}", url=url)
        return
    if known.member_crc32 is not None and table.member_crc32 is not None:
        for member in np.flatnonzero(table.member_crc32 != known.member_crc32).tolist():
            sample = int(np.searchsorted(table.sample_start, member, side="right")) - 1
            field = table.fields[int(table.member_field[member])]
            yield ShardFormatError(
                f"the bytes of field {field!r} differ from the indexed ones (crc32); {rebuild}",
                url=url,
                key=table.key(sample),
                offset=int(table.member_offset[member]),
            )
    if known.labels is not None and not (table.labels is not None and np.array_equal(table.labels, known.labels)):
        yield DatasetIndexError(f"the index has other labels than the shard; {rebuild}", url=url)
