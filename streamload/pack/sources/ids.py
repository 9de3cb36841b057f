"""A folder with one file per sample, named by its ID, and a file that maps IDs to labels.

This is the layout of many hand-written `Dataset`s: `data/<ID>.pt`, `labels = {ID: label}`, and sometimes
`partition = {"train": [ID, ...], "validation": [ID, ...]}`. It is read as a table whose column of paths is found by ID.
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
from streamload.text import counted

_LABELS_NAMES = ("labels.json", *(f"labels{extension}" for extension in TABLE_EXTENSIONS))
_NAMED = 5


def labels_inside(tree: Tree) -> str | None:
    """Return the path of a file of labels that lies beside samples, unlike in a folder of class folders; or None."""
    _, loose = tree.inside("")
    if not any(map(is_data, loose)):
        return None
    return next((os.path.join(tree.root, name) for name in _LABELS_NAMES if name in loose), None)


def files_by_id(
    tree: Tree, labels: str, partition: str | None, columns: TableColumns, classes: tuple[str, ...] | None
) -> Source:
    """Return the files of a folder that have a label; an ID is a file's path without its extension.

    Args:
        tree: the folder.
        labels: JSON, `{"ID": label, ...}`, or a table with a column of IDs and one of labels.
        partition: JSON, `{"train": ["ID", ...], ...}`, or None.
        columns: the columns of a table.
        classes: the given names of the classes by number, or None.

    Raises:
        SourceError: a file has no label, two files have one ID, an ID has no file, or a mapping has the wrong form.
        OSError: something cannot be read.
    """
    if labels.lower().endswith(TABLE_EXTENSIONS):
        table = open_table(labels)
    else:
        label_of = _json_mapping(labels, "--labels", '{"ID": label, ...}')
        values: dict[str, list[Any]] = {"id": list(label_of), "label": list(label_of.values())}
        head = {name: column[0] for name, column in values.items()}
        table = Table(
            labels, ["id", "label"], len(label_of), lambda row: f"ID {values['id'][row]!r}", head, values.__getitem__
        )
    id_column, label_column = table.ids_and_labels(columns)
    ids = [str(value).strip() for value in table.column(id_column)]
    own = {os.path.realpath(path) for path in (labels, partition) if path is not None}
    files = [path for path in tree.files if os.path.realpath(os.path.join(tree.root, path)) not in own]
    candidates = list(filter(is_data, files)) or files
    known = set(ids)
    by_id: dict[str, str] = {}
    for path in candidates:
        name = path if path in known else path.removesuffix(f".{extension_of(path)}")
        if name in by_id:
            raise SourceError(f"{by_id[name]!r} and {path!r} have one ID, {name!r}; remove or rename one of them")
        by_id[name] = path
    _refuse("file", f"without a label in {labels!r}", [name for name in by_id if name not in known])
    _refuse("ID", f"of {labels!r} without a file in {tree.root!r}", [name for name in ids if name not in by_id])
    _refuse("ID", f"in two rows of {labels!r}", [name for name, count in Counter(ids).items() if count > 1])
    replaced = {id_column: [by_id[name] for name in ids]}
    options = replace(columns, paths=(id_column,), label=label_column)
    if partition is not None:
        part_of = _parts(partition, ids)
        options = replace(options, split="--partition")
        replaced["--partition"] = [part_of[name] for name in ids]
    original = table.column
    table = table._replace(
        names=list(dict.fromkeys((*table.names, *replaced))),
        head=table.head | {name: column[0] for name, column in replaced.items()},
        column=lambda name: replaced[name] if name in replaced else original(name),
    )
    source = samples_of_table(table, options, classes, tree.root)
    notes = tree.notes()
    if strays := len(files) - len(candidates):
        notes.append(f"skipped {counted(strays, 'file')} of other kinds than images, sound and arrays")
    return replace(source, notes=(*notes, *source.notes))


def _parts(path: str, ids: list[str]) -> dict[str, str]:
    """Return the split of each ID."""
    part_of: dict[str, str] = {}
    known = set(ids)
    for part, members in _json_mapping(path, "--partition", '{"train": ["ID", ...], ...}').items():
        if not isinstance(members, list):
            raise SourceError(f'{path!r}: {part!r} is no split; give a list of IDs: "train": ["ID", ...]')
        unknown = [str(name) for name in members if str(name) not in known]
        _refuse("ID", f"of the split {part!r} in {path!r} without a file", unknown)
        for name in map(str, members):
            if name in part_of:
                raise SourceError(f"{path!r}: the ID {name!r} stands in {part_of[name]!r} and in {part!r}")
            part_of[name] = part
    _refuse("file", f"in no split of {path!r}", [name for name in ids if name not in part_of])
    return part_of


def _json_mapping(path: str, option: str, form: str) -> dict[str, Any]:
    if path.lower().endswith((".pt", ".pth", ".pkl", ".pickle")):
        raise SourceError(
            f"{path!r} is a pickle, which can run any code when it is loaded; write it as JSON, with "
            f"json.dump(mapping, open(..., 'w')), and give that as {option}"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            mapping = json.load(file)
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{path!r} is not JSON ({exc}); {option} takes {form}") from exc
    if not isinstance(mapping, dict) or not mapping:
        raise SourceError(f"{path!r} holds no mapping; {option} takes {form}")
    return mapping


def _refuse(noun: str, complaint: str, names: list[str]) -> None:
    if names:
        some = ", ".join(map(repr, sorted(names)[:_NAMED])) + (", ..." if names[_NAMED:] else "")
        raise SourceError(f"{counted(len(names), noun)} {complaint}: {some}")
