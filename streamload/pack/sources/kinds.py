"""Determine the kind of a source, and list it."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import fields, replace

from streamload.pack.output import UsageError
from streamload.pack.sources.arrays import ARRAYS_EXTENSIONS, rows_of_arrays
from streamload.pack.sources.folders import Tree, samples_of_folder, walk
from streamload.pack.sources.source import Source, SourceOptions, extension_of, is_data
from streamload.pack.sources.table import TABLE_EXTENSIONS, Table, id_columns, open_table, samples_of_table
from streamload.storage.errors import close_matches
from streamload.text import counted, listed

_LABELS_NAMES = ("labels.json", *(f"labels{extension}" for extension in TABLE_EXTENSIONS))
_COLUMNS = {"path_column", "text_column", "label_column", "labels_as_names", "keep_columns", "split_column"}


def open_source(source: str, options: SourceOptions) -> Source:
    """List a source of any kind. Raises OSError; and UsageError also for an option that has no effect on it."""
    for path in filter(None, (source, options.labels)):
        if not os.path.exists(path):
            folder, name = os.path.split(path.rstrip("/"))
            names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
            raise UsageError(f"{path!r} does not exist; {close_matches(name, names, folder or '.')}")
    if not os.path.isdir(source):
        if source.lower().endswith(TABLE_EXTENSIONS):
            _refuse_others(options, "a table", {*_COLUMNS, "classes"})
            return samples_of_table(open_table(source), options)
        if source.lower().endswith(ARRAYS_EXTENSIONS):
            _refuse_others(options, "a file of arrays", {"label_column", "labels_as_names", "classes"})
            return rows_of_arrays(source, options)
        raise UsageError(
            f"{source!r} is a file; give the folder that holds one folder for each class, a .csv, .tsv, .jsonl or "
            ".parquet with a sample in each row, or a .npz, .npy or .pt of rows"
        )
    tree = walk(source, follow_links=options.follow_symlinks)
    labels, beside = options.labels, tree.inside("")[1]
    if labels is None and options.stems is None and any(map(is_data, beside)):
        labels = next((os.path.join(source, name) for name in _LABELS_NAMES if name in beside), None)
    if labels is not None:
        accepted = {"labels", "follow_symlinks", "labels_as_names", "classes"}
        is_table = labels.lower().endswith(TABLE_EXTENSIONS)
        _refuse_others(options, "a folder with labels by ID", accepted | _COLUMNS if is_table else accepted)
        return files_by_id(tree, labels, options)
    if options.stems:
        _refuse_others(options, "files that share a stem", {"stems", "follow_symlinks"})
    _refuse_others(options, "a folder", {"stems", "follow_symlinks", "classes"})
    return samples_of_folder(tree, options.classes, by_stem=options.stems)


def _refuse_others(options: SourceOptions, kind: str, accepted: set[str]) -> None:
    changed = [each.name for each in fields(options) if getattr(options, each.name) != each.default]
    if useless := [f"--{name.replace('_', '-')}" for name in changed if name not in accepted]:
        raise UsageError(f"{' and '.join(useless)} would have no effect on {kind}, which SOURCE is; leave it out")


def files_by_id(tree: Tree, labels: str, options: SourceOptions) -> Source:
    """Return the files of a folder that have a label; an ID is a file's path without its extension.

    Labels are JSON, `{"ID": label, ...}`, or a table with a column of IDs and one of labels. Raises OSError, and
    UsageError if IDs, files and labels do not agree.
    """
    table = open_table(labels) if labels.lower().endswith(TABLE_EXTENSIONS) else _json_table(labels)
    id_column, label_column = id_columns(table, options)
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
    options = replace(options, path_column=(id_column,), label_column=label_column)
    source = samples_of_table(table, options, tree.root)
    notes = [*tree.notes]
    if strays := len(files) - len(candidates):
        notes.append(f"skipped {counted(strays, 'file')} of other kinds than images, sound and arrays")
    return replace(source, notes=(*notes, *source.notes))


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
