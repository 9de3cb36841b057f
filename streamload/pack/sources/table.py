"""Tables: a row is a sample of files (by path, or stored in the table), a label, texts and other columns."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from streamload.pack.sources.source import (
    COLUMNS_FIELD,
    SPLIT_NAME,
    ArrayRow,
    Source,
    SourceError,
    SourceFile,
    SourceSample,
    extension_of,
    field_named,
    field_prefix,
    is_image,
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
_ROWS_TO_LOOK_AT = 1024


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of a table.

    Attributes:
        paths: the columns of files; none to find them by name and content.
        label: the column of labels, or None for the first with a usual name, if there is one.
        texts: the columns of texts.
        keep: store the other columns as JSON.
        as_names: treat labels that are numbers as names of classes.
        split: the column of names of splits, or None.
    """

    paths: tuple[str, ...] = ()
    label: str | None = None
    texts: tuple[str, ...] = ()
    keep: bool = False
    as_names: bool = False
    split: str | None = None


class Table(NamedTuple):
    """A table whose columns are read when they are needed.

    Attributes:
        path: its path.
        names: of its columns; "1", "2", ... without a header.
        rows: how many it has.
        place: names a row, such as `line 3`.
        head: the first value of each column that is not empty, among the first rows.
        column: returns the values of a column; those of csv are texts.
        is_text: whether all values are texts.
    """

    path: str
    names: list[str]
    rows: int
    place: Callable[[int], str]
    head: dict[str, Any]
    column: Callable[[str], list[Any]]
    is_text: bool = False

    def where(self, row: int, column: str) -> str:
        """Name a value by file, row and column."""
        return f"{self.path!r}, {self.place(row)}, column {column!r}"

    def usual(self, names: Sequence[str], usual: Sequence[str], position: int | None = None) -> str | None:
        """Return the first of `names` that is usual, in any case, or the one at a position if there is no header."""
        if len(self.names) >= 2 and self.names == [str(number + 1) for number in range(len(self.names))]:
            return None if position is None or self.names[position] not in names else self.names[position]
        lower = {name.lower().replace("-", "_").replace(" ", "_"): name for name in reversed(names)}
        return next((lower[name] for name in usual if name in lower), None)

    def ids_and_labels(self, options: TableColumns) -> tuple[str, str]:
        """Return the names of the columns of IDs and of labels. Raises SourceError."""
        ids = options.paths[0] if options.paths else self.usual(self.names, _PATH_NAMES, 0)
        label = options.label or self.usual([name for name in self.names if name != ids], _LABEL_NAMES, 1)
        for option, name in (("--path-column", ids), ("--label-column", label)):
            if name is None or name not in self.names:
                raise SourceError(
                    f"{self.path!r} needs columns of IDs and of labels, of {listed(self.names)}; name one with {option}"
                )
        return str(ids), str(label)


class _Chosen(NamedTuple):
    """What the columns of a table are used for."""

    files: list[str]
    label: str | None
    texts: list[str]
    split: str | None
    rest: list[str]


