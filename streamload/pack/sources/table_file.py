"""The rows of a CSV, TSV, JSON lines or parquet file, by the names of their columns."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from streamload.pack.sources.source import SourceError
from streamload.text import counted

TABLE_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

_JSON_LINES = (".jsonl", ".ndjson")
_ROWS_TOGETHER = 1024

# The number of a line in its file (of a parquet, of a row), from 1, and its values by column.
_Record = tuple[int, dict[str, Any]]


def open_table(path: str) -> tuple[list[str], Callable[[Sequence[str]], Iterable[_Record]]]:
    """The names of a table's columns, and a function that gives its records with at least the columns that it is given.

    A CSV whose first line contains the path of an existing file has no header; its columns are named "1", "2", ...
    Those of JSON lines are the names in the first line.

    Raises:
        SourceError: there is no row, a line is invalid, or a package is missing.
        OSError: the file cannot be read.
    """
    if path.lower().endswith(".parquet"):
        return _open_parquet(path)
    json_lines = path.lower().endswith(_JSON_LINES)
    try:
        with open(path, encoding="utf-8-sig", newline="\n" if json_lines else "") as file:
            records = list(_json_lines(path, file) if json_lines else _separated_lines(path, file.read()))
    except UnicodeDecodeError as exc:
        raise SourceError(f"{path!r} is not UTF-8 text ({exc.reason} at byte {exc.start}); save it as UTF-8") from exc
    if not records:
        raise SourceError(f"{path!r} holds no row; there is nothing to pack")
    return list(records[0][1]), lambda _: records


def _open_parquet(path: str) -> tuple[list[str], Callable[[Sequence[str]], Iterable[_Record]]]:
    try:
        from pyarrow import parquet
    except ImportError as exc:
        raise SourceError(f"{path!r}: to read parquet, install pyarrow: pip install 'streamload[parquet]'") from exc

    def records(columns: Sequence[str]) -> Iterator[_Record]:
        line = 0
        try:
            with parquet.ParquetFile(path, pre_buffer=False) as file:
                for batch in file.iter_batches(_ROWS_TOGETHER, columns=list(columns), use_threads=False):
                    yield from enumerate(batch.to_pylist(), start=line + 1)
                    line += len(batch)
        except (ValueError, OSError) as exc:  # what pyarrow raises for damage
            raise SourceError(f"{path!r} cannot be read as parquet after {counted(line, 'row')}: {exc}") from exc

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            names, rows = list(file.schema_arrow.names), file.metadata.num_rows
    except (ValueError, OSError) as exc:
        raise SourceError(f"{path!r} cannot be read as parquet: {exc}") from exc
    if not rows:
        raise SourceError(f"{path!r} holds no row; there is nothing to pack")
    _check_header(path, names)
    return names, records


def _json_lines(path: str, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise SourceError(f"{path!r}, line {line}: not JSON ({exc})") from exc
        if not isinstance(record, dict):
            raise SourceError(f"{path!r}, line {line}: not a JSON object with a path and a label")
        yield line, record


def _separated_lines(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    first = text.partition("\n")[0]
    comma = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=comma, strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [cell.strip() for cell in cells]
                if not any(os.path.isfile(os.path.join(os.path.dirname(path), cell)) for cell in header if cell):
                    _check_header(path, header)
                    continue
                header = [str(number) for number in range(1, len(cells) + 1)]
            if len(cells) != len(header):
                raise SourceError(
                    f"{path!r}, line {reader.line_num}: {counted(len(cells), 'column')}, and the first "
                    f"line has {len(header)}"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as exc:
        raise SourceError(f"{path!r}, line {reader.line_num}: {exc}") from exc


def _check_header(path: str, header: Sequence[str]) -> None:
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise SourceError(f"{path!r} has two columns called {twice!r}; rename one of them")
