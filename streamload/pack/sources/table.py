"""Read tables, in which each row is a sample: files (by path, or stored), a label, texts and other columns."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import math
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from streamload.pack.run import UsageError
from streamload.pack.sources.folders import Tree
from streamload.pack.sources.source import (
    COLUMNS_FIELD,
    SPLIT_NAME,
    Source,
    SourceFile,
    SourceOptions,
    SourceSample,
    extension_of,
    field_named,
    field_prefix,
    file_at,
    is_data,
    numbers_of_classes,
    unique_key,
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
_CODE = re.compile(r"\s*[+-]?0[0-9]|.*_")  # 01 and 1_2 are names
_SIGNATURES = (
    *((b"\xff\xd8\xff", "jpg"), (b"\x89PNG", "png"), (b"GIF8", "gif"), (b"BM", "bmp")),
    *((b"II*\0", "tif"), (b"MM\0*", "tif"), (b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3")),
)


class Table(NamedTuple):
    """A table in memory.

    Attributes:
        columns: values by name.
        place: returns the place of a row, such as `line 3`.
        is_text: all values are strings, as in a csv.
        noun: the term for a column in messages.
    """

    path: str
    columns: dict[str, list[Any]]
    place: Callable[[int], str]
    is_text: bool = False
    noun: str = "column"

    def where(self, row: int, column: str) -> str:
        """Return the file, row and column of a value, for messages."""
        return f"{self.path!r}, {self.place(row)}, {self.noun} {column!r}"

    def first(self, column: str) -> Any:
        """Return the first non-empty value of a column, or None."""
        return next((value for value in self.columns[column] if value not in (None, "")), None)


def samples_of_table(table: Table, options: SourceOptions, root: str | None = None) -> Source:
    """Return a sample for each row of a table, without opening files. Raises UsageError, OSError.

    A file's field is its extension, a text's is `txt`, and other columns share `json`; if an earlier column has the
    field, the later column's name becomes a prefix (`mask.png`). Relative paths start at `root`, by default the table's
    folder.
    """
    root = os.path.dirname(table.path) if root is None else root
    notes: list[str] = []
    file_columns, label, text_columns, rest = _choose(table, options, notes)
    labels, classes = _labels(table, label, options)
    rows = range(len(labels))
    used = ({LABEL_FIELD} if label is not None else set()) | ({COLUMNS_FIELD} if rest else set())
    values: list[list[tuple[str, bytes]]] = [[] for _ in rows]
    members: list[list[SourceFile]] = [[] for _ in rows]

    def prefix(column: str, fields: set[str]) -> str:
        """Return the prefix that makes a column's fields unique."""
        before = "" if used.isdisjoint(fields) else field_prefix(column)
        if twice := used.intersection(before + field for field in fields):
            raise UsageError(f"{table.path!r}: two columns would be the field {min(twice)!r}; rename {column!r}")
        used.update(before + field for field in fields)
        return before

    have_paths = bool(file_columns) and isinstance(table.first(file_columns[0]), str)
    for name in file_columns:
        may_lack = name != file_columns[0] or not have_paths
        files = [_file(table, row, name, root, may_lack=may_lack) for row in rows]
        before = prefix(name, {file.field for file in files if file is not None and file.field is not None})
        for row, file in enumerate(files):
            if file is not None:
                members[row].append(file._replace(field=before + file.field) if before and file.field else file)
    for name in text_columns:
        field = prefix(name, {"txt"}) + "txt"
        for row in rows:
            if (text := table.columns[name][row]) not in (None, "") and text == text:  # noqa: PLR0124 (NaN)
                values[row].append((field, _content(table, row, name, text)))
    columns = {name: _numbers(table, name, notes) if table.is_text else table.columns[name] for name in rest}
    for row in rows if rest else ():
        record = {name: None if column[row] != column[row] else column[row] for name, column in columns.items()}  # NaN
        values[row].append((COLUMNS_FIELD, _content(table, row, ", ".join(columns), record)))

    keys: list[str] = [f"{row:09d}" for row in rows]
    if have_paths:
        used_keys: set[str] = set()
        paths = [str(path).strip() for path in table.columns[file_columns[0]]]
        keys = [unique_key(path.removesuffix(f".{extension_of(path)}"), used_keys) for path in paths]
    samples = [SourceSample(keys[row], tuple(members[row]), labels[row], tuple(values[row])) for row in rows]
    parts = None if options.split_column is None else _parts(table, options.split_column)
    return Source(tuple(samples), classes, tuple(notes), parts)