def samples_of_table(
    table: Table, options: TableColumns, known: tuple[str, ...] | None = None, root: str | None = None
) -> Source:
    """Return a sample for each row of a table; no file is opened.

    A file's field is its extension, a text's is `txt`, and that of all columns kept is `json`. If an earlier column has
    such a field too, the name of the column stands before it (`mask.png`).

    Args:
        table: the table.
        options: its columns.
        known: the given names of the classes by number, or None.
        root: the folder that paths are relative to; None for the table's.

    Raises:
        SourceError: the table is invalid; the message names file, row and column.
        OSError: it cannot be read.
    """
    root = os.path.dirname(table.path) if root is None else root
    notes: list[str] = []
    chosen = _choose(table, options, notes)
    labels: Sequence[int | None] = [None] * table.rows
    classes = None
    if chosen.label is not None:
        label = chosen.label
        values = [value.strip() if isinstance(value, str) else value for value in table.column(label)]
        labels, classes = numbered_labels(
            values, lambda row: table.where(row, label), as_names=options.as_names, classes=known
        )
    elif known is not None or options.as_names:
        raise SourceError(f"{table.path!r} has no column of labels to number; name it with --label-column")

    taken = {LABEL_FIELD} if chosen.label is not None else set()
    taken |= {COLUMNS_FIELD} if chosen.rest else set()

    def prefix(column: str, fields: set[str]) -> str:
        """Return what has to stand before these fields so that they are unlike all others."""
        before = "" if taken.isdisjoint(fields) else field_prefix(column)
        if twice := taken.intersection(before + field for field in fields):
            raise SourceError(f"{table.path!r}: two columns would be the field {min(twice)!r}; rename {column!r}")
        taken.update(before + field for field in fields)
        return before

    files: list[list[SourceFile | ArrayRow | None]] = []
    groups: list[tuple[str, ...]] = []
    stems = None
    for number, name in enumerate(chosen.files):
        column = _files(table, name, root, may_lack=number > 0 or not isinstance(table.head[name], str | int))
        if not number and isinstance(table.head[name], str | int):
            stems = [str(value).strip() for value in table.column(name)]
        fields = {file.field for file in column if file is not None and file.field is not None}
        if before := prefix(name, fields):
            column = [file._replace(field=before + file.field) if file and file.field else file for file in column]
        files.append(column)
        groups.append(tuple(sorted(before + field for field in fields)))
    texts = {f"{prefix(name, {'txt'})}txt": _texts(table, name) for name in chosen.texts}
    columns = {name: table.column(name) for name in chosen.rest}
    if table.is_text:
        columns = {name: _numbers(table, name, values, notes) for name, values in columns.items()}

    samples = []
    keys: set[str] = set()
    for row in range(table.rows):
        members = tuple([file for column in files if (file := column[row]) is not None])
        content = [(field, text) for field, column in texts.items() if (text := column[row]) is not None]
        if columns:
            content.append((COLUMNS_FIELD, _json(table, row, columns)))
        stem = None if stems is None else stems[row]
        key = f"{row:09d}" if stem is None else unique_key(stem.removesuffix(f".{extension_of(stem)}"), keys)
        samples.append(SourceSample(key, members, labels[row], tuple(content)))
    noun = "sample" if stems is None or len(files) > 1 else "image" if all(map(is_image, groups[0])) else "file"
    fields_of_values = [*texts, COLUMNS_FIELD] if columns and not files and not texts else list(texts)
    return Source(
        tuple(samples),
        classes,
        noun,
        tuple(notes),
        None if chosen.split is None else _parts(table, chosen.split),
        (*filter(None, groups), *((field,) for field in fields_of_values)),
    )


def _choose(table: Table, options: TableColumns, notes: list[str]) -> _Chosen:
    """Decide what the columns are used for, and say so."""
    named = [("--path-column", name) for name in options.paths] + [("--text-column", name) for name in options.texts]
    named += [("--label-column", options.label)] if options.label is not None else []
    named += [("--split-column", options.split)] if options.split is not None else []
    used = [name for _, name in named]
    for option, name in named:
        if name not in table.names:
            raise SourceError(
                f"{table.path!r} has no column {name!r} ({option}); its columns are {listed(table.names)}"
            )
        if used.count(name) > 1:
            raise SourceError(f"{table.path!r}: the column {name!r} is named twice; a column has one meaning")
    free = [name for name in table.names if name not in used]
    stored = [name for name in free if _is_stored(table.head[name])]
    files = list(options.paths)
    if not files and (path := table.usual([name for name in free if _is_path(table, name)], _PATH_NAMES, 0)):
        files = [path]
    has_paths = any(isinstance(table.head[name], str | int) for name in files)
    free = [name for name in free if name not in files]
    label = options.label
    if (
        label is None
        and (label := table.usual([name for name in free if name not in stored], _LABEL_NAMES, 1))
        and (reason := _no_label(table, label))
    ):
        notes.append(f"{table.path!r}: column {label!r} {reason}, so it is no label; --label-column makes it one")
        label = None
    texts = list(options.texts)
    free = [name for name in free if name != label]
    if options.keep or not has_paths or not (label or texts or len(files) > 1):
        files += [name for name in stored if name not in files]
        free = [name for name in free if name not in files]
        if not options.keep and not texts:
            strings = [name for name in free if isinstance(table.head[name], str) and not is_number(table.head[name])]
            text = table.usual(strings, _TEXT_NAMES) or (strings[0] if strings and strings == free else None)
            texts = [text] if text is not None else []
        rest = [name for name in free if name not in texts]
        if options.keep and not rest:
            notes.append("--keep-columns has no effect: all columns are used without it")
    else:
        rest = []
        if free:
            notes.append(f"left out: {_columns(free)}; --keep-columns stores other columns as json")
    if not (files or texts or rest):
        raise SourceError(f"{table.path!r} holds labels alone; there is nothing else to pack")
    split = table.usual(free, ("split",)) if options.split is None else None
    if split is not None:
        notes.append(f"{_columns([split])} may name splits: --split-column {split} packs each into a folder of its own")
    uses = [f"files are {_columns(files)}"] if files else ["no column holds paths or files"]
    uses += [f"texts are {_columns(texts)}"] if texts else []
    uses += [f"json holds {_columns(rest)}"] if rest else []
    uses += [f"labels are {_columns([label])}" if label is not None else "there are no labels"]
    notes.append("; ".join(uses))
    return _Chosen(files, label, texts, options.split, rest)


