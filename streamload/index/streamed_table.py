"""The table of a whole shard, read from its start to its end, wherever it lies and however it is compressed."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardFormatError
from streamload.memory.sparse import SparseMemory
from streamload.storage.download import Pin, download
from streamload.storage.local_storage import LocalStorage
from streamload.storage.protocol import Storage
from streamload.tar.decompression import Decompressor, compression_of
from streamload.tar.header_chain import RECORD_BYTES
from streamload.tar.scan import GrowingTable, crc32_of, labels_of, scan_file, scan_prefix
from streamload.tar.table import ShardTable

_STEP_BYTES = 8 << 20
_TO_THE_END = 1 << 62


class ReadShard(NamedTuple):
    """A shard that was read to its end.

    Attributes:
        bytes: its size, compressed if it is.
        mtime_ns: its time of modification; None if the storage has a version or nothing.
        etag: its version, if the storage has one.
        table: its samples.
    """

    bytes: int
    mtime_ns: int | None
    etag: str | None
    table: ShardTable


async def read_table(storage: Storage, url: str) -> ShardTable:
    """Return the table of a shard: reads the headers of a local uncompressed one, and all bytes of any other.

    Raises:
        StorageError: it cannot be read.
        ShardFormatError: it is damaged.
    """
    if not isinstance(storage, LocalStorage) or compression_of(url) is not None:
        return (await stream_shard(storage, url, every_byte=False)).table

    def scan() -> ShardTable:
        with open(storage.open(url), "rb", buffering=0) as file:
            return scan_file(file.fileno(), os.fstat(file.fileno()).st_size, url)

    return await asyncio.to_thread(scan)


async def stream_shard(
    storage: Storage,
    url: str,
    *,
    every_byte: bool,
    record_bytes: int = RECORD_BYTES,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> ReadShard:
    """Read a shard as one stream; no more than some megabytes of it, or its largest sample, are held at once.

    Args:
        storage: where it lies.
        url: the shard.
        every_byte: compute the crc32 of each member and read the labels.
        record_bytes: as for `scan_shard`.
        on_bytes: called with the number of bytes as they arrive; what it raises ends the reading.

    Raises:
        StorageError: it cannot be read.
        ShardFormatError: it is damaged.
    """
    pin = Pin()
    compression = compression_of(url)
    decompressor = None if compression is None else Decompressor(compression, url)
    table = _StreamedTable(url, every_byte=every_byte, record_bytes=record_bytes)

    def take(_: int, piece: bytes) -> None:
        on_bytes(len(piece))
        for decompressed in (piece,) if decompressor is None else decompressor.feed(piece):
            table.add(decompressed)

    try:
        await download(storage, url, 0, _TO_THE_END, take, pin=pin)
        if decompressor is not None and pin.total_bytes != 0:
            decompressor.finish()
        return ReadShard(pin.total_bytes or 0, None, pin.etag, table.finish())
    finally:
        table.close()


class _StreamedTable:
    """Takes the bytes of an uncompressed shard in their order, and finds its samples as they come."""

    def __init__(self, url: str, *, every_byte: bool, record_bytes: int) -> None:
        """Begin; `close` must be called in the end."""
        self._url = url
        self._every_byte = every_byte
        self._record_bytes = record_bytes
        self._growing = GrowingTable(url)
        self._memory = SparseMemory(None)
        self._available = 0
        self._next_scan = _STEP_BYTES
        self._crc32: list[NDArray[np.uint32]] = []
        self._labels: list[NDArray[np.int64]] | None = []

    def add(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ShardFormatError: the shard is damaged.
            OSError: there is no memory left.
        """
        self._memory.write(self._available, data)
        self._available += len(data)
        if self._available >= self._next_scan:
            self._scan(None)

    def finish(self) -> ShardTable:
        """Return the table, after the last byte, as `scan_shard` makes it. Raises ShardFormatError."""
        if self._available == 0:
            raise ShardFormatError("the shard is empty; fetch it again", url=self._url, offset=0)
        while self._growing.needs is not None:
            self._scan(self._available)
        table = self._growing.table
        if not self._every_byte:
            return table
        crc32 = np.concatenate([np.empty(0, np.uint32), *self._crc32])
        labels = np.concatenate(self._labels) if self._labels else None
        return replace(table, member_crc32=crc32, labels=labels)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory.close()

    def _scan(self, total: int | None) -> None:
        growing = self._growing
        mapped = mmap.mmap(self._memory.descriptor, self._available, access=mmap.ACCESS_READ)
        octets = np.frombuffer(mapped, np.uint8)
        piece = scan_prefix(
            octets,
            self._url,
            start=growing.resume,
            available=self._available,
            total=total,
            record_bytes=self._record_bytes,
        )
        growing.add(piece)
        table = piece.table
        if self._every_byte and len(table):
            self._crc32.append(crc32_of(octets, table.member_offset, table.member_size))
            labels = labels_of(table, lambda offset, _: (octets, offset))
            self._labels = None if labels is None or self._labels is None else [*self._labels, labels]
        self._memory.free(0, min(growing.resume, self._available))
        self._next_scan = max(growing.needs or 0, self._available + _STEP_BYTES)
