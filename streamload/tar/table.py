"""The table of a shard: offsets, sizes, fields and keys of its samples as flat arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MISSING = -1
"""The offset and the size of a field that a sample does not have."""

# Keys of samples at least this far apart are cut one by one, which is faster than cutting all of them.
_FAR_APART = 16


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """The members of one shard, grouped into samples.

    Attributes:
        shard_bytes: size of the (uncompressed) shard.
        fields: the distinct fields, in the order of their first appearance.
        member_offset: int64[M], first byte of each member's payload.
        member_size: int64[M], payload bytes.
        member_field: uint16[M], the field as a number in `fields`.
        sample_start: int64[S + 1], the members of sample i are `sample_start[i]:sample_start[i + 1]`.
        key_bytes: uint8[K], all keys in UTF-8, one after the other.
        key_start: int64[S + 1], the start of each key in `key_bytes`.
        member_crc32: uint32[M], crc32 of each payload, or None.
        labels: int64[S], the integers in `cls`; None if a sample has none.
        skipped: number of skipped members, by reason.
        member_shard: int64[M], the number of each member's shard; None if all lie in this one.
        columns: results of `column`.
    """

    shard_bytes: int
    fields: tuple[str, ...]
    member_offset: NDArray[np.int64]
    member_size: NDArray[np.int64]
    member_field: NDArray[np.uint16]
    sample_start: NDArray[np.int64]
    key_bytes: NDArray[np.uint8]
    key_start: NDArray[np.int64]
    member_crc32: NDArray[np.uint32] | None = None
    labels: NDArray[np.int64] | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    member_shard: NDArray[np.int64] | None = None
    columns: dict[tuple[str, ...], NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.sample_start) - 1

    def key(self, sample: int) -> str:
        """Return the key of a sample. A name that is not UTF-8 keeps its bytes as surrogates, as in `os.fsdecode`."""
        start, end = int(self.key_start[sample]), int(self.key_start[sample + 1])
        return self.key_bytes[start:end].tobytes().decode("utf-8", "surrogateescape")

    def keys(self, samples: NDArray[np.int64] | None = None) -> list[str]:
        """Return the keys of some samples, int64[n], in the order given; by default of all."""
        chosen = np.arange(len(self)) if samples is None else samples
        if not len(chosen):
            return []
        first, last = int(chosen.min()), int(chosen.max()) + 1
        if last - first > _FAR_APART * len(chosen):
            return [self.key(sample) for sample in chosen.tolist()]
        offset = int(self.key_start[first])
        starts, ends = self.key_start[chosen] - offset, self.key_start[chosen + 1] - offset
        edges = zip(starts.tolist(), ends.tolist(), strict=True)
        joined = self.key_bytes[offset : int(self.key_start[last])].tobytes()
        if joined.isascii():
            text = joined.decode("ascii")
            return [text[start:end] for start, end in edges]
        return [joined[start:end].decode("utf-8", "surrogateescape") for start, end in edges]

    def column(self, alternatives: Sequence[str]) -> NDArray[np.int64]:
        """Return the member of each sample's first present field of `alternatives`, int64[S], or MISSING.

        The result is kept for the next call.
        """
        names = tuple(alternatives)
        if names in self.columns:
            return self.columns[names]
        self.columns[names] = members = np.full(len(self), MISSING, np.int64)
        sample_of_member = np.repeat(np.arange(len(self)), np.diff(self.sample_start))
        for name in reversed(names):
            if name in self.fields:
                holding = np.flatnonzero(self.member_field == self.fields.index(name))
                members[sample_of_member[holding]] = holding
        return members

    def sample_fields(self, sample: int) -> tuple[str, ...]:
        """Return the fields of one sample, in the order in which they are stored."""
        start, end = int(self.sample_start[sample]), int(self.sample_start[sample + 1])
        return tuple(self.fields[number] for number in self.member_field[start:end].tolist())


def joined_tables(tables: Sequence[ShardTable]) -> ShardTable:
    """Return one table of the samples of several tables with the same fields, one table after the other.

    Offsets stay. There are checksums and labels if all tables have them.
    """
    joined: dict[str, Any] = {}
    for name in ("member_offset", "member_size", "member_field", "key_bytes", "member_crc32", "labels"):
        columns = [getattr(table, name) for table in tables]
        joined[name] = None if any(column is None for column in columns) else np.concatenate(columns)
    return ShardTable(
        shard_bytes=max(table.shard_bytes for table in tables),
        fields=tables[0].fields,
        sample_start=starts_of(np.concatenate([np.diff(table.sample_start) for table in tables])),
        key_start=starts_of(np.concatenate([np.diff(table.key_start) for table in tables])),
        **joined,
    )


def stretches(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers from each start to its end."""
    lengths = ends - starts
    return np.arange(lengths.sum()) + np.repeat(starts - starts_of(lengths)[:-1], lengths)


def starts_of(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each of consecutive stretches, and the end: int64[n + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
