"""Read tables: a row is a sample of files (by path, or stored), a label, texts and other columns."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from streamload.pack.output import UsageError
from streamload.pack.sources.folders import Tree
from streamload.pack.sources.source import (
    COLUMNS_FIELD,
    SPLIT_NAME,
    ArrayRow,
    Source,
    SourceFile,
    SourceOptions,
    SourceSample,
    extension_of,
    field_named,
    field_prefix,
    file_at,
    is_data,
    is_number,
    numbered_labels,
    unique_key,
    whole_number,
)
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted, listed

TABLE_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

_PATH_NAMES = (
    *("path", "filepath", "file_path", "file", "filename", "file_name", "image", "image_path"),
    *("img", "img_path", "image_file", "image_name", "audio", "name", "id"),
)
_LABEL_NAMES = (
    *("label", "labels", "class", "class_name", "category", "target", "cls", "y"),
    *("class_id", "label_id", "class_index"),
)
_TEXT_NAMES = ("text", "caption", "sentence", "content", "transcript", "transcription", "description")
_SIGNATURES = (
    *((b"\xff\xd8\xff", "jpg"), (b"\x89PNG", "png"), (b"GIF8", "gif"), (b"BM", "bmp")),
    *((b"II*\0", "tif"), (b"MM\0*", "tif"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3")),
)


class Table(NamedTuple):
    """A table in memory.

    Attributes:
        columns: values by name.
        place: returns the place of a row, such as `line 3`.
        is_text: all values are texts, as in a csv.
    """

    path: str
    columns: dict[str, list[Any]]
    place: Callable[[int], str]
    is_text: bool = False

    def where(self, row: int, column: str) -> str:
        """Return the file, row and column of a value, for messages."""
        return f"{self.path!r}, {self.place(row)}, column {column!r}"

    def first(self, column: str) -> Any:
        """Return the first value of a column that is not empty, or None."""
        return next((value for value in self.columns[column] if value not in (None, "")), None)


def samples_of_table(table: Table, options: SourceOptions, root: str | None = None) -> Source:
    """Return a sample for each row of a table; no file is opened. Raises UsageError, OSError.

    Files have their extension as field, texts `txt`, other columns `json`; if an earlier column has the field, the
    column's name is prefixed (`mask.png`). Relative paths start at `root`, or at the table.
    """
    root = os.path.dirname(table.path) if root is None else root
    notes: list[str] = []
    file_columns, label, text_columns, rest = _choose(table, options, notes)
    others = [name for name in table.columns if name not in (*file_columns, label, *text_columns)]
    if options.split_column is None and (split := _usual(others, ("split",))):
        notes.append(f"{_quoted([split])} may name splits: --split-column {split} packs each into a folder of its own")
    if options.keep_columns and not rest:
        notes.append("--keep-columns has no effect: all columns are used without it")
    labels, classes = _labels(table, label, options)
    rows = len(labels)
    used = {LABEL_FIELD} if label is not None else set()
    used |= {COLUMNS_FIELD} if rest else set()

    def prefix(column: str, fields: set[str]) -> str:
        """Return the prefix that tells these fields from all others."""
        before = "" if used.isdisjoint(fields) else field_prefix(column)
        if twice := used.intersection(before + field for field in fields):
            raise UsageError(f"{table.path!r}: two columns would be the field {min(twice)!r}; rename {column!r}")
        used.update(before + field for field in fields)
        return before

    members: list[list[SourceFile | ArrayRow]] = [[] for _ in range(rows)]
    values: list[list[tuple[str, bytes]]] = [[] for _ in range(rows)]
    have_paths = bool(file_columns) and isinstance(table.first(file_columns[0]), str)
    for number, name in enumerate(file_columns):
        may_lack = number > 0 or not have_paths
        column = [
            _file(value, root, partial(table.where, row, name), may_lack=may_lack)
            for row, value in enumerate(table.columns[name])
        ]
        before = prefix(name, {file.field for file in column if file is not None and file.field is not None})
        for row, file in enumerate(column):
            if file is not None:
                members[row].append(file._replace(field=before + file.field) if before and file.field else file)
    for name in text_columns:
        field = prefix(name, {"txt"}) + "txt"
        for row, text in _texts(table, name):
            values[row].append((field, text))
    columns = {name: _numbers(table, name, notes) if table.is_text else table.columns[name] for name in rest}
    for row in range(rows) if rest else ():
        values[row].append((COLUMNS_FIELD, _json(table, row, columns)))

    samples = []
    keys: set[str] = set()
    for row in range(rows):
        stem = str(table.columns[file_columns[0]][row]).strip() if have_paths else None
        key = f"{row:09d}" if stem is None else unique_key(stem.removesuffix(f".{extension_of(stem)}"), keys)
        samples.append(SourceSample(key, tuple(members[row]), labels[row], tuple(values[row])))
    parts = None if options.split_column is None else _parts(table, options.split_column)
    return Source(tuple(samples), classes, tuple(notes), parts)


def _labels(
    table: Table, name: str | None, options: SourceOptions
) -> tuple[Sequence[int | None], tuple[str, ...] | None]:
    if name is None:
        if options.classes is not None or options.labels_as_names:
            raise UsageError(f"{table.path!r} has no column of labels to number; name it with --label-column")
        return [None] * len(next(iter(table.columns.values()))), None
    values = [value.strip() if isinstance(value, str) else value for value in table.columns[name]]
    where = partial(table.where, column=name)
    return numbered_labels(values, where, as_names=options.labels_as_names, classes=options.classes)


def _choose(
    table: Table, options: SourceOptions, notes: list[str]
) -> tuple[list[str], str | None, list[str], list[str]]:
    single = (options.label_column, options.split_column)
    named = [*options.path_column, *options.text_column, *(name for name in single if name is not None)]
    for name in named:
        if name not in table.columns:
            raise UsageError(f"{table.path!r} has no column {name!r}; its columns are {listed(list(table.columns))}")
        if named.count(name) > 1:
            raise UsageError(f"{table.path!r}: the column {name!r} is named twice; a column has one meaning")
    free = [name for name in table.columns if name not in named]
    stored = [name for name in free if _is_stored(table.first(name))]
    files, texts, label = [*options.path_column], [*options.text_column], options.label_column
    if not files and (path := _usual([name for name in free if _is_path(table, name)], _PATH_NAMES)):
        files = [path]
    has_paths = any(isinstance(table.first(name), str) for name in files)
    free = [name for name in free if name not in files]
    if label is None and (usual := _usual([name for name in free if name not in stored], _LABEL_NAMES)):
        if _are_labels(table.columns[usual]):
            label = usual
            free.remove(usual)
        else:
            notes.append(
                f"column {usual!r} holds no classes or whole numbers, so it is no label; --label-column makes it one"
            )
    rest = []
    if options.keep_columns or not has_paths or not (label or texts or len(files) > 1):
        files += [name for name in stored if name in free]
        free = [name for name in free if name not in files]
        if not options.keep_columns and not texts:
            strings = [name for name in free if isinstance(table.first(name), str) and not is_number(table.first(name))]
            text = _usual(strings, _TEXT_NAMES) or (strings[0] if strings and strings == free else None)
            texts = [text] if text is not None else []
        rest = [name for name in free if name not in texts]
    elif free:
        notes.append(f"left out: {_quoted(free)}; --keep-columns stores other columns as json")
    if not (files or texts or rest):
        raise UsageError(f"{table.path!r} holds labels alone; there is nothing else to pack")
    uses = [f"files are {_quoted(files)}"] if files else ["no column holds paths or files"]
    uses += [f"texts are {_quoted(texts)}"] if texts else []
    uses += [f"json holds {_quoted(rest)}"] if rest else []
    uses += [f"labels are {_quoted([label])}" if label is not None else "there are no labels"]
    notes.append("; ".join(uses))
    return files, label, texts, rest


def _usual(names: Sequence[str], usual: Sequence[str]) -> str | None:
    lower = {name.lower().replace("-", "_").replace(" ", "_"): name for name in reversed(names)}
    return next((lower[name] for name in usual if name in lower), None)


def _quoted(names: Sequence[str]) -> str:
    return f"column{'s' * (len(names) > 1)} {listed([repr(name) if name else 'without a name' for name in names])}"


def _is_path(table: Table, name: str) -> bool:
    """Return True if a column with a usual name may hold paths; columns of names and IDs often do not."""
    value = table.first(name)
    if not isinstance(value, str) or "\0" in value:
        return False
    return name.lower() not in ("name", "id") or os.path.isfile(os.path.join(os.path.dirname(table.path), value))


def _are_labels(values: Sequence[object]) -> bool:
    """Return True if half of the values are whole numbers or texts, and most texts repeat."""
    texts = [value for value in values if isinstance(value, str) and not is_number(value)]
    labels = len(texts) + sum(whole_number(value) is not None for value in values)
    return 2 * labels >= len(values) and (len(values) <= 20 or 2 * len(set(texts)) <= len(values))


def _is_stored(value: Any) -> bool:
    return isinstance(value, bytes | ArrayRow) or (
        isinstance(value, dict) and "bytes" in value and {*value} <= {"bytes", "path"}
    )


def _file(value: Any, root: str, where: Callable[[], str], *, may_lack: bool) -> SourceFile | ArrayRow | None:
    """Return the file that a table's value holds or names; None if it `may_lack` one. Raises UsageError."""
    if isinstance(value, ArrayRow):
        return value
    stored = {"bytes": value} if isinstance(value, bytes) else value if _is_stored(value) else {"path": value}
    content, path = stored.get("bytes"), stored.get("path")
    if content is not None:
        extension = (extension_of(path) if isinstance(path, str) else "") or _extension_by_content(content)
        return SourceFile(where(), field_named(extension), content=content, size=len(content))
    if isinstance(path, str) and path.strip() and "\0" not in path:
        path = os.path.join(root, path.strip())
        return file_at(path, field_named(extension_of(path)))
    if may_lack and path in (None, ""):
        return None
    raise UsageError(f"{where()} holds {reprlib.repr(value)}, which is no path of a file")


