"""Read columns of a dataset, for selecting or weighting samples, and the names of classes.

Keys, labels, sizes and presence of fields are derived from the shards' tables. Metadata is stored in the index
(`columns.npz`), the names of classes in `classes.json` beside the shards.
"""

from __future__ import annotations

import asyncio
import difflib
import io
import json
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamload.arguments import did_you_mean
from streamload.errors import DatasetIndexError, ShardChangedError, without_secrets
from streamload.index.dataset import Dataset
from streamload.index.dataset_index import MOST_INDEX_BYTES, DatasetIndex
from streamload.index.listing import Listing
from streamload.index.shard_names import locked_folder, read_if_there
from streamload.index.streamed_table import read_shard
from streamload.limits import SMALL_REQUESTS
from streamload.order.sampling import group_sizes
from streamload.storage.protocol import UNKNOWN_BYTES, Storage
from streamload.storage.storages import Storages
from streamload.tar.scan import LABEL_FIELD
from streamload.tar.table import MISSING, ShardTable, starts_of
from streamload.text import listed

COLUMNS_FILE = "columns.npz"
KEY, KEY_HASH, LABEL, SIZE, PRESENT = "key", "key hash", "label", "size.", "has."
"""Names of columns that follow from tables; a field follows the last two."""

_NOT_OF_FIELDS = (KEY, KEY_HASH, LABEL)
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)
# Names in conditions that need no metadata columns, besides `size.<field>` and `"<field>"`.
_BUILT_IN = ("key", "label", "class_name", "fraction")

_SHARDS, _CRC32, _STARTS = "shards", "table_crc32", "starts"
_OF_SAMPLES = "column:"
_IN_NO_INDEX = "this shard is in no index"
_UNREADABLE = (ValueError, KeyError, OSError, EOFError, zlib.error)

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The labels of a dataset.

    Attributes:
        values: the distinct labels, ascending.
        number: unsigned[N], each sample's label as an index into `values`, in the order of the listing.
    """

    values: tuple[int, ...]
    number: NDArray[np.unsignedinteger]

    def numbers_in(self, other: Labels) -> NDArray[np.unsignedinteger]:
        """Return each sample's label, unsigned[N], as an index into the values of `other`."""
        if other is self:
            return self.number
        dtype = np.min_scalar_type(len(other.values))
        numbers: NDArray[np.unsignedinteger] = np.searchsorted(other.values, self.values).astype(dtype)[self.number]
        return numbers

    def of(self, selected: NDArray[np.bool_]) -> Labels:
        """Return the labels of the selected samples, bool[N]."""
        numbers = self.number[selected]
        occurring = np.flatnonzero(group_sizes(numbers, len(self.values)))
        dtype = np.min_scalar_type(max(0, len(occurring) - 1))
        values = tuple(self.values[number] for number in occurring.tolist())
        return Labels(values, np.searchsorted(occurring, np.arange(len(self.values))).astype(dtype)[numbers])


def read_labels(listing: Listing, storages: Storages) -> Labels:
    """Read the labels of all samples from the index. Blocks.

    Raises:
        DatasetIndexError: a shard's index is missing, damaged, without labels, or of other shards.
        StorageError: an index cannot be read.
    """
    for shard in listing.shards:
        if shard.index_folder is None:
            raise _no_labels(_IN_NO_INDEX, shard.url)

    labels = read_columns(listing, storages, [LABEL])[0][LABEL]
    values, number = np.unique(labels, return_inverse=True)
    return Labels(tuple(values.tolist()), number.astype(np.min_scalar_type(max(0, len(values) - 1))))


def _no_labels(why: str, url: str) -> DatasetIndexError:
    return DatasetIndexError(
        f"this needs the labels that an index holds, and {why}; write the class of each sample as a field "
        "cls, make the index with `streamload index` (or pack with shardify), or give weights= as one number a sample",
        url=url,
    )


