"""The images of an ImageFolder, or of one ImageFolder per split: one folder per class, numbered in order of name.

The convention is that of torchvision's `ImageFolder`: the classes are the folders directly in the source, sorted, and
contain images at any depth. Hidden names are skipped and counted; other files are listed, since they may be mistakes.
Links to files are followed, links to folders only on request.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamload.pack.sources.source import (
    ARRAY_FIELDS,
    IMAGE_FIELDS,
    SAMPLE_FIELDS,
    KeyedSamples,
    Source,
    SourceError,
    SourceSample,
    field_of,
    numbers_of_classes,
    other_kinds_advice,
)
from streamload.text import counted

_NAMED = 5
LIKE_SPLITS = ("train", "training", "val", "valid", "validation", "test")
"""Names of folders that are more likely splits than classes."""


@dataclass(slots=True)
class _Skipped:
    """What a walk skipped."""

    hidden: int = 0
    links: list[str] = field(default_factory=list)
    circles: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        notes = []
        if self.links:
            noun = "link to a folder" if len(self.links) == 1 else "links to folders"
            notes.append(f"skipped {len(self.links):,} {noun}: {_some(self.links)}; --follow-symlinks follows them")
        if self.circles:
            notes.append(f"skipped links that lead back to a folder above them: {_some(self.circles)}")
        return notes


def find_images(source: str, *, follow_links: bool = False, known: tuple[str, ...] | None = None) -> Source:
    """List an ImageFolder without opening a file.

    Args:
        source: the folder of the class folders.
        follow_links: follow links to folders, except to a parent folder.
        known: the given names of the classes by number; None to use the names of the folders.

    Raises:
        SourceError: it has images outside of the class folders, no class, an unknown class, or only empty classes.
        OSError: a folder cannot be listed.
    """
    passed = _Skipped()
    names = sorted(os.listdir(source))
    visible = [name for name in names if not name.startswith(".")]
    passed.hidden = len(names) - len(visible)
    folders = [name for name in visible if os.path.isdir(os.path.join(source, name))]
    others = sorted(set(visible) - set(folders))
    classes = [name for name in folders if _may_enter(os.path.join(source, name), follow_links, passed)]
    _check_layout(source, classes, others, passed)
    samples: list[SourceSample] = []
    keyed = KeyedSamples(IMAGE_FIELDS)
    above = frozenset({_identity(source)})
    prefix = os.path.join(source, "")
    numbers = numbers_of_classes(classes, known or classes, lambda _: f"a class folder in {source!r}")
    for label, name in zip(numbers, classes, strict=True):
        for path in sorted(_files_below(os.path.join(source, name), above, follow_links, passed)):
            samples.append(keyed.sample(path, path[len(prefix) :], label))
    if not samples:
        raise SourceError(
            f"no class folder in {source!r} holds a file; there is nothing to pack" + _hint_of_links(passed)
        )
    labels = {sample.label for sample in samples}
    empty = [name for label, name in zip(numbers, classes, strict=True) if label not in labels]
    notes = _notes(source, classes, samples, empty=empty, strays=len(others), passed=passed)
    return Source(tuple(samples), known or tuple(classes), notes=tuple(notes))


def visible_files(folder: str, *, follow_links: bool) -> tuple[list[str], list[str]]:
    """The paths of all visible files below a folder, sorted, and notes on what was skipped.

    Raises:
        OSError: a folder cannot be listed.
    """
    passed = _Skipped()
    found = sorted(_files_below(folder, frozenset(), follow_links, passed))
    notes = [f"skipped {counted(passed.hidden, 'hidden name')}"] if passed.hidden else []
    return found, notes + passed.notes()


def _check_layout(source: str, classes: list[str], others: list[str], passed: _Skipped) -> None:
    """Refuse what is not an ImageFolder, and say what it may be."""
    arrays = [name for name in others if field_of(name, ARRAY_FIELDS)]
    if arrays:
        raise SourceError(
            f"files such as {arrays[0]!r} lie directly in {source!r}; say what their labels are with --labels FILE, "
            "which maps each file's name without extension (its ID) to a label, as JSON or as a table"
        )
    loose = [name for name in others if field_of(name, IMAGE_FIELDS)]
    if loose:
        raise SourceError(
            f"images lie directly in {source!r}, such as {loose[0]!r}, and so belong to no class; "
            "put them into class folders"
            + (", or give the folder above this one" if not classes else "")
            + ", or give their labels with --labels FILE"
        )
    if not classes:
        advice = other_kinds_advice(others)
        raise SourceError(
            f"{source!r} holds no class folder; it needs one folder of images for each class"
            + _hint_of_links(passed)
            + (f"; {advice}" if advice else "")
        )


def _hint_of_links(passed: _Skipped) -> str:
    return f" (it holds links to folders, such as {passed.links[0]!r}: add --follow-symlinks)" if passed.links else ""


def _notes(
    source: str, classes: list[str], samples: Sequence[SourceSample], *, empty: list[str], strays: int, passed: _Skipped
) -> list[str]:
    notes = []
    if passed.hidden or strays:
        hidden = counted(passed.hidden, "hidden name")
        notes.append(f"skipped {hidden}, and {counted(strays, 'file')} outside of the class folders")
    notes += passed.notes()
    if empty:
        are = (
            "class folder is empty and keeps its number"
            if len(empty) == 1
            else "class folders are empty and keep their numbers"
        )
        notes.append(f"{len(empty):,} {are}: {_some(empty)}")
    if set(LIKE_SPLITS).issuperset(classes):
        notes.append(
            f"the classes are {', '.join(classes)}; if these are splits, pack each of them by "
            "itself, all but the first with --classes FIRST/classes.json"
        )
    if len(classes) == 1:
        folder = os.path.join(source, classes[0])
        below = {os.path.dirname(os.path.relpath(sample.members[0].path, folder)) for sample in samples} - {""}
        if len(below) > 1:
            notes.append(f"{classes[0]!r} is the only class; if the folders in it are the classes, give {folder!r}")
    return notes


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + (", ..." if names[_NAMED:] else "")


def _files_below(folder: str, above: frozenset[tuple[int, int]], follow_links: bool, passed: _Skipped) -> list[str]:
    """The visible files below a folder, in any order."""
    found: list[str] = []
    waiting = [(folder, above)]
    while waiting:
        current, above_current = waiting.pop()
        identity = _identity(current)
        if identity in above_current:
            passed.circles.append(current)
            continue
        with os.scandir(current) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    passed.hidden += 1
                elif not entry.is_dir():
                    found.append(entry.path)
                elif _may_enter(entry.path, follow_links, passed):
                    waiting.append((entry.path, above_current | {identity}))
    return found


def _may_enter(folder: str, follow_links: bool, passed: _Skipped) -> bool:
    if follow_links or not os.path.islink(folder):
        return True
    passed.links.append(folder)
    return False


def _identity(folder: str) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def split_folders(source: str, *, follow_links: bool) -> list[str]:
    """The names of the splits in a folder; empty unless it contains at least two splits and no other folder or sample.

    A split contains class folders and no image beside them, so classes named `train` and `test` whose images are
    directly in them are classes.

    Raises:
        OSError: a folder cannot be listed.
    """
    folders, files = names_inside(source, follow_links)
    if len(folders) < 2 or not set(LIKE_SPLITS).issuperset(folders) or _samples(files):
        return []
    for name in folders:
        classes, loose = names_inside(os.path.join(source, name), follow_links)
        if not classes or _samples(loose):
            return []
    return sorted(folders, key=LIKE_SPLITS.index)


def images_of_splits(
    source: str, splits: Sequence[str], *, follow_links: bool, known: tuple[str, ...] | None
) -> Source:
    """List the ImageFolders of all splits without opening a file. Keys are those of each split packed separately.

    Args:
        source: the folder of the splits.
        splits: their names.
        follow_links: follow links to folders.
        known: the given names of the classes by number; None to use the names of the folders in all splits.

    Raises:
        SourceError: as for `find_images`.
        OSError: a folder cannot be listed.
    """
    folders = {split: os.path.join(source, split) for split in splits}
    found = {name for folder in folders.values() for name in names_inside(folder, follow_links)[0]}
    classes = known or tuple(sorted(found))
    samples: list[SourceSample] = []
    parts: dict[str, Sequence[int]] = {}
    notes = [
        f"{', '.join(splits)} are taken as splits of one dataset and packed into folders of these names, with the same "
        f"numbers of classes ({len(classes):,})"
    ]
    only = sorted(found.difference(names_inside(folders[splits[0]], follow_links)[0]))
    if only:
        notes.append(f"{counted(len(only), 'class folder')} not in {splits[0]!r}, such as {only[0]!r}")
    for split, folder in folders.items():
        listed = find_images(folder, follow_links=follow_links, known=classes)
        parts[split] = range(len(samples), len(samples) + len(listed.samples))
        samples += listed.samples
        notes += [f"{split}: {note}" for note in listed.notes]
    return Source(tuple(samples), classes, notes=tuple(notes), parts=parts)


def names_inside(folder: str, follow_links: bool) -> tuple[list[str], list[str]]:
    """The names of the visible folders and of the other files in a folder; links to folders only if followed."""
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
