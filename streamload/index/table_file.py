"""Shard tables as `.npz` files: written with the same bytes for the same table, read without trusting them."""

from __future__ import annotations

import json
import zipfile
import zlib
from io import BytesIO
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError
from streamload.storage.local_files import open_regular, why_not_opened
from streamload.tar.table import ShardTable
from streamload.text import counted

__all__ = ["MAX_COUNT", "TABLE_FORMAT", "table_crc32", "table_from_npz", "table_to_npz"]

TABLE_FORMAT = 1
"""The version of the file's layout; a file of another version is refused."""

MAX_COUNT = 1 << 48
"""No shard has more bytes or samples; so the sums over all shards of a dataset fit into 63 bits."""

_DTYPES: dict[str, type[np.generic]] = {
    "member_offset": np.int64,
    "member_size": np.int64,
    "member_field": np.uint16,
    "sample_start": np.int64,
    "key_bytes": np.uint8,
    "key_start": np.int64,
    "member_crc32": np.uint32,
    "labels": np.int64,
}
_OPTIONAL = ("member_crc32", "labels")
_FILES = {f"{name}.npy": name for name in ("about", *_DTYPES)}


class _TableError(Exception):
    """What a table file holds does not make a table; the text says why."""


def table_to_npz(table: ShardTable, file: str | BinaryIO) -> None:
    """Write a table as an uncompressed `.npz`.

    The bytes depend on nothing but the table: `numpy.savez` dates every entry 1980-01-01.

    Args:
        table: what to write.
        file: a path, taken as it is, or a file open for writing.

    Raises:
        OSError: the file cannot be written.
    """
    if isinstance(file, str):
        with open(file, "wb") as opened:
            table_to_npz(table, opened)
        return
    about = {
        "format": TABLE_FORMAT,
        "shard_bytes": table.shard_bytes,
        "fields": table.fields,
        "skipped": dict(sorted(table.skipped.items())),
        "missing_end": table.missing_end,
    }
    arrays: dict[str, NDArray[Any]] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for name in _DTYPES:
        array = getattr(table, name)
        if array is not None:
            arrays[name] = array
    np.savez(file, allow_pickle=False, **arrays)


def table_crc32(table: ShardTable) -> int:
    """The checksum of the bytes that `table_to_npz` writes for a table."""
    content = BytesIO()
    table_to_npz(table, content)
    return zlib.crc32(content.getbuffer())


def table_from_npz(file: str | BinaryIO, url: str, crc32: int | None = None) -> ShardTable:
    """Read a table and check that it can be one: types, lengths, and that everything lies within the shard.

    What it takes of memory is in proportion to the file: nothing in it is compressed, and of what is in it besides
    nothing is read.

    Args:
        file: a path or a file open for reading.
        url: how errors name the file.
        crc32: the checksum that the file must have; None where that is not known.

    Raises:
        DatasetIndexError: the file is missing, cannot be read, is damaged, of another version, or inconsistent.
        MemoryError: there is not enough memory for it.
    """
    try:
        if not isinstance(file, str):
            return _table_of(_arrays_in(file.read(), crc32))
        with open(open_regular(file), "rb") as opened:
            return _table_of(_arrays_in(opened.read(), crc32))
    except FileNotFoundError as exc:
        raise DatasetIndexError("the index has no such file; rebuild it with `streamload index`", url=url) from exc
    except _TableError as exc:
        raise DatasetIndexError(f"{exc}; rebuild the index with `streamload index`", url=url) from exc
    except OSError as exc:
        if exc.errno is None:  # said by NumPy of what is in the file
            raise DatasetIndexError(
                f"not a readable index file ({exc}); rebuild the index with `streamload index`", url=url
            ) from exc
        raise DatasetIndexError(f"the index file cannot be read: {why_not_opened(exc)}", url=url) from exc
    except MemoryError as exc:
        raise MemoryError(f"no memory is left to read the index file {url!r}; free some, or use fewer workers") from exc
    except Exception as exc:  # of many kinds, from zipfile, NumPy's parser of headers and json
        raise DatasetIndexError(
            f"not a readable index file ({type(exc).__name__}: {exc}); rebuild the index with `streamload index`",
            url=url,
        ) from exc


