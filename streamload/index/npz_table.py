"""Tables as the indexes of format 1 have them: one `.npz` a shard. They are read, and no longer written."""

from __future__ import annotations

import json
import zipfile
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError
from streamload.index.table_file import (
    MAX_COUNT,
    WRONG_CHECKSUM,
    TableError,
    check_table,
    checked_fields,
    checked_skipped,
    index_error,
)
from streamload.tar.table import ShardTable

__all__ = ["table_from_npz"]

_FORMAT = 1
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


def table_from_npz(content: bytes, url: str, crc32: int | None = None) -> ShardTable:
    """Read a table and check that it can be one: types, lengths, and that everything lies within the shard.

    What it takes of memory is in proportion to the file: nothing in it is compressed, and of what is in it besides
    nothing is read.

    Args:
        content: the file.
        url: how errors name it.
        crc32: the checksum that it must have; None where that is not known.

    Raises:
        DatasetIndexError: the file is damaged, of another version, or inconsistent.
    """
    try:
        return _table_of(_arrays_in(content, crc32))
    except TableError as exc:
        raise index_error(str(exc), url) from exc
    except (MemoryError, DatasetIndexError):
        raise
    except Exception as exc:  # of many kinds, from zipfile, NumPy's parser of headers and json
        raise index_error(f"not a readable index file ({type(exc).__name__}: {exc})", url) from exc


def _arrays_in(content: bytes, crc32: int | None) -> dict[str, NDArray[Any]]:
    if crc32 is not None and zlib.crc32(content) != crc32:
        raise TableError(WRONG_CHECKSUM)
    with zipfile.ZipFile(BytesIO(content)) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename in _FILES]
        if len({entry.filename for entry in entries}) != len(entries):
            raise TableError("it has two members of one name")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise TableError("a member is compressed, which none of an index is")
        if sum(entry.file_size for entry in entries) > len(content):
            raise TableError("its members are longer than the file")
        return {_FILES[entry.filename]: _array_in(archive.read(entry)) for entry in entries}


def _array_in(content: bytes) -> NDArray[Any]:
    """The array in an npy file; as long as what is there, so no memory is taken for what a header claims."""
    file = BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise TableError(f"a member is an npy file of version {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 1 or dtype.hasobject or shape[0] * dtype.itemsize != len(content) - file.tell():
        raise TableError(f"a member is said to be {dtype}{list(shape)}, and has {len(content)} bytes")
    return np.frombuffer(content, dtype, shape[0], file.tell()) if shape[0] else np.empty(0, dtype)


def _table_of(arrays: dict[str, NDArray[Any]]) -> ShardTable:
    about = json.loads(_take(arrays, "about", np.uint8).tobytes())
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise TableError("an npz file of an unknown format")
    shard_bytes = about.get("shard_bytes")
    if type(shard_bytes) is not int or not 0 <= shard_bytes <= MAX_COUNT:
        raise TableError(f"{shard_bytes!r} bytes is not a shard's size")
    columns = {
        name: _take(arrays, name, dtype) for name, dtype in _DTYPES.items() if name in arrays or name not in _OPTIONAL
    }
    table = ShardTable(
        shard_bytes=shard_bytes,
        fields=checked_fields(about.get("fields")),
        skipped=checked_skipped(about.get("skipped")),
        missing_end=about.get("missing_end") is True,
        **columns,
    )
    check_table(table)
    return table


def _take(arrays: dict[str, NDArray[Any]], name: str, dtype: type[np.generic]) -> NDArray[Any]:
    array = arrays.get(name)
    if array is None:
        raise TableError(f"it has no {name}")
    if array.dtype != dtype or array.ndim != 1:
        raise TableError(f"its {name} is {array.dtype}{list(array.shape)}")
    return array
