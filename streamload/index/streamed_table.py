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
    pin, growing, memory = Pin(), GrowingTable(url), SparseMemory(None)
    compression = compression_of(url)
    decompressor = None if compression is None else Decompressor(compression, url)
    available, next_scan = 0, _STEP_BYTES
    crc32s: list[NDArray[np.uint32]] = [np.empty(0, np.uint32)]
    labels: list[NDArray[np.int64] | None] = []

    def scan(total: int | None) -> None:
        nonlocal next_scan
        octets = np.frombuffer(mmap.mmap(memory.descriptor, available, access=mmap.ACCESS_READ), np.uint8)
        piece = scan_prefix(
            octets, url, start=growing.resume, available=available, total=total, record_bytes=record_bytes
        )
        growing.add(piece)
        table = piece.table
        if every_byte and len(table):
            crc32s.append(crc32_of(octets, table.member_offset, table.member_size))
            labels.append(labels_of(table, lambda offset, _: (octets, offset)))
        memory.free(0, min(growing.resume, available))
        next_scan = max(growing.needs or 0, available + _STEP_BYTES)

    def take(_: int, piece: bytes) -> None:
        nonlocal available
        on_bytes(len(piece))
        for data in (piece,) if decompressor is None else decompressor.feed(piece):
            memory.write(available, data)
            available += len(data)
            if available >= next_scan:
                scan(None)

    try:
        await download(storage, url, 0, _TO_THE_END, take, pin=pin)
        if decompressor is not None and pin.total_bytes != 0:
            decompressor.finish()
        if available == 0:
            raise ShardFormatError("the shard is empty; fetch it again", url=url, offset=0)
        while growing.needs is not None:
            scan(available)
        table = growing.table
        if every_byte:
            known = [each for each in labels if each is not None]
            all_labels = np.concatenate(known) if known and len(known) == len(labels) else None
            table = replace(table, member_crc32=np.concatenate(crc32s), labels=all_labels)
        return ReadShard(pin.total_bytes or 0, None, pin.etag, table)
    finally:
        memory.close()
