"""A folder with one file per sample, named by its ID, and a file that maps IDs to labels.

This is the layout of many hand-written `Dataset`s: `data/<ID>.pt`, and `labels = {ID: label}`. It is read as a table
whose column of paths is found by ID.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

from streamload.pack.sources.folders import Tree
from streamload.pack.sources.source import Source, SourceError, extension_of, is_data
from streamload.pack.sources.table import TABLE_EXTENSIONS, Table, TableColumns, open_table, samples_of_table
from streamload.text import counted, listed

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