def _columns(names: Sequence[str]) -> str:
    return f"column{'s' * (len(names) > 1)} {listed([repr(name) if name else 'without a name' for name in names])}"


def _is_path(table: Table, name: str) -> bool:
    """Return True if a column of a usual name may hold paths; names and IDs often are something else."""
    value = table.head[name]
    if not isinstance(value, str) or "\0" in value:
        return False
    return name.lower() not in ("name", "id") or os.path.isfile(os.path.join(os.path.dirname(table.path), value))


def _no_label(table: Table, name: str) -> str | None:
    """Say why a column with the usual name of labels holds something else, or return None."""
    values = table.column(name)
    if isinstance(table.head[name], bool) or not isinstance(table.head[name], str | int | float):
        return f"holds {reprlib.repr(table.head[name])}"
    if 2 * sum(is_number(value) and whole_number(value) is None for value in values) > len(values):
        return "holds numbers with fractions"
    names = {value for value in values if isinstance(value, str) and not is_number(value)}
    return "has another text in most rows" if len(values) > 20 and 2 * len(names) > len(values) else None


def _is_stored(value: Any) -> bool:
    """Return True for bytes, rows of arrays, and the `{bytes, path}` of a file in tables of Hugging Face."""
    return isinstance(value, bytes | ArrayRow) or (
        isinstance(value, dict) and "bytes" in value and {*value} <= {"bytes", "path"}
    )


def _files(table: Table, name: str, root: str, *, may_lack: bool) -> list[SourceFile | ArrayRow | None]:
    """Return the files of a column, given by their paths or stored in the table."""
    files: list[SourceFile | ArrayRow | None] = []
    for row, value in enumerate(table.column(name)):
        if isinstance(value, ArrayRow):
            files.append(value)
            continue
        stored = {"bytes": value} if isinstance(value, bytes) else value if _is_stored(value) else {"path": value}
        content, path = stored.get("bytes"), stored.get("path")
        if isinstance(path, int) and not isinstance(path, bool):
            path = str(path)
        if content is not None:
            extension = (extension_of(path) if isinstance(path, str) else "") or _extension_by_content(content)
            files.append(SourceFile(table.where(row, name), field_named(extension), decodable=False, content=content))
        elif isinstance(path, str) and path.strip() and "\0" not in path:
            path = os.path.join(root, path.strip())
            files.append(SourceFile(path, field_named(extension_of(path)), decodable=False))
        elif may_lack and path in (None, ""):
            files.append(None)
        else:
            raise SourceError(f"{table.where(row, name)} holds {reprlib.repr(value)}, which is no path of a file")
    return files


def _extension_by_content(content: bytes) -> str:
    if content.startswith(b"RIFF"):
        return {b"WEBP": "webp", b"WAVE": "wav"}.get(content[8:12], "bin")
    return next((extension for signature, extension in _SIGNATURES if content.startswith(signature)), "bin")


def _texts(table: Table, name: str) -> list[bytes | None]:
    texts: list[bytes | None] = []
    for row, value in enumerate(table.column(name)):
        text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if text is not None and not isinstance(text, str):
            raise SourceError(
                f"{table.where(row, name)} holds {reprlib.repr(value)}, which is no text; --keep-columns stores lists "
                "and the like as json"
            )
        texts.append(text.encode("utf-8", "surrogatepass") if text else None)
    return texts


def _numbers(table: Table, name: str, values: list[str], notes: list[str]) -> list[Any]:
    """Convert a column of texts to numbers if all are numbers, empty or nan; say which one is not if most are."""
    lacking = [value.strip().lower() in ("", "nan") for value in values]
    odd = [
        row for row, value in enumerate(values) if not lacking[row] and not (is_number(value) and "inf" not in value)
    ]
    numbers = len(values) - sum(lacking) - len(odd)
    if odd or not numbers:
        if numbers > len(odd):
            notes.append(f"{table.where(odd[0], name)} is {values[odd[0]]!r}, so all of the column is stored as text")
        return values
    whole = all(lack or re.fullmatch(r"\s*-?\d+\s*", value) for value, lack in zip(values, lacking, strict=True))
    convert = int if whole else float
    return [None if lack else convert(value) for value, lack in zip(values, lacking, strict=True)]


def _json(table: Table, row: int, columns: dict[str, list[Any]]) -> bytes:
    values = {name: column[row] for name, column in columns.items()}
    values = {name: None if value != value else value for name, value in values.items()}  # noqa: PLR0124  NaN
    try:
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=_plain).encode(
            "utf-8", "surrogatepass"
        )
    except TypeError as exc:
        raise SourceError(
            f"{table.where(row, listed(list(columns)))}: {exc}; leave the column out, or use pack"
        ) from exc


