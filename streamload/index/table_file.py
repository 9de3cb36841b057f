"""A shard's table as bytes, as docs/index-format.md describes them: reproducible, and read without trusting them."""

from __future__ import annotations

import json
import struct
import zlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy import count_nonzero
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError
from streamload.tar.table import ShardTable

# The version of the layout; a table of another version is refused.
_TABLE_FORMAT = 2

MAX_COUNT = 1 << 48
"""No shard has more bytes or samples; so the sums over all shards of a dataset fit into 63 bits."""

_MAGIC = b"slt\n"
# Magic, format, flags, the shard's bytes; the numbers of members, samples, bytes of keys, bytes of JSON.
_HEADER = struct.Struct("<4sHHQQQQQ")

_CRC32, _LABELS = 1, 2
_ALIGNMENT = 8
_INT64, _UINT32, _UINT16, _UINT8 = (np.dtype(code) for code in ("<i8", "<u4", "<u2", "u1"))


class _TableError(Exception):
    """Bytes of an index do not make a table; the text says why."""


def pack_table(table: ShardTable) -> bytes:
    """Return the bytes of a table; they depend on nothing but the table."""
    about = json.dumps({"fields": table.fields, "skipped": dict(sorted(table.skipped.items()))}).encode("ascii")
    flags = (_CRC32 if table.member_crc32 is not None else 0) | (_LABELS if table.labels is not None else 0)
    counts = (len(table.member_offset), len(table), len(table.key_bytes), len(about))
    columns = (
        (table.member_offset, _INT64),
        (table.member_size, _INT64),
        (table.sample_start, _INT64),
        (table.key_start, _INT64),
        (table.labels, _INT64),
        (table.member_crc32, _UINT32),
        (table.member_field, _UINT16),
        (table.key_bytes, _UINT8),
    )
    arrays = [np.asarray(column, dtype).tobytes() for column, dtype in columns if column is not None]
    packed = b"".join((_HEADER.pack(_MAGIC, _TABLE_FORMAT, flags, table.shard_bytes, *counts), *arrays, about))
    return packed + bytes(-len(packed) % _ALIGNMENT)


def unpack_table(content: bytes, url: str, crc32: int | None = None, *, offset: int | None = None) -> ShardTable:
    """Return the table that `pack_table` packed, after checking that everything lies within the shard.

    Its arrays are views of the bytes.

    Args:
        content: the bytes.
        url: how errors name the file that they are from.
        crc32: the checksum that they must have; None where that is not known.
        offset: where they lie in that file, for errors.

    Raises:
        DatasetIndexError: they are damaged, of another version, or inconsistent.
    """
    try:
        if crc32 is not None and zlib.crc32(content) != crc32:
            raise _TableError(
                "its checksum is not the one in the list of shards, so it was changed or belongs to another"
            )
        return _table_in(content)
    except _TableError as exc:
        raise index_error(str(exc), url, offset) from exc


def index_error(why: str, url: str, offset: int | None = None) -> DatasetIndexError:
    """Return the error for a damaged file of an index."""
    return DatasetIndexError(f"{why}; rebuild the index with `streamload index`", url=url, offset=offset)


def _table_in(content: bytes) -> ShardTable:
    if len(content) < _HEADER.size:
        raise _TableError(f"a table is cut: {len(content)} bytes are there")
    magic, version, flags, shard_bytes, members, samples, key_bytes, about_bytes = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise _TableError("there is no table")
    if version != _TABLE_FORMAT:
        raise _TableError(f"a table of format {version}, and this release reads format {_TABLE_FORMAT}")
    has_crc32, has_labels = bool(flags & _CRC32), bool(flags & _LABELS)
    numbers = 2 * members + 2 * (samples + 1) + (samples if has_labels else 0)
    end = _HEADER.size + 8 * numbers + (4 if has_crc32 else 0) * members + 2 * members + key_bytes + about_bytes
    if shard_bytes > MAX_COUNT or end + -end % _ALIGNMENT != len(content):
        raise _TableError(f"a table of {len(content)} bytes is said to have {end}, of a shard of {shard_bytes}")
    ints = np.frombuffer(content, _INT64, numbers, _HEADER.size)
    starts = 2 * members
    keys, labels = starts + samples + 1, starts + 2 * (samples + 1)
    at = _HEADER.size + 8 * numbers
    crc32s = _view(content, _UINT32, members, at) if has_crc32 else None
    at += 4 * members if has_crc32 else 0
    fields, skipped = _about(content[end - about_bytes : end])
    table = ShardTable(
        shard_bytes=shard_bytes,
        fields=fields,
        member_offset=ints[:members],
        member_size=ints[members:starts],
        member_field=_view(content, _UINT16, members, at),
        sample_start=ints[starts:keys],
        key_bytes=_view(content, _UINT8, key_bytes, at + 2 * members),
        key_start=ints[keys:labels],
        member_crc32=crc32s,
        labels=ints[labels:] if has_labels else None,
        skipped=dict(skipped),
    )
    _check_table(table)
    return table


def _view(content: bytes, dtype: np.dtype[Any], count: int, start: int) -> NDArray[Any]:
    return np.frombuffer(content, dtype, count, start) if count else np.empty(0, dtype)


@lru_cache(64)
def _about(content: bytes) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Return the fields, and the skipped members by reason; nearly all shards of a dataset share them."""
    try:
        about = json.loads(content)
        fields, skipped = about["fields"], about["skipped"]
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise _TableError(f"its fields cannot be read ({exc})") from exc
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        raise _TableError("its fields are not a list of names")
    if not isinstance(skipped, dict) or not all(type(n) is int and 0 <= n <= MAX_COUNT for n in skipped.values()):
        raise _TableError("its skipped members are not counts by reason")
    return tuple(fields), tuple(skipped.items())


def _check_table(table: ShardTable) -> None:
    """Raise _TableError for a table that would point outside of its shard or of itself.

    The columns have the lengths that the header says. Edges are compared, not subtracted, since the difference of two
    large numbers may overflow; and counted, since `any` takes ten times as long for the table of a small shard.
    """
    members, offset, size = len(table.member_offset), table.member_offset, table.member_size
    starts, keys = table.sample_start, table.key_start
    if starts[0] != 0 or starts[-1] != members or count_nonzero(starts[1:] <= starts[:-1]):
        raise _TableError(f"its sample_start does not run from 0 to {members}")
    if keys[0] != 0 or keys[-1] != len(table.key_bytes) or count_nonzero(keys[1:] < keys[:-1]):
        raise _TableError(f"its key_start does not run from 0 to {len(table.key_bytes)}")
    if members:
        if count_nonzero((offset | size) < 0) or count_nonzero(size > table.shard_bytes - offset):
            raise _TableError(f"a member does not lie within the shard's {table.shard_bytes} bytes")
        if count_nonzero(table.member_field >= len(table.fields)):
            raise _TableError("a member has a field that is not among its fields")
