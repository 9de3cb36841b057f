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

__all__ = ["spot_check"]

_SAMPLES = 4
_SAMPLES_OF_TOUCHED = 16
_MOST_BYTES = 64 << 10
_FURTHER_BYTES = 256 << 10
"""What is read of a shard besides the smallest fields: these are labels, which two shards may well share."""


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
    small = os.pread(descriptor, table.shard_bytes, 0) if table.shard_bytes <= _MOST_BYTES else None
    compared: set[int] = set()
    others: dict[int, int] = {}
    for sample, (size, member, offset, expected) in _chosen(table, crc32, _SAMPLES_OF_TOUCHED if touched else _SAMPLES):
        content = os.pread(descriptor, size, offset) if small is None else small[offset : offset + size]
        if zlib.crc32(content) != expected:
            others.setdefault(sample, member)
            if touched and sample not in compared:  # its smallest field, such as a label that was corrected
                return sample, member
        compared.add(sample)
    return next(iter(others.items())) if others and 2 * len(others) >= len(compared) else None


def _chosen(
    table: ShardTable, crc32: NDArray[np.uint32], samples: int
) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Samples, and members of them: the smallest of each, and further ones while there is room.

    A member is its size, its number, its offset and its checksum.
    """
    further_bytes = _FURTHER_BYTES
    last = len(table) - 1
    for sample in sorted({number * last // (samples - 1) for number in range(samples)}):
        first, end = table.sample_start[sample : sample + 2].tolist()
        sizes, offsets, crc32s = (
            column[first:end].tolist() for column in (table.member_size, table.member_offset, crc32)
        )
        smallest, *further = sorted(zip(sizes, range(first, end), offsets, crc32s, strict=True))
        if smallest[0] <= _MOST_BYTES:
            yield sample, smallest
        for member in further:
            further_bytes -= member[0]
            if further_bytes >= 0:
                yield sample, member