def _labels(
    table: Table, name: str | None, options: SourceOptions
) -> tuple[Sequence[int | None], tuple[str, ...] | None]:
    """Return labels as numbers, and the names of the classes if labels are names.

    Labels stay numbers if all are whole, as `1.0` is; otherwise all are names, numbered in sorted order. With `classes`
    or `labels_as_names`, whole numbers are names too; `classes` gives their numbers. Raises UsageError, also if only
    most labels are numbers.
    """
    classes = options.classes
    if name is None:
        if classes is not None or options.labels_as_names:
            raise UsageError(f"{table.path!r} has no column of labels to number; name it with --label-column")
        return [None] * len(next(iter(table.columns.values()))), None
    labels = [value.strip() if isinstance(value, str) else value for value in table.columns[name]]
    numbers = list(map(_whole, labels))
    for row, label in enumerate(labels):
        if isinstance(label, bool) or not isinstance(label, str | int | float) or label == "":
            reason = "a label is a whole number or the name of a class"
            raise UsageError(f"{table.where(row, name)} is {reprlib.repr(label)}; {reason}")
    if classes is None and not options.labels_as_names:
        whole = [number for number in numbers if number is not None]
        if len(whole) == len(labels):
            return whole, None
        if 2 * sum(_number(label) is not None for label in labels) > len(labels):
            row = numbers.index(None)
            raise UsageError(
                f"{table.where(row, name)} is {labels[row]!r}, but most labels are numbers; correct it, give "
                "--labels-as-names if labels are names or have over 64 bits, or rename the column if it has no labels"
            )
    pairs = zip(labels, numbers, strict=True)
    names = [label if isinstance(label, str) else str(label if number is None else number) for label, number in pairs]
    classes = classes or tuple(sorted(set(names)))
    return numbers_of_classes(names, classes, partial(table.where, column=name)), classes


def _number(value: object) -> int | float | None:
    """Return a value or text as a number; None if it is not one. Text such as `01` or `1_2` is a name."""
    if isinstance(value, str) and not _CODE.match(value):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    """Return the int of a whole number: 7 for 7, 7.0, `7` and `7.0`; None for other values, as `07`, 7.5 and 2**63."""
    number = _number(value)
    return int(number) if number is not None and number % 1 == 0 and -(1 << 63) <= number < 1 << 63 else None


def _choose(
    table: Table, options: SourceOptions, notes: list[str]
) -> tuple[list[str], str | None, list[str], list[str]]:
    """Return the columns of files, the column of labels, the columns of texts, and the columns to store as json."""
    files, texts, label = [*options.path_column], [*options.text_column], options.label_column
    free = _not_named(table, [*files, *texts, label, options.split_column])
    if not files and (path := _usual([name for name in free if _is_path(table, name)], _PATH_NAMES)):
        files = [path]
    stored = [name for name in free if _is_stored(table.first(name))]
    if label is None and (usual := _usual([name for name in free if name not in (*files, *stored)], _LABEL_NAMES)):
        if _are_labels(table.columns[usual]):
            label = usual
        else:
            notes.append(f"column {usual!r} does not look like labels, so samples get none without --label-column")
    free = [name for name in free if name not in (*files, label)]
    has_paths = any(isinstance(table.first(name), str) for name in files)
    rest: list[str] = []
    if options.keep_columns or not has_paths or not (label or texts or len(files) > 1):
        files += [name for name in free if name in stored]
        rest = free = [name for name in free if name not in stored]
        strings = [name for name in rest if isinstance(first := table.first(name), str) and _number(first) is None]
        if not options.keep_columns and not texts and strings:
            texts = list(filter(None, [_usual(strings, _TEXT_NAMES) or (strings[0] if strings == rest else None)]))
            rest = free = [name for name in rest if name not in texts]
    elif free:
        notes.append(f"left out: {_quoted(free)}; --keep-columns stores such columns as json")
    if not (files or texts or rest):
        raise UsageError(f"{table.path!r} holds only labels; there is nothing else to pack")
    uses = {"files are": files, "texts are": texts, "json holds": rest, "labels are": [] if label is None else [label]}
    missing = {"files are": "no column holds paths or files", "labels are": "there are no labels"}
    clauses = (f"{use} {_quoted(names, table.noun)}" if names else missing.get(use) for use, names in uses.items())
    notes.append("; ".join(filter(None, clauses)))
    if options.split_column is None and (split := _usual(free, ("split",))):
        notes.append(f"{_quoted([split])} may name splits: --split-column {split} packs each into a folder of its own")
    if options.keep_columns and not rest:
        notes.append("--keep-columns has no effect: all columns are used anyway")
    return files, label, texts, rest


