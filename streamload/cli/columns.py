"""Columns of metadata for an index: from a JSON field of each sample, or from a table beside each shard."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

import streamload
from streamload.errors import ShardNotFoundError
from streamload.index.columns import COLUMNS_FILE, KEY, LABEL, pack_columns, read_columns, unpack_columns
from streamload.index.dataset_index import INDEX_FILE, DatasetIndex
from streamload.index.index_writer import IndexFolder
from streamload.index.listing import list_shards
from streamload.index.shard_names import folder_and_name
from streamload.pack.failures import UsageError
from streamload.pack.ray_pool import ON_A_NODE, RayPool
from streamload.sampling.expression import CLASS_NAME, FRACTION
from streamload.storage.storages import Storages
from streamload.text import counted, listed

_BATCH_SIZE = 512
_MOST_TABLE_BYTES = 1 << 30
_MOST_INTEGER = (1 << 63) - 1
_LONGEST_STRING = 256


@dataclass(frozen=True, slots=True)
class MetadataColumns:
    """The columns that a user asks for.

    Attributes:
        names: for each source (a field that holds JSON objects; "csv" or "parquet", a file beside the shard) the
            columns, which may be dotted paths in JSON.
    """

    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, text: str) -> MetadataColumns:
        """From `json:aesthetic,json:width,parquet:similarity`.

        Raises:
            UsageError: it is not written like that.
        """
        names: dict[str, tuple[str, ...]] = {}
        for entry in text.split(","):
            source, colon, name = entry.strip().partition(":")
            if not (source and colon and name):
                raise UsageError(
                    f"--columns {text!r}: write SOURCE:NAME,..., such as json:aesthetic,parquet:similarity"
                )
            if name in (KEY, LABEL, CLASS_NAME) or name.split(".")[0] in (FRACTION, "size", "has"):
                raise UsageError(
                    f"--columns {text!r}: {name!r} has a meaning of its own in conditions; rename the column"
                )
            names[source] = (*names.get(source, ()), name)
        flat = [name for of_source in names.values() for name in of_source]
        if len(set(flat)) < len(flat):
            raise UsageError(f"--columns {text!r} has a name twice; columns are known by their names alone")
        return cls(names)

    def write(
        self,
        place: IndexFolder,
        urls: Sequence[str],
        storage_options: Mapping[str, Any],
        pool: RayPool | None = None,
    ) -> None:
        """Collect the values of all samples of an index, and write them beside it.

        Args:
            place: the index, which was written before.
            urls: all of its shards.
            storage_options: of where they lie.
            pool: reads fields on the nodes of a cluster.

        Raises:
            UsageError: the index has other shards as well, or a column has numbers and strings.
            StreamloadError: a shard or a table cannot be read.
        """
        index = DatasetIndex.from_json(place.read(INDEX_FILE) or b"", place.folder)
        by_name = {folder_and_name(url)[1]: url for url in urls}
        others = [shard.name for shard in index.shards if shard.name not in by_name]
        if others:
            raise UsageError(
                f"--columns: the index has {counted(len(others), 'shard')} more, such as {others[0]!r}; name them too"
            )
        ordered = [by_name[shard.name] for shard in index.shards]
        columns = unpack_columns(place.read(COLUMNS_FILE), index)
        for source, names in self.names.items():
            rows: Iterable[tuple[Any, ...]]
            if source in _READERS:
                rows = _rows_of_tables(ordered, source, names, place.folder, storage_options)
            elif pool is None:
                rows = _rows_of_field(ordered, source, names, place.folder, storage_options)
            else:
                calls = (partial(_rows_of_shard, url, source, names, storage_options) for url in ordered)
                rows = chain.from_iterable(pool.results(calls))
            columns |= dict(zip(names, map(_column, names, zip(*rows, strict=True)), strict=True))
        with place.writing():
            place.write(COLUMNS_FILE, pack_columns(index, columns))


def _rows_of_shard(
    url: str, field: str, names: Sequence[str], storage_options: Mapping[str, Any], _: Callable[[int, int], None]
) -> list[tuple[Any, ...]]:
    return list(_rows_of_field([url], field, names, None, storage_options, **ON_A_NODE))


def _rows_of_field(
    urls: Sequence[str],
    field: str,
    names: Sequence[str],
    index: str | None,
    storage_options: Mapping[str, Any],
    **options: Any,
) -> Iterator[tuple[Any, ...]]:
    with streamload.StreamLoader(
        urls,
        _BATCH_SIZE,
        fields=(f"{field}?",),
        collate_fn=_Values(names),
        index=index,
        storage_options=storage_options or None,
        **options,
    ) as loader:
        for rows in loader:
            yield from rows


class _Values:
    """Takes some values out of each sample's JSON; a class, to travel to the workers."""

    def __init__(self, names: Sequence[str]) -> None:
        self._paths = [name.split(".") for name in names]

    def __call__(self, samples: list[tuple[Any]]) -> list[tuple[Any, ...]]:
        return [tuple(_at(value, path) for path in self._paths) for (value,) in samples]