def read_columns(listing: Listing, storages: Storages, names: Sequence[str]) -> tuple[Columns, NDArray[np.int64]]:
    """Read some columns of all samples. Blocks; shards without an index are scanned.

    Returns:
        The columns, in the order of the listing, and the samples of each shard, int64[shards].

    Raises:
        DatasetIndexError: a column does not exist, an index is damaged, or a sample has no label.
        ShardFormatError: a shard is damaged.
        StorageError: a shard or an index cannot be read, or a shard has another size than when it was listed.
    """
    stored = [name for name in names if name not in _NOT_OF_FIELDS and not name.startswith((SIZE, PRESENT))]
    others = [name for name in names if name not in stored]
    columns = _stored(listing, storages, stored) if stored else {}
    if not others and listing.counts is not None:
        return columns, np.array(listing.counts, np.int64)
    fields: set[str] = set()
    dataset, room, left = Dataset(listing, storages.copy()), asyncio.Semaphore(SMALL_REQUESTS), threading.Event()

    async def of_shard(shard: int) -> list[Any]:
        url = dataset.url(shard)
        async with room:
            if left.is_set():
                raise asyncio.CancelledError
            table = await dataset.load(shard)
            if table is None:
                read = await read_shard(dataset.storages.for_url(url), url, labels=LABEL in names)
                if read.bytes != listing.shards[shard].bytes != UNKNOWN_BYTES:
                    raise ShardChangedError("the shard was cut or changed since it was listed; list it anew", url=url)
                table = read.table
            fields.update(table.fields)
            return [len(table), *(_values(table, name, url) for name in others)]

    async def read_all() -> list[list[Any]]:
        try:
            return await asyncio.gather(*map(of_shard, range(len(listing.shards))))
        finally:
            await dataset.storages.aclose()

    with ThreadPoolExecutor(1) as thread:  # the caller may be in a running loop
        try:
            counts, *values = zip(*thread.submit(asyncio.run, read_all()).result(), strict=True)
        finally:
            left.set()  # Ctrl-C does not wait for the shards that are left
    for field in (name.removeprefix(SIZE).removeprefix(PRESENT) for name in others if name not in _NOT_OF_FIELDS):
        if field not in fields:
            raise DatasetIndexError(
                f"where= asks for the field {field!r}, which no sample has; there are {listed(sorted(fields))}",
                url=listing.shards[0].url,
            )
    columns |= {name: np.concatenate(parts) for name, parts in zip(others, values, strict=True)}
    return columns, np.array(counts, np.int64)


def _values(table: ShardTable, name: str, url: str) -> NDArray[Any]:
    if name == KEY:
        return np.array(table.keys(), dtype=object)
    if name == KEY_HASH:
        return _key_hashes(table)
    if name == LABEL:
        if table.labels is None and len(table):
            raise _no_labels("there are none of this shard, since not every sample has a whole number as cls", url)
        return np.empty(0, np.int64) if table.labels is None else table.labels
    members = table.column([name.removeprefix(SIZE).removeprefix(PRESENT)])
    present: NDArray[np.bool_] = members != MISSING
    if name.startswith(PRESENT):
        return present
    sizes = np.full(len(table), np.nan)
    sizes[present] = table.member_size[members[present]]
    return sizes


def _key_hashes(table: ShardTable) -> NDArray[np.uint64]:
    """Hash each key: the polynomial of its bytes at an odd number, modulo 2**64."""
    lengths = np.diff(table.key_start)
    if not len(lengths):
        return np.empty(0, np.uint64)
    within = np.arange(len(table.key_bytes)) - np.repeat(table.key_start[:-1], lengths)
    powers = np.cumprod(np.full(int(lengths.max()) + 1, _HASH_BASE))
    terms = np.append((table.key_bytes.astype(np.uint64) + np.uint64(1)) * powers[within], np.uint64(0))
    return np.add.reduceat(terms, table.key_start[:-1]) * (lengths > 0)


# -- the file with columns of metadata -----------------------------------------------------------------------------


def update_columns(storage: Storage, index: DatasetIndex, columns: Mapping[str, NDArray[Any]]) -> None:
    """Add or replace columns of all samples of an index in its file of columns, an archive of NumPy arrays.

    Columns in a file that is damaged or of other shards are dropped.

    Raises:
        StorageError: the file cannot be read or written.
    """
    url, names = f"{index.folder}/{COLUMNS_FILE}", [entry.name for entry in index.shards]
    with locked_folder(os.path.dirname(index.folder)):
        try:
            kept, rows = _columns_in(read_if_there(storage, url, MOST_INDEX_BYTES), index)
        except _UNREADABLE:
            kept, rows = {}, {}
        arrays: dict[str, Any] = {
            _SHARDS: np.array(names, dtype=np.str_),
            _CRC32: np.array([entry.table_crc32 for entry in index.shards], np.uint32),
            _STARTS: starts_of([entry.samples for entry in index.shards]),
        }
        columns = {**(kept if [*rows] == names else {}), **columns}
        file = io.BytesIO()
        arrays |= {f"{_OF_SAMPLES}{name}": values for name, values in columns.items()}
        np.savez(file, **arrays)
        storage.write(url, file.getvalue())


def _columns_in(content: bytes | None, index: DatasetIndex) -> tuple[Columns, dict[str, slice]]:
    """Return the columns in a file, and the rows of each shard whose table has not changed since."""
    if not content:
        return {}, {}
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    shards, starts, crc32s = (arrays.pop(name).tolist() for name in (_SHARDS, _STARTS, _CRC32))
    rows = {}
    for name, start, end, crc32 in zip(shards, starts[:-1], starts[1:], crc32s, strict=True):
        entry = index.find(name)
        if entry is not None and (entry.table_crc32, entry.samples) == (crc32, end - start):
            rows[name] = slice(start, end)
    return {name.removeprefix(_OF_SAMPLES): values for name, values in arrays.items()}, rows