def _extension_by_content(content: bytes) -> str:
    if content.startswith(b"RIFF"):
        return {b"WEBP": "webp", b"WAVE": "wav"}.get(content[8:12], "bin")
    return next((extension for signature, extension in _SIGNATURES if content.startswith(signature)), "bin")


def _texts(table: Table, name: str) -> Iterator[tuple[int, bytes]]:
    for row, value in enumerate(table.columns[name]):
        text = str(value) if type(value) in (int, float) else value
        if text is not None and not isinstance(text, str):
            raise UsageError(
                f"{table.where(row, name)} holds {reprlib.repr(value)}, which is no text; --keep-columns stores lists "
                "and the like as json"
            )
        if text:
            yield row, text.encode("utf-8", "surrogatepass")


def _numbers(table: Table, name: str, notes: list[str]) -> list[Any]:
    """Convert a column of texts to numbers or None (empty, nan) if it has nothing else; note a single odd value."""
    values = table.columns[name]
    known = [row for row, value in enumerate(values) if value.strip().lower() not in ("", "nan")]
    odd = [row for row in known if not is_number(values[row]) or "inf" in values[row].lower()]
    if odd or not known:
        if 2 * len(odd) < len(known):
            notes.append(f"{table.where(odd[0], name)} is {values[odd[0]]!r}, so all of the column is stored as text")
        return values
    convert = int if all(re.fullmatch(r"\s*-?\d+\s*", values[row]) for row in known) else float
    return [None if value.strip().lower() in ("", "nan") else convert(value) for value in values]