def _at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _rows_of_tables(
    urls: Sequence[str], kind: str, names: Sequence[str], index: str, storage_options: Mapping[str, Any]
) -> Iterator[tuple[Any, ...]]:
    """The values from the table beside each shard, joined by its column `key`."""
    storages = Storages(storage_options)
    columns, counts = read_columns(list_shards(urls, index, storages), storages, [KEY])
    keys = iter(columns[KEY].tolist())
    for url, count in zip(urls, counts.tolist(), strict=True):
        table_url = f"{url.removesuffix('.tar')}.{kind}"
        try:
            content = storages.for_url(table_url).read_bytes(table_url, most_bytes=_MOST_TABLE_BYTES)
        except ShardNotFoundError as exc:
            raise UsageError(f"--columns {kind}:{names[0]}: beside the shard there is no {table_url!r}") from exc
        rows = _READERS[kind](content, names, table_url)
        for key in islice(keys, count):
            if key not in rows:
                raise UsageError(f"--columns: {table_url!r} has no row for the sample {key!r}, by its column 'key'")
            yield rows[key]


def _csv_rows(content: bytes, names: Sequence[str], url: str) -> dict[str, tuple[Any, ...]]:
    try:
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
    except UnicodeDecodeError as exc:
        raise UsageError(f"{url!r} is not text in UTF-8 ({exc}); save it as UTF-8") from exc
    _check_names(reader.fieldnames or (), names, url)
    return {row["key"]: tuple(_parsed(row[name]) for name in names) for row in reader}


def _parquet_rows(content: bytes, names: Sequence[str], url: str) -> dict[str, tuple[Any, ...]]:
    try:
        from pyarrow import BufferReader, parquet
    except ImportError as exc:
        raise UsageError("--columns parquet:... needs pyarrow: pip install 'streamload[parquet]'") from exc
    try:
        with parquet.ParquetFile(BufferReader(content)) as file:
            _check_names(file.schema_arrow.names, names, url)
            table = file.read(["key", *names], use_threads=False)
    except (ValueError, OSError) as exc:  # what pyarrow raises for damage
        raise UsageError(f"{url!r} cannot be read as parquet: {exc}") from exc
    keys, *columns = (table[name].to_pylist() for name in ("key", *names))
    return dict(zip(map(str, keys), zip(*columns, strict=True), strict=True))


_READERS: Mapping[str, Callable[[bytes, Sequence[str], str], dict[str, tuple[Any, ...]]]] = {
    "csv": _csv_rows,
    "parquet": _parquet_rows,
}


def _check_names(existing: Sequence[str], names: Sequence[str], url: str) -> None:
    for name in ("key", *names):
        if name not in existing:
            raise UsageError(f"{url!r} has no column {name!r}; it has {listed(list(existing))}")


def _parsed(text: str | None) -> Any:
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _column(name: str, values: Sequence[Any]) -> NDArray[Any]:
    """Values as an array: missing numbers are NaN, which meets no condition, and missing strings are empty."""
    kinds = {type(value) for value in values} - {type(None)}
    complete = None not in values
    if not kinds:
        raise UsageError(f"--columns: no sample has a value of {name!r}; check its name and that of the field or file")
    if any(isinstance(value, int) and abs(value) > _MOST_INTEGER for value in values):
        raise UsageError(f"--columns: the column {name!r} has integers beyond 64 bits")
    longest = max((len(value) for value in values if isinstance(value, str)), default=0)
    if longest > _LONGEST_STRING:
        raise UsageError(
            f"--columns: the column {name!r} has strings of {longest:,} characters; columns are for what samples are "
            f"selected by, with at most {_LONGEST_STRING}"
        )
    if kinds <= {bool} and complete:
        return np.array(values, np.bool_)
    if kinds <= {int} and complete:
        return np.array(values, np.int64)
    if kinds <= {bool, int, float}:
        return np.array([np.nan if value is None else value for value in values], np.float64)
    if kinds == {str}:
        return np.array(["" if value is None else value for value in values], np.str_)
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise UsageError(f"--columns: the column {name!r} has values of {found}; a column has numbers, or strings")