def _stored(listing: Listing, storages: Storages, names: Sequence[str]) -> Columns:
    folders = dict.fromkeys(shard.index_folder for shard in listing.shards)
    files = {folder: _read_columns(listing.indexes[folder], storages) for folder in folders if folder is not None}
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for shard in listing.shards:
        fields, columns, rows = files.get(shard.index_folder or "", (None, {}, {}))
        for name in names:
            if name not in columns:
                raise DatasetIndexError(_no_column(name, fields, sorted(columns)), url=shard.url)
            if shard.name not in rows:
                raise DatasetIndexError(
                    f"the column {name!r} has no values of this shard, which is newer; make the columns again with "
                    "`streamload index` and its --columns",
                    url=shard.url,
                )
            parts[name].append(columns[name][rows[shard.name]])
    return {name: np.concatenate(each) for name, each in parts.items()}


def _read_columns(index: DatasetIndex, storages: Storages) -> tuple[tuple[str, ...], Columns, dict[str, slice]]:
    url = f"{index.folder}/{COLUMNS_FILE}"
    try:
        return index.fields, *_columns_in(read_if_there(storages.for_url(url), url, MOST_INDEX_BYTES), index)
    except _UNREADABLE as exc:
        raise DatasetIndexError(
            f"the columns cannot be read ({exc}); make them again with `streamload index` and its --columns",
            url=url,
        ) from exc


def _no_column(name: str, fields: Sequence[str] | None, columns: Sequence[str]) -> str:
    sizes = [f"{SIZE}{field}" for field in fields or ()]
    if name == LABEL_FIELD:
        hint = f" (write {LABEL}, which is the integer in the field {name})"
    elif name in (fields or ()):
        hint = f' (for the field {name}, write "{name}" in quotes for its presence, {SIZE}{name} for its size)'
    else:
        hint = did_you_mean(name, [*columns, *sizes, *_BUILT_IN], 0.5)
    has = f"the index has {listed(columns) or 'no columns of metadata'}" if fields is not None else _IN_NO_INDEX
    return (
        f'there is no column {name!r}{hint}: {has}; {", ".join(_BUILT_IN)}, size.<field> and "<field>" are built in, '
        "and others are kept in an index and named by their path in the JSON: `streamload index --columns json:NAME`"
    )


CLASSES_FILE = "classes.json"
MOST_CLASSES_BYTES = 256 << 20

_NEAR = 3
_SHOWN = 20


def read_class_names(folders: Sequence[str], storages: Storages) -> tuple[str, ...] | None:
    """Read the names of classes by number; None if no folder has a `classes.json`. Blocks.

    Raises:
        DatasetIndexError: a file is damaged, or two folders have different names.
        StorageError: a file cannot be read.
    """
    urls = [f"{folder.rstrip('/')}/{CLASSES_FILE}" for folder in folders]

    def names_at(url: str) -> tuple[str, ...] | None:
        content = read_if_there(storages.for_url(url), url, MOST_CLASSES_BYTES)
        return None if content is None else parse_class_names(content, url)

    with ThreadPoolExecutor(SMALL_REQUESTS, "streamload-classes") as threads:
        contents = list(threads.map(names_at, urls))
    existing = [(url, names) for url, names in zip(urls, contents, strict=True) if names is not None]
    for other, other_names in existing[1:]:
        first, names = without_secrets(existing[0][0]), existing[0][1]
        for label, pair in enumerate(zip_longest(other_names, names)):
            if pair[0] != pair[1]:
                here, there = (f"is {name!r}" if name is not None else "has no name" for name in pair)
                raise DatasetIndexError(
                    f"the same label stands for different classes: {label} {here} here, and {there} in {first!r}; pack "
                    f"them with one numbering (`shardify --classes {first}`), read each apart, or leave cls out of "
                    "fields. In a Mixture, a Portion with a transform of its own may give its labels another meaning",
                    url=other,
                )
    return existing[0][1] if existing else None


def parse_class_names(content: bytes, url: str) -> tuple[str, ...]:
    """Parse the content of a `classes.json`; DatasetIndexError if it is damaged."""
    try:
        names = json.loads(content)["classes"]
    except (ValueError, TypeError, KeyError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DatasetIndexError('it is not as shardify writes it: {"classes": ["name", ...]}', url=url)
    return tuple(names)


def unknown_class(name: str, names: Sequence[str]) -> str:
    """Describe an unknown class, with similar names or the existing ones, as the end of a message."""
    missing = f"{name!r}, which classes.json does not have;"
    alike = difflib.get_close_matches(name, names, _NEAR)
    if not alike:
        lowered = {other.lower(): other for other in names}
        alike = [lowered[found] for found in difflib.get_close_matches(name.lower(), list(lowered), _NEAR)]
    if alike:
        return f"{missing} did you mean {' or '.join(map(repr, alike))}?"
    return f"{missing} the classes are {', '.join(map(repr, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''}"