def _json(table: Table, row: int, columns: dict[str, list[Any]]) -> bytes:
    record = {name: None if column[row] != column[row] else column[row] for name, column in columns.items()}  # NaN
    try:
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except TypeError as exc:
        where = table.where(row, listed(list(columns)))
        raise UsageError(f"{where}: {exc}; leave the column out, or use pack") from exc
    return text.encode("utf-8", "surrogatepass")


def _plain(value: object) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"JSON cannot hold {reprlib.repr(value)}")


def _parts(table: Table, name: str) -> dict[str, list[int]]:
    parts: dict[str, list[int]] = {}
    for row, value in enumerate(table.columns[name]):
        split = value.strip() if isinstance(value, str) else value
        if not isinstance(split, str) or not SPLIT_NAME.fullmatch(split):
            raise UsageError(f"{table.where(row, name)} is {value!r}, which cannot be the name of a split")
        parts.setdefault(split, []).append(row)
    return parts


def files_by_id(tree: Tree, labels: str, options: SourceOptions) -> Source:
    """Return the labelled files of a folder; an ID is a path without its extension.

    Labels are JSON, `{"ID": label, ...}`, or a table of IDs and labels. Raises OSError, and UsageError if IDs and files
    do not agree.
    """
    table = open_table(labels) if labels.lower().endswith(TABLE_EXTENSIONS) else _json_table(labels)
    columns = list(table.columns)
    id_column = options.path_column[0] if options.path_column else _usual(columns, _PATH_NAMES)
    label = options.label_column or _usual([name for name in columns if name != id_column], _LABEL_NAMES)
    if id_column is None or label is None or not {id_column, label} <= {*columns}:
        raise UsageError(
            f"{table.path!r} needs columns of IDs and of labels, of {listed(columns)}; name them with "
            "--path-column and --label-column"
        )
    ids = [str(value).strip() for value in table.columns[id_column]]
    own = os.path.realpath(labels)
    files = [path for path in tree.files if os.path.realpath(os.path.join(tree.root, path)) != own]
    candidates = list(filter(is_data, files)) or files
    known = set(ids)
    by_id: dict[str, str] = {}
    for path in candidates:
        name = path if path in known else path.removesuffix(f".{extension_of(path)}")
        if name in by_id:
            raise UsageError(f"{by_id[name]!r} and {path!r} have one ID, {name!r}; remove or rename one of them")
        by_id[name] = path
    for noun, complaint, names in (
        ("file", f"without a label in {labels!r}", by_id.keys() - known),
        ("ID", f"of {labels!r} without a file in {tree.root!r}", known - by_id.keys()),
        ("ID", f"in two rows of {labels!r}", {name for name, count in Counter(ids).items() if count > 1}),
    ):
        if names:
            raise UsageError(f"{counted(len(names), noun)} {complaint}: {listed(list(map(repr, sorted(names))))}")

    table = table._replace(columns=table.columns | {id_column: [by_id[name] for name in ids]})
    options = replace(options, path_column=(id_column,), label_column=label)
    source = samples_of_table(table, options, tree.root)
    notes = [*tree.notes]
    if strays := len(files) - len(candidates):
        notes.append(f"skipped {counted(strays, 'file')} of other kinds than images, sound and arrays")
    return replace(source, notes=(*notes, *source.notes))


