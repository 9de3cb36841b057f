"""A folder with one file per sample, named by its ID, and a file that maps IDs to labels.

This is the layout of many hand-written `Dataset`s: `data/<ID>.pt`, `labels = {ID: label}`, and sometimes
`partition = {"train": [ID, ...], "validation": [ID, ...]}`. Both mappings are read from JSON, labels also from a table;
nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from streamload.pack.sources.image_folders import visible_files
from streamload.pack.sources.source import (
    COLUMNS_FIELD,
    SAMPLE_FIELDS,
    SPLIT_NAME,
    KeyedSamples,
    Source,
    SourceError,
    field_of,
    is_label,
    numbered_labels,
    other_kinds_advice,
)
from streamload.pack.sources.table import Row, TableColumns, read_table
from streamload.pack.sources.table_file import TABLE_EXTENSIONS
from streamload.text import counted

_NAMED = 5


def files_by_id(
    source: str,
    labels_file: str,
    partition_file: str | None,
    columns: TableColumns,
    *,
    follow_links: bool,
    classes: tuple[str, ...] | None = None,
) -> Source:
    """The files of a folder that have a label, in the order of their IDs.

    A file's ID is its path from the folder, without its extension.

    Args:
        source: the folder.
        labels_file: JSON, `{"ID": label, ...}`, or a table with a column of IDs and one of labels.
        partition_file: JSON, `{"train": ["ID", ...], ...}`, or None.
        columns: the columns of a table.
        follow_links: follow links to folders.
        classes: the given names of the classes by number, or None.

    Raises:
        SourceError: a file has no label, two files have one ID, an ID has no file, or a mapping has the wrong form.
        OSError: something cannot be read.
    """
    rows = _labels(labels_file, columns)
    paths, notes = visible_files(source, follow_links=follow_links)
    own = {os.path.realpath(path) for path in (labels_file, partition_file) if path is not None}
    by_id: dict[str, str] = {}
    strays = []
    for path in paths:
        if os.path.realpath(path) in own:
            continue
        if field_of(path, SAMPLE_FIELDS) is None:
            strays.append(path)
            continue
        known = os.path.splitext(os.path.relpath(path, source))[0]
        if known in by_id:
            raise SourceError(f"{by_id[known]!r} and {path!r} have one ID, {known!r}; remove or rename one of them")
        by_id[known] = path
    if not by_id:
        advice = other_kinds_advice(strays) or "there is nothing to pack"
        raise SourceError(f"{source!r} holds no .pt, .npy or image file; {advice}")
    _refuse("file", f"without a label in {labels_file!r}", [name for name in by_id if name not in rows])
    _refuse("ID", f"of {labels_file!r} without a file in {source!r}", [name for name in rows if name not in by_id])
    names = sorted(by_id)
    numbers, names_of_classes = numbered_labels(
        [label for name in names if (label := rows[name].label) is not None],
        lambda position: f"{labels_file!r}: the label of {names[position]!r}",
        as_names=columns.as_names,
        classes=classes,
    )
    keyed = KeyedSamples(SAMPLE_FIELDS)
    samples = tuple(
        keyed.sample(by_id[name], os.path.relpath(by_id[name], source), number, _kept_columns(rows[name]))
        for name, number in zip(names, numbers, strict=True)
    )
    if strays:
        notes.append(f"skipped {counted(len(strays), 'file')} without a sample, such as {strays[0]!r}")
    parts = None if partition_file is None else _parts(partition_file, names)
    return Source(samples, names_of_classes, "file", tuple(notes), parts)


def _kept_columns(row: Row) -> tuple[tuple[str, bytes], ...]:
    return () if row.columns is None else ((COLUMNS_FIELD, row.columns),)


def _labels(path: str, columns: TableColumns) -> dict[str, Row]:
    """The row of each ID."""
    if path.lower().endswith(TABLE_EXTENSIONS):
        found: dict[str, Row] = {}
        for row in read_table(path, columns, needs_label=True).rows:
            name = _without_extension(row.path)  # tables often contain file names instead of IDs
            if name in found:
                raise SourceError(f"{path!r}, line {row.line}: the ID {name!r} stands in line {found[name].line} too")
            found[name] = row
        return found
    labels = _json_mapping(path, "--labels", '{"ID": label, ...}')
    for name, label in labels.items():
        if not is_label(label):
            raise SourceError(
                f"{path!r}: the label of {name!r} is {label!r}; it must be a whole number or the name of a class"
            )
    return {name: Row(0, name, label) for name, label in labels.items()}


def _without_extension(name: str) -> str:
    return os.path.splitext(name)[0] if field_of(name, SAMPLE_FIELDS) else name


def _parts(path: str, names: list[str]) -> dict[str, list[int]]:
    """The positions of each split's IDs."""
    position = {name: number for number, name in enumerate(names)}
    parts: dict[str, list[int]] = {}
    taken: dict[str, str] = {}
    for part, ids in _json_mapping(path, "--partition", '{"train": ["ID", ...], ...}').items():
        if not SPLIT_NAME.fullmatch(part) or not _are_ids(ids):
            raise SourceError(
                f'{path!r}: {part!r} is no split; a split is a name with a list of IDs: "train": ["ID", ...]'
            )
        members = [str(name) for name in ids]
        _refuse("ID", f"of the split {part!r} in {path!r} without a file", [n for n in members if n not in position])
        for name in members:
            if name in taken:
                raise SourceError(f"{path!r}: the ID {name!r} stands in {taken[name]!r} and in {part!r}")
            taken[name] = part
        parts[part] = sorted(position[name] for name in members)
    _refuse("file", f"in no split of {path!r}", [name for name in names if name not in taken])
    return parts


def _are_ids(ids: object) -> bool:
    return isinstance(ids, list) and all(isinstance(name, str | int) for name in ids)


def _json_mapping(path: str, option: str, form: str) -> Mapping[str, Any]:
    if path.lower().endswith((".pt", ".pth", ".pkl", ".pickle")):
        raise SourceError(
            f"{path!r} is a pickle, which can run any code when it is loaded; write it as JSON, with "
            f"json.dump(mapping, open(..., 'w')), and give that as {option}"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            found = json.load(file)
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{path!r} is not JSON ({exc}); {option} takes {form}") from exc
    if not isinstance(found, dict) or not found:
        raise SourceError(f"{path!r} holds no mapping; {option} takes {form}")
    return found


def _refuse(noun: str, complaint: str, names: list[str]) -> None:
    if names:
        some = ", ".join(map(repr, sorted(names)[:_NAMED])) + (", ..." if names[_NAMED:] else "")
        raise SourceError(f"{counted(len(names), noun)} {complaint}: {some}")
