"""Whether a local shard still holds what the index says, by some of its samples."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError, StorageError
from streamload.storage.local_storage import LocalStorage
from streamload.tar.table import ShardTable

__all__ = ["spot_check", "was_touched"]

_SAMPLES = 4
_SAMPLES_OF_TOUCHED = 16
_MOST_BYTES = 64 << 10
_FURTHER_BYTES = 256 << 10
"""What is read of a shard besides the smallest fields: these are labels, which two shards may well share."""


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


def spot_check(url: str, table: ShardTable, *, touched: bool) -> None:
    """Compare a few fields with their checksums in the index: all over the shard, and nothing in between.

    A shard that was rewritten may have the size that it had, since tar fills up to whole records, and the time too,
    which `cp -p` and `rsync -t` keep. Copying may change the time of a file, so the time alone says nothing.

    Args:
        url: a local, uncompressed shard.
        table: what the index has of it; without checksums nothing is compared.
        touched: its time is another, so more samples are compared.

    Raises:
        DatasetIndexError: half of the samples compared are others; or one is, by its smallest field, and the shard was
            touched. Fewer are damage, which their own samples show when they are read.
        ShardNotFoundError, StorageError: the shard cannot be read.
    """
    if table.member_crc32 is None or not len(table):
        return
    descriptor = LocalStorage().open(url)
    try:
        other = _find_other(descriptor, table, table.member_crc32, touched=touched)
    except OSError as exc:
        raise StorageError(f"the shard cannot be read ({exc.strerror}); check the disk", url=url) from exc
    finally:
        os.close(descriptor)
    if other is not None:
        sample, member = other
        raise DatasetIndexError(
            f"the shard was changed since it was indexed: field {table.fields[int(table.member_field[member])]!r} "
            "of this sample is another; rebuild the index with `streamload index`, or restore the shard",
            url=url,
            key=table.key(sample),
            offset=int(table.member_offset[member]),
        )


def _find_other(
    descriptor: int, table: ShardTable, crc32: NDArray[np.uint32], *, touched: bool
) -> tuple[int, int] | None:
    """The first sample, and its member, by which the shard is another; None where what differs is damage at most."""
    compared: set[int] = set()
    others: dict[int, int] = {}
    for sample, member in _chosen(table, _SAMPLES_OF_TOUCHED if touched else _SAMPLES):
        is_smallest = sample not in compared
        compared.add(sample)
        content = os.pread(descriptor, int(table.member_size[member]), int(table.member_offset[member]))
        if zlib.crc32(content) != int(crc32[member]):
            others.setdefault(sample, member)
            if touched and is_smallest:  # such as a label that was corrected
                return sample, member
    return next(iter(others.items())) if others and 2 * len(others) >= len(compared) else None


def _chosen(table: ShardTable, samples: int) -> Iterator[tuple[int, int]]:
    """Samples, and members of them: the smallest of each, and further ones while there is room."""
    further_bytes = _FURTHER_BYTES
    for sample in np.unique(np.linspace(0, len(table) - 1, samples).astype(np.int64)).tolist():
        first, end = int(table.sample_start[sample]), int(table.sample_start[sample + 1])
        smallest, *others = (first + np.argsort(table.member_size[first:end], kind="stable")).tolist()
        if table.member_size[smallest] <= _MOST_BYTES:
            yield sample, smallest
        for member in others:
            further_bytes -= int(table.member_size[member])
            if further_bytes >= 0:
                yield sample, member
