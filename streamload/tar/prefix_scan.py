"""Part of a shard, as far as it has come, to the table of the samples that lie in it as a whole.

Headers lie behind payloads, so a sample is known to be whole only when the first header behind it has been read. What
is not whole stays for the next call, which begins at the sample's first header. The calls share nothing, so each may
be made by another process; `growing_table` puts their results together.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamload.tar.archive_part import ArchivePart
from streamload.tar.end_marker import is_cut_in
from streamload.tar.grouping import Samples, group_part
from streamload.tar.header import BLOCK_BYTES, padded
from streamload.tar.header_chain import TarMembers, read_chain_part
from streamload.tar.table import ShardTable

__all__ = ["UNKNOWN_BYTES", "ScannedPiece", "scan_prefix"]

UNKNOWN_BYTES = -1
"""The `shard_bytes` of a table whose shard's size is not known yet."""


@dataclass(frozen=True, slots=True, eq=False)
class ScannedPiece:
    """What one call of `scan_prefix` has found.

    Attributes:
        start: where the call began.
        table: the samples that are whole, from `start` on. Offsets are those of the shard; members, samples and
            fields are numbered from 0 in this piece. There are no checksums and no labels. Every byte of these
            samples lies before `resume`.
        resume: where the next call must begin; where the shard's size is known it may lie behind what was available.
            No scan needs what lies before.
        needs: the end of the bytes that must be there before the next call can get further, always more than were
            there; or None if there is nothing left to scan.
        end: where the end-of-archive marker begins, if this piece has come upon it.
        cut: whether zeros may have taken the place of the last payload's end; False where `end` is None.
    """

    start: int
    table: ShardTable
    resume: int
    needs: int | None
    end: int | None = None
    cut: bool = False

    @property
    def ended(self) -> bool:
        """Whether the shard has been scanned and checked to its end."""
        return self.needs is None


def scan_prefix(
    data: memoryview | NDArray[np.uint8],
    url: str,
    *,
    start: int,
    available: int,
    total: int | None,
    strict: bool = True,
) -> ScannedPiece:
    """Find the samples that are whole in bytes `start` to `available` of an uncompressed tar archive.

    Nothing outside of these bytes is looked at. All checks of `scan_shard` are made, each as soon as its bytes have
    come; `GrowingTable` makes those that concern several pieces: a key that comes again, and zeros behind the end. Of
    several faults the one whose bytes come first is raised, which with a whole shard need not be the one that
    `scan_shard` names.

    Args:
        data: maps the shard from its first byte to `available` at least.
        url: the shard, for errors.
        start: 0, or where the last piece says to `resume`.
        available: the end of the bytes that have come without a gap from `start` on.
        total: the size of the shard, or None where that is not known yet; then it cannot come to its end, and must be
            scanned once more with the size when all bytes have come.
        strict: as for `scan_shard`.

    Raises:
        ShardFormatError: as for `scan_shard`.
        ValueError: the numbers make no sense; see `ArchivePart`.
    """
    octets = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    members = read_chain_part(ArchivePart(octets, start, available, total), url, strict=strict)
    samples = group_part(members.names, members.offset - BLOCK_BYTES, url)
    if members.end is not None or not samples.keys:
        whole, member_end = len(samples.keys), len(members.names)
        resume = members.reached if members.needs is not None or total is None else total
    else:
        whole, member_end = len(samples.keys) - 1, int(samples.member[samples.sample_start[-2]])
        resume = start if member_end == 0 else _end_of(members, member_end - 1)
    skipped = Counter(reason for position, reason in members.skipped if position < resume or members.needs is None)
    skipped.update(reason for member, reason in samples.skipped.items() if member < member_end)
    shard_bytes = UNKNOWN_BYTES if total is None else total
    table = _table_of(members, samples, whole, shard_bytes, dict(skipped))
    # The last sample stays for the piece that has come upon the end, so its payloads are there.
    offset, size = table.member_offset, table.member_size
    cut = members.end is not None and is_cut_in(lambda first, end: octets[first:end].tobytes(), offset, size)
    return ScannedPiece(start, table, resume, members.needs, members.end, cut)


def _end_of(members: TarMembers, member: int) -> int:
    """Where the next header stands behind a member, be it a member's own, an extension header or another kind."""
    return int(members.offset[member]) + padded(int(members.size[member]))


def _table_of(
    members: TarMembers, samples: Samples, whole: int, shard_bytes: int, skipped: dict[str, int]
) -> ShardTable:
    """The table of the first `whole` samples."""
    member_end = int(samples.sample_start[whole])
    chosen, member_field = samples.member[:member_end], samples.member_field[:member_end]
    # Fields are numbered in the order of their appearance, so those of the first members are the first ones.
    fields = samples.fields[: int(member_field.max()) + 1 if member_end else 0]
    keys = samples.keys[:whole]
    return ShardTable(
        shard_bytes=shard_bytes,
        fields=fields,
        member_offset=members.offset[chosen],
        member_size=members.size[chosen],
        member_field=member_field,
        sample_start=samples.sample_start[: whole + 1],
        key_bytes=np.frombuffer(b"".join(keys), np.uint8),
        key_start=np.cumsum([0, *map(len, keys)], dtype=np.int64),
        skipped=skipped,
        missing_end=members.missing_end,
    )
