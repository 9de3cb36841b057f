"""Determines the kind of a source, and lists it."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field

from streamload_tools.sources.id_folder import files_by_id
from streamload_tools.sources.image_folders import find_images, images_of_splits, split_folders
from streamload_tools.sources.source import SAMPLE_FIELDS, Source, SourceError, field_of
from streamload_tools.sources.table import TABLE_EXTENSIONS, TableColumns, files_of_table

__all__ = ["SourceOptions", "open_source"]

_LABELS_NAMES = ("labels.json", *(f"labels{extension}" for extension in TABLE_EXTENSIONS))


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """How to read a source; see the options of the same names.

    Attributes:
        labels: the file that maps IDs to labels, or None.
        partition: the file that maps splits to IDs, or None.
        columns: the columns of a table.
        follow_links: follow links to folders.
        classes: the given names of the classes by number, or None.
    """

    labels: str | None = None
    partition: str | None = None
    columns: TableColumns = field(default_factory=TableColumns)
    follow_links: bool = False
    classes: tuple[str, ...] | None = None


def open_source(source: str, options: SourceOptions) -> Source:
    """List a source: a table of files, a folder of files with IDs and labels, or an ImageFolder.

    There may be one ImageFolder per split. A folder that contains samples and a `labels.json` (or `.csv`, `.tsv`,
    `.jsonl`) is one of files with IDs.

    Raises:
        SourceError: the source does not exist or cannot be packed as it is; the message says what to do.
        OSError: it cannot be read.
    """
    if not os.path.exists(source):
        raise SourceError(f"{source!r} does not exist{_guess(source)}")
    if not os.path.isdir(source):
        if not source.lower().endswith(TABLE_EXTENSIONS):
            raise SourceError(
                f"{source!r} is a file; give the folder that holds one folder for each class, or a .csv, .tsv or "
                ".jsonl of paths and labels"
            )
        if options.labels is not None or options.partition is not None:
            raise SourceError(
                "--labels and --partition belong to a folder of files; a table has its labels in a column"
            )
        return files_of_table(source, options.columns, options.classes)
    labels = options.labels if options.labels is not None else _labels_inside(source)
    if labels is not None:
        for file in filter(None, (labels, options.partition)):
            if not os.path.isfile(file):
                raise SourceError(f"{file!r} does not exist{_guess(file)}")
        return files_by_id(
            source,
            labels,
            options.partition,
            options.columns,
            follow_links=options.follow_links,
            classes=options.classes,
        )
    if options.partition is not None:
        raise SourceError("--partition lists IDs of files; give their labels too, with --labels FILE")
    splits = split_folders(source, follow_links=options.follow_links)
    if splits:
        return images_of_splits(source, splits, follow_links=options.follow_links, known=options.classes)
    return find_images(source, follow_links=options.follow_links, known=options.classes)


def _labels_inside(folder: str) -> str | None:
    """The labels file in a folder that also contains samples, unlike an ImageFolder; or None."""
    if not any(field_of(name, SAMPLE_FIELDS) for name in os.listdir(folder)):
        return None
    return next((path for name in _LABELS_NAMES if os.path.isfile(path := os.path.join(folder, name))), None)


def _guess(path: str) -> str:
    """A suggestion: an existing path of a similar name."""
    folder, name = os.path.split(path.rstrip("/"))
    if folder and not os.path.isdir(folder):
        return f", and neither does {folder!r}{_guess(folder)}"
    try:
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    except OSError:
        near = []
    return f"; did you mean {os.path.join(folder, near[0])!r}?" if near else "; check the path"
