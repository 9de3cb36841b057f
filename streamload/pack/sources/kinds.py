"""Determines the kind of a source, and lists it."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from dataclasses import dataclass, field, replace

from streamload.pack.sources.arrays import ARRAYS_EXTENSIONS, rows_of_arrays
from streamload.pack.sources.id_folder import files_by_id
from streamload.pack.sources.image_folders import (
    LIKE_SPLITS,
    find_images,
    images_of_splits,
    names_inside,
    split_folders,
)
from streamload.pack.sources.source import SAMPLE_FIELDS, Source, SourceError, field_of
from streamload.pack.sources.stems import samples_by_stem, share_stems, stem_of
from streamload.pack.sources.table import TableColumns, files_of_table
from streamload.pack.sources.table_file import TABLE_EXTENSIONS

# What alone makes no folder of samples: tables of them, archives, programs.
_NO_SAMPLES = (*TABLE_EXTENSIONS, ".tar", ".zip", ".gz", ".md", ".py", ".npz", ".html")
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
        stems: files that share a stem are a sample; None if the folder decides.
    """

    labels: str | None = None
    partition: str | None = None
    columns: TableColumns = field(default_factory=TableColumns)
    follow_links: bool = False
    classes: tuple[str, ...] | None = None
    stems: bool | None = None


def open_source(source: str, options: SourceOptions) -> Source:
    """List a source: a table, arrays, a folder of files with IDs and labels, an ImageFolder, or files by stem.

    There may be one ImageFolder per split. A folder that contains samples and a `labels.json` (or table of that
    name) is one of files with IDs. One without folders in it, or in which most images have files of other kinds
    beside them that share their stem, has a sample for each stem.

    Raises:
        SourceError: the source does not exist or cannot be packed as it is; the message says what to do.
        OSError: it cannot be read.
    """
    if not os.path.exists(source):
        raise SourceError(f"{source!r} does not exist{_guess(source)}")
    return _open_folder(source, options) if os.path.isdir(source) else _open_file(source, options)


def _open_file(source: str, options: SourceOptions) -> Source:
    arrays = source.lower().endswith(ARRAYS_EXTENSIONS)
    if not arrays and not source.lower().endswith(TABLE_EXTENSIONS):
        raise SourceError(
            f"{source!r} is a file; give the folder that holds one folder for each class, a .csv, .tsv, .jsonl or "
            ".parquet of paths and labels, or a .npz or .npy of rows"
        )
    if options.labels is not None or options.partition is not None:
        raise SourceError("--labels and --partition belong to a folder of files; others have their labels in a column")
    if options.stems:
        raise SourceError("--stems is for a folder of files")
    columns = options.columns
    if not arrays:
        return files_of_table(source, columns, options.classes)
    if columns.paths or columns.texts or columns.keep:
        raise SourceError(
            "--path-column, --text-column and --keep-columns are for tables; all arrays of a file are packed"
        )
    return rows_of_arrays(source, columns.label, as_names=columns.as_names, classes=options.classes)


def _open_folder(source: str, options: SourceOptions) -> Source:
    if options.stems:
        if options.labels is not None or options.partition is not None or options.classes is not None:
            raise SourceError(
                "--stems takes labels from files .cls alone; leave out --labels, --partition and --classes"
            )
        return _by_stem(source, options)
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
    may_share = options.stems is None and options.classes is None
    splits = split_folders(source, follow_links=options.follow_links)
    if may_share and not splits and _has_loose_samples(source):
        return _by_stem(source, options, "; --labels FILE gives labels")
    if splits:
        found = images_of_splits(source, splits, follow_links=options.follow_links, known=options.classes)
    else:
        found = find_images(source, follow_links=options.follow_links, known=options.classes)
    if may_share and _others_share_stems(found):
        return _by_stem(source, options, "; --no-stems takes folders as classes of images")
    return found


def _others_share_stems(images: Source) -> bool:
    """Whether most images have another file beside them; one among many is a mistake."""
    odd = {stem_of(sample.members[0].path) for sample in images.samples if sample.members[0].field is None}
    if not odd:
        return False
    files = Counter(stem_of(sample.members[0].path) for sample in images.samples)
    return 2 * sum(files[stem] > 1 for stem in odd) >= len(files)


def _by_stem(source: str, options: SourceOptions, hint: str = "") -> Source:
    folders, files = names_inside(source, options.follow_links)
    are_splits = len(folders) > 1 and set(LIKE_SPLITS).issuperset(folders) and not any("." in name for name in files)
    splits = sorted(folders, key=LIKE_SPLITS.index) if are_splits else []
    found = samples_by_stem(source, splits, follow_links=options.follow_links)
    labels = "" if any(sample.label is not None for sample in found.samples) else ", without labels"
    note = f"files that share a name up to its first dot are packed as one sample{labels}{hint}"
    return replace(found, notes=(note, *found.notes))


def _has_loose_samples(source: str) -> bool:
    """Whether the files directly in a folder can only be samples."""
    names = [name for name in os.listdir(source) if not name.startswith(".")]
    folders = [name for name in names if os.path.isdir(os.path.join(source, name))]
    files = set(names).difference(folders)
    if folders:  # of classes, perhaps
        odd = {stem_of(name) for name in files if field_of(name, SAMPLE_FIELDS)}
        return share_stems(name for name in files if stem_of(name) in odd)
    return any(not name.lower().endswith(_NO_SAMPLES) and "." in name for name in files)


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
