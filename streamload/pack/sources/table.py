"""Tables of files: one or several columns of paths (or IDs), and perhaps columns of labels and of texts."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamload.pack.sources.source import (
    COLUMNS_FIELD,
    KeyedSamples,
    Source,
    SourceError,
    SourceFile,
    SourceSample,
    field_named,
    is_image,
    is_label,
    key_of,
    numbered_labels,
)
from streamload.pack.sources.table_file import open_table
from streamload.tar.scan import LABEL_FIELD
from streamload.text import listed

_PATH_NAMES = (
    *("path", "filepath", "file_path", "file", "filename", "file_name", "image", "image_path"),
    *("img", "img_path", "image_file", "image_name", "name", "id"),
)
_NO_NAME = re.compile(r"[^a-z0-9_-]+")
_LABEL_NAMES = (
    *("label", "labels", "class", "class_name", "category", "target", "cls", "y"),
    *("class_id", "label_id", "class_index"),
)


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table.

    Attributes:
        paths: the columns of paths; none for the first with a common name.
        label: the column of labels, or None for the first with a common name, if there is one.
        texts: the columns of texts.
        keep: store the other columns as JSON.
        as_names: treat labels that are numbers as names of classes.
    """

    paths: tuple[str, ...] = ()
    label: str | None = None
    texts: tuple[str, ...] = ()
    keep: bool = False
    as_names: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        line: its number in the file, from 1.
        path: the value in the first column of paths.
        label: the value in the column of labels; None if there is no such column.
        others: the values in the other columns of paths, None where there is none.
        texts: the values in the columns of texts, None where there is none.
        columns: JSON of the other columns, or None.
    """

    line: int
    path: str
    label: str | int | None
    others: tuple[str | None, ...] = ()
    texts: tuple[str | None, ...] = ()
    columns: bytes | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a table, and the names of its columns that are used."""

    rows: list[Row]
    paths: tuple[str, ...]
    label: str | None
    texts: tuple[str, ...]


def files_of_table(table_path: str, columns: TableColumns, known: tuple[str, ...] | None = None) -> Source:
    """The files in a table, whose paths are relative to the table's folder. No file is opened.

    A file's field is its extension. Where an earlier column has files of one that a column has too, the name of the
    column stands before it (`mask.png`), for all files of that column. Texts are `txt`.

    Args:
        table_path: the table.
        columns: its columns.
        known: the given names of the classes by number, or None.

    Raises:
        SourceError: the table is invalid; the message names the line.
        OSError: it cannot be read.
    """
    table = read_table(table_path, columns)
    labels: Sequence[int | None] = [None] * len(table.rows)
    classes = None
    if table.label is not None:
        labels, classes = numbered_labels(
            [row.label for row in table.rows if row.label is not None],
            lambda position: f"{table_path!r}, line {table.rows[position].line}: the label",
            as_names=columns.as_names,
            classes=known,
        )
    elif known is not None:
        raise SourceError(
            f"{table_path!r} has no column of labels, which --classes numbers; name it with --label-column"
        )
    names = _FieldNames(table_path, set() if table.label is None else {LABEL_FIELD}, keep=columns.keep)
    by_column = zip(*((row.path, *row.others) for row in table.rows), strict=True)
    fields = [names.of_files(column, paths) for column, paths in zip(table.paths, by_column, strict=True)]
    texts = [names.of_texts(column) for column in table.texts]
    folder, keyed = os.path.dirname(table_path), KeyedSamples({})
    samples = []
    for row, label in zip(table.rows, labels, strict=True):
        files = (
            SourceFile(os.path.join(folder, path), of_extension[_extension(path)], decodable=False)
            for path, of_extension in zip((row.path, *row.others), fields, strict=True)
            if path is not None
        )
        values = [(name, text.encode()) for name, text in zip(texts, row.texts, strict=True) if text is not None]
        if row.columns is not None:
            values.append((COLUMNS_FIELD, row.columns))
        stem = row.path.removesuffix("." + _extension(row.path))
        samples.append(SourceSample(keyed.unique(key_of(stem)), tuple(files), label, tuple(values)))
    groups = [tuple(filter(None, of_extension.values())) for of_extension in fields]
    images = all(map(is_image, groups[0])) if groups[0] else True
    noun = "sample" if len(groups) > 1 else "image" if images else "file"
    return Source(tuple(samples), classes, noun, (_note(table),), None, (*groups, *((name,) for name in texts)))


class _FieldNames:
    """Names the fields of a table's columns, unlike each other.

    Args:
        table: its path.
        taken: what other things are called.
        keep: the other columns are stored too.
    """

    def __init__(self, table: str, taken: set[str], *, keep: bool) -> None:
        self._table = table
        self._taken = taken | ({COLUMNS_FIELD} if keep else set())

    def of_files(self, column: str, paths: Sequence[str | None]) -> dict[str, str | None]:
        """The field for each extension in a column of paths; None for one that cannot be a field."""
        extensions = dict.fromkeys(_extension(path) for path in paths if path is not None)
        found = {extension: field_named(extension) for extension in extensions}
        chosen = self._free(column, sorted({field for field in found.values() if field is not None}))
        return {extension: chosen.get(field or "") for extension, field in found.items()}

    def of_texts(self, column: str) -> str:
        """The field for a column of texts."""
        return self._free(column, ["txt"])["txt"]

    def _free(self, column: str, fields: Sequence[str]) -> dict[str, str]:
        prefix = ""
        if not self._taken.isdisjoint(fields):
            prefix = (_NO_NAME.sub("_", column.lower()).strip("_") or "column") + "."
        chosen = {field: prefix + field for field in fields}
        twice = self._taken.intersection(chosen.values())
        if twice:
            raise SourceError(f"{self._table!r}: two columns would be the field {min(twice)!r}; rename {column!r}")
        self._taken.update(chosen.values())
        return chosen


