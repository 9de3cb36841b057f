"""A whole shard, mapped in memory, to its table of samples."""

from __future__ import annotations

import re
import zlib
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from streamload.dataset.chain import read_chain
from streamload.dataset.grouping import Samples, group_members
from streamload.dataset.table import MISSING, ShardTable
from streamload.dataset.tar import BLOCK_BYTES
from streamload.dataset.tar_end import check_zeros_behind

__all__ = ["LABEL_FIELD", "crc32_of", "labels_of", "scan_shard"]

LABEL_FIELD = "cls"
"""The field whose decimal integer is a sample's label."""

_INTEGER = re.compile(rb"\s*([+-]?[0-9]{1,19})\s*")
_MOST_LABEL_BYTES = 64


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
        data: uint8[n], the whole shard, contiguous; usually a mapped file.
        url: the shard, for errors.
        strict: False accepts a missing end-of-archive mark, which is then counted in `skipped`, and an archive that is
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
    if members.end is not None:
        check_zeros_behind(members.end, len(octets), url, strict=strict)
    samples = group_members(members.names, members.offset - BLOCK_BYTES, url)
    offset = members.offset[samples.member]
    size = members.size[samples.member]
    skipped = Counter(reason for _, reason in members.skipped)
    skipped.update(samples.skipped.values())
    return ShardTable(
        shard_bytes=len(octets),
        fields=samples.fields,
        member_offset=offset,
        member_size=size,
        member_field=samples.member_field,
        sample_start=samples.sample_start,
        key_bytes=np.frombuffer(b"".join(samples.keys), np.uint8),
        key_start=np.cumsum([0, *map(len, samples.keys)], dtype=np.int64),
        member_crc32=crc32_of(octets, offset, size) if crc32 else None,
        labels=_labels_of(octets, samples, offset, size) if labels else None,
        skipped=dict(skipped),
        missing_end=members.missing_end,
    )


def crc32_of(octets: NDArray[np.uint8], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.uint32]:
    """uint32[M], the crc32 of each payload; `octets` maps the shard from its start, as far as payloads reach."""
    view = octets.data
    edges = zip(offset.tolist(), (offset + size).tolist(), strict=True)
    return np.fromiter((zlib.crc32(view[start:end]) for start, end in edges), np.uint32, len(offset))


def _labels_of(
    octets: NDArray[np.uint8], samples: Samples, offset: NDArray[np.int64], size: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """int64[S], or None unless every sample has a label."""
    if LABEL_FIELD not in samples.fields:
        return None
    chosen = np.flatnonzero(samples.member_field == samples.fields.index(LABEL_FIELD))
    # No sample has a field twice, so as many labels as samples is one for each, in their order.
    return _integers(octets, offset[chosen], size[chosen]) if len(chosen) == len(samples.keys) else None


def labels_of(octets: NDArray[np.uint8], table: ShardTable) -> NDArray[np.int64] | None:
    """int64[S], the labels of a table's samples, or None unless every sample has one; `octets` as for `crc32_of`."""
    chosen = table.column((LABEL_FIELD,))
    if not len(chosen) or (chosen == MISSING).any():
        return None
    return _integers(octets, table.member_offset[chosen], table.member_size[chosen])


def _integers(
    octets: NDArray[np.uint8], offset: NDArray[np.int64], size: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """The decimal integers in some payloads, or None if one of them holds anything else."""
    if (size > _MOST_LABEL_BYTES).any():
        return None
    view = octets.data
    labels: list[int] = []
    for start, end in zip(offset.tolist(), (offset + size).tolist(), strict=True):
        match = _INTEGER.fullmatch(view, start, end)
        if match is None or not -(1 << 63) <= int(match[1]) < 1 << 63:
            return None
        labels.append(int(match[1]))
    return np.array(labels, np.int64)
