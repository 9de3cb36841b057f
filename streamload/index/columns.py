"""Columns of a dataset: for each sample a value by which samples are selected, from the index or from a scan.

Keys, labels, sizes and which fields there are follow from the shards' tables. Further columns of metadata are kept in a
file of the index, `columns.npz`: docs/index-format.md.
"""

from __future__ import annotations

import asyncio
import difflib
import io
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.errors import DatasetIndexError
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import Listing
from streamload.index.streamed_table import stream_shard
from streamload.index.table_reader import TableReader
from streamload.index.tables import Tables
from streamload.limits import SMALL_REQUESTS
from streamload.storage.local_storage import storage_for
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of
from streamload.tar.extensions import KIND_OF, Kind
from streamload.tar.scan import LABEL_FIELD, scan_file
from streamload.tar.table import MISSING, ShardTable
from streamload.text import counted, listed

COLUMNS_FILE = "columns.npz"
KEY, KEY_HASH, LABEL, SIZE, PRESENT = "key", "key hash", "label", "size.", "has."
"""Names of columns that no file is needed for; after the last two the field follows."""

_NOT_OF_FIELDS = (KEY, KEY_HASH, LABEL)
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
# What a condition may name without columns of metadata, besides `size.<field>` and `"<field>"`.
_BUILT_IN = ("key", "label", "class_name", "fraction")

_SHARDS, _CRC32, _STARTS = "shards", "table_crc32", "starts"
_OF_SAMPLES = "column:"

Columns = dict[str, NDArray[Any]]


def _crc32s(index: DatasetIndex) -> list[int]:
    """The checksums of the tables; 0 where an old index has none."""
    return [crc32 or 0 for crc32 in index.shards.crc32s]


def pack_columns(index: DatasetIndex, columns: Mapping[str, NDArray[Any]]) -> bytes:
    """The file with the columns of an index, an archive of NumPy arrays.

    Args:
        index: its shards, all of which have a table.
        columns: for each name the values of all samples, in the order of the shards: numbers, or strings.
    """
    starts = np.concatenate([[0], np.cumsum(index.shards.samples, dtype=np.int64)])
    arrays: dict[str, Any] = {
        _SHARDS: np.array(list(index.shards.names), dtype=np.str_),
        _CRC32: np.array(_crc32s(index), np.uint32),
        _STARTS: starts,
    }
    file = io.BytesIO()
    arrays |= {f"{_OF_SAMPLES}{name}": values for name, values in columns.items()}
    np.savez(file, **arrays)
    return file.getvalue()


def unpack_columns(content: bytes | None, index: DatasetIndex) -> Columns:
    """The columns in a file of this index; none where there is none, or it is of other shards or cannot be read."""
    if not content:
        return {}
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            if arrays[_SHARDS].tolist() != list(index.shards.names) or arrays[_CRC32].tolist() != _crc32s(index):
                return {}
            return {
                name.removeprefix(_OF_SAMPLES): arrays[name] for name in arrays.files if name.startswith(_OF_SAMPLES)
            }
    except (ValueError, KeyError, OSError, EOFError, zlib.error):
        return {}


def read_columns(listing: Listing, storages: Storages, names: Sequence[str]) -> tuple[Columns, NDArray[np.int64]]:
    """Some columns of all samples. Blocks; shards that no index knows are scanned, and that is remembered.

    Args:
        listing: the shards.
        storages: where they lie.
        names: of the columns.

    Returns:
        The columns, in the order of the listing, and the samples of each shard, int64[shards].

    Raises:
        DatasetIndexError: there is no such column, an index is damaged, or some sample has no label.
        ShardFormatError: a shard is damaged.
        StorageError: a shard or an index cannot be read.
    """
    with ThreadPoolExecutor(1) as thread:  # the caller may be in a loop of its own
        return thread.submit(asyncio.run, _read(listing, storages.copy(), names)).result()


