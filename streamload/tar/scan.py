"""A whole shard to its table of samples: from memory, or from a file that is read and not mapped."""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardChangedError
from streamload.memory.gathered import gather, read_fully
from streamload.memory.mapped import Bytes
from streamload.tar.archive_part import ArchivePart
from streamload.tar.end_marker import check_zeros_behind, is_cut_in
from streamload.tar.grouping import group_members
from streamload.tar.header import BLOCK_BYTES
from streamload.tar.header_chain import TarMembers, read_chain, read_chain_part
from streamload.tar.table import MISSING, ShardTable

__all__ = ["LABEL_FIELD", "Gather", "crc32_of", "labels_of", "scan_file", "scan_shard"]

LABEL_FIELD = "cls"
"""The field whose decimal integer is a sample's label."""

_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
_MOST_LABEL_BYTES = 64

_WINDOW_BYTES = 1 << 20
_FAR_APART_BYTES = 256 << 10
"""From this mean distance on headers are read one by one, and what lies between them is not."""

Gather = Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[Bytes, NDArray[np.int64]]]
"""Gives the bytes of some places (offsets, sizes) of a shard, and where each of them begins in what is given."""


def scan_shard(
    data: memoryview | NDArray[np.uint8],
    url: str,
    *,
    strict: bool = True,
    crc32: bool = False,
    labels: bool = False,
) -> ShardTable:
    """Find the samples of an uncompressed tar archive, trusting nothing.

    Every header is verified, and so is the end of the archive; what is returned is all that the archive holds.
    Nothing in the table refers to `data`, and payloads are not read unless asked for.

    Args:
        data: uint8[n], the whole shard, contiguous; a mapped file only in a process that may die of one that is cut.
        url: the shard, for errors.
        strict: False accepts a missing end-of-archive marker, which is then counted in `skipped`, and an archive that
        is
            followed by more zeros than tar writes; nothing else.
        crc32: compute the crc32 of every payload, which reads the whole shard.
        labels: read the labels; they are None if some sample has no `cls`, or one that is not a decimal integer.

    Raises:
        ShardFormatError: the archive is damaged or cut or not tar; it holds what cannot be read in place (sparse or
            multi-volume members); a sample's members are not together, or a field comes twice. `url` and `offset`
            are set.
    """
    octets = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    members = read_chain(octets, url, strict=strict)
    table = _table_of(members, len(octets), url, lambda start, end: octets[start:end].tobytes(), strict=strict)
    if crc32:
        table = replace(table, member_crc32=crc32_of(octets, table.member_offset, table.member_size))
    if labels:
        table = replace(table, labels=labels_of(table, lambda offset, _: (octets, offset)))
    return table


def scan_file(
    descriptor: int, shard_bytes: int, url: str, *, strict: bool = True, crc32: bool = False, labels: bool = False
) -> ShardTable:
    """`scan_shard` of an open file of which nothing is mapped, so that it may be cut meanwhile.

    What lies between headers is not read where these are far apart.

    Args:
        descriptor: the file.
        shard_bytes: its size.
        url: as for `scan_shard`, as all that follows.
        strict: see there.
        crc32: see there.
        labels: see there.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ShardChangedError: the file has become shorter.
        OSError: it cannot be read.
    """

    def places(offset: NDArray[np.int64], size: NDArray[np.int64]) -> tuple[Bytes, NDArray[np.int64]]:
        found = gather(descriptor, offset, size)
        if found is None:
            raise _shorter(url, shard_bytes)
        return found

    members = _chain_of(descriptor, shard_bytes, url, strict=strict)
    table = _table_of(
        members, shard_bytes, url, lambda start, end: os.pread(descriptor, end - start, start), strict=strict
    )
    if crc32:
        edges = zip(table.member_offset.tolist(), table.member_size.tolist(), strict=True)
        checksums = (_crc32_at(descriptor, offset, size, url, shard_bytes) for offset, size in edges)
        table = replace(table, member_crc32=np.fromiter(checksums, np.uint32, len(table.member_offset)))
    if labels:
        table = replace(table, labels=labels_of(table, places))
    return table