def _not_named(table: Table, named: Sequence[str | None]) -> list[str]:
    """Return the columns that no option names. Raises UsageError if a named column does not exist or is named twice."""
    for name in named:
        if name is not None and name not in table.columns:
            raise UsageError(f"{table.path!r} has no column {name!r}; its columns are {listed(list(table.columns))}")
        if name is not None and named.count(name) > 1:
            raise UsageError(f"{table.path!r}: the column {name!r} is named twice; name it in one option")
    return [name for name in table.columns if name not in named]


def _usual(names: Sequence[str], usual: Sequence[str]) -> str | None:
    lower = {name.lower().replace("-", "_").replace(" ", "_"): name for name in reversed(names)}
    return next((lower[name] for name in usual if name in lower), None)


def _quoted(names: Sequence[str], noun: str = "column") -> str:
    return f"{noun}{'s' * (len(names) > 1)} {listed([repr(name) if name else 'without a name' for name in names])}"


def _is_path(table: Table, name: str) -> bool:
    """Return True if a column's first value may be a path; in `name` and `id` it must be that of an existing file."""
    value = table.first(name)
    if not isinstance(value, str) or "\0" in value:
        return False
    return name.lower() not in ("name", "id") or os.path.isfile(os.path.join(os.path.dirname(table.path), value))


def _are_labels(values: Sequence[object]) -> bool:
    """Return True if at least half are whole numbers or texts; beyond 20 values, at most half may be distinct texts."""
    numbers = list(map(_number, values))
    texts = [value for value, number in zip(values, numbers, strict=True) if isinstance(value, str) and number is None]
    labels = len(texts) + sum(number is not None and number % 1 == 0 for number in numbers)
    return 2 * labels >= len(values) and (len(values) <= 20 or 2 * len(set(texts)) <= len(values))


def _is_stored(value: Any) -> bool:
    return isinstance(value, bytes | SourceFile) or (
        isinstance(value, dict) and "bytes" in value and {*value} <= {"bytes", "path"}
    )


def _file(table: Table, row: int, name: str, root: str, *, may_lack: bool) -> SourceFile | None:
    """Return the file that a value holds or names; None for an empty value if `may_lack`. Raises UsageError."""
    value = table.columns[name][row]
    if isinstance(value, SourceFile):
        return value
    stored = {"bytes": value} if isinstance(value, bytes) else value if _is_stored(value) else {"path": value}
    content, path = stored.get("bytes"), stored.get("path")
    if content is not None:
        extension = (extension_of(path) if isinstance(path, str) else "") or _extension_by_content(content)
        return SourceFile(table.where(row, name), field_named(extension), content=content, size=len(content))
    if isinstance(path, str) and path.strip() and "\0" not in path:
        path = os.path.join(root, path.strip())
        return file_at(path, field_named(extension_of(path)))
    if may_lack and path in (None, ""):
        return None
    raise UsageError(f"{table.where(row, name)} holds {reprlib.repr(value)}, which is not the path of a file")


def _extension_by_content(content: bytes) -> str:
    if content.startswith(b"RIFF"):
        return {b"WEBP": "webp", b"WAVE": "wav"}.get(content[8:12], "bin")
    return next((extension for signature, extension in _SIGNATURES if content.startswith(signature)), "bin")


def _numbers(table: Table, name: str, notes: list[str]) -> list[Any]:
    """Convert a column of text to numbers, and empty text to nan; keep all as text if any is infinite or no number.

    An empty column stays text too. If most are numbers, add a note that names the first that is not.
    """
    values = table.columns[name]
    numbers = [_number(value if value.strip() else "nan") for value in values]
    known = [number for number in numbers if number == number]  # noqa: PLR0124
    odd = [row for row, number in enumerate(numbers) if number is None or math.isinf(number)]
    if odd and 2 * len(odd) < len(known):
        notes.append(f"{table.where(odd[0], name)} is {values[odd[0]]!r}, so the whole column is stored as text")
    if odd or not known:
        return values
    if all(isinstance(number, int) for number in known):
        return numbers
    return [None if number is None else float(number) for number in numbers]


def _content(table: Table, row: int, column: str, value: object) -> bytes:
    """Return the bytes of a text, or the JSON of another value. Raises UsageError."""
    text = value
    if not isinstance(text, str):
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)
        except TypeError as exc:
            raise UsageError(f"{table.where(row, column)}: {exc}; drop the column, or use streamload.pack") from exc
    return text.encode("utf-8", "surrogatepass")


