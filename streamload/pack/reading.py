"""Scan whole local shards, and compare tables."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from streamload.errors import DatasetIndexError, ShardFormatError, StorageError, StreamloadError
from streamload.storage.local_storage import storage_for
from streamload.tar.header_chain import RECORD_BYTES
from streamload.tar.scan import scan_file
from streamload.tar.table import ShardTable


def scanned_table(
    url: str, *, every_byte: bool = False, labels: bool = False, record_bytes: int = RECORD_BYTES
) -> ShardTable:
    """Scan a local uncompressed shard strictly.

    Args:
        url: the shard.
        every_byte: also compute the members' crc32 and the labels, by reading all of it.
        labels: also read the labels.
        record_bytes: as for `scan_shard`.

    Raises:
        StorageError: it cannot be opened.
        ShardFormatError: it is damaged.
    """
    descriptor = storage_for(url).open(url)
    try:
        size_bytes = os.fstat(descriptor).st_size
        labels = every_byte or labels
        return scan_file(descriptor, size_bytes, url, crc32=every_byte, labels=labels, record_bytes=record_bytes)
    except OSError as exc:
        raise StorageError(f"the shard cannot be read ({exc.strerror}); check the disk", url=url) from exc
    finally:
        os.close(descriptor)


def differences(url: str, table: ShardTable, known: ShardTable) -> Iterator[StreamloadError]:
    """The differences between a shard's own table and the one in the index."""
    rebuild = "restore the shard, or rebuild the index with `streamload index` if the shard is right"
    same_places = (
        table.fields == known.fields
        and np.array_equal(table.member_offset, known.member_offset)
        and np.array_equal(table.member_size, known.member_size)
        and np.array_equal(table.member_field, known.member_field)
        and np.array_equal(table.sample_start, known.sample_start)
        and np.array_equal(table.key_bytes, known.key_bytes)
        and np.array_equal(table.key_start, known.key_start)
    )
    if not same_places:
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
