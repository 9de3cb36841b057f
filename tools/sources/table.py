"""Tables of files: CSV, TSV or JSON lines with a column of paths (or IDs) and a column of labels."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamload_tools.sources.source import (
    ARRAY_FIELDS,
    COLUMNS_FIELD,
    SAMPLE_FIELDS,
    KeyedSamples,
    Source,
    SourceError,
    is_label,
    numbered_labels,
)

from streamload.text import counted

__all__ = ["TABLE_EXTENSIONS", "Row", "TableColumns", "files_of_table", "read_table"]

TABLE_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson")

_PATH_NAMES = (
    *("path", "filepath", "file_path", "file", "filename", "file_name", "image", "image_path"),
    *("img", "img_path", "image_file", "image_name", "name", "id"),
)
_LABEL_NAMES = (
    *("label", "labels", "class", "class_name", "category", "target", "cls", "y"),
    *("class_id", "label_id", "class_index"),
)


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table.

    Attributes:
        path: the column of paths, or None for the first with a common name.
        label: the column of labels, or None for the first with a common name.
        keep: store the other columns as JSON.
        as_names: treat labels that are numbers as names of classes.
    """

    path: str | None = None
    label: str | None = None
    keep: bool = False
    as_names: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        line: its number in the file, from 1.
        path: the value in the column of paths.
        label: the value in the column of labels.
        values: the field `json` with the other columns, if they are kept.
    """

    line: int
    path: str
    label: str | int
    values: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a table, and the names of its two columns."""

    rows: list[Row]
    path_column: str
    label_column: str


def files_of_table(table_path: str, columns: TableColumns, known: tuple[str, ...] | None = None) -> Source:
    """The files in a table, whose paths are relative to the table's folder. No file is opened.

    Args:
        table_path: the table.
        columns: its columns.
        known: the given names of the classes by number, or None.

    Raises:
        SourceError: the table is invalid; the message names the line.
        OSError: it cannot be read.
    """
    table = read_table(table_path, columns)
    labels, classes = numbered_labels(
        [row.label for row in table.rows],
        lambda position: f"{table_path!r}, line {table.rows[position].line}: the label",
        as_names=columns.as_names,
        classes=known,
    )
    folder, keyed = os.path.dirname(table_path), KeyedSamples(SAMPLE_FIELDS)
    samples = [
        keyed.sample(os.path.join(folder, row.path), row.path, label, row.values)
        for row, label in zip(table.rows, labels, strict=True)
    ]
    note = f"paths are taken from column {table.path_column!r}, labels from column {table.label_column!r}"
    noun = "file" if any(sample.members[0].field in ARRAY_FIELDS for sample in samples) else "image"
    return Source(tuple(samples), classes, noun, (note,))


def read_table(path: str, columns: TableColumns) -> Table:
    """Read the rows of a `.csv`, `.tsv` or `.jsonl`; names of columns are case-insensitive.

    A CSV whose first line contains the path of an existing file has no header; its columns are named "1", "2", ...

    Raises:
        SourceError: there is no row, a column is missing or unknown, or a line is invalid.
        OSError: the file cannot be read.
    """
    json_lines = path.lower().endswith((".jsonl", ".ndjson"))
    try:
        with open(path, encoding="utf-8-sig", newline="\n" if json_lines else "") as file:
            records = list(_json_lines(path, file) if json_lines else _separated_lines(path, file.read()))
    except UnicodeDecodeError as exc:
        raise SourceError(f"{path!r} is not UTF-8 text ({exc.reason} at byte {exc.start}); save it as UTF-8") from exc
    if not records:
        raise SourceError(f"{path!r} holds no row; there is nothing to pack")
    names = list(records[0][1])
    try:
        path_column = _chosen("--path-column", columns.path, names, _PATH_NAMES, 0)
        label_column = _chosen("--label-column", columns.label, names, _LABEL_NAMES, 1)
        table = Table([], path_column, label_column)
        for line, record in records:
            table.rows.append(_row(line, record, table, keep=columns.keep))
    except _TableError as exc:
        raise SourceError(f"{path!r}{exc}") from exc
    return table


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


def _chosen(option: str, requested: str | None, names: Sequence[str], usual: Sequence[str], position: int) -> str:
    """The requested column, or the first with a common name, or by position if there is no header."""
    listed = ", ".join(map(repr, names))
    if requested is not None:
        if requested not in names:
            raise _TableError(f" has no column {requested!r} ({option}); its columns are {listed}")
        return requested
    if len(names) >= 2 and list(names) == [str(number) for number in range(1, len(names) + 1)]:
        return names[position]
    lower = {name.lower().replace("-", "_").replace(" ", "_"): name for name in reversed(names)}
    found = [lower[name] for name in usual if name in lower]
    if not found:
        meaning = option.removeprefix("--").removesuffix("-column")
        raise _TableError(f" has no column that looks like a {meaning}, of {listed}; name it with {option}")
    return found[0]


def _row(line: int, record: dict[str, Any], table: Table, *, keep: bool) -> Row:
    where, label = record.get(table.path_column), record.get(table.label_column)
    if isinstance(where, int) and not isinstance(where, bool):
        where = str(where)
    if not isinstance(where, str) or not where.strip() or "\0" in where:
        raise _TableError(f", line {line}: column {table.path_column!r} holds {where!r}, which is no path")
    if isinstance(label, str):
        label = label.strip()
    if not is_label(label):
        raise _TableError(
            f", line {line}: the label in column {table.label_column!r} is {label!r}; it must be a whole number or "
            "the name of a class"
        )
    rest = {name: value for name, value in record.items() if name not in (table.path_column, table.label_column)}
    columns = json.dumps(rest, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return Row(line, where.strip(), label, ((COLUMNS_FIELD, columns),) if keep else ())


class _TableError(Exception):
    """What is wrong with a table; the message continues a sentence that begins with the table's path."""