def _plain(value: object) -> str:
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value) if isinstance(value, decimal.Decimal) else value.isoformat()
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
    """Return the labelled files of a folder; an ID is a path with or without its extension.

    Labels are JSON, `{"ID": label, ...}`, or a table of IDs and labels. Raises OSError, and UsageError if IDs and files
    do not agree.
    """
    table = open_table(labels) if labels.lower().endswith(TABLE_EXTENSIONS) else _json_table(labels)
    columns = list(table.columns)
    id_column = options.path_column[0] if options.path_column else _usual(columns, _PATH_NAMES)
    label = options.label_column or _usual([name for name in columns if name != id_column], _LABEL_NAMES)
    if id_column is None or label is None or not {id_column, label} <= {*columns}:
        raise UsageError(
            f"{table.path!r} needs columns of IDs and of labels, but has {listed(columns)}; name them with "
            "--path-column and --label-column"
        )
    ids = [str(value).strip() for value in table.columns[id_column]]
    own, known = os.path.realpath(labels), set(ids)
    files = [path for path in tree.files if os.path.realpath(os.path.join(tree.root, path)) != own]
    candidates = list(filter(is_data, files)) or files
    by_id: dict[str, str] = {}
    for path in candidates:
        name = path if path in known else path.removesuffix(f".{extension_of(path)}")
        if by_id.setdefault(name, path) != path:
            raise UsageError(f"{by_id[name]!r} and {path!r} have the same ID, {name!r}; remove or rename one of them")
    for noun, complaint, names in (
        ("file", f"without a label in {labels!r}", by_id.keys() - known),
        ("ID", f"of {labels!r} without a file in {tree.root!r}", known - by_id.keys()),
        ("ID", f"in two rows of {labels!r}", {name for name, count in Counter(ids).items() if count > 1}),
    ):
        if names:
            raise UsageError(f"{counted(len(names), noun)} {complaint}: {listed(list(map(repr, sorted(names))))}")
    notes = [*tree.notes]
    if strays := len(files) - len(candidates):
        notes.append(f"skipped {counted(strays, 'file')} other than images, sound and arrays")
    table = table._replace(columns=table.columns | {id_column: [by_id[name] for name in ids]})
    options = replace(options, path_column=(id_column,), label_column=label)
    source = samples_of_table(table, options, tree.root)
    return replace(source, notes=(*notes, *source.notes))


def open_table(path: str) -> Table:
    """Read a CSV, TSV, JSON lines or parquet file. Raises UsageError, OSError.

    If the first line of a CSV or TSV has the path of an existing file, it is no header; columns are path, label, 3, ...
    """
    table = _read_parquet(path) if path.lower().endswith(".parquet") else _read_lines(path)
    if not any(table.columns.values()):
        raise UsageError(f"{path!r} has no rows; there is nothing to pack")
    return table


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
    return Table(path, columns, lambda row: f"row {row + 1}")


def _read_lines(path: str) -> Table:
    is_json = path.lower().endswith((".jsonl", ".ndjson"))
    try:
        with open(path, encoding="utf-8-sig", newline="\n" if is_json else "") as file:
            text = file.read()
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path!r} is not UTF-8 text ({exc.reason} at byte {exc.start}); save it as UTF-8") from exc
    rows = list((_json_rows if is_json else _separated_rows)(path, text))
    lines = [line for line, _ in rows]
    names = dict.fromkeys(name for _, row in rows for name in row)
    columns = {name: [row.get(name) for _, row in rows] for name in names}
    return Table(path, columns, lambda row: f"line {lines[row]}", is_text=not is_json)


def _json_rows(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in enumerate(text.split("\n"), start=1):
        if not row.strip():
            continue
        try:
            record = json.loads(row)
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{path!r}, line {line}: not JSON ({exc})") from exc
        if not isinstance(record, dict):
            raise UsageError(f"{path!r}, line {line}: not a JSON object with columns")
        yield line, record


def _separated_rows(path: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    first = text.partition("\n")[0]
    delimiter = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            if not any(map(str.strip, cells)):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                if not any(os.path.isfile(os.path.join(os.path.dirname(path), cell)) for cell in header if cell):
                    _check_header(path, header)
                    continue
                header = ["path", "label", *map(str, range(3, len(header) + 1))][: len(header)]
            if len(cells) != len(header):
                columns = counted(len(cells), "column")
                raise UsageError(f"{path!r}, line {reader.line_num}: {columns}, but the first line has {len(header)}")
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as exc:
        raise UsageError(f"{path!r}, line {reader.line_num}: {exc}") from exc


def _check_header(path: str, header: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise UsageError(f"{path!r} has two columns called {twice[0]!r}; rename one of them")


def _json_table(path: str) -> Table:
    try:
        with open(path, encoding="utf-8-sig") as file:
            mapping = json.load(file)
        ids, labels = list(mapping), list(mapping.values())
    except (ValueError, RecursionError, TypeError, AttributeError) as exc:
        raise UsageError(f'{path!r} is not JSON, or holds no mapping {{"ID": label, ...}} ({exc})') from exc
    return Table(path, {"id": ids, "label": labels}, lambda row: f"ID {ids[row]!r}")
