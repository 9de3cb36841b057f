"""Determines the kind of a source, and lists it."""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from streamload.pack.sources.arrays import ARRAYS_EXTENSIONS, rows_of_arrays
from streamload.pack.sources.folders import Tree, samples_of_folder, walk
from streamload.pack.sources.source import Source, SourceError, extension_of, is_data
from streamload.pack.sources.table import TABLE_EXTENSIONS, Table, TableColumns, open_table, samples_of_table
from streamload.text import counted, listed

_COLUMNS = {"--path-column", "--text-column", "--label-column", "--labels-as-names", "--keep-columns", "--split-column"}


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to read a source; see the options of the same names.

    Attributes:
        labels: the file that maps IDs to labels, or None.
        columns: the columns of a table.
        follow_links: follow links to folders.
        classes: the given names of the classes by number, or None.
        stems: files that share a stem are a sample; None if the folder decides.
    """

    labels: str | None = None
    columns: TableColumns = field(default_factory=TableColumns)
    follow_links: bool = False
    classes: tuple[str, ...] | None = None
    stems: bool | None = None


def open_source(source: str, options: SourceOptions) -> Source:
    """List a source: a table, arrays, a folder of files with IDs and labels, class folders, or files by stem.

    Raises:
        SourceError: the source does not exist or cannot be packed as it is, or an option has no effect on it; the
            message says what to do.
        OSError: it cannot be read.
    """
    columns = options.columns
    for path in filter(None, (source, options.labels)):
        if not os.path.exists(path):
            raise SourceError(f"{path!r} does not exist{_guess(path)}")
    if source.lower().endswith(TABLE_EXTENSIONS) and not os.path.isdir(source):
        _refuse_others(options, "a table", {*_COLUMNS, "--classes"})
        return samples_of_table(open_table(source), columns, options.classes)
    if source.lower().endswith(ARRAYS_EXTENSIONS) and not os.path.isdir(source):
        _refuse_others(options, "a file of arrays", {"--label-column", "--labels-as-names", "--classes"})
        return rows_of_arrays(source, columns, options.classes)
    if not os.path.isdir(source):
        raise SourceError(
            f"{source!r} is a file; give the folder that holds one folder for each class, a .csv, .tsv, .jsonl or "
            ".parquet with a sample in each row, or a .npz, .npy or .pt of rows"
        )
    tree = walk(source, follow_links=options.follow_links)
    labels = options.labels if options.labels is not None or options.stems is not None else labels_inside(tree)
    if labels is not None:
        takes = {"--labels", "--follow-symlinks", "--labels-as-names", "--classes"}
        is_table = labels.lower().endswith(TABLE_EXTENSIONS)
        _refuse_others(options, "a folder with labels by ID", takes | _COLUMNS if is_table else takes)
        return files_by_id(tree, labels, columns, options.classes)
    if options.stems:
        _refuse_others(options, "files that share a stem", {"--stems", "--follow-symlinks"})
    _refuse_others(options, "a folder", {"--stems", "--follow-symlinks", "--classes"})
    return samples_of_folder(tree, options.classes, by_stem=options.stems)


def _refuse_others(options: SourceOptions, kind: str, takes: set[str]) -> None:
    """Refuse options that have no effect on a source of this kind."""
    columns = options.columns
    values = {
        "--labels": options.labels,
        "--stems": options.stems is not None,
        "--follow-symlinks": options.follow_links,
        "--classes": options.classes,
        "--label-column": columns.label,
        "--labels-as-names": columns.as_names,
        "--path-column": columns.paths,
        "--text-column": columns.texts,
        "--keep-columns": columns.keep,
        "--split-column": columns.split,
    }
    if useless := [option for option, value in values.items() if value and option not in takes]:
        raise SourceError(f"{' and '.join(useless)} would have no effect on {kind}, which SOURCE is; leave it out")


def _guess(path: str) -> str:
    """Suggest an existing path of a similar name."""
    folder, name = os.path.split(path.rstrip("/"))
    if folder and not os.path.isdir(folder):
        return f", and neither does {folder!r}{_guess(folder)}"
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    except OSError:
        near = []
    return f"; did you mean {os.path.join(folder, near[0])!r}?" if near else "; check the path"


# -- files named by their IDs, and a file that maps IDs to labels ----------------------------------------------------

_LABELS_NAMES = ("labels.json", *(f"labels{extension}" for extension in TABLE_EXTENSIONS))


def labels_inside(tree: Tree) -> str | None:
    """Return the path of a file of labels that lies beside samples, unlike in a folder of class folders; or None."""
    _, loose = tree.inside("")
    if not any(map(is_data, loose)):
        return None
    return next((os.path.join(tree.root, name) for name in _LABELS_NAMES if name in loose), None)


def files_by_id(tree: Tree, labels: str, columns: TableColumns, classes: tuple[str, ...] | None) -> Source:
    """Return the files of a folder that have a label; an ID is a file's path without its extension.

    Args:
        tree: the folder.
        labels: JSON, `{"ID": label, ...}`, or a table with a column of IDs and one of labels.
        columns: the columns of a table.
        classes: the given names of the classes by number, or None.

    Raises:
        SourceError: a file has no label, two files have one ID, an ID has no file, or the mapping has the wrong form.
        OSError: something cannot be read.
    """
    table = open_table(labels) if labels.lower().endswith(TABLE_EXTENSIONS) else _json_table(labels)
    id_column, label_column = table.ids_and_labels(columns)
    ids = [str(value).strip() for value in table.column(id_column)]
    own = os.path.realpath(labels)
    files = [path for path in tree.files if os.path.realpath(os.path.join(tree.root, path)) != own]
    candidates = list(filter(is_data, files)) or files
    known = set(ids)
    by_id: dict[str, str] = {}
    for path in candidates:
        name = path if path in known else path.removesuffix(f".{extension_of(path)}")
        if name in by_id:
            raise SourceError(f"{by_id[name]!r} and {path!r} have one ID, {name!r}; remove or rename one of them")
        by_id[name] = path
    for noun, complaint, names in (
        ("file", f"without a label in {labels!r}", by_id.keys() - known),
        ("ID", f"of {labels!r} without a file in {tree.root!r}", known - by_id.keys()),
        ("ID", f"in two rows of {labels!r}", {name for name, count in Counter(ids).items() if count > 1}),
    ):
        if names:
            raise SourceError(f"{counted(len(names), noun)} {complaint}: {listed(list(map(repr, sorted(names))))}")

    paths = [by_id[name] for name in ids]
    original = table.column
    table = table._replace(
        head=table.head | {id_column: paths[0]},
        column=lambda name: paths if name == id_column else original(name),
    )
    source = samples_of_table(table, replace(columns, paths=(id_column,), label=label_column), classes, tree.root)
    notes = tree.notes()
    if strays := len(files) - len(candidates):
        notes.append(f"skipped {counted(strays, 'file')} of other kinds than images, sound and arrays")
    return replace(source, notes=(*notes, *source.notes))


def _json_table(path: str) -> Table:
    if path.lower().endswith((".pt", ".pth", ".pkl", ".pickle")):
        raise SourceError(
            f"{path!r} is a pickle, which can run any code when it is loaded; write it as JSON, with "
            "json.dump(mapping, open(..., 'w')), and give that as --labels"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            mapping = json.load(file)
    except (ValueError, RecursionError) as exc:
        raise SourceError(f'{path!r} is not JSON ({exc}); --labels takes {{"ID": label, ...}}') from exc
    if not isinstance(mapping, dict) or not mapping:
        raise SourceError(f'{path!r} holds no mapping; --labels takes {{"ID": label, ...}}, or a table')
    ids, labels = list(mapping), list(mapping.values())
    columns: dict[str, list[Any]] = {"id": ids, "label": labels}
    head = {"id": ids[0], "label": labels[0]}
    return Table(path, ["id", "label"], len(ids), lambda row: f"ID {ids[row]!r}", head, columns.__getitem__)
