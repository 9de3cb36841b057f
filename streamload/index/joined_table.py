"""A shard's table joined with those of its sidecars: one table of all fields of its samples, matched by key.

On its own because it is arithmetic of arrays, and `tables.py` is about which tables are held.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError
from streamload.tar.table import MISSING, ShardTable

__all__ = ["joined_table", "matched_samples"]


def matched_samples(table: ShardTable, sidecar: ShardTable, url: str) -> NDArray[np.int64]:
    """For each sample of a table the number of the one with its key in a sidecar.

    Args:
        table: of a shard, or of the samples that are found so far.
        sidecar: of its sidecar, which may lack samples, or have more.
        url: of the sidecar, for errors.

    Returns:
        int64[S], ascending but for those that are MISSING.

    Raises:
        DatasetIndexError: the samples of the sidecar are in another order.
    """
    starts = table.key_start
    same_lengths = np.array_equal(sidecar.key_start[: len(starts)], starts)
    if same_lengths and np.array_equal(sidecar.key_bytes[: len(table.key_bytes)], table.key_bytes):
        return np.arange(len(table))
    wanted, there = table.keys(), sidecar.keys()
    numbers = dict(zip(there, range(len(there)), strict=True))
    found = np.array([numbers.get(key, MISSING) for key in wanted], np.int64)
    present = found[found != MISSING]
    if (np.diff(present) < 0).any():
        raise DatasetIndexError(
            "the samples of this sidecar are in another order than those of its shard; write it with `streamload map "
            "--sidecar`, or in the order of the shard",
            url=url,
        )
    return found


def joined_table(
    shard: int, table: ShardTable, sidecars: Mapping[int, tuple[ShardTable, NDArray[np.int64]]]
) -> ShardTable:
    """The table with the fields of sidecars; `member_shard` says where each lies.

    Args:
        shard: the shard's number.
        table: of the shard.
        sidecars: by number, the table and what `matched_samples` has found in it.
    """
    counts = np.diff(table.sample_start)
    fields = dict.fromkeys((*table.fields, *(name for other, _ in sidecars.values() for name in other.fields)))
    numbers = {name: number for number, name in enumerate(fields)}
    members = [(shard, table, np.repeat(np.arange(len(table)), counts), np.arange(len(table.member_offset)))]
    for number, (other, matched) in sidecars.items():
        rows = np.flatnonzero(matched != MISSING)
        of_sample = np.repeat(np.arange(len(other)), np.diff(other.sample_start))
        row_of = np.full(len(other), MISSING, np.int64)
        row_of[matched[rows]] = rows
        chosen = np.flatnonzero(row_of[of_sample] != MISSING)
        members.append((number, other, row_of[of_sample[chosen]], chosen))
    samples = np.concatenate([rows for _, _, rows, _ in members])
    order = np.argsort(samples, kind="stable")
    crc32s = [each.member_crc32[chosen] for _, each, _, chosen in members if each.member_crc32 is not None]
    renumbered = [
        np.array([numbers[name] for name in each.fields], np.uint16)[each.member_field[chosen]]
        for _, each, _, chosen in members
    ]
    return replace(
        table,
        fields=tuple(fields),
        member_offset=np.concatenate([each.member_offset[chosen] for _, each, _, chosen in members])[order],
        member_size=np.concatenate([each.member_size[chosen] for _, each, _, chosen in members])[order],
        member_field=np.concatenate(renumbered)[order],
        member_crc32=np.concatenate(crc32s)[order] if len(crc32s) == len(members) else None,
        member_shard=np.concatenate([np.full(len(chosen), number) for number, _, _, chosen in members])[order],
        sample_start=np.concatenate([[0], np.cumsum(np.bincount(samples, minlength=len(table)))]).astype(np.int64),
    )