async def _read(listing: Listing, storages: Storages, names: Sequence[str]) -> tuple[Columns, NDArray[np.int64]]:
    stored = [name for name in names if name not in _NOT_OF_FIELDS and not name.startswith((SIZE, PRESENT))]
    others = [name for name in names if name not in stored]
    try:
        found = await asyncio.to_thread(_stored, listing, storages, stored) if stored else {}
        if not others and listing.counts is not None:
            return found, np.array(listing.counts, np.int64)
        tables = Tables(listing, storages=storages)
        room = asyncio.Semaphore(SMALL_REQUESTS)

        fields: set[str] = set()

        async def of_shard(shard: int) -> list[Any]:
            async with room:
                table = await _table(tables, storages, shard)
                fields.update(table.fields)
                return [len(table), *(_values(table, name, tables.url(shard)) for name in others)]

        counts, *values = zip(*await asyncio.gather(*map(of_shard, range(len(listing.shards)))), strict=True)
    finally:
        await storages.aclose()
    for field in (name.removeprefix(SIZE).removeprefix(PRESENT) for name in others if name not in _NOT_OF_FIELDS):
        if field not in fields:
            raise DatasetIndexError(
                f"where= asks for the field {field!r}, which no sample has; there are {listed(sorted(fields))}",
                url=listing.shards[0].url,
            )
    joined = {name: np.concatenate(parts) for name, parts in zip(others, values, strict=True)}
    return {**found, **joined}, np.array(counts, np.int64)


async def _table(tables: Tables, storages: Storages, shard: int) -> ShardTable:
    table = await tables.load(shard)
    if table is not None:
        return table
    url = tables.url(shard)
    if storages.is_local(url) and compression_of(url) is None:
        table = await asyncio.to_thread(_scan, url)
    else:
        table = (await stream_shard(storages.for_url(url), url, every_byte=False)).table
    tables.add(shard, table)
    return table


def _scan(url: str) -> ShardTable:
    descriptor = storage_for(url).open(url)
    try:
        return scan_file(descriptor, os.fstat(descriptor).st_size, url)
    finally:
        os.close(descriptor)


def _values(table: ShardTable, name: str, url: str) -> NDArray[Any]:
    if name == KEY:
        return np.array(table.keys(), dtype=object)
    if name == KEY_HASH:
        return _key_hashes(table)
    if name == LABEL:
        if table.labels is None and len(table):
            raise DatasetIndexError(
                "label= needs the labels that an index holds, and there are none of this shard: not every sample has a "
                "whole number as cls, or no index was made with `streamload index`",
                url=url,
            )
        return np.empty(0, np.int64) if table.labels is None else table.labels
    members = table.column([name.removeprefix(SIZE).removeprefix(PRESENT)])
    present: NDArray[np.bool_] = members != MISSING
    if name.startswith(PRESENT):
        return present
    sizes = np.full(len(table), np.nan)
    sizes[present] = table.member_size[members[present]]
    return sizes


def _key_hashes(table: ShardTable) -> NDArray[np.uint64]:
    """For each key the polynomial of its bytes at an odd number, modulo 2**64, without a string for each of them."""
    lengths = np.diff(table.key_start)
    if not len(lengths):
        return np.empty(0, np.uint64)
    within = np.arange(len(table.key_bytes)) - np.repeat(table.key_start[:-1], lengths)
    powers = np.cumprod(np.full(int(lengths.max()) + 1, _HASH_BASE))
    terms = np.append((table.key_bytes.astype(np.uint64) + np.uint64(1)) * powers[within], np.uint64(0))
    return np.add.reduceat(terms, table.key_start[:-1]) * (lengths > 0)


def _stored(listing: Listing, storages: Storages, names: Sequence[str]) -> Columns:
    """Columns of metadata; those of shards that have been written since are not taken for theirs."""
    reader = TableReader(storages)
    folders = dict.fromkeys(folder for folder in listing.index_of if folder is not None)
    files = {folder: _File(folder, reader) for folder in folders}
    found: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for shard, folder in zip(listing.shards, listing.index_of, strict=True):
        file = None if folder is None else files[folder]
        missing = [name for name in names if file is None or name not in file.names]
        if file is None or missing:
            raise DatasetIndexError(_no_column(missing, file), url=shard.url)
        for name in names:
            found[name].append(file.values(shard.name, name, shard.url))
    return {name: np.concatenate(parts) for name, parts in found.items()}


