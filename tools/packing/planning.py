"""Which file goes into which shard: pure functions of the files, their sizes and the options.

Nothing here depends on the number of workers, so neither does a byte of what is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray
from streamload_tools.packing.split import order_of, split_by_class
from streamload_tools.sources.source import Source, SourceFile

from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, member_header
from streamload.tar.scan import LABEL_FIELD
from streamload.tar.table import ShardTable

__all__ = ["COLUMNS_FIELD", "Span", "planned_parts", "sample_bytes", "shard_spans", "table_sample_bytes"]

COLUMNS_FIELD = "json"
"""The field for the other columns of a table."""

_BLOCK_BYTES = 512
_USTAR_NAME_BYTES = 100
_USTAR_SIZE = 8**11

Span = tuple[int, int]
"""A run of samples: the first, and the one behind the last."""


def planned_parts(
    source: Source, fractions: Mapping[str, float] | None, bad: frozenset[str], *, shuffle: bool, seed: int
) -> dict[str, list[int]]:
    """The positions of each split's files, in the order in which they are packed; one nameless part without splits.

    Args:
        source: the files.
        fractions: the share of each split, or None. Each class is divided in these shares.
        bad: paths of files that are left out before anything is divided.
        shuffle: mix the classes; otherwise the source's order stays.
        seed: of the shuffle and of the division.
    """
    good = [number for number, file in enumerate(source.files) if file.path not in bad]
    if source.parts is not None:
        kept = set(good)
        parts = {name: [number for number in numbers if number in kept] for name, numbers in source.parts.items()}
    elif fractions is not None:
        chosen = split_by_class([source.files[number].label for number in good], fractions, seed)
        parts = {name: [good[position] for position in positions] for name, positions in chosen.items()}
    else:
        parts = {"": good}
    if not shuffle:
        return parts
    return {name: [part[position] for position in order_of(len(part), seed).tolist()] for name, part in parts.items()}


def sample_bytes(file: SourceFile, size: int) -> int:
    """What a file takes up in a shard, with its label and headers, if its bytes are stored as they are."""
    total = _member_bytes(file.key, file.field or "", size) + _member_bytes(file.key, LABEL_FIELD, len(str(file.label)))
    if file.columns is not None:
        total += _member_bytes(file.key, COLUMNS_FIELD, len(file.columns))
    return total


def shard_spans(sizes: Iterable[int], max_bytes: int, max_count: int | None) -> list[Span]:
    """Cut a run of samples into shards, each as full as it may be.

    Args:
        sizes: the bytes of each sample.
        max_bytes: no shard is larger, end-of-archive marker included; a single sample that is larger gets a shard of
        its own.
        max_count: no shard holds more samples.
    """
    spans: list[Span] = []
    start = number = filled = 0
    for number, size in enumerate(sizes):
        if number > start and (filled + size + len(END_OF_ARCHIVE) > max_bytes or number - start == max_count):
            spans.append((start, number))
            start, filled = number, 0
        filled += size
    return [*spans, (start, number + 1)] if filled else spans


def table_sample_bytes(table: ShardTable) -> NDArray[np.int64]:
    """int64[S], what each sample of a shard that was written here takes up, headers and padding included."""
    ends = table.member_offset + table.member_size
    ends += -ends % _BLOCK_BYTES
    return np.diff(ends[table.sample_start[1:] - 1], prepend=0)


def _member_bytes(key: str, field: str, size: int) -> int:
    # Building a header to measure it would cost several microseconds a file, and nearly all are one block.
    if len(key) + 1 + len(field) <= _USTAR_NAME_BYTES and key.isascii() and size < _USTAR_SIZE:
        return _BLOCK_BYTES + size + -size % _BLOCK_BYTES
    return member_bytes(member_header(f"{key}.{field}", size), size)