def _extension(path: str) -> str:
    """What follows the last dot of a file's name; of a compressed file, also what stands before (`npy.gz`)."""
    stem, extension = os.path.splitext(path)
    if extension.lower() == ".gz":
        extension = os.path.splitext(stem)[1] + extension
    return extension[1:]


def _note(table: Table) -> str:
    def columns(names: Sequence[str]) -> str:
        return f"column{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"

    texts = f", texts from {columns(table.texts)}" if table.texts else ""
    labels = "and there are no labels" if table.label is None else f"labels from column {table.label!r}"
    return f"paths are taken from {columns(table.paths)}{texts}, {labels}"


def read_table(path: str, columns: TableColumns, *, needs_label: bool = False) -> Table:
    """Read the rows of a table; names of columns that are not given are found case-insensitively.

    Args:
        path: the table.
        columns: its columns.
        needs_label: there must be a column of labels.

    Raises:
        SourceError: there is no row, a column is missing or unknown, or a line is invalid.
        OSError: the file cannot be read.
    """
    names, records = open_table(path)
    try:
        table = _chosen_columns(names, columns, needs_label=needs_label)
        used = [*table.paths, *table.texts, *filter(None, (table.label,))]
        for line, record in records(names if columns.keep else used):
            try:
                table.rows.append(_row(record, line, table, keep=columns.keep))
            except _TableError as exc:
                raise _TableError(f", line {line}: {exc}") from exc
    except _TableError as exc:
        raise SourceError(f"{path!r}{exc}") from exc
    return table


def _chosen_columns(names: Sequence[str], columns: TableColumns, *, needs_label: bool) -> Table:
    given = [
        *(("--path-column", name) for name in columns.paths),
        *(("--text-column", name) for name in columns.texts),
        *(("--label-column", name) for name in (columns.label,) if name is not None),
    ]
    for option, name in given:
        if name not in names:
            raise _TableError(f" has no column {name!r} ({option}); its columns are {listed(list(names))}")
        if [other for _, other in given].count(name) > 1:
            raise _TableError(f": the column {name!r} is named twice; a column has one meaning")
    taken = {name for _, name in given}
    paths = columns.paths or tuple(filter(None, (_usual(names, taken, _PATH_NAMES, 0),)))
    if not paths:
        raise _TableError(f" has no column that looks like a path, of {_all(names)}; name it with --path-column")
    label = columns.label or _usual(names, taken | set(paths), _LABEL_NAMES, 1)
    rest = set(names) - taken - set(paths)
    if label is None and (needs_label or (rest and not (columns.keep or columns.texts or len(paths) > 1))):
        others = "" if needs_label else ", or what else to take with --text-column or --keep-columns"
        raise _TableError(
            f" has no column that looks like a label, of {_all(names)}; name it with --label-column{others}"
        )
    return Table([], paths, label, columns.texts)


def _all(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _usual(names: Sequence[str], taken: set[str], usual: Sequence[str], position: int) -> str | None:
    """The first free column with a common name, or by position if there is no header; or None."""
    if len(names) >= 2 and list(names) == [str(number) for number in range(1, len(names) + 1)]:
        return names[position] if names[position] not in taken else None
    lower = {name.lower().replace("-", "_").replace(" ", "_"): name for name in reversed(names) if name not in taken}
    return next((lower[name] for name in usual if name in lower), None)


def _row(record: dict[str, Any], line: int, table: Table, *, keep: bool) -> Row:
    first, *others = (_path(record, column, may_lack=number > 0) for number, column in enumerate(table.paths))
    label = None if table.label is None else _label(record, table.label)
    texts = tuple(_text(record, column) for column in table.texts)
    columns = None
    if keep:
        used = {*table.paths, *table.texts, table.label}
        rest = {name: value for name, value in record.items() if name not in used}
        columns = json.dumps(rest, ensure_ascii=False, separators=(",", ":"), default=_plain).encode("utf-8")
    return Row(line, first or "", label, tuple(others), texts, columns)


def _path(record: dict[str, Any], column: str, *, may_lack: bool) -> str | None:
    value = record.get(column)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if may_lack and (value is None or value == ""):
        return None
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        inside = isinstance(value, bytes | dict)
        advice = "; pack files whose bytes lie in a table with streamload.pack" if inside else ""
        raise _TableError(f"column {column!r} holds {reprlib.repr(value)}, which is no path{advice}")
    return value.strip()


def _label(record: dict[str, Any], column: str) -> str | int:
    label = record.get(column)
    if isinstance(label, str):
        label = label.strip()
    if not is_label(label):
        raise _TableError(
            f"the label in column {column!r} is {reprlib.repr(label)}; it must be a whole number or the name of a class"
        )
    return label


def _text(record: dict[str, Any], column: str) -> str | None:
    value = record.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise _TableError(
            f"the text in column {column!r} is {reprlib.repr(value)}; --keep-columns stores lists and the like as json"
        )
    return value


def _plain(value: object) -> str:
    """What JSON has no form for and parquet has."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise _TableError(
        f"a column holds {reprlib.repr(value)}, which JSON cannot hold; leave out --keep-columns, or use pack"
    )


class _TableError(Exception):
    """What is wrong with a table; the message continues a sentence that begins with the table's path."""