class _File:
    """The columns of one index.

    Attributes:
        fields: of its shards.
        names: of the columns.
    """

    def __init__(self, folder: str, reader: TableReader) -> None:
        self._url = f"{folder}/{COLUMNS_FILE}"
        self._index = reader.index(folder)
        self.fields = self._index.fields
        self._arrays: dict[str, NDArray[Any]] = {}
        content = reader.read_file(folder, COLUMNS_FILE)
        try:
            if content:
                with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                    self._arrays = {name: arrays[name] for name in arrays.files}
            self.names = sorted(each.removeprefix(_OF_SAMPLES) for each in self._arrays if each.startswith(_OF_SAMPLES))
            names = self._arrays.get(_SHARDS, np.empty(0, np.str_)).tolist()
            starts = self._arrays.get(_STARTS, np.zeros(1, np.int64)).tolist()
            self._places = dict(zip(names, zip(starts, starts[1:], self._crc32s(), strict=False), strict=True))
        except (ValueError, KeyError, OSError, EOFError, zlib.error) as exc:
            raise DatasetIndexError(
                f"the columns cannot be read ({exc}); make them again with `streamload index` and its --columns",
                url=self._url,
            ) from exc

    def values(self, shard_name: str, name: str, url: str) -> NDArray[Any]:
        """A column, one of `names`, of one shard."""
        column = self._arrays[f"{_OF_SAMPLES}{name}"]
        entry = self._index.find(shard_name)
        start, end, crc32 = self._places.get(shard_name, (0, -1, -1))
        if entry is None or entry.table is None or entry.table.crc32 != crc32 or end - start != entry.samples:
            raise DatasetIndexError(
                f"the column {name!r} has no values of this shard, which is newer; "
                f"{counted(len(self._places), 'shard')} have them; make them again with `streamload index` and its "
                "--columns",
                url=url,
            )
        return column[start:end]

    def _crc32s(self) -> list[int]:
        found: list[int] = self._arrays.get(_CRC32, np.empty(0, np.uint32)).tolist()
        return found


def _no_column(missing: Sequence[str], file: _File | None) -> str:
    """Which column is missing, what may be meant, and what there is; `file` is None for a shard in no index."""
    hints = {name: _hint(name, file) for name in missing}
    name = next((name for name in missing if hints[name]), missing[0])
    hint, kept = (f" ({hints[name]})", "json:NAME") if hints[name] else ("", f"json:{name}")
    if (place := _place_in_json(name, file)) is not None:
        kept = ":".join(place)
    if file is None:
        has = "this shard is in no index"
    else:
        has = f"the index has {listed(file.names) or 'no columns of metadata'}"
    return (
        f'there is no column {name!r}{hint}: {has}; {", ".join(_BUILT_IN)}, size.<field> and "<field>" are built in, '
        f"and others are kept in an index: `streamload index --columns {kept}`"
    )


def _fields(file: _File | None) -> tuple[str, ...]:
    """The fields of an index; of a shard in none they are not known, so what fields are often called."""
    return tuple(KIND_OF) if file is None else file.fields


def _place_in_json(name: str, file: _File | None) -> tuple[str, str] | None:
    """The field that a name begins with, and the path in it; None where no field with JSON is named."""
    for field in _fields(file):
        path = name.removeprefix(f"{field}.")
        if path not in (name, "size") and KIND_OF.get(field.rpartition(".")[2]) is Kind.JSON:
            return field, path
    return None


def _hint(name: str, file: _File | None) -> str:
    """What may be meant by the name of a column that is not there; empty where nothing is like it."""
    fields = _fields(file)
    if name == LABEL_FIELD:
        return f"write {LABEL}, which is the integer in the field {name}"
    if name in fields:
        return f'for the field {name}, write "{name}" in quotes for its presence, {SIZE}{name} for its size'
    field = name.removesuffix(".size")
    if field != name and field in fields:
        return f"did you mean {SIZE + field!r}?"
    if (place := _place_in_json(name, file)) is not None:
        return f"write {place[1]}: a column from {place[0]} is named by its path within that field"
    names = () if file is None else (*file.names, *(f"{SIZE}{each}" for each in fields))
    alike = difflib.get_close_matches(name, [*names, *_BUILT_IN], 1)
    return f"did you mean {alike[0]!r}?" if alike else ""
