"""Determines the kind of a source, and lists it."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field

from streamload.pack.sources.arrays import ARRAYS_EXTENSIONS, rows_of_arrays
from streamload.pack.sources.folders import samples_of_folder, walk
from streamload.pack.sources.ids import files_by_id, labels_inside
from streamload.pack.sources.source import Source, SourceError
from streamload.pack.sources.table import TABLE_EXTENSIONS, TableColumns, open_table, samples_of_table

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