def _plain(value: object) -> str:
    """Return a text for a value of parquet that JSON has no form for."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    raise TypeError(f"JSON cannot hold {reprlib.repr(value)}")


def _parts(table: Table, name: str) -> dict[str, list[int]]:
    parts: dict[str, list[int]] = {}
    for row, value in enumerate(table.column(name)):
        split = value.strip() if isinstance(value, str) else value
        if not isinstance(split, str) or not SPLIT_NAME.fullmatch(split):
            raise SourceError(f"{table.where(row, name)} is {value!r}, which cannot be the name of a split")
        parts.setdefault(split, []).append(row)
    return parts


def open_table(path: str) -> Table:
    """Open a CSV, TSV, JSON lines or parquet file.

    A CSV whose first line contains the path of an existing file has no header.

    Raises:
        SourceError: there is no row, a line is invalid, or a package is missing.
        OSError: the file cannot be read.
    """
    if path.lower().endswith(".parquet"):
        return _open_parquet(path)
    json_lines = path.lower().endswith((".jsonl", ".ndjson"))
    try:
        with open(path, encoding="utf-8-sig", newline="\n" if json_lines else "") as file:
            text = file.read()
    except UnicodeDecodeError as exc:
        raise SourceError(f"{path!r} is not UTF-8 text ({exc.reason} at byte {exc.start}); save it as UTF-8") from exc
    rows = _json_lines(path, text) if json_lines else _separated_lines(path, text)
    if not rows:
        raise SourceError(f"{path!r} holds no row; there is nothing to pack")
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    first = [row for _, row in rows[:_ROWS_TO_LOOK_AT]]
    head = {name: next((row[name] for row in first if row.get(name) not in (None, "")), None) for name in names}
    return Table(
        path,
        names,
        len(rows),
        lambda row: f"line {rows[row][0]}",
        head,
        lambda name: [row.get(name) for _, row in rows],
        is_text=not json_lines,
    )


def _open_parquet(path: str) -> Table:
    try:
        from pyarrow import parquet
    except ImportError as exc:
        raise SourceError(f"{path!r}: to read parquet, install pyarrow: pip install 'streamload[parquet]'") from exc

    def column(name: str) -> list[Any]:
        try:
            with parquet.ParquetFile(path, pre_buffer=False) as file:
                values: list[Any] = file.read([name], use_threads=False).column(name).to_pylist()
                return values
        except (ValueError, OSError, KeyError) as exc:  # what pyarrow raises for damage
            raise SourceError(f"{path!r}: column {name!r} cannot be read: {exc}") from exc

    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            names, count = list(file.schema_arrow.names), file.metadata.num_rows
            _check_header(path, names)
            if not count:
                raise SourceError(f"{path!r} holds no row; there is nothing to pack")
            first = next(file.iter_batches(_ROWS_TO_LOOK_AT, use_threads=False)).to_pydict()
    except (ValueError, OSError) as exc:
        raise SourceError(f"{path!r} cannot be read as parquet: {exc}") from exc
    head = {name: next((value for value in first[name] if value not in (None, "")), None) for name in names}
    return Table(path, names, count, lambda row: f"row {row + 1}", head, column)


def _json_lines(path: str, text: str) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    for line, row in enumerate(text.split("\n"), start=1):
        if not row.strip():
            continue
        try:
            record = json.loads(row)
        except (ValueError, RecursionError) as exc:
            raise SourceError(f"{path!r}, line {line}: not JSON ({exc})") from exc
        if not isinstance(record, dict):
            raise SourceError(f"{path!r}, line {line}: not a JSON object with columns")
        rows.append((line, record))
    return rows


def _separated_lines(path: str, text: str) -> list[tuple[int, dict[str, Any]]]:
    first = text.partition("\n")[0]
    delimiter = "\t" if path.lower().endswith(".tsv") else max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[tuple[int, dict[str, Any]]] = []
    header: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                if not any(os.path.isfile(os.path.join(os.path.dirname(path), cell)) for cell in header if cell):
                    _check_header(path, header)
                    continue
                header = [str(number) for number in range(1, len(cells) + 1)]
            if len(cells) != len(header):
                columns = counted(len(cells), "column")
                raise SourceError(f"{path!r}, line {reader.line_num}: {columns}, and the first line has {len(header)}")
            rows.append((reader.line_num, dict(zip(header, cells, strict=True))))
    except csv.Error as exc:
        raise SourceError(f"{path!r}, line {reader.line_num}: {exc}") from exc
    return rows


def _check_header(path: str, header: Sequence[str]) -> None:
    if len(set(header)) != len(header):
        twice = next(name for name in header if header.count(name) > 1)
        raise SourceError(f"{path!r} has two columns called {twice!r}; rename one of them")