def open_table(path: str) -> Table:
    """Read a CSV, TSV, JSON lines or parquet file. Raises UsageError, OSError.

    A CSV whose first line contains the path of an existing file has no header; its columns are path, label, 3, 4, ...
    """
    if path.lower().endswith(".parquet"):
        return _read_parquet(path)
    json_lines = path.lower().endswith((".jsonl", ".ndjson"))
    try:
        with open(path, encoding="utf-8-sig", newline="\n" if json_lines else "") as file:
            text = file.read()
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path!r} is not UTF-8 text ({exc.reason} at byte {exc.start}); save it as UTF-8") from exc
    lines, rows = _json_lines(path, text) if json_lines else _separated_lines(path, text)
    if not rows:
        raise UsageError(f"{path!r} holds no row; there is nothing to pack")
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Table(path, columns, lambda row: f"line {lines[row]}", is_text=not json_lines)


def _read_parquet(path: str) -> Table:
    try:
        from pyarrow import parquet
    except ImportError as exc:
        raise UsageError(f"{path!r}: to read parquet, install pyarrow: pip install 'streamload[parquet]'") from exc
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            _check_header(path, list(file.schema_arrow.names))
            columns = file.read(use_threads=False).to_pydict()
    except (ValueError, OSError) as exc:
        raise UsageError(f"{path!r} cannot be read as parquet: {exc}") from exc
    if not any(columns.values()):
        raise UsageError(f"{path!r} holds no row; there is nothing to pack")
    return Table(path, columns, lambda row: f"row {row + 1}")


def _json_lines(path: str, text: str) -> tuple[list[int], list[dict[str, Any]]]:
    lines, rows = [], []
    for line, row in enumerate(text.split("\n"), start=1):
        if not row.strip():
            continue
        try:
            record = json.loads(row)
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{path!r}, line {line}: not JSON ({exc})") from exc
        if not isinstance(record, dict):
            raise UsageError(f"{path!r}, line {line}: not a JSON object with columns")
        lines.append(line)
        rows.append(record)
    return lines, rows


def _separated_lines(path: str, text: str) -> tuple[list[int], list[dict[str, Any]]]:
    first = text.partition("\n")[0]
    delimiter = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as exc:
        raise UsageError(f"{path!r}, line {reader.line_num}: {exc}") from exc
    header = [cell.strip() for cell in lines[0][1]] if lines else []
    if any(os.path.isfile(os.path.join(os.path.dirname(path), cell)) for cell in header if cell):
        header = ["path", "label", *map(str, range(3, len(header) + 1))][: len(header)]
    else:
        _check_header(path, header)
        del lines[:1]
    for line, cells in lines:
        if len(cells) != len(header):
            columns = counted(len(cells), "column")
            raise UsageError(f"{path!r}, line {line}: {columns}, and the first line has {len(header)}")
    return [line for line, _ in lines], [dict(zip(header, cells, strict=True)) for _, cells in lines]


def _check_header(path: str, header: Sequence[str]) -> None:
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise UsageError(f"{path!r} has two columns called {twice!r}; rename one of them")


def _json_table(path: str) -> Table:
    try:
        with open(path, encoding="utf-8-sig") as file:
            mapping = json.load(file)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f'{path!r} is not JSON ({exc}); --labels takes {{"ID": label, ...}}') from exc
    if not isinstance(mapping, dict) or not mapping:
        raise UsageError(f'{path!r} holds no mapping; --labels takes {{"ID": label, ...}}, or a table')
    ids = list(mapping)
    return Table(path, {"id": ids, "label": list(mapping.values())}, lambda row: f"ID {ids[row]!r}")