def _chain_of(descriptor: int, shard_bytes: int, url: str, *, strict: bool) -> TarMembers:
    """The members of an open file, window by window."""
    found: list[TarMembers] = []
    start, window_bytes = 0, _WINDOW_BYTES
    needs: int | None = BLOCK_BYTES
    while needs is not None:
        available = min(shard_bytes, max(needs, start + window_bytes))
        data = np.empty(available - start, np.uint8)
        if read_fully(descriptor, memoryview(data.data), start) < len(data):
            raise _shorter(url, shard_bytes)
        part = read_chain_part(ArchivePart(data, start, available, shard_bytes, first=start), url, strict=strict)
        found.append(part)
        far_apart = part.reached - start > _FAR_APART_BYTES * max(1, len(part.names))
        window_bytes = BLOCK_BYTES if far_apart else _WINDOW_BYTES
        start, needs = part.reached, part.needs
    if len(found) == 1:
        return found[0]
    return replace(
        found[-1],
        names=list(chain.from_iterable(part.names for part in found)),
        offset=np.concatenate([part.offset for part in found]),
        size=np.concatenate([part.size for part in found]),
        skipped=list(chain.from_iterable(part.skipped for part in found)),
        end=next((part.end for part in found if part.end is not None), None),
    )


def _crc32_at(descriptor: int, offset: int, size: int, url: str, shard_bytes: int) -> int:
    """The crc32 of one payload, of which no more than a window is held at once."""
    checksum, end = 0, offset + size
    while offset < end:
        data = os.pread(descriptor, min(end - offset, _WINDOW_BYTES), offset)
        if not data:
            raise _shorter(url, shard_bytes)
        checksum = zlib.crc32(data, checksum)
        offset += len(data)
    return checksum


def _shorter(url: str, shard_bytes: int) -> ShardChangedError:
    return ShardChangedError(
        f"the shard had {shard_bytes} bytes and became shorter while it was read; let nothing write to shards that are "
        "in use, and fetch or pack it again",
        url=url,
    )


def _table_of(
    members: TarMembers, shard_bytes: int, url: str, read: Callable[[int, int], bytes], *, strict: bool
) -> ShardTable:
    """The samples of a whole archive's members; `read` gives bytes of it from a place to another."""
    samples = group_members(members.names, members.offset - BLOCK_BYTES, url)
    offset, size = members.offset[samples.member], members.size[samples.member]
    if members.end is not None:
        check_zeros_behind(members.end, shard_bytes, url, strict=strict, cut=is_cut_in(read, offset, size))
    skipped = Counter(reason for _, reason in members.skipped)
    skipped.update(samples.skipped.values())
    return ShardTable(
        shard_bytes=shard_bytes,
        fields=samples.fields,
        member_offset=offset,
        member_size=size,
        member_field=samples.member_field,
        sample_start=samples.sample_start,
        key_bytes=np.frombuffer(b"".join(samples.keys), np.uint8),
        key_start=np.cumsum([0, *map(len, samples.keys)], dtype=np.int64),
        skipped=dict(skipped),
        missing_end=members.missing_end,
    )


def crc32_of(octets: NDArray[np.uint8], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.uint32]:
    """uint32[M], the crc32 of each payload; `octets` maps the shard from its start, as far as payloads reach."""
    view = octets.data
    edges = zip(offset.tolist(), (offset + size).tolist(), strict=True)
    return np.fromiter((zlib.crc32(view[start:end]) for start, end in edges), np.uint32, len(offset))


def labels_of(table: ShardTable, places: Gather) -> NDArray[np.int64] | None:
    """int64[S], the labels of a table's samples, or None unless every sample has one; raises what `places` raises."""
    chosen = table.column((LABEL_FIELD,))
    if not len(chosen) or (chosen == MISSING).any():
        return None
    offset, size = table.member_offset[chosen], table.member_size[chosen]
    if (size > _MOST_LABEL_BYTES).any():
        return None
    octets, offset = places(offset, size)
    view = octets.data
    labels: list[int] = []
    for start, end in zip(offset.tolist(), (offset + size).tolist(), strict=True):
        match = _INTEGER.fullmatch(view, start, end)
        if match is None or not -(1 << 63) <= int(match[1]) < 1 << 63:
            return None
        labels.append(int(match[1]))
    return np.array(labels, np.int64)