def _arrays_in(content: bytes, crc32: int | None) -> dict[str, NDArray[Any]]:
    if crc32 is not None and zlib.crc32(content) != crc32:
        raise _TableError("its checksum is not the one in the list of shards, so it was changed or belongs to another")
    with zipfile.ZipFile(BytesIO(content)) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename in _FILES]
        if len({entry.filename for entry in entries}) != len(entries):
            raise _TableError("it has two members of one name")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise _TableError("a member is compressed, which none of an index is")
        if sum(entry.file_size for entry in entries) > len(content):
            raise _TableError("its members are longer than the file")
        return {_FILES[entry.filename]: _array_in(archive.read(entry)) for entry in entries}


def _array_in(content: bytes) -> NDArray[Any]:
    """The array in an npy file; as long as what is there, so no memory is taken for what a header claims."""
    file = BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise _TableError(f"a member is an npy file of version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 1 or dtype.hasobject or shape[0] * dtype.itemsize != len(content) - file.tell():
        raise _TableError(f"a member is said to be {dtype}{list(shape)}, and has {len(content)} bytes")
    return np.frombuffer(content, dtype, shape[0], file.tell()) if shape[0] else np.empty(0, dtype)


def _table_of(arrays: dict[str, NDArray[Any]]) -> ShardTable:
    about = json.loads(_take(arrays, "about", np.uint8).tobytes())
    if not isinstance(about, dict) or about.get("format") != TABLE_FORMAT:
        found = about.get("format") if isinstance(about, dict) else None
        raise _TableError(f"an index file of format {found!r}, and this release reads format {TABLE_FORMAT}")
    shard_bytes, fields, skipped = about.get("shard_bytes"), about.get("fields"), about.get("skipped")
    if not isinstance(shard_bytes, int) or not _is_count(shard_bytes):
        raise _TableError(f"{shard_bytes!r} bytes is not a shard's size")
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        raise _TableError("its fields are not a list of names")
    if not isinstance(skipped, dict) or not all(_is_count(count) for count in skipped.values()):
        raise _TableError("its skipped members are not counts by reason")
    columns = {
        name: _take(arrays, name, dtype) for name, dtype in _DTYPES.items() if name in arrays or name not in _OPTIONAL
    }
    table = ShardTable(
        shard_bytes=shard_bytes,
        fields=tuple(fields),
        skipped=skipped,
        missing_end=about.get("missing_end") is True,
        **columns,
    )
    _check(table)
    return table


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _take(arrays: dict[str, NDArray[Any]], name: str, dtype: type[np.generic]) -> NDArray[Any]:
    array = arrays.get(name)
    if array is None:
        raise _TableError(f"it has no {name}")
    if array.dtype != dtype or array.ndim != 1:
        raise _TableError(f"its {name} is {array.dtype}{list(array.shape)}")
    return array


def _check(table: ShardTable) -> None:
    """Refuse a table that would point outside of its shard or of itself."""
    members, offset, size = len(table.member_offset), table.member_offset, table.member_size
    for name in ("member_size", "member_field", "member_crc32"):
        array = getattr(table, name)
        if array is not None and len(array) != members:
            raise _TableError(f"its {name} has {counted(len(array), 'entry')} for {counted(members, 'member')}")
    _check_edges("sample_start", table.sample_start, members, smallest=1)
    _check_edges("key_start", table.key_start, len(table.key_bytes), smallest=0)
    samples = len(table)
    if len(table.key_start) != samples + 1 or (table.labels is not None and len(table.labels) != samples):
        raise _TableError(f"its keys or labels are not as many as its {counted(samples, 'sample')}")
    if members:
        # Compared this way round, since the sum of two large numbers may overflow.
        if min(int(offset.min()), int(size.min())) < 0 or (size > table.shard_bytes - offset).any():
            raise _TableError(f"a member does not lie within the shard's {table.shard_bytes} bytes")
        if int(table.member_field.max()) >= len(table.fields):
            raise _TableError("a member has a field that is not among its fields")


def _check_edges(name: str, edges: NDArray[np.int64], end: int, *, smallest: int) -> None:
    if not len(edges) or edges[0] != 0 or edges[-1] != end or (np.diff(edges) < smallest).any():
        raise _TableError(f"its {name} does not run from 0 to {end}")
