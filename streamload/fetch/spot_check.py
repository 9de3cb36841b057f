"""Whether a local shard that was written or copied since it was indexed still holds what the index says, by samples."""

from __future__ import annotations

import os
import zlib

import numpy as np
from numpy.typing import NDArray

from streamload.dataset.table import ShardTable
from streamload.errors import DatasetIndexError, StorageError
from streamload.fetch.storage.local import LocalStorage

__all__ = ["spot_check", "was_touched"]

_SAMPLES = 16
_MOST_BYTES = 64 << 10


def was_touched(mtime_ns: int, indexed_ns: int | None, table_path: str) -> bool:
    """Whether a shard may have been written since it was indexed: its time is another, or later than that of the index.

    Args:
        mtime_ns: the shard's time of modification.
        indexed_ns: what that was then; None where the index does not say, as those of `ShardWriter` do not.
        table_path: the shard's file in the index, which was written after the shard.

    Raises:
        DatasetIndexError: there is no such file.
    """
    if indexed_ns is not None:
        return mtime_ns != indexed_ns
    try:
        return mtime_ns > os.stat(table_path).st_mtime_ns
    except OSError as exc:
        raise DatasetIndexError(f"the index cannot be read ({exc.strerror})", url=table_path) from exc


def spot_check(url: str, table: ShardTable) -> None:
    """Compare a few small fields with their checksums in the index: all over the shard, and nothing in between.

    A shard that was written anew may have the size that it had, since tar fills up to whole records. Copying changes
    the time of a file too, so the time alone says nothing.

    Args:
        url: a local, uncompressed shard.
        table: what the index has of it; without checksums nothing is compared.

    Raises:
        DatasetIndexError: a field has another checksum.
        ShardNotFoundError, StorageError: the shard cannot be read.
    """
    if table.member_crc32 is None or not len(table):
        return
    descriptor = LocalStorage().open(url)
    try:
        _compare(descriptor, table, table.member_crc32, url)
    except OSError as exc:
        raise StorageError(f"the shard cannot be read ({exc.strerror}); check the disk", url=url) from exc
    finally:
        os.close(descriptor)


def _compare(descriptor: int, table: ShardTable, crc32: NDArray[np.uint32], url: str) -> None:
    for sample in np.unique(np.linspace(0, len(table) - 1, _SAMPLES).astype(np.int64)).tolist():
        first, end = int(table.sample_start[sample]), int(table.sample_start[sample + 1])
        member = first + int(np.argmin(table.member_size[first:end]))
        size = int(table.member_size[member])
        if size > _MOST_BYTES:
            continue
        found = os.pread(descriptor, size, int(table.member_offset[member]))
        if zlib.crc32(found) != int(crc32[member]):
            raise DatasetIndexError(
                f"the shard was changed since it was indexed: field {table.fields[int(table.member_field[member])]!r} "
                "of this sample is another; make the index anew with `streamload index`, or restore the shard",
                url=url,
                key=table.key(sample),
                offset=int(table.member_offset[member]),
            )
