"""Columns of metadata for an index: from a JSON field of each sample, or from a table beside each shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streamload
from streamload.errors import ShardNotFoundError
from streamload.index.columns import COLUMNS_FILE, KEY, LABEL, pack_columns, unpack_columns
from streamload.index.dataset_index import INDEX_FILE, DatasetIndex
from streamload.index.index_writer import IndexFolder
from streamload.index.shard_names import folder_and_name
from streamload.pack.failures import UsageError
from streamload.sampling.expression import CLASS_NAME, FRACTION
from streamload.storage.storages import Storages
from streamload.text import counted, listed

_TABLE = "parquet"
_BATCH_SIZE = 512
_MOST_TABLE_BYTES = 1 << 30
_LONGEST_STRING = 256
_DTYPES: Mapping[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}


def parse_columns(text: str) -> dict[str, list[str]]:
    """Return the names of `json:aesthetic,json:width,parquet:similarity` by their source.

    A source is a field that holds JSON objects, whose names may be dotted paths, or "parquet".

    Raises:
        UsageError: the text is not written like that.
    """
    sources: dict[str, list[str]] = {}
    for entry in text.split(","):
        source, _, name = entry.strip().partition(":")
        if not (source and name):
            raise UsageError(f"--columns {text!r}: write SOURCE:NAME,..., such as json:aesthetic,parquet:similarity")
        if name in (KEY, LABEL, CLASS_NAME) or name.split(".")[0] in (FRACTION, "size", "has"):
            raise UsageError(f"--columns {text!r}: {name!r} has a meaning of its own in conditions; rename the column")
        if any(name in names for names in sources.values()):
            raise UsageError(f"--columns {text!r} has a name twice; columns are known by their names alone")
        sources.setdefault(source, []).append(name)
    return sources


def write_columns(
    sources: Mapping[str, Sequence[str]], place: IndexFolder, urls: Sequence[str], storage_options: dict[str, Any]
) -> None:
    """Collect the values of all samples of an index, and write them beside it.

    Args:
        sources: as `parse_columns` returns them.
        place: the index.
        urls: all shards of the index.
        storage_options: of the shards' storages.

    Raises:
        UsageError: the index has other shards as well, or a column has numbers and strings.
        StreamloadError: a shard or a table cannot be read.
    """
    index = DatasetIndex.from_json(place.read(INDEX_FILE) or b"", place.folder)
    by_name = {folder_and_name(url)[1]: url for url in urls}
    others = [shard.name for shard in index.shards if shard.name not in by_name]
    if others:
        more = f"{counted(len(others), 'shard')} more, such as {others[0]!r}"
        raise UsageError(f"--columns: the index has {more}; name them too")
    ordered = [by_name[shard.name] for shard in index.shards]
    columns = unpack_columns(place.read(COLUMNS_FILE), index)
    for source, names in sources.items():
        with streamload.StreamLoader(
            ordered,
            _BATCH_SIZE,
            fields=("__key__",) if source == _TABLE else (f"{source}?",),
            collate_fn=list,
            index=place.folder,
            rank=0,
            world_size=1,
            storage_options=storage_options or None,
        ) as loader:
            values = (value for batch in loader for (value,) in batch)
            if source == _TABLE:
                counts = [shard.samples for shard in index.shards]
                rows = list(_rows_of_tables(ordered, counts, values, names, Storages(storage_options)))
            else:
                rows = [tuple(_at(value, name) for name in names) for value in values]
        columns |= {name: _column(name, column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    with place.writing():
        place.write(COLUMNS_FILE, pack_columns(index, columns))


def _at(value: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _rows_of_tables(
    urls: Sequence[str], counts: Sequence[int], keys: Iterator[str], names: Sequence[str], storages: Storages
) -> Iterator[tuple[Any, ...]]:
    """Yield each sample's row of the table beside its shard, joined by the table's column `key`."""
    try:
        from pyarrow import BufferReader, parquet
    except ImportError as exc:
        raise UsageError("--columns parquet:... needs pyarrow: pip install 'streamload[parquet]'") from exc
    for shard_url, count in zip(urls, counts, strict=True):
        url = f"{shard_url.removesuffix('.tar')}.{_TABLE}"
        try:
            with parquet.ParquetFile(
                BufferReader(storages.for_url(url).read_bytes(url, most_bytes=_MOST_TABLE_BYTES))
            ) as file:
                for name in ("key", *names):
                    if name not in file.schema_arrow.names:
                        raise UsageError(f"{url!r} has no column {name!r}; it has {listed(file.schema_arrow.names)}")
                table = file.read(["key", *names], use_threads=False)
        except ShardNotFoundError as exc:
            raise UsageError(f"--columns {_TABLE}:{names[0]}: beside the shard there is no {url!r}") from exc
        except (ValueError, OSError) as exc:  # from pyarrow, for damage
            raise UsageError(f"{url!r} cannot be read as parquet: {exc}") from exc
        values = zip(*(table[name].to_pylist() for name in names), strict=True)
        rows = dict(zip(map(str, table["key"].to_pylist()), values, strict=True))
        for key in islice(keys, count):
            if key not in rows:
                raise UsageError(f"--columns: {url!r} has no row for the sample {key!r}, by its column 'key'")
            yield rows[key]


def _column(name: str, values: Sequence[Any]) -> NDArray[Any]:
    """Return values as an array: missing numbers are NaN, which meets no condition, and missing strings are empty."""
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        raise UsageError(f"--columns: no sample has a value of {name!r}; check its name and that of the field or file")
    if kinds == {str}:
        strings = np.array([value or "" for value in values], np.str_)
        if (longest := strings.dtype.itemsize // 4) > _LONGEST_STRING:
            limit = f"{longest:,} characters; columns select samples, and have at most {_LONGEST_STRING}"
            raise UsageError(f"--columns: the column {name!r} has strings of {limit}")
        return strings
    if not kinds <= {bool, int, float}:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise UsageError(f"--columns: the column {name!r} has values of {shown}; a column has numbers, or strings")
    kind = kinds.pop() if None not in values and len(kinds) == 1 else float
    try:
        return np.array([np.nan if value is None else value for value in values], _DTYPES[kind])
    except OverflowError:
        raise UsageError(f"--columns: the column {name!r} has integers beyond 64 bits") from None
