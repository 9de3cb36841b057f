"""An ImageFolder for each split, as in `data/train/<class>` and `data/val/<class>`: one dataset with one numbering."""

from __future__ import annotations

import os
from collections.abc import Sequence

from streamload_tools.sizes import counted
from streamload_tools.sources.classes import SPLITS, find_images
from streamload_tools.sources.source import SAMPLE_FIELDS, Source, SourceFile, field_of

__all__ = ["images_of_splits", "split_folders"]


def split_folders(source: str, *, follow_links: bool) -> list[str]:
    """The names of the splits that a folder holds; empty unless it holds two or more of them and nothing else.

    Each must hold folders, which are the classes, and no image beside them. So classes that are called `train` and
    `test` are classes where their images lie directly in them.

    Raises:
        OSError: a folder cannot be listed.
    """
    folders, files = _inside(source, follow_links)
    if len(folders) < 2 or not set(SPLITS).issuperset(folders) or _samples(files):
        return []
    for name in folders:
        classes, loose = _inside(os.path.join(source, name), follow_links)
        if not classes or _samples(loose):
            return []
    return sorted(folders, key=SPLITS.index)


def images_of_splits(
    source: str, splits: Sequence[str], *, follow_links: bool, known: tuple[str, ...] | None
) -> Source:
    """List the ImageFolders of all splits, without opening a file. Keys are as if each split were packed by itself.

    Args:
        source: the folder of the splits.
        splits: their names.
        follow_links: go into folders behind links too.
        known: the names of the classes by number, where they are given; otherwise those of all splits, in their order.

    Raises:
        SourceError: as for `find_images`.
        OSError: a folder cannot be listed.
    """
    folders = {split: os.path.join(source, split) for split in splits}
    found = {name for folder in folders.values() for name in _inside(folder, follow_links)[0]}
    classes = known or tuple(sorted(found))
    files: list[SourceFile] = []
    parts: dict[str, Sequence[int]] = {}
    notes = [
        f"{', '.join(splits)} are taken for splits of one dataset and packed into folders of these names, with one "
        f"numbering of classes ({len(classes):,})"
    ]
    only = sorted(found.difference(_inside(folders[splits[0]], follow_links)[0]))
    if only:
        notes.append(f"{counted(len(only), 'class folder')} not in {splits[0]!r}, such as {only[0]!r}")
    for split, folder in folders.items():
        listed = find_images(folder, follow_links=follow_links, known=classes)
        parts[split] = range(len(files), len(files) + len(listed.files))
        files += listed.files
        notes += [f"{split}: {note}" for note in listed.notes]
    return Source(tuple(files), classes, notes=tuple(notes), parts=parts)


def _inside(folder: str, follow_links: bool) -> tuple[list[str], list[str]]:
    """The names of the visible folders and of the other files in a folder."""
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.is_dir():
                files.append(entry.name)
            elif follow_links or not entry.is_symlink():
                folders.append(entry.name)
    return folders, files


def _samples(names: Sequence[str]) -> bool:
    return any(field_of(name, SAMPLE_FIELDS) for name in names)
